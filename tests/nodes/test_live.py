"""Picks for the page while sampling: at most four a second, never two at once. The clock is the test's own."""

from threading import Event
from types import SimpleNamespace

import pytest


@pytest.fixture
def paced(comfy):
    from comfyui_toma.nodes.live import Paced

    ready, clock, sent = Event(), SimpleNamespace(now=100.0), []
    ready.set()

    def send(pick) -> None:
        ready.wait(10)
        sent.append(pick)

    return SimpleNamespace(it=Paced(send, lambda: clock.now), clock=clock, ready=ready, sent=sent)


def sampled(paced, steps: int, seconds: float) -> None:
    """A sampler that picks at each step and takes so long for it."""
    for step in range(steps):
        if paced.it:
            paced.it(step)
            paced.it.sender.join(10)
        paced.clock.now += seconds


def test_at_most_four_a_second(paced):
    sampled(paced, 1000, 0.01)
    assert 36 <= len(paced.sent) <= 40


def test_all_of_a_slow_run(paced):
    sampled(paced, 20, 1.0)
    assert paced.sent == list(range(20))


def test_dropped_while_the_page_is_slow(paced):
    paced.ready.clear()
    paced.it("first")
    paced.clock.now += 60
    assert not paced.it
    paced.ready.set()
    paced.it.sender.join(10)
    assert paced.it and paced.sent == ["first"]
