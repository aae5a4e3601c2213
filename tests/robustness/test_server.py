"""Faults and bad prompts in a real server: afterwards it answers, and its next run equals a fresh one."""

import json
import random
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import websocket
from comfy_server import PACK_NAME, ROOT, ComfyServer, PromptError

STEPS = 5
BAD_PROMPTS = 300
SURVIVED: list[str] = []


PACKS = {PACK_NAME: ROOT, "fault_pack": Path(__file__).parent / "fault_pack"}


@pytest.fixture(scope="module")
def trusty(tmp_path_factory):
    """A server with the pack and the nodes of fault_pack."""
    with ComfyServer(tmp_path_factory.mktemp("robustness"), PACKS) as running:
        yield running


def graph(kind="sdxl", seed=0, fault="none", at=1, steps=STEPS, width=128, batch=1, toma=None, meeting="") -> dict:
    widgets = {
        "preset": "custom", "ratio": 0.5, "tile_size": "8", "reselect_every": 3, "reweight_every": 3,
        "start_percent": 0.0, "end_percent": 1.0, "merge": "whole block", "budget": "equal", "skip_first_blocks": 0,
    }  # fmt: skip
    sampler = {
        "seed": seed,
        "steps": steps,
        "cfg": 2.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
    }
    links = {"model": ["3", 0], "positive": ["1", 1], "negative": ["1", 2], "latent_image": ["1", 3]}
    return {
        "1": {"class_type": "TrustModel", "inputs": {"kind": kind, "width": width, "batch": batch}},
        "2": {"class_type": "ToMA", "inputs": {"model": ["1", 0], **widgets, **(toma or {})}},
        "3": {
            "class_type": "TrustFault",
            "inputs": {"model": ["2", 0], "fault": fault, "at": at, "meeting": str(meeting)},
        },
        "4": {"class_type": "KSampler", "inputs": {**sampler, **links}},
        "5": {"class_type": "TrustDigest", "inputs": {"latent": ["4", 0]}},
    }


def look(done) -> dict:
    return done.outputs["5"]


def forget(server) -> None:
    """Cached outputs would stand in for the next run."""
    server.post("/free", {"unload_models": True, "free_memory": True})


@pytest.fixture(scope="module")
def fresh(trusty):
    found = {}
    for kind in ("sdxl", "flux"):
        found[kind] = look(trusty.queue(graph(kind)))
        assert found[kind]["finite"] == [True] and not found[kind].get("alive")
    return found


def check_next_run(server, fresh, what, figure, kind="sdxl") -> None:
    forget(server)
    after = look(server.queue(graph(kind)))
    assert after["digest"] == fresh[kind]["digest"], f"{what} shows in the next run"
    assert not after.get("alive"), after
    SURVIVED.append(what)
    figure("faults survived in a server", f"{len(SURVIVED)}: it answers, the next run equals a fresh one")


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_interrupt_at_every_step(trusty, fresh, figure, kind, step):
    """As the button does it, but at a certain call of the model."""
    with pytest.raises(PromptError) as stopped:
        trusty.queue(graph(kind, seed=step, fault="interrupt", at=step, toma={"tolerance": 0.0}))  # all of them run
    assert "exception_type" not in stopped.value.details, "an error, not an interrupt"
    check_next_run(trusty, fresh, f"interrupt of {kind} at step {step}", figure, kind)


def test_interrupt_from_outside(trusty, fresh, figure):
    def on_event(kind, data):
        if kind == "progress" and data.get("node") == "4":
            trusty.interrupt()

    with pytest.raises(PromptError):
        trusty.queue(graph(seed=99, steps=400), on_event=on_event)
    check_next_run(trusty, fresh, "interrupt over HTTP", figure)


@pytest.mark.parametrize("fault", ["error", "oom"])
@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_a_model_that_fails(trusty, fresh, figure, kind, fault):
    with pytest.raises(PromptError):
        trusty.queue(graph(kind, seed=9, fault=fault, at=3))
    check_next_run(trusty, fresh, f"{fault} in {kind}", figure, kind)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_no_memory_for_our_own_work(trusty, fresh, figure, kind):
    start = len(trusty.log)
    done = look(trusty.queue(graph(kind, seed=9, fault="oom of ours", at=2)))
    assert done["finite"] == [True] and not done.get("alive")
    assert trusty.log[start:].count("ToMA: left unmerged because merging ran out of memory") == 1
    check_next_run(trusty, fresh, f"no memory for selection in {kind}", figure, kind)


def test_the_client_goes_away(trusty, fresh, figure):
    job = trusty.submit(graph(seed=21))
    job.socket.close()
    check_next_run(trusty, fresh, "the client gone", figure)


def test_the_queue_is_cleared_while_a_run_is_interrupted(trusty, fresh, figure):
    jobs = [trusty.submit(graph(seed=30 + i, steps=60)) for i in range(3)]
    trusty.post("/queue", {"clear": True})
    trusty.interrupt()
    other = threading.Thread(target=trusty.interrupt)
    other.start()
    other.join()
    for job in jobs:
        job.socket.close()
    check_next_run(trusty, fresh, "queue cleared, interrupted twice", figure)


def test_two_servers_at_once(trusty, fresh, figure, tmp_path, tmp_path_factory):
    """Both are in the middle of a merged run at the same time, and each gives what one alone gives."""
    with ComfyServer(tmp_path_factory.mktemp("second"), PACKS) as second:
        for kind in ("sdxl", "flux"):
            place = tmp_path / kind
            place.mkdir()
            forget(trusty)
            pair = {server: graph(kind, fault="meet", at=3, meeting=place / name)
                    for name, server in (("first", trusty), ("second", second))}  # fmt: skip
            jobs = [server.submit(prompt) for server, prompt in pair.items()]
            for job in jobs:
                done = look(job.wait())
                assert done["digest"] == fresh[kind]["digest"] and not done.get("alive"), kind
    figure("two servers at once", "each gives what one alone gives, on SDXL and Flux")


def odd(random_: random.Random):
    return random_.choice(
        [None, True, "", "x", -1, 0, 10**30, -(10**30), 1e308, float("nan"), float("inf"), [], {}, ["1", 0], ["1", 9],
         ["99", 0], "<img src=x onerror=alert(1)>", "../../etc/passwd", [[]], {"a": 1}, 0.5, 7]
    )  # fmt: skip


def test_bad_prompts(trusty, fresh, figure):
    """Damaged widget values, missing and extra inputs: refused with a message, or run to a finite result."""
    random_ = random.Random(8)
    refused = ran = 0
    for number in range(BAD_PROMPTS):
        prompt = graph(seed=number, steps=1, toma={"preset": random_.choice(["balanced", "paper", "custom"])})
        inputs = prompt["2"]["inputs"]
        for key in random_.sample(sorted(inputs), random_.choice([1, 1, 2, 3])):
            if random_.random() < 0.2:
                del inputs[key]
            else:
                inputs[key] = odd(random_)
        if random_.random() < 0.3:
            inputs["from_a_later_version"] = odd(random_)
        try:
            job = trusty.submit(prompt)
        except PromptError as error:
            refused += 1
            assert "Traceback" not in json.dumps(error.details)
            continue
        try:
            assert look(job.wait())["finite"] == [True]
            ran += 1
        except PromptError as error:
            told = error.details
            assert told["exception_type"].rsplit(".")[-1] in ("SettingsError", "UnsupportedModel"), told
            refused += 1
    assert refused > BAD_PROMPTS // 3, (refused, ran)
    figure(
        "inputs tried through /prompt",
        f"{BAD_PROMPTS}: {refused} refused with a message, {ran} run to the end",
    )
    check_next_run(trusty, fresh, f"{BAD_PROMPTS} bad prompts", figure)


JSON = {"Content-Type": "application/json"}


def answer(server, body: bytes, headers: dict | None = None, path: str = "/toma/live", method: str = "POST") -> int:
    """The status of a request, which must not harm the server."""
    request = urllib.request.Request(server.url + path, body, {**JSON, **(headers or {})}, method=method)
    try:
        status = urllib.request.urlopen(request, timeout=20).status
    except urllib.error.HTTPError as refused:
        status = refused.code
        refused.close()
    assert server.get("/system_stats")["system"]
    return status


def wish(client: str = "x", on: object = True, **more) -> bytes:
    return json.dumps({"client_id": client, "on": on, **more}).encode()


BAD_BODIES = [
    b"", b"[]", b"null", b"{", b'{"client_id": 1, "on": true}', b'{"client_id": "x", "on": "yes"}', b'{"on": true}',
    b'{"client_id": ["x"], "on": true}', b'{"client_id": {}, "on": true}', b"[" * 1000, b"\xff" * 100, b"NaN",
]  # fmt: skip


def test_our_route_refuses(trusty, figure):
    """Only a connected page of this origin is heard, and no more than it has to say is read."""
    start = len(trusty.log)
    socket = websocket.create_connection(f"ws://127.0.0.1:{trusty.port}/ws?clientId=page", timeout=20)
    try:
        assert answer(trusty, wish("page")) == answer(trusty, wish("page", False)) == 200
        for body in BAD_BODIES:
            assert answer(trusty, body) == 400, body
        for client in ("x", "../../x", "<img src=x>", ""):
            assert answer(trusty, wish(client)) == 404, client
        huge = wish("page", more="x" * 2_000_000)
        assert answer(trusty, huge) == answer(trusty, b"[" * 200_000) == 413
        assert answer(trusty, wish("page"), {"Content-Type": "application/json; charset=no-such"}) == 200
        for foreign in (
            {"Origin": "http://evil.example"},
            {"Origin": "null", "Sec-Fetch-Site": "cross-site"},
        ):
            assert answer(trusty, wish("page"), foreign) == 403, foreign
            assert answer(trusty, wish("page"), foreign, "/api/toma/live") == 403, foreign
    finally:
        socket.close()
    assert "Traceback" not in trusty.log[start:] and "Error handling request" not in trusty.log[start:]
    figure("requests that our route refused", f"{len(BAD_BODIES) + 4 + 2 + 4} of as many")


def test_there_is_one_route_and_it_takes_no_path(trusty):
    routes = trusty.queue({"1": {"class_type": "TrustRoutes", "inputs": {"pack": PACK_NAME}}}).outputs["1"]["routes"]
    assert sorted(routes) == ["POST /api/toma/live", "POST /toma/live"]
    for path in ("/toma", "/toma/", "/toma/live/", "/toma/live/..%2f..%2fpyproject.toml", "/toma/live/x"):
        assert answer(trusty, wish(), path=path) in (404, 405), path
    for method in ("GET", "PUT", "DELETE"):
        assert answer(trusty, wish(), method=method) in (404, 405), method
    page = f"/extensions/{PACK_NAME}"
    assert trusty.get(f"{page}/toma.js")
    for path in ("/../pyproject.toml", "/%2e%2e/pyproject.toml", "/..%2fpyproject.toml", "//etc/passwd"):
        assert answer(trusty, None, path=page + path, method="GET") != 200, path
