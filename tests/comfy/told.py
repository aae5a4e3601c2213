"""What a patched model tells of its runs."""


def report(model):
    """The report of its last run."""
    return model.model_options["toma"].reports[-1]


def flops_saved(told) -> float:
    """Of the evaluations that ran, the share of the transformer blocks' FLOPs that was not computed."""
    return 1.0 - told.flops_run / told.flops_full if told.flops_full else 0.0
