"""Through a real server: recording only with a preview, one more run when it is added, the live route."""

import json
import os
import time
import urllib.error
import uuid

import pytest
import websocket

if "COMFYUI_URL" in os.environ:
    # While working on the nodes: tests against a server that is already running.
    @pytest.fixture(scope="module")
    def server(tmp_path_factory):
        from comfy_server import ComfyServer

        port = int(os.environ["COMFYUI_URL"].rsplit(":", 1)[1])
        return ComfyServer(tmp_path_factory.mktemp("server"), port=port)


def prompt(seed: int, preview: bool = False, tolerance: float = 0.0, steps: int = 2) -> dict:
    """Some steps of the demo Flux at 64 pixels; seeds are not used twice, or the server would answer from
    its cache."""
    nodes = {
        "load": ("ToMADemoLoader", {"name": "flux"}),
        "toma": ("ToMA", {
            "model": ["load", 0], "preset": "custom", "ratio": 0.5, "tile_size": "4", "reselect_every": 1,
            "reweight_every": 1, "start_percent": 0.0, "end_percent": 1.0, "merge": "whole block",
            "budget": "equal", "skip_first_blocks": 0, "tolerance": tolerance,
        }),
        "text": ("ToMADemoPrompt", {"caption": "fox on blue", "width": 64, "height": 64}),
        "size": ("ToMADemoLatent", {"width": 64, "height": 64, "batch_size": 1}),
        "sample": ("KSampler", {
            "model": ["toma", 0], "positive": ["text", 0], "negative": ["text", 0], "latent_image": ["size", 0],
            "seed": seed, "steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        }),
        "picture": ("VAEDecode", {"samples": ["sample", 0], "vae": ["load", 1]}),
        "show": ("PreviewImage", {"images": ["picture", 0]}),
    }  # fmt: skip
    if preview:
        looks = {"step": 0, "blocks": "", "style": "kept tokens"}
        nodes["look"] = ("ToMAPreview", {"model": ["toma", 0], "images": ["picture", 0], **looks})
    return {id: {"class_type": kind, "inputs": inputs} for id, (kind, inputs) in nodes.items()}


def executed(finished) -> set[str]:
    return {data["node"] for kind, data in finished.events if kind == "executing" and data.get("node")}


def new_seed() -> int:
    return uuid.uuid4().int % 10**9


def test_preview_added_to_a_finished_graph_samples_once_more_and_then_rests(server):
    seed = new_seed()
    assert "sample" in executed(server.queue(prompt(seed)))
    assert "sample" not in executed(server.queue(prompt(seed))), "nothing changed"
    added = server.queue(prompt(seed, preview=True))
    assert {"toma", "sample", "look"} <= executed(added)
    recorded = server.get("/view", **added.outputs["look"]["toma"][0]["picks"])
    recorded = recorded if isinstance(recorded, dict) else json.loads(recorded)
    assert recorded["picks"] and recorded["steps"] == 2
    moved = prompt(seed, preview=True)
    moved["look"]["inputs"]["step"] = 1
    assert executed(server.queue(moved)) == {"look"}, "looking at another step needs no new run"


def sent(server, wish: dict | None, event: str = "toma.picks", **run) -> list[dict]:
    """What a client is sent in one run, after it told its wish."""
    from comfy_server import Job

    client = uuid.uuid4().hex
    socket = websocket.create_connection(f"ws://127.0.0.1:{server.port}/ws?clientId={client}", timeout=60)
    if wish is not None:
        server.post("/toma/live", {"client_id": client, **wish})
    answer = server.post("/prompt", {"prompt": prompt(new_seed(), **run), "client_id": client})
    finished = Job(server, answer["prompt_id"], socket, time.monotonic()).wait()
    return [data for kind, data in finished.events if kind == event]


def test_picks_are_sent_to_the_page_that_asked_and_to_no_other(server):
    assert sent(server, None) == []
    assert sent(server, {"on": False}) == []
    picks = sent(server, {"on": True})
    assert picks and picks[0]["node"] == "toma" and picks[0]["step"] == 1, "by the answer of the step before"
    assert picks[0]["grid"] == [16, 16] and len(set(picks[0]["kept"])) == 128


def test_runs_are_told_to_pages_that_are_there(server):
    run = {"event": "toma.run", "tolerance": 0.1, "steps": 6}
    assert sent(server, None, **run) == []
    told = sent(server, {"on": False}, **run)
    assert told[-1]["over"] and told[-1]["finished"] and len({message["run"] for message in told}) == 1
    assert len(told[-1]["evaluations"]) == told[-1]["steps"] == 6
    assert told[-1]["summary"].startswith("6 steps: ")
    assert all(not message["over"] for message in told[:-1])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"client_id": "x"}, 400),
        ({"client_id": 7, "on": True}, 400),
        ({"client_id": "x", "on": "yes"}, 400),
        ({"client_id": "nobody", "on": True}, 404),
    ],
)
def test_live_route_refuses_what_it_should_not_take(server, body, status):
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.post("/toma/live", body)
    assert refused.value.code == status


@pytest.mark.parametrize("language", ["ko", "zh"])
def test_server_hands_out_the_translations(server, language):
    words = server.get("/i18n")[language]
    assert words["nodeDefs"]["ToMA"]["inputs"]["ratio"]["tooltip"]
    assert words["settings"]["ToMA_LivePicks"]["name"]
