"""Every node of ComfyUI core that takes and gives a MODEL, before and after ToMA: tests/robustness/COMPOSITION.md.

python dev.py bench composition [node ids]     with ids: prints these and writes nothing
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in ("support", "robustness"):
    sys.path.insert(0, str(TESTS / folder))
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]

from comfy_here import import_comfyui  # noqa: E402


def table(outcomes: list) -> str:
    """The results in Markdown, a row a node."""
    import composing
    from comfyui_version import __version__

    rows: dict[str, dict] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.node, {})[outcome.model] = outcome
    names = list(next(iter(rows.values())))
    lines = [
        "# ToMA and the other nodes that change a model",
        "",
        f"Written by `python dev.py bench composition` with ComfyUI {__version__}: every core node that takes a MODEL",
        "and gives one, on tiny models of both families, alone, then before and after ToMA. *composes*: tokens are",
        "merged, and the node changes the picture the way it does without ToMA. *no effect here*: it changes nothing",
        "on this model, with or without ToMA. *not for this model*: it fails there without ToMA, too. *not tried*:",
        "it needs what can't be made from nothing.",
        "",
        f"{composing.figure(outcomes)}.",
        "",
        f"| Node | {' | '.join(names)} | Remark |",
        f"|---|{'---|' * len(names)}---|",
    ]
    for node, row in rows.items():
        notes = dict.fromkeys(o.note.replace("|", "/") for o in row.values() if o.note)
        lines.append(f"| {node} | {' | '.join(row[n].status for n in names)} | {'<br>'.join(notes)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        import_comfyui(Path(folder))
        logging.getLogger().setLevel(logging.ERROR)
        import composing
        import torch

        torch.set_num_threads(1)
        bench = composing.Bench(Path(folder) / "models")
        outcomes = []
        for outcome in composing.compose_all(bench, only=sys.argv[1:]):
            print(outcome, flush=True)
            outcomes.append(outcome)
        if len(sys.argv) == 1:
            file = TESTS / "robustness" / "COMPOSITION.md"
            file.write_text(table(outcomes), encoding="utf-8")
        print(composing.figure(outcomes))
        return int(any(outcome.status == composing.BAD for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
