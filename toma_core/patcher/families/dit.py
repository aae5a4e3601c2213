"""Diffusion transformers, by one generic seam: kept image tokens ride through the whole network.

An entry of the table (table.py) says where the blocks of a network are and what their arguments are called. A block is
met in its slot of ComfyUI's `patches_replace["dit"]`, or, where it has none, by its forward. Either way its arguments
are a dictionary by name: the rows of the kept tokens are taken from those that have a row for each token, and the block
itself runs unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil, prod

import torch
from torch import Tensor, nn

from ...clean import Patch, grid_of
from ...evaluation import Counted, Evaluation, Grid, Place, Unmergeable
from ...merge import Merge
from ...settings import MergeWhere, Settings, SettingsError
from ..dynamo import has_patches, keep_out_of_graphs, uncompiled
from ..memory import ours
from .attention import AttentionSeam
from .base import KEY, Family
from .table import Entry, Sequence, Stream

PUBLISHED_SKIP = 5  # first blocks of each kind that the authors' code leaves alone on Flux
WHOLE = "all blocks"  # the row through which tokens ride
TEXT = "text tokens"  # in an evaluation's scratch: how many there are, as the last block with a text of its own saw it


class DiTFamily(Family):
    kind = "dit"

    def __init__(self, network: nn.Module, entry: Entry) -> None:
        super().__init__()
        self.name = entry.name
        self.entry = entry
        self.patch: Patch = entry.patch(network)
        blocks = {stream: list(network.get_submodule(stream.blocks)) for stream in entry.streams}
        self.depths = {stream: len(found) for stream, found in blocks.items()}
        self.weights = {stream: _weights(found[0], stream) for stream, found in blocks.items() if found}
        self.attention: AttentionSeam | None = None
        self.has_attention_patch = AttentionSeam.fits(network)

    def arrange(self, settings: Settings) -> DiTFamily:
        if settings.merge is MergeWhere.ATTENTION and not self.has_attention_patch:
            raise SettingsError(
                f"merge is 'attention only', which there is no hook for on {self.name}. Set it to 'whole block'."
            )
        family = object.__new__(DiTFamily)
        family.__dict__.update(self.__dict__, settings=settings)
        skip, rides = settings.skip_first_blocks, settings.rides
        if skip < 0:
            skip = 0 if rides else PUBLISHED_SKIP
        total = sum(self.depths.values())
        family.places = []
        for stream, depth in self.depths.items():
            for i in range(depth):
                index = len(family.places)
                if rides:
                    place = Place(WHOLE, WHOLE, index, last=index == total - 1, skipped=index < skip)
                else:
                    place = Place(f"{stream.kind} {i}", stream.kind, i, last=True, skipped=i < skip)
                family.places.append(place)
        if settings.merge is MergeWhere.ATTENTION:
            family.attention = AttentionSeam(family)
            # These patches sit inside of the blocks, where nothing would tell a graph with them from one without.
            family.compiles = False
        return family

    def seated(self) -> Iterator[tuple[Place, Stream, int]]:
        """Each place, the list that its block is in, and its index there."""
        places = iter(self.places)
        for stream, depth in self.depths.items():
            yield from ((next(places), stream, i) for i in range(depth))

    def install(self, options: dict) -> None:
        keep_out_of_graphs(DiTFamily, Evaluation, Slot, ForwardSeam, AttentionSeam, ours)
        if self.attention is not None:
            self.attention.install(options)
            return
        slots = options.setdefault("patches_replace", {}).setdefault("dit", {})
        for place, stream, i in self.seated():
            if stream.slot:
                slots[stream.slot, i] = Slot(self, place, stream, slots.get((stream.slot, i)))

    def seams(self, network: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Callable], Callable]]]:
        for place, stream, i in self.seated():
            if not stream.slot:
                block = network.get_submodule(stream.blocks)[i]
                yield block, partial(ForwardSeam, self, place, stream, inspect.signature(type(block).forward))

    def why_not(self, x: Tensor, options: dict, inputs: dict) -> str | None:
        slots = options.get("patches_replace", {}).get("dit", {})
        for _, stream, i in self.seated() if self.attention is None else ():
            slot = slots.get((stream.slot, i))
            if stream.slot and (not isinstance(slot, Slot) or slot.inner is not None):
                return f"another node runs code of its own in the place of {stream.slot} {i}"
        if "double_block" in options.get("patches", {}) and not self.entry.wraps_patches:
            return "a patch of another node works on the tokens between blocks"
        return self.entry.why_not(x, options, inputs)

    def grid(self, latent: tuple[int, ...]) -> Grid:
        return grid_of(latent, self.patch)

    def label(self, place: Place, grid: Grid) -> str:
        return f"{grid[0]}x{grid[1]}" if self.settings.rides else place.share

    def block_flops(self, place: Place, counted: Counted, after: int) -> float:
        stream = next(stream for other, stream, _ in self.seated() if other is place)
        image, text = self.weights[stream]
        linear = counted.before if self.settings.merge is MergeWhere.ATTENTION else after
        length = after + counted.beside + (0 if stream.crosses else counted.text)
        products = image * (linear + counted.beside) + text * counted.text
        crossed = 2 * length * counted.text * counted.channels if stream.crosses else 0
        return 2.0 * (products + 2 * length**2 * counted.channels + crossed)

    # ----------------------------------------------------------------------- what reaches the network

    def shorter_inputs(self, evaluation: Evaluation, options: dict, control: dict | None) -> tuple[dict, dict | None]:
        """Options and ControlNet residuals of a call whose kept tokens ride: what is added between blocks reaches the
        kept tokens, and patches that other nodes have there see all tokens, copies of the kept ones."""
        if not self.settings.rides or not evaluation.merges:
            return options, control
        merge, count = next(iter(evaluation.kept.merges.values())), prod(evaluation.grid)

        def rows(add: Tensor | None) -> Tensor | None:
            if add is None or add.shape[1] < count:
                return add
            return torch.cat((merge.take(add[:, :count].expand(len(merge.kept), -1, -1)), add[:, count:]), 1)

        def on_all(patch: Callable) -> Callable:
            def between(args: dict) -> dict:
                kept, image = merge.kept.shape[1], args["img"]
                whole = torch.cat((merge.copied(image[:, :kept]), image[:, kept:]), 1)
                out = patch({**args, "img": whole})
                return {
                    **out,
                    "img": torch.cat((merge.take(out["img"][:, :count]), out["img"][:, count:]), 1),
                }

            return between

        if control is not None:
            control = {kind: [rows(add) for add in adds] for kind, adds in control.items() if isinstance(adds, list)}
        patches = options.get("patches", {})
        if "double_block" in patches:
            options = {
                **options,
                "patches": {**patches, "double_block": [on_all(p) for p in patches["double_block"]]},
            }
        return options, control

    # ----------------------------------------------------------------------- a block

    def block(self, place: Place, stream: Stream, args: dict, options: dict, run: Callable[[dict], object]):
        """A block with arguments `args` by name, through `run`, on the tokens that the evaluation says."""
        evaluation: Evaluation | None = options.get(KEY)
        sequence = args.get(stream.image)
        if evaluation is None or not isinstance(sequence, Tensor):
            return run(args)
        count = prod(evaluation.grid)
        now = evaluation.tokens_now(place, count)  # of the image, in the sequence as it comes
        text = args.get(stream.text) if stream.text else None
        if isinstance(text, Tensor):
            evaluation.scratch[TEXT] = text.shape[1]
        evaluation.text = text.shape[1] if isinstance(text, Tensor) else 0
        tokens = sequence.flatten(1, -2)
        full = tokens.shape[1] + count - now
        start = stream.start(Sequence(full, count, evaluation.scratch.get(TEXT), options, evaluation.inputs))
        if start is None or not 0 <= start <= full - count:
            if evaluation.merges:
                raise Unmergeable(f"{stream.blocks} are called in a way that does not tell where the image tokens lie")
            return run(args)
        evaluation.beside = full - count
        kept, merge = ours(evaluation.enter, place, tokens[:, start : start + now], evaluation.grid)
        if merge is None:
            return run(args)
        if now == count:
            evaluation.scratch["shape"] = sequence.shape
        out = run(ours(_shorter, stream, evaluation, args, options, tokens, kept, merge, start, full))
        made = stream.image_of(out).flatten(1, -2)
        image = ours(evaluation.leave, place, made[:, start : start + kept.shape[1]])
        if image.shape[1] == kept.shape[1]:
            return out
        whole = ours(_joined, made, image, start, kept.shape[1])
        return stream.with_image(
            out, whole.unflatten(1, evaluation.scratch["shape"][1:-1]) if sequence.ndim > 3 else whole
        )


class Slot:
    """A block's place in `patches_replace["dit"]`. `inner` is what another node had put there."""

    def __init__(self, family: DiTFamily, place: Place, stream: Stream, inner: Callable | None) -> None:
        self.family, self.place, self.stream = family, place, stream
        self.inner = inner.inner if isinstance(inner, Slot) else inner

    def __deepcopy__(self, memo: dict) -> Slot:
        return self

    def __call__(self, args: dict, extra: dict) -> dict:
        # Packs with a forward of their own give the options elsewhere, or not at all.
        options = args.get("transformer_options") or extra.get("transformer_options") or {}

        def run(args: dict) -> dict:
            if self.inner is not None:
                return uncompiled(self.inner, args, extra)
            if has_patches(options):
                return uncompiled(extra["original_block"], args)
            return extra["original_block"](args)

        return self.family.block(self.place, self.stream, args, options, run)


class ForwardSeam:
    """A block's forward; its arguments get their names by its signature."""

    def __init__(
        self,
        family: DiTFamily,
        place: Place,
        stream: Stream,
        signature: inspect.Signature,
        original: Callable,
    ) -> None:
        self.family, self.place, self.stream = family, place, stream
        self.signature, self.original = signature, original

    def __call__(self, *args, **kwargs):
        bound = self.signature.bind(None, *args, **kwargs)  # None: its self
        options = bound.arguments.get("transformer_options") or {}

        def run(arguments: dict):
            bound.arguments.update(arguments)
            original = partial(uncompiled, self.original) if has_patches(options) else self.original
            return original(*bound.args[1:], **bound.kwargs)

        return self.family.block(self.place, self.stream, dict(bound.arguments), options, run)


def _shorter(
    stream: Stream,
    evaluation: Evaluation,
    args: dict,
    options: dict,
    tokens: Tensor,
    kept: Tensor,
    merge: Merge,
    start: int,
    full: int,
) -> dict:
    """The arguments of a block for the kept tokens [B, K, C] of its sequence, which had `full` tokens."""
    image = len(merge.assignment[0])
    now = tokens.shape[1] - (full - image)
    shape = args[stream.image].shape
    sequence = kept if evaluation.copies else kept.clone()  # blocks add to it in place
    if tokens.shape[1] > now:
        sequence = torch.cat((tokens[:, :start], kept, tokens[:, start + now :]), 1)
    frames = [name for name in stream.per_frame if _frames_of(args.get(name)) > 1]
    if len(shape) == 5:  # [B, T, H, W, C]
        sequence = sequence[:, :, None, None] if frames else sequence[:, None, :, None]
    changed = {**args, stream.image: sequence}
    for name in (*stream.rows, *stream.masks, *frames):
        if isinstance(args.get(name), Tensor):
            changed[name] = _of_rows(stream, evaluation, name, args[name], merge, start, full)
    if not stream.slot and "img_slice" in options:
        begin, end = options["img_slice"]
        changed["transformer_options"] = {**options, "img_slice": [begin, end - (image - kept.shape[1])]}
    return changed


def _of_rows(
    stream: Stream, evaluation: Evaluation, name: str, value: Tensor, merge: Merge, start: int, full: int
) -> Tensor:
    """An argument with a row for each token, for the rows that stay: all that comes before the image, the kept image
    tokens, all that follows. It is the same for all blocks of a call."""
    known = evaluation.scratch.get((stream.kind, name))
    if known is not None and known[0] is value and known[1] is merge:
        return known[2]
    if name in stream.per_frame:
        each = ceil(full / value.shape[1])
        rows = _rows(merge, start, full).div(each, rounding_mode="floor")
        made = _take(value, rows, 1)
    elif name in stream.masks:
        made = value.unsqueeze(0) if value.ndim == 2 else value
        length = made.shape[-1]
        rows = _rows(merge, start + length - full, length)
        for dim in (made.ndim - 2, made.ndim - 1):
            made = _take(made, rows, dim) if made.shape[dim] == length else made
    else:
        dim = stream.rows[name]
        length = value.shape[dim]
        made = _take(value, _rows(merge, start + length - full, length), dim)
    evaluation.scratch[stream.kind, name] = (value, merge, made)
    return made


def _rows(merge: Merge, start: int, length: int) -> Tensor:
    """[B, L'] the rows of a sequence of `length` that the merged one holds, if the image begins at `start`."""
    kept = merge.kept
    end = start + len(merge.assignment[0])
    before = torch.arange(start, device=kept.device).expand(len(kept), -1)
    after = torch.arange(end, length, device=kept.device).expand(len(kept), -1)
    return torch.cat((before, kept + start, after), 1)


def _take(value: Tensor, rows: Tensor, dim: int) -> Tensor:
    """Along `dim` the rows [B, L'] of each image; a value that is the same for all images is taken for each."""
    value = value.expand(len(rows), *value.shape[1:])
    return torch.stack([part.index_select(dim - 1, index) for part, index in zip(value, rows)])


def _joined(sequence: Tensor, image: Tensor, start: int, kept: int) -> Tensor:
    """The sequence with all image tokens [B, N, C] in the place of the kept ones."""
    if sequence.shape[1] == kept:
        return image
    return torch.cat((sequence[:, :start], image, sequence[:, start + kept :]), 1)


def _frames_of(value: object) -> int:
    return value.shape[1] if isinstance(value, Tensor) and value.ndim > 2 else 1


def _weights(block: nn.Module, stream: Stream) -> tuple[int, int]:
    """How many weights of a block's linear layers each image token meets, and how many each token of a text apart."""
    image = text = 0
    for path, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2 or any(part in path for part in stream.per_image):
            continue
        if any(part in path for part in stream.of_text):
            text += weight.numel()
        else:
            image += weight.numel()
    return image, text
