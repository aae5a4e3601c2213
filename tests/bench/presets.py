"""The presets and what they save, by the FLOPs of the full-size models: python dev.py bench presets [--steps 20]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import comfyui_toma  # noqa: F401
from comfyui_toma.toma_core.settings import PRESETS

sys.path.insert(0, str(Path(__file__).parent))

import fullsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    print(f"FLOPs unmerged / merged, 1024 x 1024, {steps} steps")
    for name, families in PRESETS.items():
        factors = [f"{family} {fullsize.speedup_by_flops(family, families[family], steps):.2f}x" for family in families]
        print(f"  {name:10}", "  ".join(factors))


if __name__ == "__main__":
    main()
