"""Nodes of other packs before and after ToMA on the demo models, in the real ComfyUI.

python dev.py bench packs FOLDER [FOLDER ...] [--add] [--json FILE] [--write docs/compatibility.md] [--site FOLDER]

FOLDER is a pack or a folder of packs, fetched by you: nothing is downloaded here. Every node of theirs that takes
and gives a MODEL is filled with its defaults and sampled alone, behind and in front of ToMA. The packs run: read
what you don't trust before. They get a copy of ComfyUI to write into, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH))

from packslib import report  # noqa: E402
from packslib.watching import Limits, Watch, packs_in  # noqa: E402

RESULTS = BENCH / "results" / "packs.json"
ABOUT = """Written by `python dev.py bench packs` with ComfyUI {version} on {date}: each pack beside ToMA in a
process of its own; every node of it that takes and gives a MODEL, with its defaults (but for the few values in
`INSTEAD` of tests/bench/packslib/trying.py), on the demo Flux and the demo UNet, {steps} steps, alone, then before
and after ToMA with {preset}. *compose*: the run is accelerated and the node changes the image the way it does
without ToMA; a node that leaves out work by itself (another cache) is only held to twice the error that it or ToMA
has alone. *no effect here*: it changes nothing on these models, with or without ToMA. *run in full*: nothing is
forecast, because answers with this node do not continue smoothly enough for the tolerance, or because it runs the
model in a way of its own; the run's report says which. *fail without ToMA*:
they fail by themselves, with these models, this release, or for want of model files. *not tried*: they need what
can't be made from nothing. A plain run afterwards is the same bit by bit, except where the remark says that the
pack changes it."""


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev.py bench packs", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="FOLDER",
        help="a pack, or a folder of packs; none with --add: the table is written anew",
    )
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE", help="rows are kept here")
    parser.add_argument("--write", type=Path, metavar="FILE", help="Markdown file that gets the table")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="Python packages that these packs need")
    parser.add_argument("--add", action="store_true", help="keep the rows of other packs that are in the JSON file")
    parser.add_argument("--preset", default="", help="of ToMA; custom merges tokens as well. Without: the default")
    parser.add_argument("--models", nargs="+", choices=Limits.models, default=Limits.models, help="the demo models")
    parser.add_argument("--steps", type=int, default=Limits.steps, help="of the sampler")
    parser.add_argument("--load-seconds", type=float, default=Limits.load, help="for a pack to be loaded")
    parser.add_argument("--stage-seconds", type=float, default=Limits.stage, help="for one run of one node")
    parser.add_argument("--pack-seconds", type=float, default=Limits.pack, help="for one pack")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the packs print")
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    options = arguments(given)
    folders = [folder.resolve() for folder in options.folders]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    packs = [] if missing else packs_in(folders)
    if not packs and (folders or not options.add):
        print(f"No pack in {', '.join(missing or map(str, folders))}: a pack is a folder with an __init__.py.")
        return 2
    times = (options.load_seconds, options.stage_seconds, options.pack_seconds)
    limits = Limits(*times, options.steps, options.preset, tuple(options.models))
    rows = {row["pack"]: row for row in kept(options.json)} if options.add else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        try:
            tree = shutil.copytree(os.environ["COMFYUI_PATH"], folder / "ComfyUI")
            for pack in packs:
                started, own = time.monotonic(), folder / pack.name
                own.mkdir()
                site = options.site.resolve() if options.site else None
                row = Watch(pack, own, tree, limits, site).row(lambda line: print(line, flush=True))
                rows[pack.name] = row
                print(f"== {report.totals([row])} ({time.monotonic() - started:.0f} s)", flush=True)
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(in_order(rows), indent=1) + "\n", encoding="utf-8")
                if options.logs:
                    options.logs.mkdir(parents=True, exist_ok=True)
                    shutil.copy(own / "log.txt", options.logs / f"{pack.name}.txt")
                shutil.rmtree(own, ignore_errors=True)
        finally:
            if sys.pycache_prefix:  # what Python compiled of the copy
                shutil.rmtree(Path(sys.pycache_prefix) / folder.relative_to(folder.anchor), ignore_errors=True)
    if options.write:
        write(options.write, in_order(rows), limits)
    print(f"\n{report.totals(list(rows.values()))}")
    return int(bool(report.count(list(rows.values()))[report.BAD]))


def in_order(rows: dict[str, dict]) -> list[dict]:
    return sorted(rows.values(), key=lambda row: (row["source"] or row["pack"]).lower())


def kept(file: Path) -> list[dict]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def write(file: Path, rows: list[dict], limits: Limits) -> None:
    version = (Path(os.environ["COMFYUI_PATH"]) / "comfyui_version.py").read_text(encoding="utf-8").split('"')[-2]
    preset = f"preset {limits.preset}" if limits.preset else "its default preset"
    about = ABOUT.format(version=version, date=time.strftime("%Y-%m-%d"), steps=limits.steps, preset=preset)
    text = file.read_text(encoding="utf-8") if file.is_file() else "# Compatibility\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(report.put_section(text, report.section(rows, about)), encoding="utf-8")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a bench that is ended takes its process with it
    sys.exit(main(sys.argv[1:]))
