"""`python dev.py demo`: the shipped demo workflow through a real server, and what it shows in a table.

The workflow samples the same picture without and with ToMA, compares the two and shows where the forecasts were off
(with a preset that merges: the kept tokens).
"""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import numpy
import psutil
from comfy_server import (
    DEMO_PACK,
    DEV,
    ComfyServer,
    Finished,
    PromptError,
    port_is_taken,
)
from PIL import Image

import workflows

HOME = DEV / "home"
WORKFLOW = DEMO_PACK / "workflows" / "toma-demo.json"
MODELS = {"Flux": "flux", "SDXL": "sdxl-like unet"}


class Demo:
    """The demo workflow as a prompt for one of the models, with its pictures saved under speaking names."""

    def __init__(self, object_info: dict, model: str, prefix: str):
        self.prompt = workflows.to_prompt(json.loads(WORKFLOW.read_text(encoding="utf-8")), object_info)
        self.one("ToMADemoLoader")["inputs"]["name"] = model
        compared = self.one("ToMACompare")
        plain, merged = compared["inputs"]["reference"], compared["inputs"]["image"]
        self.plain_sampler, self.merged_sampler = self.sampler_of(plain), self.sampler_of(merged)
        self.save("without-toma", plain, prefix)
        self.save("with-toma", merged, prefix)
        self.save("compared", [self.number("ToMACompare"), 0], prefix)
        self.save("preview", [self.number("ToMAPreview"), 0], prefix)

    def number(self, class_type: str) -> str:
        return next(number for number, node in self.prompt.items() if node["class_type"] == class_type)

    def one(self, class_type: str) -> dict:
        return self.prompt[self.number(class_type)]

    def sampler_of(self, link: list) -> str:
        return self.prompt[link[0]]["inputs"]["samples"][0]

    def save(self, name: str, link: list, prefix: str) -> None:
        inputs = {"images": link, "filename_prefix": f"{prefix}_{name}"}
        self.prompt[name] = {"class_type": "SaveImage", "inputs": inputs}


class Progress:
    """Prints a dot for each step, each sampler on a line of its own, and keeps the time that the server worked.

    Working time, on one thread: what other programs take from the machine does not count.
    """

    def __init__(self, server: ComfyServer, names: dict[str, str]):
        self.process = psutil.Process(server.process.pid)
        self.names = names
        self.times: dict[str, dict[int, float]] = {number: {} for number in names}  # step -> seconds so far

    def __call__(self, kind: str, data: dict) -> None:
        times = self.times.get(data.get("node")) if kind == "progress" else None
        if times is None:
            return
        if not times:
            print(f"  {self.names[data['node']]:<20}", end="")
        print("." * (data["value"] - max(times, default=0)), end="", flush=True)
        used = self.process.cpu_times()
        times[data["value"]] = used.user + used.system
        if data["value"] == data["max"]:
            print(f"  {data['max']} steps, {self.seconds_per_step(data['node']):.2f} s each", flush=True)

    def seconds_per_step(self, number: str) -> float:
        """Mean over the steps after the first that was told, whose time holds loading and warming up. The server
        does not tell of all of them."""
        told = sorted(self.times[number].items())
        (first, began), (last, ended) = told[0], told[-1]
        return (ended - began) / (last - first)


def saved_file(finished: Finished, base: Path, name: str) -> Path:
    image = finished.outputs[name]["images"][0]
    return base / image["type"] / image["subfolder"] / image["filename"]


def distance(first: Path, second: Path) -> tuple[float, float]:
    """PSNR in dB and mean difference of a colour value (0 to 255)."""
    a, b = (numpy.asarray(Image.open(path).convert("RGB"), float) for path in (first, second))
    error = ((a - b) ** 2).mean()
    return (10 * numpy.log10(255**2 / error) if error else float("inf")), abs(a - b).mean()


def run(server: ComfyServer, label: str, model: str) -> tuple[str, list[Path]]:
    prefix = time.strftime(f"demo_%Y%m%d-%H%M%S_{label.lower()}")
    demo = Demo(server.get("/object_info"), model, prefix)
    names = {demo.plain_sampler: f"{label} without ToMA", demo.merged_sampler: f"{label} with ToMA"}
    progress = Progress(server, names)
    finished = server.queue(demo.prompt, 900, progress)
    before = progress.seconds_per_step(demo.plain_sampler)
    after = progress.seconds_per_step(demo.merged_sampler)
    files = [saved_file(finished, server.base, name) for name in ("without-toma", "with-toma", "compared", "preview")]
    psnr, difference = distance(*files[:2])
    row = f"{label:<6}{before:>12.2f} s{after:>12.2f} s{before / after:>10.2f}x"
    row += f"{psnr:>11.1f} dB{difference:>12.1f}"
    return row, files


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.port and port_is_taken(options.port):
        print(f"Port {options.port} is taken: stop what uses it, or choose another with --port.")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = ComfyServer(HOME, port=options.port)
    print("Starting ComfyUI with the pack ...", flush=True)
    try:
        with server:
            print(f"ComfyUI answers on {server.url}", flush=True)
            results = [run(server, label, name) for label, name in MODELS.items()]
    except KeyboardInterrupt:
        print("\nStopped.")
        return 1
    except (RuntimeError, PromptError, TimeoutError) as error:
        print(f"{error}\nThe demo failed: read {server.log_file} and run the same command again.")
        return 1
    print("\nPictures without and with ToMA, both compared, and where its forecasts were off:")
    for _, files in results:
        for file in files:
            print(f"  {file}")
    print(f"\n{'':<6}{'without ToMA':>14}{'with ToMA':>14}{'speed-up':>11}{'likeness':>14}{'difference':>12}")
    for row, _ in results:
        print(row)
    print("Seconds of work per step, on one thread of the CPU. Likeness: PSNR of the two pictures.")
    print("Difference: mean over all colour values, which go from 0 to 255.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
