"""One node of another pack on one demo model: alone, then behind and in front of ToMA, and what it leaves behind."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import comfy.sample
import composing
import torch
from comfy.patcher_extension import WrappersMP
from composing import NEGLIGIBLE, NOT_MERGED, Unmade, call, far, judge, sentence
from demo_pack import loading
from demo_pack.captions import CONTEXT_DIM
from demo_pack.models import UNET_CONFIG
from torch import Tensor

import nodes

from .report import ALONE, BAD, GOOD, NOTHING, OWN, UNMADE

ASKED = {
    "guider": WrappersMP.PREDICT_NOISE,
    "conds": WrappersMP.CALC_COND_BATCH,
    "model": WrappersMP.APPLY_MODEL,
    "network": WrappersMP.DIFFUSION_MODEL,
}
# Where defaults show nothing in a short run, and moving every number off its default would switch it off again
INSTEAD = {
    ("ApplyFBCacheOnModel", "residual_diff_threshold"): 0.3,
    ("TeaCache", "rel_l1_thresh"): 0.8,
    ("MagCache", "magcache_thresh"): 0.5,
    ("TiledDiffusion", "tile_width"): 128,  # four tiles in a latent of 32 x 32
    ("TiledDiffusion", "tile_height"): 128,
    ("TiledDiffusion", "tile_overlap"): 32,
}
HIDDEN = {"UNIQUE_ID": "1", "PROMPT": {}, "EXTRA_PNGINFO": {}}
SHAKE = 0.02  # share of other noise, which moves a plain image about as far as merging does
EMBED = 64  # width of an image's embedding
SHARED, COMFYUI = "changes the shared model by itself", "changes ComfyUI itself"
ERRORS = (Exception, SystemExit)  # whatever another pack raises is its own affair
# A node that gives another image each time by itself may be far from its own run without ToMA, but not idle.
SILENT = ("ToMA's run", "no tokens", "not finite")


@dataclass
class Alone:
    """A node's run without ToMA."""

    out: Tensor
    nudged: bool  # whether its numbers were moved off their defaults
    asked: dict[str, int]
    has_effect: bool
    left: str = ""  # what it left behind for plain runs


class PackBench(composing.Bench):
    """The demo models, with ToMA as the node gives it by default or by a preset."""

    run = {"width": 64, "height": 64, "steps": 12, "cfg": 2.0}

    def __init__(self, folder: Path, names: dict[str, Path], steps: int, preset: str, models: list[str]) -> None:
        self.names_of_models = models
        super().__init__(folder)
        self.run, self.preset = {**self.run, "steps": steps}, preset
        composing.INSTEAD.update(INSTEAD)
        self.names = names  # folders as they are called in a traceback
        self.plain: dict[str, Tensor] = {}  # two steps, to be compared bit by bit
        self.unmerged: dict[str, Tensor] = {}

    def make_models(self, seed: int) -> dict:
        return {name: self.load(name, seed) for name in self.names_of_models}

    def load(self, name: str, seed: int = 0):
        model = getattr(loading, f"load_demo_{name}")()
        if seed:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for weight in model.model.diffusion_model.parameters():
                    weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
        return model

    def toma(self, model):
        node = nodes.NODE_CLASS_MAPPINGS["ToMA"]
        widgets = {
            key: options["default"]
            for key, (_, options, _) in composing.inputs_of(node).items()
            if "default" in options
        }
        return call(node, {"model": model, **widgets, **({"preset": self.preset} if self.preset else {})})

    def conditioning(self, caption: str) -> list:
        return loading.encode_prompt(caption, self.run["width"], self.run["height"])

    def made(self, kind: str, name: str):
        if kind == "CONDITIONING":
            return self.conditioning("rose on green")
        if kind == "LATENT":
            return loading.empty_latent(self.run["width"], self.run["height"])
        if kind == "SIGMAS":
            return torch.linspace(1, 0, self.run["steps"] + 1)
        if kind == "EMBEDS":
            return torch.randn(1, EMBED, generator=torch.Generator().manual_seed(5))
        if kind == "IPADAPTER" and name == "unet":
            return ip_adapter()
        return super().made(kind, name)

    def value(self, key: str, kind: str, options: dict, name: str, nudged: bool):
        if kind == "BOOLEAN" and nudged and re.search("enable|apply|active", key):
            return True
        if kind == "COMBO" and key == "backend" and "inductor" in (options.get("options") or []):
            return "eager"  # no C++ compiler needed
        return super().value(key, kind, options, name, nudged and (kind != "INT" or self.moves_counts))

    def fill(self, node_id: str, node: type, name: str, model, nudged: bool) -> dict:
        hidden = {} if hasattr(node, "define_schema") else node.INPUT_TYPES().get("hidden") or {}
        given = {key: HIDDEN.get(kind) for key, kind in hidden.items() if isinstance(kind, str)}
        # Whole numbers are counts and limits more often than strengths: moved only where there is nothing else.
        self.moves_counts = all(kind != "FLOAT" for kind, *_ in composing.inputs_of(node).values())
        return {**super().fill(node_id, node, name, model, nudged), **given}

    def sample(self, model, masked: bool = False, steps: int | None = None, shake: float = 0.0) -> Tensor:
        torch.manual_seed(0)
        latent = loading.empty_latent(self.run["width"], self.run["height"])["samples"]
        latent = comfy.sample.fix_empty_latent_channels(model, latent)
        noise = comfy.sample.prepare_noise(latent, 0)
        noise = (noise + shake * comfy.sample.prepare_noise(latent, 1)) / (1 + shake**2) ** 0.5
        return comfy.sample.sample(
            model, noise, steps or self.run["steps"], self.run["cfg"],
            "euler", "simple", self.conditioning("fox on blue"), self.conditioning(""), latent,
            disable_pbar=True, seed=0,
        )  # fmt: skip

    def plain_is_as_before(self, name: str) -> bool:
        try:
            return torch.equal(self.sample(self.models[name], steps=2), self.plain[name])
        except ERRORS:
            return False

    def put_right(self, name: str) -> str:
        """What the last runs left behind that a plain run notices, bit by bit; the model is loaded anew then."""
        if name not in self.plain:
            self.plain[name] = self.sample(self.models[name], steps=2)
        if self.plain_is_as_before(name):
            return ""
        self.models[name] = self.load(name)
        if self.plain_is_as_before(name):
            return SHARED
        for kept in (self.baselines, self.plain, self.unmerged):
            kept.clear()
        return COMFYUI

    def first(self, node_id: str, node: type, name: str) -> Alone | dict:
        """Without ToMA, which no run of this process has met yet: what a node gives, or why it can't be tried."""
        try:
            alone = self.alone(node_id, node, name)
        except Unmade as error:
            return {"status": UNMADE, "note": str(error)}
        except ERRORS as error:
            left = self.put_right(name)
            if self.had_no_clip(node):
                return {"status": UNMADE, "note": "needs a CLIP"}
            return {
                "status": ALONE,
                "note": sentence(error),
                "changes": left,
                "frames": self.frames(error, 3),
            }
        alone.left = self.put_right(name)
        if not torch.isfinite(alone.out).all():
            return {"status": ALONE, "note": "gives values that are not finite", "changes": alone.left}
        return alone

    def compose(self, node_id: str, node: type, name: str, alone: Alone, say: Callable[[str], None]) -> dict:
        """Behind and in front of ToMA: status, note, which hooks were asked how often, and where it failed."""
        notes, about = [], {"changes": alone.left, "asked": alone.asked}
        for where in ("after", "before"):
            say(where)
            if alone.left:
                self.models[name] = self.load(name)
            plain, merged = self.baseline(name)
            say(where)  # each of these is given its own time
            frames, out = [], None
            try:
                out, patched = self.together(node_id, node, name, alone.nudged, where)
                fault, note = judge(plain, merged, alone.out, out, patched)
            except ERRORS as error:
                fault, note, frames = sentence(error), "", self.frames(error, 8)
            if fault:
                self.put_right(name)
                say(where)
                fault, note = self.second_look(node_id, node, name, alone, fault, out, out is not None and patched)
            if fault:
                return {"status": BAD, "note": f"{where} ToMA: {fault}", **about, "frames": frames}
            notes += [note] if note and note not in notes else []
        if self.put_right(name) and not alone.left:
            about["changes"] = self.left_by_itself(node_id, node, name, alone)
            if not about["changes"]:
                return {"status": BAD, "note": "a plain run after both differs", **about}
        status = GOOD if alone.has_effect else NOTHING
        if any(note.startswith(NOT_MERGED) for note in notes):
            status = OWN
        return {"status": status, "note": "; ".join(notes), **about}

    def left_by_itself(self, node_id: str, node: type, name: str, alone: Alone) -> str:
        """What a node leaves behind without ToMA in shorter runs: a cache on the shared model that counts calls gives
        itself away only at some of them, and beside forecasts there are fewer."""
        for steps in range(self.run["steps"] - 1, self.run["steps"] // 3, -1):
            self.sample(call(node, self.fill(node_id, node, name, self.models[name], alone.nudged)), steps=steps)
            left = self.put_right(name)
            if left:
                return left
        return ""

    def second_look(self, node_id: str, node: type, name: str, alone: Alone, fault: str, out, patched):
        """(fault, note) once more. A node that gives something else now, without ToMA, is judged by that: other
        nodes of its pack ran since. One that a little other noise moves as far has no image to be kept."""
        try:
            again = self.alone(node_id, node, name).out
            if out is None or fault.startswith(SILENT):
                return fault, ""
            if far(again, alone.out) > NEGLIGIBLE:
                fault, note = judge(*self.baseline(name), again, out, patched)
                if not fault:
                    return "", note
                if far(again, alone.out) > far(out, alone.out) / 2:
                    return "", "differs as much from run to run by itself"
            if self.leaves_out_work(node_id, node, name, alone):
                plain, merged = self.baseline(name)
                error, own = far(out, plain), far(again, plain)
                if error <= composing.MOST_COST * max(own, far(merged, plain)):
                    return "", f"leaves out work by itself: {error:.2f} from the plain image, alone {own:.2f}"
            model = call(node, self.fill(node_id, node, name, self.models[name], alone.nudged))
            shaken = far(self.sample(model, shake=SHAKE), again)
            if shaken > far(out, again) / 2:
                return "", f"{SHAKE:.0%} of other noise moves it as far by itself ({shaken:.2f})"
        except ERRORS as error:
            return f"{fault} (now without ToMA, too: {sentence(error)})", ""
        return fault, ""

    def alone(self, node_id: str, node: type, name: str) -> Alone:
        """Without ToMA; with numbers off their defaults where these show no effect."""
        if name not in self.unmerged:
            self.unmerged[name] = self.sample(self.models[name])
        for nudged in (False, True):
            model = call(node, self.fill(node_id, node, name, self.models[name], nudged)).clone()
            asked = count_hooks(model)
            out = self.sample(model)
            torch.compiler.reset()  # a compiled network's guards look for the counters, and fail where there are none
            has_effect = far(out, self.unmerged[name]) > NEGLIGIBLE
            if has_effect:
                break
        return Alone(out, nudged, asked, has_effect)

    def together(self, node_id: str, node: type, name: str, nudged: bool, where: str):
        model, others = self.models[name], self.others
        if where == "after":  # of a node that takes two models ToMA is on both: a switch gives one of them
            self.others = {**others, name: self.toma(others[name])}
            try:
                patched = call(node, self.fill(node_id, node, name, self.toma(model), nudged))
            finally:
                self.others = others
        else:
            patched = self.toma(call(node, self.fill(node_id, node, name, model, nudged)))
        return self.sample(patched), patched

    def leaves_out_work(self, node_id: str, node: type, name: str, alone: Alone) -> bool:
        """Whether the innermost block runs less often with the node than without: a cache, whose effect is an error."""
        self.put_right(name)
        network = self.models[name].model.diffusion_model
        block, runs = (network.single_blocks[-1] if name == "flux" else network.middle_block[0]), []
        hook = block.register_forward_pre_hook(lambda *_: runs.append(1))
        try:
            self.sample(self.models[name])
            plain = len(runs)
            self.sample(call(node, self.fill(node_id, node, name, self.models[name], alone.nudged)))
        finally:
            hook.remove()
        return len(runs) - plain < plain

    def had_no_clip(self, node: type) -> bool:
        return any(kind == "CLIP" and required for kind, _, required in composing.inputs_of(node).values())

    def frames(self, error: BaseException, last: int) -> list[str]:
        """The innermost frames of a traceback, without the machine's own paths."""
        return [
            f"{self.shown(Path(frame.filename))}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-last:]
        ]

    def shown(self, path: Path) -> str:
        for folder in ("custom_nodes", "site-packages"):
            if folder in path.parts:
                return "/".join(path.parts[path.parts.index(folder) + 1 :])
        for called, folder in self.names.items():
            if path.is_relative_to(folder):
                return f"{called}/{path.relative_to(folder).as_posix()}"
        return "/".join(path.parts[-3:])


def ip_adapter(tokens: int = 4, layers: int = 16) -> dict:
    """Random weights in the shape of an IP-Adapter for the demo UNet, whose blocks all have one width."""
    generator, width, context = (
        torch.Generator().manual_seed(6),
        2 * UNET_CONFIG["model_channels"],
        CONTEXT_DIM,
    )
    project = torch.randn(tokens * context, EMBED, generator=generator) / EMBED**0.5
    image = {"proj.weight": project, "proj.bias": torch.zeros(tokens * context)}
    image |= {"norm.weight": torch.ones(context), "norm.bias": torch.zeros(context)}
    attention = {
        f"{2 * i + 1}.to_{part}_ip.weight": torch.randn(width, context, generator=generator) / context**0.5
        for i in range(layers)
        for part in "kv"
    }
    return {"image_proj": image, "ip_adapter": attention}


def count_hooks(model) -> dict[str, int]:
    """How often a run asks the guider, a list of conds, the model and the network: filled while it samples."""
    asked = dict.fromkeys(ASKED, 0)

    def counting(name: str) -> Callable:
        def wrapper(executor, *args, **kwargs):
            asked[name] += 1
            return executor(*args, **kwargs)

        return wrapper

    for name, kind in ASKED.items():
        model.add_wrapper_with_key(kind, "packs_bench", counting(name))
    return asked
