"""Many queued runs in one server, of changing size, model, ratio and batch: python dev.py bench endurance [RUNS]

Memory at the end must be within 2 % of that after the tenth run (each combination has run by then), and times flat.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in ("support", "robustness"):
    sys.path.insert(0, str(TESTS / folder))

import psutil  # noqa: E402
from comfy_server import PACK_NAME, ROOT, ComfyServer  # noqa: E402
from test_server import graph, look  # noqa: E402

COMBINATIONS = [
    ("sdxl", 128, 1, 0.5), ("flux", 128, 1, 0.5), ("sdxl", 192, 1, 0.25), ("flux", 96, 2, 0.75), ("sdxl", 128, 3, 0.75),
    ("flux", 192, 1, 0.25), ("sdxl", 96, 2, 0.5), ("flux", 128, 2, 0.5),
]  # fmt: skip
WARM, WITHIN = 10, 0.02


def main(runs: int) -> int:
    packs = {PACK_NAME: ROOT, "fault_pack": TESTS / "robustness" / "fault_pack"}
    with tempfile.TemporaryDirectory() as folder, ComfyServer(Path(folder), packs) as server:
        process = psutil.Process(server.process.pid)
        memory, seconds, digests = [], [], {}
        for number, combination in zip(range(runs), itertools.cycle(COMBINATIONS)):
            kind, width, batch, ratio = combination
            # `at` counts for nothing without a fault, but keeps ComfyUI from answering out of its cache
            prompt = graph(kind, seed=1, steps=3, width=width, batch=batch, toma={"ratio": ratio}, at=number + 1)
            done = server.queue(prompt)
            memory.append(process.memory_info().rss)
            seconds.append(done.seconds)
            told = look(done)
            assert told["finite"] == [True] and not told.get("alive"), told
            assert digests.setdefault(combination, told["digest"]) == told["digest"], f"run {number} differs"
        grown = memory[-1] / memory[WARM - 1] - 1
        part = max(1, (runs - WARM) // 3)
        first, last = (statistics.median(s) for s in (seconds[WARM : WARM + part], seconds[-part:]))
        print(f"{runs} runs: memory {memory[WARM - 1] >> 20} MB after run {WARM}, {memory[-1] >> 20} MB at the end")
        print(f"({grown:+.1%}), median {first:.2f} s a run in the first third, {last:.2f} s in the last; every")
        print("combination gave the same picture each time, nothing of ours was alive after any run")
        return int(abs(grown) > WITHIN or last > 1.25 * first)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
