"""Through a real server: recording only with a preview, one more run when it is added, the live route."""

import json
import os
import time
import urllib.error
import uuid

import pytest
import websocket
from demo_prompt import new_seed, prompt

if "COMFYUI_URL" in os.environ:
    # While working on the nodes: tests against a server that is already running.
    @pytest.fixture(scope="module")
    def server(tmp_path_factory):
        from comfy_server import ComfyServer

        port = int(os.environ["COMFYUI_URL"].rsplit(":", 1)[1])
        return ComfyServer(tmp_path_factory.mktemp("server"), port=port)


def executed(finished) -> set[str]:
    return {data["node"] for kind, data in finished.events if kind == "executing" and data.get("node")}


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


def sent(server, wish: dict | None, event: str = "toma.picks", nodes: dict | None = None, **run) -> list[dict]:
    """What a client is sent in one run, after it told its wish."""
    from comfy_server import Job

    client = uuid.uuid4().hex
    socket = websocket.create_connection(f"ws://127.0.0.1:{server.port}/ws?clientId={client}", timeout=60)
    if wish is not None:
        server.post("/toma/live", {"client_id": client, **wish})
    answer = server.post("/prompt", {"prompt": nodes or prompt(new_seed(), **run), "client_id": client})
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


def test_two_nodes_alike_tell_each_of_its_own_runs(server):
    nodes = prompt(new_seed(), tolerance=0.1)
    nodes["toma2"] = nodes["toma"]
    for name, source in (("sample", "toma"), ("picture", "sample"), ("show", "picture")):
        inputs = nodes[name]["inputs"]
        inputs = {key: [f"{source}2", 0] if given == [source, 0] else given for key, given in inputs.items()}
        nodes[f"{name}2"] = {**nodes[name], "inputs": inputs}
    told = sent(server, {"on": False}, "toma.run", nodes)
    over = [message["node"] for message in told if message["over"]]
    assert sorted(over) == ["toma", "toma2"] and len({message["run"] for message in told}) == 2


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
