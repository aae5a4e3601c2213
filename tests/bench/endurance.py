"""Many queued runs in one server: python dev.py bench endurance [RUNS] [--tiny] [--write docs/compatibility.md]

200 runs of changing size, model, ratio and batch; with --tiny 2000 small ones, merged and forecast, some compiled, each
with node ids of its own and from a client of its own that watches. At the end memory must be within 2 % of what it was
when every combination had run and every cache was full, caches no larger, nothing of a run or of an earlier workflow
alive. The work of the processor is told and decides nothing: it depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
for folder in ("support", "robustness", "bench"):
    sys.path.insert(0, str(TESTS / folder))

import psutil  # noqa: E402
from comfy_server import PACK_NAME, ROOT, ComfyServer  # noqa: E402
from packslib.report import put_section  # noqa: E402
from test_server import graph, look  # noqa: E402

WITHIN = 0.02
BOTH, MERGED = {"ratio": 0.5, "tolerance": 1.0}, {"ratio": 0.5, "tolerance": 0.0}


@dataclass(frozen=True)
class Way:
    """What is queued, over and over, and after how many runs it is measured."""

    name: str
    warm: int
    look_every: int
    about: str
    combinations: tuple[dict, ...]

    def prompt(self, number: int) -> dict:
        # `at` counts for nothing without a fault, but keeps ComfyUI from answering out of its cache
        given = dict(self.combinations[number % len(self.combinations)])
        compiled = given.pop("compiled", False)
        prompt = graph(seed=1, at=number + 1, **given)
        if self.name == "tiny":
            prompt["4"]["inputs"]["cfg"] = 1.0
            prompt["5"]["inputs"].update(model=["2", 0], collect=False)
            if compiled:
                prompt["6"] = {"class_type": "TrustCompile", "inputs": {"model": ["2", 0]}}
                prompt["3"]["inputs"]["model"] = ["6", 0]
        return prompt


MIXED = Way(
    "mixed", 10, 50, "of changing size, model, ratio and batch",
    tuple(
        {"kind": kind, "width": width, "batch": batch, "steps": 3, "toma": {"ratio": ratio}}
        for kind, width, batch, ratio in (
            ("sdxl", 128, 1, 0.5), ("flux", 128, 1, 0.5), ("sdxl", 192, 1, 0.25), ("flux", 96, 2, 0.75),
            ("sdxl", 128, 3, 0.75), ("flux", 192, 1, 0.25), ("sdxl", 96, 2, 0.5), ("flux", 128, 2, 0.5),
        )
    ),
)  # fmt: skip
TINY = Way(
    "tiny", 300, 100, "of 64 x 128 pixels, each watched by a page of its own and with node ids of its own",
    tuple(
        {"kind": kind, "width": 64, "steps": 8, "toma": toma, "compiled": compiled}
        for kind, toma, compiled in (
            ("flux", BOTH, False), ("sdxl", BOTH, False), ("flux", MERGED, False), ("flux", {"preset": "turbo"}, False),
            ("flux", MERGED, True), ("sdxl", {"preset": "fast"}, False), ("flux", {"preset": "balanced"}, False),
        )
    ),
)  # fmt: skip


@dataclass
class Kept:
    """What was measured after each run, and what the pack held on to at each look."""

    memory: list[int] = field(default_factory=list)
    work: list[float] = field(default_factory=list)  # seconds of the processor
    kinds: Counter = field(default_factory=Counter)
    held: list[tuple[int, dict]] = field(default_factory=list)


def renamed(prompt: dict, number: int) -> dict:
    """With node ids that no other prompt has, but for that of the output."""
    names = {name: name if name == "5" else f"{number}-{name}" for name in prompt}
    made = {}
    for name, node in prompt.items():
        inputs = {
            key: [names[given[0]], given[1]] if isinstance(given, list) else given
            for key, given in node["inputs"].items()
        }
        made[names[name]] = {**node, "inputs": inputs}
    return made


def look_at_held(server: ComfyServer, number: int) -> dict:
    """In the second prompt after the run: ComfyUI keeps what a prompt made for one more."""
    for turn in (0, 1):
        done = server.queue({"1": {"class_type": "TrustHeld", "inputs": {"at": 2 * number + turn}}}, 600)
    return done.outputs["1"]["held"][0]


def run(way: Way, runs: int, server: ComfyServer) -> Kept:
    process, kept, digests = psutil.Process(server.process.pid), Kept(), {}
    warm = min(way.warm, runs // 2)
    for number in range(runs):
        prompt = way.prompt(number)
        before = sum(process.cpu_times()[:2])
        tiny = way.name == "tiny"
        done = server.submit(renamed(prompt, number) if tiny else prompt, watch=tiny).wait(600)
        kept.work.append(sum(process.cpu_times()[:2]) - before)
        told = look(done)
        assert told["finite"] == [True] and not told.get("alive"), told
        combination = number % len(way.combinations)
        assert digests.setdefault(combination, told["digest"]) == told["digest"], f"run {number} differs"
        kept.kinds.update(told.get("counts", [{}])[0])
        kept.memory.append(process.memory_info().rss)
        if number + 1 in (warm, runs) or (number + 1) % way.look_every == 0:
            held = look_at_held(server, number)
            kept.held.append((number + 1, held))
            server.post("/history", {"clear": True})  # ComfyUI's own, which keeps every prompt
            print(f"{number + 1} runs: {kept.memory[-1] >> 20} MB, {held['alive'] or 'nothing'} alive, "
                  f"{held['process']}", flush=True)  # fmt: skip
    return kept


def judge(way: Way, kept: Kept) -> tuple[str, list[str]]:
    """The figures in words, and what is wrong."""
    runs = len(kept.memory)
    warm, last = min(way.warm, runs // 2), kept.memory[-1]
    first, part = kept.memory[warm - 1], max(1, (runs - warm) // 3)
    early, late = (statistics.median(some) for some in (kept.work[warm : warm + part], kept.work[-part:]))
    before, after = dict(kept.held)[warm], kept.held[-1][1]
    sizes = [{**held["entries"], **held["process"]} for held in (before, after)]
    wrong = [f"{name}: {sizes[0].get(name, 0)}, then {size}" for name, size in sizes[1].items()
             if size > sizes[0].get(name, 0)]  # fmt: skip
    wrong += [f"alive after run {number}: {held['alive']}" for number, held in kept.held if held["alive"]]
    if abs(last / first - 1) > WITHIN:
        wrong.append(f"memory changed by {last / first - 1:+.1%}")
    evaluations = ", ".join(f"{count} {kind}" for kind, count in kept.kinds.items())
    entries = (sum(held["entries"].values()) for held in (before, after))
    lines = [
        f"{runs} runs {way.about}" + (f"; evaluations: {evaluations}" if evaluations else ""),
        f"memory: {first >> 20} MB after run {warm}, {last >> 20} MB at the end ({last / first - 1:+.1%})",
        f"processor time of a run: {early:.2f} s in the first third after that, {late:.2f} s in the last",
        "entries of all caches and lists of the pack: {}, then {}".format(*entries),
        *(f"{name}: {size}, then {after['process'][name]}" for name, size in before["process"].items()),
        "each combination gave the same picture every time",
        f"objects of runs and of earlier workflows that were alive, at {len(kept.held)} looks: "
        f"{sum(sum(held['alive'].values()) for _, held in kept.held)}",
    ]
    return "\n".join(f"- {line}" for line in lines), wrong


def write(file: Path, way: Way, made_with: str, text: str) -> None:
    begin, end = f"<!-- endurance {way.name} -->", f"<!-- /endurance {way.name} -->"
    section = f"{begin}\n{time.strftime('%Y-%m-%d')}, {made_with}:\n\n{text}\n{end}"
    file.write_text(put_section(file.read_text(encoding="utf-8"), section, begin, end), encoding="utf-8")


def main(given: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dev.py bench endurance", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="?", type=int, metavar="RUNS")
    parser.add_argument("--tiny", action="store_true", help="small images, merged and forecast; 2000 runs if not told")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file that gets the figures")
    options = parser.parse_args(given)
    way = TINY if options.tiny else MIXED
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny, and on a busy machine a second one mostly waits
    packs = {PACK_NAME: ROOT, "fault_pack": TESTS / "robustness" / "fault_pack"}
    with tempfile.TemporaryDirectory() as folder, ComfyServer(Path(folder), packs) as server:
        about = server.get("/system_stats")["system"]
        made_with = f"ComfyUI {about['comfyui_version']}, torch {about['pytorch_version']}, {platform.system()}, CPU"
        kept = run(way, options.runs or (2000 if options.tiny else 200), server)
    text, wrong = judge(way, kept)
    print(text)
    for what in wrong:
        print(f"WRONG: {what}")
    if options.write and not wrong:
        write(options.write, way, made_with, text)
    return int(bool(wrong))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a bench that is ended takes its server with it
    sys.exit(main(sys.argv[1:]))
