"""Starts a process for each pack and watches it: what hangs or dies is noted, and the rest goes on without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .report import ALONE, BAD, UNMADE

WORKER = Path(__file__).with_name("worker.py")
MODELS = ("flux", "unet")
# Packs that install or download something when they are imported find no way out.
NOWHERE = "http://127.0.0.1:9"
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "UV_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE),
}


@dataclass(frozen=True)
class Limits:
    """Seconds to load, for one stage of one node (alone, after, before ToMA), and for a pack in all."""

    load: float = 180
    stage: float = 60
    pack: float = 1200
    steps: int = 12  # of the sampler
    preset: str = ""  # of ToMA; "": the default
    models: tuple[str, ...] = MODELS


def packs_in(folders: list[Path]) -> list[Path]:
    """The packs themselves, of folders that are packs or hold some."""
    found = []
    for folder in folders:
        inside = sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file())
        found += [folder] if (folder / "__init__.py").is_file() else inside
    return found


def origin(pack: Path) -> dict[str, str]:
    """Where a pack comes from: of its file PACK_COMMIT ("owner/name commit date"), or of git."""
    about, note = {"source": "", "commit": "", "date": ""}, pack / "PACK_COMMIT"
    if note.is_file():
        return {**about, **dict(zip(about, note.read_text(encoding="utf-8").split()))}
    if (pack / ".git").exists() and shutil.which("git"):

        def git(*words: str) -> str:
            command = ["git", "-C", str(pack), *words]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

        about["source"] = "/".join(git("remote", "get-url", "origin").removesuffix(".git").split("/")[-2:])
        about.update(zip(("commit", "date"), git("log", "-1", "--format=%H %cs").split()))
    return about


def without_folders(text: str) -> str:
    """A message without the folders of this machine: only the files' names."""
    return re.sub(r"(?<![\w/.:])(?:[A-Za-z]:[\\/]|/)(?:[^\s'\"()\\/]+[\\/])+", "", text)


class Watch:
    """One pack from its first process to the last: a process that has to be ended is followed by another."""

    def __init__(self, pack: Path, folder: Path, tree: Path, limits: Limits, site: Path | None) -> None:
        self.pack, self.folder, self.tree, self.limits, self.site = pack, folder, tree, limits, site
        self.results: dict[tuple[str, str], dict] = {}
        self.about: dict = {}
        self.read = 0
        self.at: dict = {}
        self.ended = False

    def row(self, tell: Callable[[str], None]) -> dict:
        deadline = time.monotonic() + self.limits.pack
        attempts = 0
        while not self.ended and time.monotonic() < deadline and attempts < 12:
            attempts += 1
            before = len(self.results)
            why = self.one_process(deadline, tell)
            if self.ended:
                break
            if not self.at.get("node"):
                self.about.setdefault("loaded", f"no answer: {why}")
                break
            if time.monotonic() >= deadline:
                break
            self.note_stopped(why, tell)
            attempts = 0 if len(self.results) > before + 1 else attempts
        for node in self.about.get("nodes", []):
            for model in self.limits.models:
                late = {"status": UNMADE, "note": "the time for this pack was up"}
                self.results.setdefault((node, model), late)
        nodes = [
            {"node": node, "models": {model: self.results[node, model] for model in self.limits.models}}
            for node in self.about.get("nodes", [])
        ]
        about = {"loaded": self.about.get("loaded", "no answer"), "plain": self.about.get("plain", "")}
        return {"pack": self.pack.name, **origin(self.pack), **about, "all_nodes": self.about.get("all", 0),
                "nodes": nodes}  # fmt: skip

    def one_process(self, deadline: float, tell: Callable[[str], None]) -> str:
        """Runs until it ends, or has to be ended; says why."""
        base = Path(self.folder / f"base-{len(self.results)}")
        base.mkdir(parents=True, exist_ok=True)
        out, job = self.folder / "said.jsonl", self.folder / "job.json"
        out.write_text("")
        self.read, self.at = 0, {}
        done = [list(pair) for pair in self.results]
        limits = {name: getattr(self.limits, name) for name in ("steps", "preset", "models")}
        asked = {"pack": str(self.pack), "base": str(base), "out": str(out), "done": done, **limits}
        job.write_text(json.dumps(asked))
        path = [os.environ.get("PYTHONPATH", ""), *([str(self.site)] if self.site else [])]
        environment = {**os.environ, **OFFLINE, "COMFYUI_PATH": str(self.tree), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        with open(self.folder / "log.txt", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(WORKER), str(job)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=base,
            )  # fmt: skip
            last = time.monotonic()
            try:
                while True:
                    running = process.poll() is None
                    if self.hear(out, tell):
                        last = time.monotonic()
                    if self.ended or not running:
                        return f"the process ended with code {process.returncode}"
                    limit = self.limits.stage if self.at.get("node") else self.limits.load
                    if time.monotonic() - last > limit:
                        return f"no answer in {limit:.0f} s"
                    if time.monotonic() > deadline:
                        return "the time for this pack was up"
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()

    def hear(self, out: Path, tell: Callable[[str], None]) -> bool:
        """Takes in what was said since the last time."""
        with open(out, encoding="utf-8") as file:
            file.seek(self.read)
            new = file.read()
        whole = new[: new.rfind("\n") + 1]
        self.read += len(whole.encode())
        for line in map(json.loads, whole.splitlines()):
            if "at" in line:
                self.at = line
            elif "loaded" in line:
                self.about = {**line, "loaded": without_folders(line["loaded"])}
            elif "end" in line:
                self.ended = True
            else:
                self.take(line, tell)
        return bool(whole)

    def take(self, result: dict, tell: Callable[[str], None]) -> None:
        node, model = result.pop("node"), result.pop("model")
        result["note"] = without_folders(result["note"])
        self.results[node, model] = result
        tell(f"{self.pack.name}: {node} on {model}: {result['status']} {result['note'] and '- ' + result['note']}")

    def note_stopped(self, why: str, tell: Callable[[str], None]) -> None:
        """What the process was at when it stopped."""
        alone = self.at["at"] == "alone"
        note = why if alone else f"{self.at['at']} ToMA: {why}"
        result = {
            "node": self.at["node"],
            "model": self.at["model"],
            "status": ALONE if alone else BAD,
            "note": note,
        }
        self.take(result, tell)
