"""Every class of ComfyUI's supported_models, sampled tiny: which tokens are merged, which steps forecast, and why not.

python dev.py bench classes [--only CLASS ...] [--write docs/compatibility.md]

With --write the lines between <!-- classes --> and <!-- /classes --> are replaced. A class that a new release brings
shows up as 'not tried' until tests/support/tiny_*.py has an entry for it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "support"))
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]

from comfy_here import import_comfyui  # noqa: E402

BEGIN, END = "<!-- classes -->", "<!-- /classes -->"
NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Outcome:
    """One tiny model: whether its tokens were merged and its steps forecast, else why not."""

    name: str
    merged: str
    forecast: str


def tried(name: str) -> Outcome:
    import tiny_models
    from comfyui_toma.toma_core.patcher import family_of

    try:
        model = tiny_models.build(name)
        why = family_of(model).why_unmerged
        forecast = _forecast(name, model)
        return Outcome(name, f"no: {why}" if why else _merged(name, model), forecast)
    except Exception as error:  # of any kind: it is the outcome
        failed = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        return Outcome(name, failed, failed)


def _run(name: str, model, steps: int, **settings):
    import tiny_models
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    patched = patch(model, Settings(reselect_every=1, **settings))
    latent = tiny_models.sample(tiny_models.CASES[name], patched, steps=steps)
    parts = latent.unbind() if latent.is_nested else [latent]
    if not all(part.isfinite().all() for part in parts):
        raise ArithmeticError("the result is not finite")
    return patched.model_options["toma"].reports[-1]


def _merged(name: str, model) -> str:
    told = _run(name, model, 3, ratio=0.5)
    if told.blocks_merged:
        return "yes" if told.blocks_merged == told.blocks else f"in {told.blocks_merged} of {told.blocks} blocks"
    return "no: " + "; ".join(note.removeprefix("tokens are not merged: ") for note in told.notes)


def _forecast(name: str, model) -> str:
    told = _run(name, model, 8, ratio=0.0, tolerance=1.0)
    return "yes" if told.counts["forecast"] else "no: " + "; ".join(told.notes)


def table(outcomes: dict[str, list[Outcome]], untried: dict[str, str], release: str) -> str:
    """`outcomes` by class; `untried`: class -> why."""
    count = sum(any(o.merged == "yes" for o in found) for found in outcomes.values())
    failed = sum(all(o.forecast.startswith("failed") for o in found) for found in outcomes.values())
    lines = [
        f"ComfyUI {release}: {len(outcomes) + len(untried)} classes; merged and forecast {count}, forecast only "
        f"{len(outcomes) - count - failed}, neither {len(untried)}" + (f", failed {failed}." if failed else "."),
        "",
        "| class | tokens merged | steps forecast | sampled as |",
        "| --- | --- | --- | --- |",
    ]
    for kind in [*outcomes, *untried]:
        if kind in untried:
            lines.append(f"| {kind} | {untried[kind]} | | |")
            continue
        alike: dict[tuple[str, str], list[str]] = {}
        for outcome in outcomes[kind]:
            alike.setdefault((outcome.merged, outcome.forecast), []).append(outcome.name)
        lines += [
            f"| {kind} | {merged} | {forecast} | {', '.join(names)} |" for (merged, forecast), names in alike.items()
        ]
    return "\n".join(lines)


def written(document: str, made: str) -> str:
    before, found, rest = document.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        sys.exit(f"There is no {BEGIN} ... {END} to write between.")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CLASS")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        import_comfyui(Path(folder))
        logging.getLogger().setLevel(logging.CRITICAL)
        import comfy.supported_models
        import comfyui_version
        import tiny_models
        import torch

        torch.set_num_threads(1)
        outcomes: dict[str, list[Outcome]] = {}
        untried: dict[str, str] = {}
        for kind in sorted({kind.__name__ for kind in comfy.supported_models.models}, key=str.lower):
            if options.only and kind not in options.only:
                continue
            names = [case.name for case in tiny_models.CASES.values() if case.kind == kind]
            if names:
                outcomes[kind] = [tried(name) for name in names]
                print(kind, *outcomes[kind], sep="\n    ", file=sys.stderr, flush=True)
            else:
                untried[kind] = tiny_models.NOT_SAMPLED.get(kind, NOT_TRIED)
        made = table(outcomes, untried, comfyui_version.__version__)
        if options.write:
            document = options.write.read_text(encoding="utf-8")
            options.write.write_text(written(document, made), encoding="utf-8")
        else:
            print(made)
        failed = [o for found in outcomes.values() for o in found if "failed" in (o.merged + o.forecast)]
        return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
