"""Nodes for the fault tests in a real server: tiny models, faults on purpose, and a look at what is alive."""

import gc
import hashlib
import sys
import time
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


class TrustDigest:
    """What was sampled, as a digest, and which objects of a ToMA run are alive."""

    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "look", True, "robustness"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}}

    def look(self, latent):
        gc.collect()
        alive = [
            type(o).__name__
            for o in gc.get_objects()
            if "toma_core" in str(type(o).__module__)
            and type(o).__name__ in ("Merge", "Kept", "Evaluation", "Merging", "Run", "Anchor")
        ]
        digest = hashlib.sha256(latent["samples"].contiguous().numpy().tobytes()).hexdigest()
        finite = bool(torch.isfinite(latent["samples"]).all())
        return {"ui": {"digest": [digest], "alive": alive, "finite": [finite]}}


NODE_CLASS_MAPPINGS = {kind.__name__: kind for kind in (TrustModel, TrustFault, TrustDigest, TrustRoutes)}
