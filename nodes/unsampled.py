"""Tells of ToMA nodes whose model was not sampled, for instance on the second input of a node that merges models.

That nothing was sampled is known when the prompt is over, and ComfyUI has no call for that moment which all releases
share. So a thread looks twice a second whether the prompt is still at work, and then says it in the log and to the page
that queued it. A sampler whose result came out of ComfyUI's cache counts, if it has sampled with this node before.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from threading import Thread

from .running import Running, page_server, running

UNSAMPLED = "toma.unsampled"
PAUSE = 0.5
MOST_KEPT = 64  # samplers by node: more than any workflow has
MOST_NODES = 256  # that are remembered: a client may name the nodes of each prompt anew

_watched: set[str] = set()  # prompts under way, by id
_sampled: dict[str, set[str]] = {}  # prompts under way: the nodes whose model was sampled
# Nodes that ran, in this prompt or in an earlier one: the samplers that used its model, each with what it was made from
_before: dict[str, dict[str, str]] = {}


def watch() -> None:
    """At the begin of a prompt with a ToMA node, also when that comes out of the cache."""
    now = running()
    if now is None or now.prompt_id in _watched:
        return
    _watched.add(now.prompt_id)
    _sampled[now.prompt_id] = set()
    Thread(target=_tell_at_end, args=(now,), daemon=True).start()


def met(node_id: str) -> None:
    """A ToMA node runs."""
    _samplers(node_id)
    watch()


def sampled(node_id: str) -> None:
    """The model of a ToMA node was sampled, by the node that ComfyUI executes now."""
    from comfy_execution.utils import get_executing_context

    now, context = running(), get_executing_context()
    if now is None:
        return
    _sampled.get(now.prompt_id, set()).add(node_id)
    sampler = context.node_id.split(".")[0] if context else ""  # "7.0.0.1" is a node that node 7 made
    if sampler in now.prompt:
        samplers = _samplers(node_id)
        samplers[sampler] = made_from(now.prompt, sampler)
        while len(samplers) > MOST_KEPT:
            samplers.pop(next(iter(samplers)))


def _samplers(node_id: str) -> dict[str, str]:
    """Those of a node, which now is the newest; of too many the oldest is forgotten, and nothing is told of it."""
    samplers = _before[node_id] = _before.pop(node_id, {})
    while len(_before) > MOST_NODES:
        _before.pop(next(iter(_before)))
    return samplers


def ancestors(prompt: dict, nodes: list[str]) -> set[str]:
    """The nodes themselves and all that they are made from."""
    found, reach = set(), [str(node) for node in nodes]
    while reach:
        node = reach.pop()
        if node in found or node not in prompt:
            continue
        found.add(node)
        inputs = prompt[node].get("inputs", {}).values()
        reach += [str(given[0]) for given in inputs if isinstance(given, list) and len(given) == 2]
    return found


def made_from(prompt: dict, node: str) -> str:
    """All that decides what a node gives: if it is the same again, ComfyUI takes the result out of its cache."""
    about = {one: [prompt[one].get("class_type"), prompt[one].get("inputs")] for one in ancestors(prompt, [node])}
    return json.dumps(about, sort_keys=True, default=str)


def unsampled(now: Running, done: set[str], before: dict[str, dict[str, str]]) -> list[str]:
    """The ToMA nodes of a prompt that ran, in vain. done: whose model was sampled in it; before: that ran
    at all, each with the samplers that used its model."""
    used = ancestors(now.prompt, now.outputs)
    ours = [node for node in before if node in used and now.prompt[node].get("class_type") == "ToMA"]

    def cached(node: str) -> bool:
        return any(sampler in used and made_from(now.prompt, sampler) == made for sampler, made in before[node].items())

    return [node for node in ours if node not in done and not cached(node)]


def _tell_at_end(now: Running, sleep: Callable[[float], None] = time.sleep) -> None:
    while now.is_under_way():
        sleep(PAUSE)
    done = _sampled.pop(now.prompt_id, set())
    _watched.discard(now.prompt_id)
    if not now.completed():
        return
    for node in unsampled(now, done, {key: dict(value) for key, value in list(_before.items())}):
        logging.warning(
            "ToMA: the model of node %s was not sampled in this prompt, so the node did nothing: "
            "its MODEL has to be the one that goes into the sampler. Put it after nodes that merge models.",
            node,
        )
        if now.client:
            page_server().send_sync(UNSAMPLED, {"node": node, "prompt_id": now.prompt_id}, now.client)
