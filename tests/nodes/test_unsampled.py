"""A ToMA node whose model no sampler used says so, also when it comes out of the cache; all others say nothing."""

import time

from demo_prompt import new_seed, prompt

SAID = "ToMA: the model of node {} was not sampled in this prompt"


def merged_into_another(seed: int) -> dict:
    """ToMA on the second input of ModelMergeSimple, which goes on with the options of the first."""
    nodes = prompt(seed)
    inputs = {"model1": ["load", 0], "model2": ["toma", 0], "ratio": 0.5}
    nodes["both"] = {"class_type": "ModelMergeSimple", "inputs": inputs}
    nodes["sample"]["inputs"]["model"] = ["both", 0]
    return renamed(nodes)


def renamed(nodes: dict) -> dict:
    """With an id for the ToMA node that no other test uses."""
    node = f"toma{new_seed()}"
    nodes[node] = nodes.pop("toma")
    for other in nodes.values():
        other["inputs"] = {
            name: [node, given[1]] if isinstance(given, list) and given[0] == "toma" else given
            for name, given in other["inputs"].items()
        }
    return nodes


def toma_of(nodes: dict) -> str:
    return next(name for name, node in nodes.items() if node["class_type"] == "ToMA")


def times_said(server, nodes: dict) -> int:
    return server.log.count(SAID.format(toma_of(nodes)))


def wait_until_said(server, nodes: dict, times: int) -> None:
    until = time.monotonic() + 30
    while times_said(server, nodes) < times and time.monotonic() < until:
        time.sleep(0.1)
    assert times_said(server, nodes) == times, server.log_tail()


def test_it_is_said_each_time_also_of_a_cached_node(server):
    nodes = merged_into_another(new_seed())
    server.queue(nodes)
    wait_until_said(server, nodes, 1)
    nodes["sample"]["inputs"]["seed"] = new_seed()
    again = server.queue(nodes)
    ran = {data["node"] for kind, data in again.events if kind == "executing" and data.get("node")}
    assert "sample" in ran and toma_of(nodes) not in ran, "out of the cache"
    wait_until_said(server, nodes, 2)


def test_nothing_is_said_of_a_model_that_was_sampled_until_it_is_wired_elsewhere(server):
    nodes = renamed(prompt(new_seed()))
    server.queue(nodes)
    server.queue(nodes)  # all of it out of the cache, the sampler, too
    nodes["show2"] = {"class_type": "PreviewImage", "inputs": {"images": ["picture", 0]}}
    server.queue(nodes)  # one node more, the sampler out of the cache
    inputs = {"model1": ["load", 0], "model2": [toma_of(nodes), 0], "ratio": 0.5}
    nodes["both"] = {"class_type": "ModelMergeSimple", "inputs": inputs}
    nodes["sample"]["inputs"]["model"] = ["both", 0]
    server.queue(nodes)
    wait_until_said(server, nodes, 1)
    time.sleep(1)  # twice the pause: what the earlier prompts had to say would be there
    assert times_said(server, nodes) == 1


def test_of_two_in_a_row_the_first(server):
    nodes = renamed(prompt(new_seed()))
    first = toma_of(nodes)
    nodes["last"] = {"class_type": "ToMA", "inputs": {**nodes[first]["inputs"], "model": [first, 0]}}
    nodes["sample"]["inputs"]["model"] = ["last", 0]
    before = server.log.count(SAID.format("last"))
    server.queue(nodes)
    wait_until_said(server, nodes, 1)
    assert server.log.count(SAID.format("last")) == before


def judged(nodes: dict, done=(), before=None, outputs=("show",)) -> list[str]:
    from comfyui_toma.nodes.running import Running
    from comfyui_toma.nodes.unsampled import unsampled

    now = Running("id", nodes, None, list(outputs))
    return unsampled(now, set(done), {"toma": {}} if before is None else before)


def test_what_is_judged(comfy):
    from comfyui_toma.nodes.unsampled import made_from

    nodes = prompt(1)
    assert judged(nodes) == ["toma"]
    assert judged(nodes, done=["toma"]) == []
    assert judged(nodes, before={}) == [], "never executed: a branch that a switch left out"
    assert judged(nodes, outputs=["text"]) == [], "only a part of the graph was asked for"
    before = {"toma": {"sample": made_from(nodes, "sample")}}
    assert judged(nodes, before=before) == [], "the sampler's result is cached"
    assert judged(prompt(2), before=before) == ["toma"], "it cannot be: it has another seed"
    assert judged({**nodes, "odd": {}}, before=before) == []


def test_nodes_that_are_named_anew_each_time_are_forgotten(comfy, monkeypatch):
    """A client may give the nodes of every prompt other ids; only the newest are remembered."""
    from comfyui_toma.nodes import unsampled

    monkeypatch.setattr(unsampled, "_before", {})
    for number in range(2 * unsampled.MOST_NODES):
        unsampled.met("first")
        unsampled.met(f"toma {number}")
    assert len(unsampled._before) == unsampled.MOST_NODES
    assert "first" in unsampled._before and "toma 0" not in unsampled._before
