"""Fixtures of the trust tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # last: other folders have a conftest that is imported by name


@pytest.fixture(scope="session")
def bench(comfy, tmp_path_factory):
    """Two tiny models with all that ComfyUI's nodes may need besides."""
    from composing import Bench

    return Bench(tmp_path_factory.mktemp("composing"))
