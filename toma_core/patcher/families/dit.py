"""Diffusion transformers, by one generic seam: kept image tokens ride through the whole network.

An entry of the table (table.py) says where the blocks of a network are and what their arguments are called. A block is
met in its slot of ComfyUI's `patches_replace["dit"]`, or, where it has none, by its forward. Either way its arguments
are a dictionary by name: the rows of the kept tokens are taken from those that have a row for each token, and the block
itself runs unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from ...clean import Patch, grid_of
from ...evaluation import Block, Counted, Evaluation, Grid, Unmergeable
from ...merge import Merge
from ...settings import MergeWhere, Settings, SettingsError
from ..dynamo import has_patches, keep_out_of_graphs, uncompiled, without_compile
from ..memory import guarded
from .attention import AttentionSeam
from .base import KEY, Family
from .entry import Call, Entry, Layout, Stream
from .rows import Cut, argument_for, joined

PUBLISHED_SKIP = 5  # first blocks of each kind that the authors' code leaves alone on Flux
INSIDE = ("attn1_patch", "attn2_patch", "mlp_patch")  # patches that may know tokens by their number
WHOLE = "all blocks"  # the row through which tokens ride
TEXT = "text tokens"  # in an evaluation's scratch: how many there are, as the last block with a text of its own saw it


class DiTFamily(Family):
    kind = "dit"

    def __init__(self, network: nn.Module, entry: Entry) -> None:
        super().__init__()
        self.name = entry.name
        self.entry = entry
        self.network = network
        self.patch: Patch = entry.patch(network)
        blocks = {stream: list(network.get_submodule(stream.blocks).children()) for stream in entry.streams}
        self.depths = {stream: len(found) for stream, found in blocks.items()}
        self.weights = {(s, i): _weights(block, s) for s, found in blocks.items() for i, block in enumerate(found)}
        self.where: dict[Block, tuple[Stream, int]] = {}  # the list that a block is in, and its index there
        self.attention: AttentionSeam | None = None
        self.has_attention_patch = entry.attention_patches and AttentionSeam.fits(network)

    def arrange(self, settings: Settings) -> DiTFamily:
        if settings.merge is MergeWhere.ATTENTION and not self.has_attention_patch:
            raise SettingsError(
                f"merge is 'attention only', which there is no hook for on {self.name}. Set it to 'whole block'."
            )
        family = copy(self)
        family.settings = settings
        skip, rides = settings.skip_first_blocks, settings.rides
        if skip < 0:
            skip = 0 if rides else PUBLISHED_SKIP
        total = sum(depth for stream, depth in self.depths.items() if not stream.side)
        family.where = {}
        for stream, depth in self.depths.items():
            for i in range(depth):
                index = len(family.where)
                if rides:
                    skipped = index < skip and not stream.side
                    block = Block(WHOLE, WHOLE, index, index == total - 1, skipped)
                else:
                    block = Block(f"{stream.kind} {i}", stream.kind, i, last=True, skipped=i < skip)
                family.where[block] = stream, i
        family.blocks = list(family.where)
        if settings.merge is MergeWhere.ATTENTION:
            family.attention = AttentionSeam(family)
            # These patches sit inside of the blocks, where nothing would tell a graph with them from one without.
            family.compiles = False
        return family

    def install(self, options: dict) -> None:
        keep_out_of_graphs(DiTFamily, Evaluation, Slot, ForwardSeam, AttentionSeam, Stream, Cut, guarded)
        if self.attention is not None:
            self.attention.install(options)
            return
        slots = options.setdefault("patches_replace", {}).setdefault("dit", {})
        for block, (stream, i) in self.where.items():
            if stream.slot:
                slots[stream.slot, i] = Slot(self, block, stream, slots.get((stream.slot, i)))

    def seams(self, network: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Callable], Callable]]]:
        if type(network) is not type(self.network):  # of a guider with two models
            return
        counts = {stream: len(list(network.get_submodule(stream.blocks).children())) for stream in self.depths}
        if counts != self.depths:
            return
        for block, (stream, i) in self.where.items():
            if not stream.slot:
                module = network.get_submodule(f"{stream.blocks}.{i}")
                names = _parameters(type(without_compile(module)).forward)
                yield module, partial(ForwardSeam, self, block, stream, names)

    def why_not(self, x: Tensor, options: dict, inputs: dict) -> str | None:
        patches = options.get("patches", {})
        if self.attention is None:
            slots = options.get("patches_replace", {}).get("dit", {})
            ours = {(stream.slot, i) for stream, i in self.where.values() if stream.slot}
            for where in sorted({*slots, *ours}, key=str):
                slot = slots.get(where)
                if not isinstance(slot, Slot) or slot.inner is not None:
                    return f"another node runs code of its own in the place of {' '.join(map(str, where))}"
            if any(patches.get(name) for name in INSIDE):
                return "a patch of another node works on all tokens inside of blocks"
        if "double_block" in patches and not self.entry.double_block_patches:
            return "a patch of another node works on the tokens between blocks"
        return self.entry.why_not(Call(self.network, x, options, inputs))

    def runs_blocks(self, network: nn.Module) -> str | None:
        """The name of foreign code that runs the blocks in the place of ComfyUI's, or None. What it keeps from call to
        call (a cache of residuals) has a row for each token, so the kept ones may not ride through it."""
        name = next(name for name in ("forward_orig", "_forward", "forward") if hasattr(network, name))
        code = getattr(network, name)
        module = getattr(code, "__module__", None) or type(code).__module__
        return None if module.partition(".")[0] == "comfy" else f"{module}.{getattr(code, '__name__', name)}"

    def grid(self, latent: tuple[int, ...]) -> Grid:
        return grid_of(latent, self.patch)

    def label(self, block: Block, grid: Grid) -> str:
        return f"{grid[0]}x{grid[1]}" if self.settings.rides else block.share

    def block_flops(self, block: Block, counted: Counted, after: int) -> float:
        stream = self.where[block][0]
        image, text, alone = self.weights[self.where[block]]
        linear = counted.before if self.settings.merge is MergeWhere.ATTENTION else after
        length = after + counted.beside
        products = image * (linear + counted.beside) + text * counted.text
        pairs = length * (length + counted.text) if stream.crosses else (length + counted.text) ** 2
        pairs += length**2 if alone else 0
        return 2.0 * (products + 2 * pairs * counted.channels)

    # ----------------------------------------------------------------------- what reaches the network

    def shorter_inputs(self, evaluation: Evaluation, options: dict, control: dict | None) -> tuple[dict, dict | None]:
        """Options and ControlNet residuals of a call whose kept tokens ride: what is added between blocks reaches the
        kept tokens, and patches that other nodes have there see all tokens, copies of the kept ones."""
        merge, count = next(iter(evaluation.state.merges.values())), prod(evaluation.grid)
        if control is not None:
            if any(block.skipped for block in self.blocks):
                raise Unmergeable("a ControlNet adds to the blocks that skip_first_blocks leaves alone")
            control = self._shorter_control(control, merge, count)

        def on_all(patch: Callable) -> Callable:
            def between(args: dict) -> dict:
                if WHOLE not in evaluation.riding:  # behind the last block all tokens are there
                    return patch(args)
                kept, image = merge.kept.shape[1], args["img"]
                whole = torch.cat((merge.copied(image[:, :kept]), image[:, kept:]), 1)
                out = patch({**args, "img": whole})
                return {**out, "img": torch.cat((merge.take(out["img"][:, :count]), out["img"][:, count:]), 1)}

            return between

        patches = options.get("patches", {})
        if "double_block" in patches:
            on_kept = [on_all(patch) for patch in patches["double_block"]]
            options = {**options, "patches": {**patches, "double_block": on_kept}}
        return options, control

    def _shorter_control(self, control: dict, merge: Merge, count: int) -> dict:
        """Residuals [B, N, C] for the kept tokens; behind the last block all tokens are there."""
        streams = [stream for stream in self.depths if not stream.side]
        last = self.depths[streams[-1]] - 1

        def rows(kind: str, i: int, add: Tensor | None) -> Tensor | None:
            behind = i == last and (kind == "output" or len(streams) == 1)
            if add is None or behind or add.shape[1] == 1:
                return add
            if add.shape[1] < count:
                raise Unmergeable(f"a ControlNet adds to {add.shape[1]} of {count} image tokens")
            return torch.cat((merge.take(add[:, :count].expand(len(merge.kept), -1, -1)), add[:, count:]), 1)

        lists = {kind: adds for kind, adds in control.items() if isinstance(adds, list)}
        return {kind: [rows(kind, i, add) for i, add in enumerate(adds)] for kind, adds in lists.items()}

    # ----------------------------------------------------------------------- a block

    def run_block(self, block: Block, stream: Stream, args: dict, options: dict, run: Callable[[dict], object]):
        """A block with arguments `args` by name, through `run`, on the tokens that the evaluation says."""
        evaluation: Evaluation | None = options.get(KEY)
        sequence = args.get(stream.image)
        if evaluation is None or not isinstance(sequence, Tensor):
            return run(args)
        count, begins = prod(evaluation.grid), block.row not in evaluation.riding
        text = args.get(stream.text) if stream.text else None
        texts = text.shape[1] if isinstance(text, Tensor) else 0
        if isinstance(text, Tensor):
            evaluation.scratch[TEXT] = texts
        tokens = sequence.flatten(1, -2)
        if stream.side:
            if begins:
                evaluation.count(block, evaluation.grid, tokens.shape[2], count, count, text=texts)
                return run(args)
            if evaluation.scratch.setdefault(stream.blocks, block.index) == block.index:
                tokens = guarded(evaluation.riding[block.row].merge.take, tokens)
        now = evaluation.tokens_now(block, count)  # of the image, in the sequence as it comes
        full = tokens.shape[1] + count - now
        seen = Layout(full, count, evaluation.scratch.get(TEXT), self.network, options, evaluation.inputs)
        start = stream.start(seen)
        if start is None or not 0 <= start <= full - count:
            if evaluation.merges:
                raise Unmergeable(f"{stream.blocks} are called in a way that does not tell where the image tokens lie")
            return run(args)
        image_tokens = tokens[:, start : start + now]
        kept, merge = guarded(evaluation.enter, block, image_tokens, evaluation.grid, full - count, texts)
        if merge is None:
            return run(args)
        if begins:
            evaluation.scratch["shape"] = sequence.shape
        cut = Cut(merge, start, full)
        # Blocks add to their tokens in place; without copies what came in is needed again.
        shorter = guarded(cut.tokens, tokens, kept if evaluation.in_x0 else kept.clone(), now)
        out = run(guarded(_shorter, stream, evaluation, args, options, shorter, cut))
        made = stream.image_of(out).flatten(1, -2)
        image = guarded(evaluation.leave, block, made[:, start : start + cut.keep])
        if block.row in evaluation.riding:
            return out
        whole = guarded(joined, made, image, start, cut.keep)
        whole = whole.unflatten(1, evaluation.scratch["shape"][1:-1]) if sequence.ndim > 3 else whole
        return stream.with_image(out, whole)


class Slot:
    """A block's place in `patches_replace["dit"]`. `inner` is what another node had put there."""

    def __init__(self, family: DiTFamily, block: Block, stream: Stream, inner: Callable | None) -> None:
        self.family, self.block, self.stream, self.inner = family, block, stream, inner

    def __deepcopy__(self, memo: dict) -> Slot:
        return self

    def __call__(self, args: dict, extra: dict) -> dict:
        options = args.get("transformer_options") or {}  # packs with a forward of their own may not give them

        def run(args: dict) -> dict:
            if self.inner is not None:
                return uncompiled(self.inner, args, extra)
            if has_patches(options):
                return uncompiled(extra["original_block"], args)
            return extra["original_block"](args)

        return self.family.run_block(self.block, self.stream, args, options, run)


class ForwardSeam:
    """A block's forward; its arguments get their names by its signature."""

    def __init__(self, family: DiTFamily, block: Block, stream: Stream, names: list[str], original: Callable) -> None:
        self.family, self.block, self.stream = family, block, stream
        self.names, self.original = names, original

    def __call__(self, *args, **kwargs):
        if len(args) > len(self.names):  # a forward of another node, with arguments that have no names
            return self.original(*args, **kwargs)
        by_position = self.names[: len(args)]
        given = {**dict(zip(by_position, args)), **kwargs}
        options = given.get("transformer_options") or {}

        def run(given: dict):
            original = partial(uncompiled, self.original) if has_patches(options) else self.original
            positional = [given[name] for name in by_position]
            return original(*positional, **{name: given[name] for name in given if name not in by_position})

        return self.family.run_block(self.block, self.stream, given, options, run)


def _parameters(forward: Callable) -> list[str]:
    """The names of what a forward takes by position, without `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in inspect.signature(forward).parameters.items() if one.kind in kinds][1:]


def _shorter(stream: Stream, evaluation: Evaluation, args: dict, options: dict, tokens: Tensor, cut: Cut) -> dict:
    """The arguments of a block for the tokens [B, L', C] that are left of its sequence."""
    for name in stream.alone:
        if args.get(name) is not None:
            raise Unmergeable(f"{stream.blocks} are given {name}")
    frames = [name for name, ndim in stream.per_frame.items() if _has_frames(args.get(name), ndim)]
    if args[stream.image].ndim == 5:  # [B, T, H, W, C]
        tokens = tokens[:, :, None, None] if frames else tokens[:, None, :, None]
    changed = {**args, stream.image: tokens}
    for name in (*stream.rows, *stream.masks, *frames):
        if isinstance(args.get(name), (Tensor, tuple) if stream.tuples else Tensor):
            changed[name] = argument_for(stream, evaluation, name, args[name], cut)
        elif name in stream.rows:
            raise Unmergeable(f"{stream.blocks} are given no {name}, or in another way than is known")
    for name in stream.bounds:
        if name in args:
            changed[name] = cut.bound(args[name])
    if not stream.slot and "img_slice" in options:
        begin, end = options["img_slice"]
        changed["transformer_options"] = {**options, "img_slice": [begin, cut.bound(end)]}
    return changed


def _has_frames(value: object, ndim: int) -> bool:
    return isinstance(value, Tensor) and value.ndim == ndim and value.shape[1] > 1


def _weights(block: nn.Module, stream: Stream) -> tuple[int, int, bool]:
    """How many weights of a block's linear layers each image token meets, how many each token of a text apart, and
    whether image tokens have an attention among themselves besides."""
    image = text = 0
    for path, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2 or any(part in path for part in stream.per_image):
            continue
        if any(part in path for part in stream.of_text):
            text += weight.numel()
        else:
            image += weight.numel()
    return image, text, bool(stream.image_only) and stream.image_only in dict(block.named_modules())
