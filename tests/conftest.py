"""Fixtures for all tests: ComfyUI in this process, one real server, one browser page."""

import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

# `python -m pytest` puts the working directory first: the pack's `nodes` would hide ComfyUI's.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

NO_CHROMIUM = "Chromium was not found: install it (or set CHROMIUM to its path) and run the tests again."
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
CHROMIUM_FLAGS += ["--disable-component-update", "--disable-sync"]
READY = "() => window.app?.extensionManager?.spinner === false"

browser_tests_not_run: list[str] = []
figures: dict[str, str] = {}
PAGE = pytest.StashKey()
BLANK = "about:blank"


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes, left out unless asked for: -m slow")
    # So that a run that is told to end takes its server and browser with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def comfy(tmp_path_factory):
    """ComfyUI imported into this process: CPU, SDPA attention, its folders in a temporary directory."""
    from comfy_here import import_comfyui

    base = tmp_path_factory.mktemp("comfy")
    import_comfyui(base)
    return SimpleNamespace(base=base)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One real server for the whole run, with the pack and tests/demo_pack linked in."""
    from comfy_server import ComfyServer

    with ComfyServer(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def browser(request):
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not path:
        pytest.skip(NO_CHROMIUM)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="session")
def console() -> list[str]:
    """Warnings and errors of the page's console, in order. Clear it before what you want to watch."""
    return []


def open_front_end(page, url: str) -> None:
    page.goto(url)
    page.wait_for_function(READY, timeout=180_000)


@pytest.fixture(scope="session")
def page(request, browser, server, console):
    """The front end of `server`, ready to use. One page for all tests: leave no dialog open."""
    page = browser.new_page(viewport={"width": 1600, "height": 1000})

    def listen(message):
        if message.type in ("error", "warning"):
            console.append(f"{message.text} ({message.location['url']})")

    page.on("console", listen)
    page.on("pageerror", lambda error: console.append(str(error)))
    open_front_end(page, server.url)
    request.config.stash[PAGE] = (page, server.url)
    # Old front ends open a dialog for every model file that a workflow names and this machine doesn't have.
    page.evaluate("() => app.extensionManager.setting.set('Comfy.Workflow.ShowMissingModelsWarning', false)")
    return page


@pytest.fixture(scope="session")
def figure():
    """figure("faults survived", "14 of 14"): a line at the end of the test command."""
    return figures.__setitem__


# Two processes take the files in this order: what takes long comes first, and what starts a browser is spread.
ORDER = (
    "browser/test_demo.py", "bench/test_packs.py", "robustness/test_composition.py", "browser/", "bench/",
    "robustness/test_faults.py", "robustness/", "comfy/test_memory.py", "comfy/", "project/", "nodes/",
)  # fmt: skip


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if item.get_closest_marker("slow")] if not config.option.markexpr else []
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def place(item) -> int:
        name = item.path.as_posix().rpartition("/tests/")[2]
        return next((i for i, part in enumerate(ORDER) if name.startswith(part)), len(ORDER))

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    page, url = item.config.stash.get(PAGE, (None, ""))
    if page is not None and page.url == BLANK and "page" in item.fixturenames:
        open_front_end(page, url)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """A page that nobody looks at takes a third of a core: it is left when another folder's tests begin."""
    page, _ = item.config.stash.get(PAGE, (None, ""))
    if page is not None and nextitem is not None and nextitem.path.parent != item.path.parent:
        page.goto(BLANK)


def pytest_runtest_logreport(report):
    if report.skipped and NO_CHROMIUM in str(report.longrepr):
        browser_tests_not_run.append(report.nodeid)


def pytest_terminal_summary(terminalreporter):
    if figures:
        terminalreporter.section("figures")
        for name, value in sorted(figures.items()):
            terminalreporter.line(f"{name}: {value}")
    if browser_tests_not_run:
        terminalreporter.section("BROWSER TESTS NOT RUN", sep="!", red=True, bold=True)
        terminalreporter.line(f"{len(browser_tests_not_run)} browser tests were NOT RUN. {NO_CHROMIUM}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    figures.update(getattr(node, "workeroutput", {}).get("figures", {}))


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = figures
    if browser_tests_not_run and os.environ.get("CI") and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
