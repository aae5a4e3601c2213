"""Nodes for the fault tests in a real server: tiny models, faults on purpose, and a look at what is alive."""

import gc
import hashlib
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import comfy.model_management
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))

_models: dict = {}


class TrustModel:
    """A tiny SDXL or Flux with its two prompts."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL", "CONDITIONING", "CONDITIONING", "LATENT"), "make", "robustness"

    @classmethod
    def INPUT_TYPES(cls):
        sizes = {"width": ("INT", {"default": 128}), "batch": ("INT", {"default": 1})}
        return {"required": {"kind": (["sdxl", "flux"],), **sizes}}

    def make(self, kind, width, batch):
        import builders
        import folder_paths

        if kind not in _models:
            path = Path(folder_paths.get_temp_directory()) / "robustness" / "flux.safetensors"
            make = {
                "sdxl": lambda: builders.tiny_sdxl(deep=1),
                "flux": lambda: builders.tiny_flux(path, hidden=128, depth=1, depth_single=2),
            }
            _models[kind] = make[kind]()
        model = _models[kind]
        latent = {"samples": builders.empty_latent(model, width, 128, batch)}
        return model, builders.conditioning(model, 1), builders.conditioning(model, 2), latent


class TrustFault:
    """The model, which at call `at` raises inside of a block, or has no memory for our own work."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "arm", "robustness"

    @classmethod
    def INPUT_TYPES(cls):
        faults = ["none", "error", "oom", "oom of ours", "interrupt", "meet"]
        required = {"model": ("MODEL",), "fault": (faults,), "at": ("INT", {"default": 1})}
        return {"required": required, "optional": {"meeting": ("STRING", {"default": ""})}}

    def arm(self, model, fault, at, meeting=""):
        model, calls = model.clone(), 0
        ours = next(m for name, m in sys.modules.items() if name.endswith("toma_core.merge"))

        def wrapper(apply_model, args):
            nonlocal calls
            calls += 1
            if calls != at or fault == "none":
                return apply_model(args["input"], args["timestep"], **args["c"])
            if fault == "interrupt":
                comfy.model_management.interrupt_current_processing()
                return apply_model(args["input"], args["timestep"], **args["c"])
            if fault == "meet":
                meet(Path(meeting))
                return apply_model(args["input"], args["timestep"], **args["c"])
            if fault == "oom of ours":
                return without_memory(ours, lambda: apply_model(args["input"], args["timestep"], **args["c"]))
            raise {"error": RuntimeError, "oom": torch.cuda.OutOfMemoryError}[fault]("on purpose")

        model.set_model_unet_function_wrapper(wrapper)
        return (model,)


def without_memory(module, work):
    def never(*_, **__):
        raise torch.cuda.OutOfMemoryError("on purpose")

    original, module.select = module.select, never
    try:
        return work()
    finally:
        module.select = original


def meet(sign: Path, seconds: float = 60) -> None:
    """Waits until another server has put a sign beside this one's: then both are in the middle of a run."""
    sign.touch()
    deadline = time.monotonic() + seconds
    while len(list(sign.parent.iterdir())) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("the other server never came")
        time.sleep(0.01)


class TrustRoutes:
    """The routes of the server whose handlers are in a pack of this name."""

    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "look", True, "robustness"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"pack": ("STRING", {"default": ""})}}

    def look(self, pack):
        from server import PromptServer

        routes = PromptServer.instance.app.router.routes()
        ours = [route for route in routes if pack in getattr(route.handler, "__module__", "")]
        return {"ui": {"routes": [f"{route.method} {route.resource.canonical}" for route in ours]}}


STATE = ("Merge", "ChunkState", "Evaluation", "Merging", "Run", "Anchor")  # of a run, and gone with it
OF_A_WORKFLOW = ("Handle", "Live", "Report")  # gone with the workflow's outputs


def our_modules() -> dict:
    """The modules of the pack by their names inside of it."""
    root = next(name for name in sys.modules if name.endswith(".toma_core.merge")).removesuffix("toma_core.merge")
    return {name.removeprefix(root): module for name, module in list(sys.modules.items()) if name.startswith(root)}


def alive(names: tuple[str, ...]) -> list[str]:
    gc.collect()
    ours = {module.__name__ for module in our_modules().values()}
    kinds = (type(one) for one in gc.get_objects())
    return [kind.__name__ for kind in kinds if kind.__module__ in ours and kind.__name__ in names]


class TrustCompile:
    """torch.compile as ComfyUI's node does it, without a C++ compiler."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "compile", "robustness"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def compile(self, model):
        from comfy_extras.nodes_torch_compile import TorchCompileModel

        return TorchCompileModel.execute(model, "eager").result


class TrustHeld:
    """What the pack holds on to in a prompt that has none of its nodes: entries of every cache and container of its
    modules, objects of earlier workflows and runs, and graphs and threads of the process."""

    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "look", True, "robustness"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"at": ("INT", {"default": 0})}}

    def look(self, at):
        time.sleep(1)  # until the thread that waits for the end of the last prompt has seen it
        entries = {}
        for module, found in our_modules().items():
            for name, value in vars(found).items():
                if hasattr(value, "cache_info"):
                    entries[f"{module}.{name}"] = value.cache_info().currsize
                elif isinstance(value, (dict, set, list, deque)) and not name.startswith("__"):
                    entries[f"{module}.{name}"] = len(value)
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
        process = {"graphs": counters.get("stats", {}).get("unique_graphs", 0), "threads": threading.active_count()}
        held = {"entries": entries, "alive": dict(Counter(alive(STATE + OF_A_WORKFLOW))), "process": process}
        return {"ui": {"held": [held]}}


class TrustDigest:
    """What was sampled, as a digest, what the last run of the model did, and which objects of a run are alive."""

    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "look", True, "robustness"

    @classmethod
    def INPUT_TYPES(cls):
        required = {"latent": ("LATENT",)}
        return {"required": required, "optional": {"model": ("MODEL",), "collect": ("BOOLEAN", {"default": True})}}

    def look(self, latent, model=None, collect=True):
        digest = hashlib.sha256(latent["samples"].contiguous().numpy().tobytes()).hexdigest()
        told = {"digest": [digest], "finite": [bool(torch.isfinite(latent["samples"]).all())]}
        if model is not None:
            told["counts"] = [model.model_options["toma"].reports[-1].counts]
        return {"ui": {**told, "alive": alive(STATE) if collect else []}}


KINDS = (TrustModel, TrustFault, TrustDigest, TrustRoutes, TrustCompile, TrustHeld)
NODE_CLASS_MAPPINGS = {kind.__name__: kind for kind in KINDS}
