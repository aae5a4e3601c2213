"""Run by test_missing_hooks.py in a process of its own: ComfyUI without one hook at a time, then our pack and another.

Arguments: an empty folder and the hooks. Prints what came of each as JSON."""

import asyncio
import json
import logging
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "support"))
PACKS = (HERE.parents[1], HERE / "fault_pack")


@contextmanager
def without(hook: str):
    """ComfyUI lacks this hook: an attribute, a field of a dataclass, or a whole module."""
    module, _, path = hook.partition(":")
    *owners, name = path.split(".")
    owner = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    fields = getattr(owner, "__dataclass_fields__", {})
    held = fields if name in fields else vars(owner)
    kept = sys.modules[module] if not name else held[name]
    if not name:
        sys.modules[module] = None
    elif held is fields:
        del fields[name]
    else:
        delattr(owner, name)
    yield
    if not name:
        sys.modules[module] = kept
    elif held is fields:
        fields[name] = kept
    else:
        setattr(owner, name, kept)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().strip().splitlines()


def load() -> dict:
    """Both packs by ComfyUI's own loader."""
    import nodes

    log = Lines()
    logging.getLogger().addHandler(log)
    for name in ("ToMA", "TrustModel"):
        nodes.NODE_CLASS_MAPPINGS.pop(name, None)
    loaded = [asyncio.run(nodes.load_custom_node(str(pack))) for pack in PACKS]
    logging.getLogger().removeHandler(log)
    there = [name for name in ("ToMA", "TrustModel") if name in nodes.NODE_CLASS_MAPPINGS]
    return {"loaded": loaded, "nodes": there, "log": log.lines}


def main(base: str, *hooks: str) -> None:
    from comfy_here import import_comfyui

    import_comfyui(Path(base))
    # nodes.py puts comfy/ on the path, whose utils.py hides the folder utils; main.py imports that before.
    sys.path[:] = [entry for entry in sys.path if Path(entry).name != "comfy"]
    import server  # noqa: F401 - as main.py has it before any pack

    found = {}
    for hook in hooks:
        with without(hook):
            found[hook] = load()
    found["all there"] = load()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
