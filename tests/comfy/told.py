"""What a patched model tells of its runs."""


def report(model):
    """The report of its last run."""
    return model.model_options["toma"].reports[-1]
