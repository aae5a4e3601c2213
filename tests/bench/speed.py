"""Speed at the real widths and token counts of SDXL and Flux, beside what a user would pick instead.

    python dev.py bench speed [--quick] [--json FILE] [--only "SDXL 1024"] [--minutes N]

All methods run in one process, interleaved, three rounds; figures are medians. With --json every sample is
written as it is measured, and the same command goes on where an earlier one stopped. --quick measures one block
of each kind and computes the models from them.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

STARTED = time.monotonic()
sys.path.insert(0, str(Path(__file__).parent))
QUICK_MINUTES = 3.8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one block of each kind, within 4 minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="rows and samples; taken up again if it is there")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="where pictures go (default: beside the JSON file)")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="GROUP[:METHOD]", help="see --plan; beginnings will do"
    )
    parser.add_argument("--minutes", type=float, help="begin no sample that would end later")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    parser.add_argument("--plan", action="store_true", help="say what would be measured and how long it would take")
    parser.add_argument("--no-gpu", action="store_true", help="without the estimate for GPUs")
    return parser.parse_args()


def free_memory() -> float:
    """Bytes that can be had."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    except (OSError, StopIteration):
        return 16e9


def show_plan(groups, rounds: int) -> None:
    import torch

    a, b = torch.randn(2048, 1280), torch.randn(1280, 5120)
    a @ b
    start = time.perf_counter()
    for _ in range(8):
        a @ b
    rate = 8 * 2 * 2048 * 1280 * 5120 / (time.perf_counter() - start)
    total = 0.0
    for group in groups:
        flops = rounds * sum(group.flops(method) for method in group.methods)
        total += flops
        print(f"{group.name:34}{flops / 1e12:8.0f} TFLOPs{flops / rate / 60:8.1f} min   ", end="")
        print(", ".join(method.key for method in group.methods))
    print(f"{'all':34}{total / 1e12:8.0f} TFLOPs{total / rate / 60:8.1f} min at {rate / 1e9:.0f} GFLOPs a second now")


def unmerged_steps(rows: list[dict]) -> dict[str, float]:
    found = [r for r in rows if r["part"] == "step" and r["method"] == "none" and r["size"] == "1024x1024"]
    return {r["model"]: r["seconds"] for r in found if r["batch"] == 1}


def main() -> int:
    options = arguments()
    from comfy_here import import_comfyui

    import_comfyui(Path(tempfile.mkdtemp()))
    import comfyui_toma  # noqa: F401
    import torch
    from speedlib import account, choosing, measure, plan, plots, report

    logging.disable(logging.WARNING)
    if options.clock == "cpu":
        torch.set_num_threads(1)
    book = measure.Book(options.json, options.clock, options.quick)
    blocks = plan.flux_blocks(free_memory(), book.content["samples"])
    groups = plan.quick() if options.quick else plan.full(blocks)
    if options.plan:
        show_plan(groups, options.rounds)
        return 0
    if not measure.matching(groups, options.only):
        raise SystemExit(
            f"--only {' '.join(options.only)} names nothing. There are: {', '.join(g.name for g in groups)}"
        )
    minutes = QUICK_MINUTES if options.quick and options.minutes is None else options.minutes
    until = None if minutes is None else STARTED + 60 * minutes

    def keep_account() -> None:
        book.content["rows"] = account.rows(groups, book.content["samples"])
        book.write()

    measuring = measure.Measuring(book, options.rounds, until, options.clock, at_once=options.quick)
    measuring.run(groups, options.only, keep_account)
    keep_account()
    rows = book.content["rows"]
    steps = unmerged_steps(rows)
    if steps and "choosing" not in book.content:
        tiles = (8,) if options.quick else (4, 8, 16, 32, 0)
        book.content["choosing"] = choosing.measure(tiles, steps, clock=options.clock)
    chosen = book.content.get("choosing", [])
    book.content["bars"] = [
        {"what": bar.what, "value": bar.value, "cleared": bar.cleared} for bar in report.bars(rows, chosen)
    ]
    book.write()

    print(report.table(rows))
    print(f"\nSelection and weights by themselves\n{report.choosing_table(chosen)}")
    print(f"\nFrom small to large\n{report.growth(rows)}")
    print(f"\n{report.published(rows)}")
    if not options.quick and not options.no_gpu:
        import roofline

        book.content["gpu"] = roofline.estimates()
        book.write()
        print(f"\nGPUs, ESTIMATED, not measured\n{roofline.table(book.content['gpu'])}")
    print("\n" + "\n".join(bar.line() for bar in report.bars(rows, chosen)))
    for group, count in measuring.left_out.items():
        print(f"{group}: {count} samples not taken, no time left")
    folder = options.plots or (options.json.parent if options.json else None)
    if folder:
        stem = options.json.stem if options.json else "speed"
        print("\n" + "\n".join(f"wrote {path}" for path in plots.draw(rows, folder, stem)))
    print(f"{(time.monotonic() - STARTED) / 60:.1f} minutes, load {book.content['about']['load']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
