"""What a merged step takes at the real widths of SDXL and Flux, beside what a user would pick instead.

    python dev.py bench speed [--quick] [--json FILE] [--minutes N] [--write docs/benchmarks.md]

Blocks are ComfyUI's own, with random weights, on a CPU: of Flux so many double and single blocks as --blocks says, of
SDXL one spatial transformer of each width; the whole models are computed from them. All methods run in one process,
interleaved; figures are medians. With --json every sample is written as it is measured, and the same command goes on
where an earlier one stopped. Runs of the presets have the steps that the fidelity benchmark drew.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

STARTED = time.monotonic()
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
QUICK_MINUTES = 4.0
RATIOS = (0.35, 0.5, 0.6, 0.65)
FIDELITY = HERE / "results" / "fidelity.json"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of fewer methods, within 4 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="samples; taken up again if it is there")
    parser.add_argument("--only", nargs="*", default=[], metavar="METHOD", help="beginnings will do")
    parser.add_argument("--minutes", type=float, help="begin no sample later")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, nargs=2, default=(2, 4), metavar=("DOUBLE", "SINGLE"))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables between their markers there")
    return parser.parse_args(argv)


def compared(family: str, quick: bool) -> list:
    from speedlib import methods

    found = [methods.none(), *(methods.toma(ratio, family) for ratio in ((0.5,) if quick else RATIOS))]
    found += [methods.shorter(0.5), methods.paper(family), methods.tomesd(0.5)]
    if not quick:
        found += [methods.todo(), methods.tome_node(), methods.hypertile()]
        found += [methods.tomesd_attention(0.5), methods.hypertile(2)] if family == "unet" else []
    return found


def groups(blocks: tuple[int, int]) -> dict[str, tuple]:
    """Name -> (family, how the model is made, the size to sample at)."""
    import fullsize
    from speedlib import account, models

    found = {f"Flux {blocks[0]}+{blocks[1]} blocks": ("flux", partial(models.flux, *blocks), fullsize.FULL)}
    for channels, depth in account.ROWS.items():
        # the token grid of a row is 1/2 or 1/4 of the latent, here it is the latent
        size = tuple(side * 320 // channels for side in fullsize.FULL)
        found[f"SDXL row {channels}"] = ("unet", partial(models.one_row_unet, channels, depth), size)
    return found


def measured(options: argparse.Namespace, book: dict, until: float) -> None:
    from speedlib import measure

    for name, (family, build, size) in groups(tuple(options.blocks)).items():
        chosen = [m for m in compared(family, options.quick) if _wanted(m.key, options.only)]
        there = book.setdefault(name, {})
        model = None
        for round_ in range(1 if options.quick else options.rounds):
            for method in chosen:
                samples = there.setdefault(method.key, [])
                if len(samples) > round_ or time.monotonic() > until:
                    continue
                model = build() if model is None else model
                try:
                    samples.append(measure.sample(method.make(model), size, method.steps, options.clock))
                except Exception as error:  # a rival that fails is told of, and the others go on
                    samples.append({"error": f"{type(error).__name__}: {error}"})
                print(f"{name}, {method.key}: {samples[-1].get('step', samples[-1])}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(book, indent=1), encoding="utf-8")


def _wanted(key: str, only: list[str]) -> bool:
    return not only or key == "none" or key.startswith(tuple(only))


def steps(book: dict, blocks: tuple[int, int], quick: bool) -> list[dict]:
    """The speed-up of a step of the whole models by each method."""
    import fullsize
    from speedlib import account

    def good(group: str, method: str) -> list[dict]:
        return [sample for sample in book.get(group, {}).get(method, []) if "error" not in sample]

    found = []
    for family in ("unet", "flux"):
        for method in compared(family, quick):
            names = [name for name, about in groups(blocks).items() if about[0] == family]
            samples = {name: (good(name, method.key), good(name, "none")) for name in names}
            if not all(mine and none for mine, none in samples.values()):
                continue
            if family == "flux":
                speedup = account.flux_speedup(*samples[names[0]], blocks)
            else:
                speedup = account.unet_speedup({int(name.split()[-1]): both for name, both in samples.items()})
            ideal = None
            if method.where and method.ratio:
                ideal = fullsize.ideal(family, method.ratio, where=method.where, skip=0)
            found.append(
                {"family": family, "method": method.key, "ratio": method.ratio, "speedup": speedup, "ideal": ideal}
            )
    return found


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    from comfy_here import import_comfyui

    import_comfyui(Path(tempfile.mkdtemp()))
    import comfyui_toma  # noqa: F401
    import torch
    from comfyui_toma.toma_core.settings import PRESETS
    from speedlib import account

    logging.disable(logging.WARNING)
    if options.clock == "cpu":
        torch.set_num_threads(1)
    minutes = options.minutes if options.minutes is not None else QUICK_MINUTES if options.quick else float("inf")
    book = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.is_file() else {}
    measured(options, book, STARTED + 60 * minutes)
    found = steps(book, tuple(options.blocks), options.quick)
    merged = {(r["family"], r["ratio"]): r["speedup"] for r in found if r["method"].startswith("ToMA")}
    rows = json.loads(FIDELITY.read_text(encoding="utf-8"))["rows"] if FIDELITY.is_file() else []
    text = account.markdown(found, account.presets(rows, merged, [name for name in PRESETS if name != "paper"]))
    print(text)
    if options.write:
        page = options.write.read_text(encoding="utf-8")
        between = f"{account.BEGIN}\n\n{text}\n\n{account.END}"
        pattern = f"{re.escape(account.BEGIN)}.*?{re.escape(account.END)}"
        options.write.write_text(re.sub(pattern, lambda _: between, page, flags=re.S), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
