"""Every node of ComfyUI that takes a MODEL and gives one, before and after ToMA: found, filled, sampled, judged.

Nothing here lists the nodes: they come from the running ComfyUI, so that a new one joins by itself. An input
gets its default; where that shows no effect, a value away from it. What can't be made here is named.
"""

from __future__ import annotations

import gc
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import builders
import torch
from comfy_here import finish
from torch import Tensor

RUN = {"width": 128, "height": 128, "steps": 4, "cfg": 2.0}  # two full steps, a merged one after each
# Where the default can't serve here, and why.
INSTEAD = {
    ("TorchCompileModel", "backend"): "eager",  # no C++ compiler needed; compiling is tested by itself
    ("ContextWindowsManual", "context_length"): 8,  # of 16 latent rows, with dim 2 below
    ("ContextWindowsManual", "dim"): 2,
    ("HyperTile", "tile_size"): 64,  # several tiles in a small picture
    ("HyperTile", "max_depth"): 2,
    ("EasyCache", "reuse_threshold"): 3.0,  # of four steps one is to be skipped
    ("LazyCache", "reuse_threshold"): 3.0,
    ("FreSca", "freq_cutoff"): 4,  # of 16 frequencies
}
# Nodes that act on a part of a run that not every run has.
MASKED = {"DifferentialDiffusion"}
# The effect has to point where it points without ToMA, and merging may cost no more than twice what it costs alone.
LEAST_COSINE, MOST_COST = 0.3, 2.0
NEGLIGIBLE = 1e-4

GOOD, NOTHING, ALONE, UNMADE, BAD = "composes", "no effect here", "not for this model", "not tried", "FAILS"
NOT_MERGED = "not merged: "  # begins the remark about a run in which ToMA did nothing and says why


class Unmade(Exception):
    """An input that can't be made from nothing."""


@dataclass(frozen=True)
class Outcome:
    node: str
    model: str
    status: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.node} on {self.model}: {self.status}" + (f" ({self.note})" if self.note else "")


def load_core_nodes() -> None:
    """ComfyUI's own nodes beyond nodes.py; in process they are not there by themselves."""
    import nodes

    if "TorchCompileModel" not in nodes.NODE_CLASS_MAPPINGS:
        finish(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))


def inputs_of(node: type) -> dict[str, tuple[object, dict, bool]]:
    """name -> (type, options, required)"""
    declared = node.INPUT_TYPES()
    found = {}
    for part in ("required", "optional"):
        for name, spec in (declared.get(part) or {}).items():
            options = spec[1] if len(spec) > 1 and isinstance(spec[1], dict) else {}
            kind = "COMBO" if isinstance(spec[0], (list, tuple)) else spec[0]
            if isinstance(spec[0], (list, tuple)):
                options = {"options": spec[0], **options}
            found[name] = (kind, options, part == "required")
    return found


def takes_and_gives_a_model(node: type) -> bool:
    return "MODEL" in (getattr(node, "RETURN_TYPES", None) or ()) and any(
        kind == "MODEL" for kind, *_ in inputs_of(node).values()
    )


def model_nodes() -> dict[str, type]:
    """Nodes with a MODEL among both inputs and outputs, by id."""
    import nodes

    return {
        name: node
        for name, node in sorted(nodes.NODE_CLASS_MAPPINGS.items())
        if takes_and_gives_a_model(node) and "toma" not in getattr(node, "RELATIVE_PYTHON_MODULE", "").lower()
    }


def call(node: type, inputs: dict):
    """The MODEL that a node gives, whichever way it is written."""
    if getattr(node, "INPUT_IS_LIST", False):
        inputs = {name: [value] for name, value in inputs.items()}
    if hasattr(node, "define_schema"):
        result = node.PREPARE_CLASS_CLONE(None).execute(**inputs)
    else:
        result = getattr(node(), node.FUNCTION)(**inputs)
    if inspect.iscoroutine(result):
        result = finish(result)
    result = result["result"] if isinstance(result, dict) else getattr(result, "result", result)
    place = list(node.RETURN_TYPES).index("MODEL")
    is_list = getattr(node, "OUTPUT_IS_LIST", None)
    return result[place][0] if is_list and is_list[place] else result[place]


class Bench:
    """The tiny models, what nodes need besides them, and the pictures to compare with."""

    run = RUN

    def __init__(self, folder: Path) -> None:
        import folder_paths

        load_core_nodes()
        self.folder = folder
        self.models = self.make_models(seed=0)
        self.others = self.make_models(seed=1)
        for name in ("loras", "hypernetworks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            folder_paths.add_model_folder_path(name, str(folder / name))
        self.baselines: dict[tuple[str, bool], tuple[Tensor, Tensor]] = {}

    def make_models(self, seed: int) -> dict:
        file = self.folder / "models" / f"flux-{seed}.safetensors"
        flux = builders.tiny_flux(file, hidden=128, depth=2, depth_single=2, seed=seed)
        return {"sdxl": small_sdxl(seed), "flux": flux}

    def baseline(self, name: str, masked: bool = False) -> tuple[Tensor, Tensor]:
        """What the model gives without any other node: unmerged and merged."""
        if (name, masked) not in self.baselines:
            model = self.models[name]
            self.baselines[name, masked] = tuple(self.sample(m, masked) for m in (model, self.toma(model)))
        return self.baselines[name, masked]

    def toma(self, model):
        from comfyui_toma.toma_core.patcher import patch
        from comfyui_toma.toma_core.settings import Settings

        return patch(model, Settings(ratio=0.1, reselect_every=2, skip_first_blocks=0))

    def lora(self, name: str) -> dict[str, Tensor]:
        """A LoRA on every linear layer of the model's transformer blocks."""
        generator = torch.Generator().manual_seed(9)
        lora = {}
        for key, weight in self.models[name].model.state_dict().items():
            if weight.ndim == 2 and key.endswith(".weight") and "blocks" in key:
                key, (out, width) = key.removesuffix(".weight"), weight.shape
                lora[f"{key}.lora_A.weight"] = torch.randn(2, width, generator=generator) / width**0.5
                lora[f"{key}.lora_B.weight"] = torch.randn(out, 2, generator=generator) * 0.2
        return lora

    def fill(self, node_id: str, node: type, name: str, model, nudged: bool) -> dict:
        """All inputs of a node for one model; with `nudged` numbers are moved off their defaults."""
        filled: dict = {}
        for key, (kind, options, required) in inputs_of(node).items():
            if kind == "MODEL":
                filled[key] = self.others[name] if any(value is model for value in filled.values()) else model
            elif (node_id, key) in INSTEAD:
                filled[key] = INSTEAD[node_id, key]
            else:
                try:
                    filled[key] = self.value(key, kind, options, name, nudged)
                except Unmade:
                    if required:
                        raise
        return filled

    def value(self, key: str, kind: str, options: dict, name: str, nudged: bool):
        if kind in ("INT", "FLOAT"):
            return nudge(key, kind, options) if nudged else options.get("default", options.get("min", 0))
        if kind == "BOOLEAN":
            return options.get("default", False)
        if kind == "STRING":
            text = options.get("default", "")
            return "0, 1" if nudged and re.fullmatch(r"[\d, ]+", text) else text
        if kind == "COMBO":
            return self.choice(key, options, name)
        return self.made(kind, name)

    def choice(self, key: str, options: dict, name: str) -> str:
        if key == "lora_name":
            return self.file("loras", name, self.lora)
        if key == "hypernetwork_name":
            return self.file("hypernetworks", name, self.hypernetwork)
        choices = options.get("options") or []
        if "default" in options:
            return options["default"]
        if not choices:
            raise Unmade(f"needs a file for {key}")
        return choices[0]

    def file(self, folder: str, name: str, make: Callable[[str], dict]) -> str:
        import folder_paths

        file = self.folder / folder / f"{name}.pt"
        if not file.exists():
            torch.save(make(name), file)
            folder_paths.filename_list_cache.pop(folder, None)
        return file.name

    def hypernetwork(self, name: str) -> dict:
        """Two linear layers for keys and values of every context width."""
        generator = torch.Generator().manual_seed(3)
        width = builders.conditioning(self.models[name])[0][0].shape[-1]

        def layers() -> dict[str, Tensor]:
            down, up = (torch.randn(a, b, generator=generator) * 0.1 for a, b in ((8, width), (width, 8)))
            bias = (torch.zeros(8), torch.zeros(width))
            return dict(zip(("linear.0.weight", "linear.0.bias", "linear.1.weight", "linear.1.bias"),
                            (down, bias[0], up, bias[1])))  # fmt: skip

        about = {"activation_func": "linear", "is_layer_norm": False, "use_dropout": False}
        return {**about, "activate_output": True, "last_layer_dropout": False, width: (layers(), layers())}

    def made(self, kind: str, name: str):
        generator = torch.Generator().manual_seed(4)
        if kind == "IMAGE":
            return torch.rand(1, self.run["height"], self.run["width"], 3, generator=generator)
        if kind == "MASK":
            return torch.rand(1, self.run["height"], self.run["width"], generator=generator)
        if kind == "LATENT":
            return {"samples": builders.empty_latent(self.models[name], self.run["width"], self.run["height"])}
        if kind == "CONDITIONING":
            return builders.conditioning(self.models[name], 3)
        if kind == "LATENT_OPERATION":
            return lambda latent: latent * 0.8
        if kind == "LORA_MODEL":
            return self.lora(name)
        if kind == "CLIP":
            return None  # what a LoRA loader takes from those who have none
        raise Unmade(f"needs a {kind}")

    def sample(self, model, masked: bool = False) -> Tensor:
        torch.manual_seed(0)  # some nodes draw from the global generator
        if not masked:
            return builders.sample(model, **self.run)
        generator = torch.Generator().manual_seed(6)
        latent = torch.randn(builders.empty_latent(model).shape, generator=generator)
        ramp = torch.linspace(0, 1, self.run["width"]).expand(1, 1, self.run["height"], -1)
        return builders.sample(model, **self.run, latent=latent, noise_mask=ramp)

    def compose(self, node_id: str, node: type, name: str) -> Outcome:
        """One node on one model: alone, then behind and in front of ToMA."""
        model, masked = self.models[name], node_id in MASKED
        plain, merged = self.baseline(name, masked)
        try:
            for nudged in (False, True):
                alone = self.sample(call(node, self.fill(node_id, node, name, model, nudged)), masked)
                if far(alone, plain) > NEGLIGIBLE:
                    break
        except Unmade as error:
            return Outcome(node_id, name, UNMADE, str(error))
        except Exception as error:  # noqa: BLE001 - whatever the node says without us is its own affair
            return Outcome(node_id, name, ALONE, f"without ToMA: {sentence(error)}")
        if not torch.isfinite(alone).all():
            return Outcome(node_id, name, ALONE, "without ToMA: gives values that are not finite")
        has_effect, notes = far(alone, plain) > NEGLIGIBLE, []
        for where in ("after", "before"):
            try:
                if where == "after":
                    patched = call(node, self.fill(node_id, node, name, self.toma(model), nudged))
                else:
                    patched = self.toma(call(node, self.fill(node_id, node, name, model, nudged)))
                out = self.sample(patched, masked)
            except Exception as error:  # noqa: BLE001 - reported as a failure
                return Outcome(node_id, name, BAD, f"{where} ToMA: {sentence(error)}")
            fault, note = judge(plain, merged, alone, out, patched)
            if fault:
                return Outcome(node_id, name, BAD, f"{where} ToMA: {fault}")
            notes += [note] if note and note not in notes else []
        return Outcome(node_id, name, GOOD if has_effect else NOTHING, "; ".join(notes))


def far(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def judge(plain: Tensor, merged: Tensor, alone: Tensor, out: Tensor, patched) -> tuple[str, str]:
    """(what is wrong, what is worth telling) of a picture with both nodes."""
    if not torch.isfinite(out).all():
        return "not finite", ""
    handle = patched.model_options.get("toma")
    if handle is None or not handle.reports:
        return "ToMA's run did not take place", ""
    report = handle.reports[-1]
    reasons = "; ".join(report.notes)
    idle = not report.tokens and not report.counts["forecast"]
    if idle and not reasons:
        return "no tokens were merged, and nothing says why", ""
    if idle:
        return ("", f"{NOT_MERGED}{reasons}") if far(out, alone) < NEGLIGIBLE else ("not merged, yet changed", "")
    cost, alone_cost = far(out, alone), far(merged, plain)
    if far(alone, plain) <= NEGLIGIBLE:
        fault = f"no effect alone, but {cost:.2f} from the unmerged picture" if cost > MOST_COST * alone_cost else ""
        return fault, reasons
    if far(alone, plain) < alone_cost:
        fault = f"{cost:.2f} from the unmerged picture" if cost > MOST_COST * alone_cost else ""
        return fault, "; ".join(filter(None, (reasons, "smaller than the effect of merging")))
    alike = torch.nn.functional.cosine_similarity((out - merged).flatten(), (alone - plain).flatten(), dim=0).item()
    if alike < LEAST_COSINE and cost > 0.05:
        return f"its effect is gone (cosine {alike:.2f}, {cost:.2f} from the unmerged picture)", ""
    return "", reasons


def small_sdxl(seed: int = 0):
    """SDXL with two resolutions and one block a transformer: a third of the work of builders.tiny_sdxl."""
    import comfy.supported_models

    config = {
        "num_res_blocks": [1, 1], "channel_mult": [1, 2], "transformer_depth": [0, 1],
        "transformer_depth_output": [0, 0, 1, 1], "transformer_depth_middle": 1, "use_linear_in_transformer": True,
        "context_dim": 64, "num_classes": "sequential", "adm_in_channels": 64 + 6 * 256,
    }  # fmt: skip
    return builders.tiny_unet(comfy.supported_models.SDXL, 32, config, seed)


def nudge(key: str, kind: str, options: dict):
    """A number inside its range but away from its default; a part of the run becomes the whole of it."""
    if key in ("start_percent", "start_sigma", "end_percent", "end_sigma"):
        first = key in ("start_percent", "end_sigma")
        return options.get("min" if first else "max", 0.0 if first else 1.0)
    default, low, high = (options.get(k) for k in ("default", "min", "max"))
    default = default or 0
    low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
    wish = [default * 0.8, default * 1.2, default - 0.2, default + 0.2]
    if kind == "INT":
        wish = [default // 2, default + 1, default - 1]
    return next((value for value in wish if low <= value <= high and value != default), default)


def sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:140]}" if text else type(error).__name__


def compose_all(bench: Bench, only: Sequence[str] = ()) -> Iterator[Outcome]:
    gc.collect()
    gc.freeze()  # looking through all that is there before, after each node, takes longer than the nodes
    try:
        for node_id, node in model_nodes().items():
            if only and node_id not in only:
                continue
            for name in bench.models:
                yield bench.compose(node_id, node, name)
            gc.collect()
    finally:
        gc.unfreeze()


def distinct() -> list[str]:
    """One node of each implementation: ComfyUI has twenty names for merging two models block by block."""
    chosen: dict[object, str] = {}
    for node_id, node in model_nodes().items():
        function = node.execute if hasattr(node, "define_schema") else getattr(node, node.FUNCTION)
        chosen.setdefault(getattr(function, "__code__", node_id), node_id)
    return list(chosen.values())


def figure(outcomes: Sequence[Outcome]) -> str:
    nodes = {outcome.node for outcome in outcomes}
    by = {status: {o.node for o in outcomes if o.status == status} for status in (GOOD, NOTHING, ALONE, UNMADE, BAD)}
    good = by[GOOD] - by[BAD]
    idle = by[NOTHING] - good - by[BAD]
    return (
        f"{len(good)} of {len(nodes)} nodes compose before and after ToMA with their effect, "
        f"{len(idle)} run without having one here, {len(by[BAD])} fail, "
        f"{len(by[ALONE] - good - idle - by[BAD])} are for other models, "
        f"{len(by[UNMADE])} need what the test can't make"
    )
