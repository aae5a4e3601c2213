"""Fixtures and figures of the trust tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # last: other folders have a conftest that is imported by name

FIGURES: dict[str, str] = {}


@pytest.fixture(scope="session")
def figure():
    """figure("faults survived", "14 of 14"): a line at the end of the test command."""
    return FIGURES.__setitem__


@pytest.fixture(scope="session")
def bench(comfy, tmp_path_factory):
    """Two tiny models with all that ComfyUI's nodes may need besides."""
    from composing import Bench

    return Bench(tmp_path_factory.mktemp("composing"))


def pytest_terminal_summary(terminalreporter):
    if FIGURES:
        terminalreporter.section("trust")
        for name, value in FIGURES.items():
            terminalreporter.line(f"{name}: {value}")
