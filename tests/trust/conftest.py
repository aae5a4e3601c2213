"""Fixtures of the trust tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # last: other folders have a conftest that is imported by name


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes, left out unless asked for: -m slow")


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if item.get_closest_marker("slow")] if not config.option.markexpr else []
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def bench(comfy, tmp_path_factory):
    """Two tiny models with all that ComfyUI's nodes may need besides."""
    from composing import Bench

    return Bench(tmp_path_factory.mktemp("composing"))
