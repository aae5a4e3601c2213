"""Every node of ComfyUI core that takes and gives a MODEL, before and after ToMA: writes tests/trust/COMPOSITION.md.

python dev.py bench composition [node ids]     with ids: prints these and writes nothing
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in ("support", "trust"):
    sys.path.insert(0, str(TESTS / folder))
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != TESTS.parent]

from comfy_here import import_comfyui  # noqa: E402


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
            file = TESTS / "trust" / "COMPOSITION.md"
            file.write_text(composing.table(outcomes), encoding="utf-8")
        print(composing.figure(outcomes))
        return int(any(outcome.status == composing.BAD for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
