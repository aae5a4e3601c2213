import pytest
import torch
from hypothesis import settings

settings.register_profile("unit", max_examples=100, deadline=None, derandomize=True)
settings.load_profile("unit")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors: threads would only wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
