"""A run as it goes, for the page: at most four messages a second, never two at once, and none that the sampler waits
for. The clock is the test's own."""

import time
from threading import Event
from types import SimpleNamespace

import pytest


@pytest.fixture
def paced(comfy):
    from comfyui_toma.nodes.live import Paced

    ready, clock, sent = Event(), SimpleNamespace(now=100.0), []
    ready.set()

    def send(message) -> None:
        ready.wait(10)
        sent.append(message)

    return SimpleNamespace(it=Paced(send, lambda: clock.now), clock=clock, ready=ready, sent=sent)


def sampled(paced, steps: int, seconds: float) -> None:
    """A sampler that has something to tell at each step and takes so long for it."""
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


def test_the_end_is_told_in_any_case_after_what_is_under_way(paced):
    paced.ready.clear()
    paced.it("step")
    started = time.perf_counter()
    paced.it.finish("end")
    assert time.perf_counter() - started < 0.5, "the sampler waited"
    assert paced.sent == []
    paced.ready.set()
    paced.it.sender.join(10)
    assert paced.sent == ["step", "end"]


@pytest.fixture
def watched(comfy, monkeypatch):
    """A listener whose page, "me", is there; what it is sent."""
    from comfyui_toma.nodes import live

    server = SimpleNamespace(client_id="me", sent=[])
    server.send_sync = lambda event, message, client: server.sent.append((event, message, client))
    monkeypatch.setattr(live, "page_server", lambda: server)
    monkeypatch.setattr(live, "_watching", {"me": True})
    return SimpleNamespace(live=live, server=server, it=live.Live("7"))


def report():
    from comfyui_toma.toma_core.patcher.report import Evaluated, Report
    from comfyui_toma.toma_core.settings import Settings

    made = Report("Flux", Settings(tolerance=0.03), blocks=4, steps=3)
    made.evaluations.append(Evaluated(0, 1.0, "full", "the first"))
    made.evaluations.append(Evaluated(1, 0.5, "full", "a forecast would be off", error=0.2, off=float("inf")))
    made.evaluations.append(Evaluated(2, 0.2, "forecast", "expected", work=0.0))
    return made


def test_messages_tell_the_whole_run_under_its_name(watched):
    first, second = report(), report()
    assert watched.it
    for run in (first, second):
        watched.it.stepped(run)
        watched.it.ended(run)
        watched.it.runs.sender.join(10)
    events, messages, clients = zip(*watched.server.sent)
    assert set(events) == {"toma.run"} and set(clients) == {"me"}
    assert messages[-1]["over"] and messages[-1]["node"] == "7"
    assert messages[-1]["evaluations"] == [
        [0, "full", "the first", None, 1.0],
        [1, "full", "a forecast would be off", 1e6, 1.0],
        [2, "forecast", "expected", None, 0.0],
    ]
    assert messages[-1]["summary"] == second.summary()
    assert len({message["run"] for message in messages}) == 2, "two runs, two names"


def test_nothing_is_sent_where_no_page_is(watched, monkeypatch):
    monkeypatch.setattr(watched.live, "_watching", {})
    assert not watched.it
    watched.it.ended(report())
    monkeypatch.setattr(watched.live, "_watching", {"another": True})
    assert not watched.it
    watched.it.ended(report())
    assert watched.server.sent == [] and watched.it.runs.sender is None


def test_picks_only_for_a_page_that_wants_them(watched, monkeypatch):
    import torch
    from comfyui_toma.toma_core.patcher.report import Pick

    pick = Pick(0, "2x2", (2, 2), torch.tensor([[0, 3]]), torch.zeros(1, 4))
    monkeypatch.setattr(watched.live, "_watching", {"me": False})
    watched.it.picked(pick)
    assert watched.it.picks.sender is None
    monkeypatch.setattr(watched.live, "_watching", {"me": True})
    watched.it.picked(pick)
    watched.it.picks.sender.join(10)
    assert watched.server.sent[0][:2] == (
        "toma.picks",
        {"node": "7", "step": 0, "group": "2x2", "grid": (2, 2), "kept": [0, 3]},
    )


def test_a_page_that_hangs_costs_the_sampler_nothing(watched, tmp_path):
    """A real run of steps that are told and tokens that are picked, while nothing gets through to the page."""
    import builders
    from comfyui_toma.toma_core.patcher import patch
    from comfyui_toma.toma_core.settings import Settings

    hangs, tell = Event(), watched.server.send_sync
    watched.server.send_sync = lambda *message: (hangs.wait(60), tell(*message))
    model = builders.tiny_flux(tmp_path / "tiny.safetensors")
    model = patch(model, Settings(ratio=0.5, tile_size=4), False, watched.it)
    started = time.perf_counter()
    builders.sample(model, 64, 64, steps=4, cfg=1.0)
    assert time.perf_counter() - started < 30, "the sampler waited for the page"
    assert watched.server.sent == []
    hangs.set()
    watched.it.runs.sender.join(10)
    told = [message for _, message, *_ in watched.server.sent if "evaluations" in message][-1]  # picks have their own
    assert told["over"] and len(told["evaluations"]) == 4
