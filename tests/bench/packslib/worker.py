"""A process of its own for one pack: `worker.py JOB`, a JSON file that packslib.watching wrote.

Says what it is about to do and what came of it as lines of JSON in a file, so that whoever watches knows what
it was at when it stopped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import runpy
import sys
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
for folder in ("support", "robustness", "bench"):
    sys.path.insert(0, str(TESTS / folder))
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in (TESTS.parent, Path(__file__).parent)]
sys.path.append(str(TESTS))  # last: tests/comfy must not hide ComfyUI's comfy

from comfy_here import finish, import_comfyui  # noqa: E402
from comfy_server import PACK_NAME, link  # noqa: E402


def main(job: dict) -> None:
    base, pack = Path(job["base"]), Path(job["pack"])
    out = open(job["out"], "a", encoding="utf-8")  # noqa: SIM115 - as long as the process

    def say(**line) -> None:
        print(json.dumps(line), file=out, flush=True)

    say(at="start")
    import_comfyui(base)
    import torch

    torch.set_num_threads(1)
    start_server_object()
    link(TESTS.parent, base / "custom_nodes" / PACK_NAME)
    link(pack, base / "custom_nodes" / pack.name)
    sys.path.append(str(base))  # some packs import themselves as custom_nodes.<folder>
    logging.getLogger().setLevel(logging.WARNING)

    import composing

    import nodes
    from packslib.trying import PackBench

    names = {pack.name: pack, "ToMA": TESTS.parent, "ComfyUI": Path(sys.modules["nodes"].__file__).parent}
    composing.load_core_nodes()
    finish(nodes.load_custom_node(str(base / "custom_nodes" / PACK_NAME)))
    bench = PackBench(base / "bench", names, job["steps"], job["preset"], job["models"])
    for name in bench.models:
        bench.put_right(name)  # what a plain run gives before the pack is there
    before = dict(nodes.NODE_CLASS_MAPPINGS)
    problem = load(base / "custom_nodes" / pack.name)
    changed = dict.fromkeys(note for name in bench.models if (note := bench.put_right(name)))
    found = {
        name: node
        for name, node in sorted(nodes.NODE_CLASS_MAPPINGS.items())
        if before.get(name) is not node and is_wanted(composing, node)
    }
    all_nodes = sum(before.get(name) is not node for name, node in nodes.NODE_CLASS_MAPPINGS.items())
    say(loaded=problem or "yes", nodes=list(found), all=all_nodes, plain="; ".join(changed))
    done = {tuple(pair) for pair in job["done"]}
    todo = [(node, name) for node in found for name in bench.models if (node, name) not in done]
    alone = {}
    for node, name in todo:
        say(at="alone", node=node, model=name)
        alone[node, name] = bench.first(node, found[node], name)
        if isinstance(alone[node, name], dict):
            say(node=node, model=name, **alone.pop((node, name)))
    for (node, name), run in alone.items():
        outcome = bench.compose(
            node, found[node], name, run, lambda stage, n=node, m=name: say(at=stage, node=n, model=m)
        )
        say(node=node, model=name, **outcome)
    say(end=True)


def load(folder: Path) -> str:
    """Why a pack could not be loaded, or nothing; as ComfyUI does it, with the error kept."""
    import nodes

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        script = folder / "prestartup_script.py"
        if script.is_file():
            try:
                runpy.run_path(str(script))
            except Exception:  # noqa: BLE001 - ComfyUI goes on, too
                traceback.print_exc()
        try:
            if finish(nodes.load_custom_node(str(folder), set(nodes.NODE_CLASS_MAPPINGS))):
                return ""
        except (Exception, SystemExit) as error:
            said.append(f"{type(error).__name__}: {error}")
    finally:
        logging.getLogger().removeHandler(handler)
    return (said[-1].splitlines() or ["no reason given"])[-1].rpartition("custom nodes: ")[2] if said else "no nodes"


def is_wanted(composing, node: type) -> bool:
    try:
        return composing.takes_and_gives_a_model(node)
    except Exception:  # noqa: BLE001 - a node that can't say what it takes
        traceback.print_exc()
        return False


def start_server_object() -> None:
    """Packs add routes to the server when they are imported; it never listens."""
    if importlib.util.find_spec("server"):
        import server

        server.PromptServer(asyncio.new_event_loop())


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
