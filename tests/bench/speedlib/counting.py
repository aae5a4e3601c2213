"""What one evaluation asks of a GPU: kernel launches, bytes moved, FLOPs, and the most memory held at a time.

The model runs on meta tensors, which have a shape and no content, so that all 70 or 57 blocks at any size are
counted in seconds, in half precision. Each ATen operation that is no view counts as one launch that reads its
inputs and writes its outputs once; attention counts as one fused kernel. (Not in inference mode, in which
operations arrive whole, `linear` for one, and would not be told apart from their parts.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import fullsize
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .watch import replaced

FREE = {
    "detach",
    "alias",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "_unsafe_view",
    "_reshape_alias",
}


@dataclass
class Work:
    """Operations in groups (FLOPs, bytes) -> how often, as few groups as there are different operations."""

    kernels: Counter = field(default_factory=Counter)
    held: int = 0
    peak: int = 0

    @property
    def launches(self) -> int:
        return self.kernels.total()

    @property
    def flops(self) -> float:
        return sum(flops * count for (flops, _), count in self.kernels.items())

    @property
    def moved(self) -> int:
        return sum(size * count for (_, size), count in self.kernels.items())

    def add(self, flops: float, size: int) -> None:
        self.kernels[int(flops), int(size)] += 1

    def hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.held -= size


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.seen: weakref.WeakSet = weakref.WeakSet()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        if operation.is_view or operation._schema.name.removeprefix("aten::") in FREE:
            return out
        made = [tensor for tensor in _tensors(out) if tensor.device.type == "meta"]
        if not made:  # on the host
            return out
        given = [tensor for tensor in _tensors((args, kwargs)) if tensor.device.type == "meta"]
        count = flop_registry.get(operation.overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count else 0
        self.work.add(flops, sum(map(_bytes, given)) + sum(map(_bytes, made)))
        self.hold(made)
        return out

    def hold(self, made: list[torch.Tensor]) -> None:
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage not in self.seen:
                self.seen.add(storage)
                self.work.hold(tensor)

    def attention(self, q, k, v, *_, **__) -> torch.Tensor:
        """Stands for ComfyUI's call of SDPA: q [B, H, n, D], k and v [B, H, m, D]."""
        out = torch.empty_like(q)
        flops = 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]
        self.work.add(flops, sum(map(_bytes, (q, k, v, out))))
        self.hold([out])
        return out


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [t for part in value for t in _tensors(part)] if isinstance(value, (tuple, list, type({}.values()))) else []


def _bytes(tensor: torch.Tensor) -> int:
    """Of what is really there: an expanded tensor is read once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride]
    count = 1
    for size in sizes:
        count *= size
    return count * tensor.element_size()


def evaluations(
    model,
    family: str,
    size: fullsize.Size,
    settings=None,
    actions: tuple[str, ...] = ("leave",),
    batch: int = 1,
) -> dict[str, Work]:
    """What one evaluation of a model on the meta device asks for, by what the schedule says to do in it."""
    from comfyui_toma.toma_core.patcher import family_of
    from comfyui_toma.toma_core.patcher.call import Call, Kept
    from comfyui_toma.toma_core.patcher.run import KEY
    from comfyui_toma.toma_core.schedule import Action

    if settings is None:
        return {"leave": _count(model, family, size, batch, {})}
    seams, patched, options, found = family_of(model)(model, settings), model.clone(), {}, {}
    seams.apply(patched)
    seams.install(options)
    latent, kept = (size[1] // 8, size[0] // 8), Kept(1, 0, 0)
    for action in sorted(actions, key=lambda action: action != "reselect"):  # the others need what it chose
        options[KEY] = Call(settings, Action(action), kept, 0, latent)
        found[action] = _count(patched, family, size, batch, options)
    return found


def of_method(model, family: str, size: fullsize.Size, method, batch: int = 1) -> Work:
    """The same of a method that is not ours."""
    patched = method.make(model)
    options = {**patched.model_options["transformer_options"], "latent_grid": (size[1] // 8, size[0] // 8)}
    return _count(patched, family, size, batch, options)


def _count(patched, family: str, size: fullsize.Size, batch: int, options: dict) -> Work:
    """One evaluation of a patched model, with its object patches on as long as it lasts."""
    network = patched.model.diffusion_model
    inputs = _inputs(family, size, next(network.parameters()).dtype, batch)
    counting = Counting()
    with ExitStack() as stack:
        for path, seam in patched.object_patches.items():
            owner = patched.model.get_submodule(path.rpartition(".")[0])
            stack.enter_context(replaced(owner, "forward", lambda _, seam=seam: seam))
        with torch.no_grad(), fused(counting), counting:
            network(**inputs, transformer_options=options)
    return counting.work


@contextmanager
def fused(counting: Counting):
    import comfy.ops

    with replaced(comfy.ops, "scaled_dot_product_attention", lambda _: counting.attention):
        yield


def _inputs(family: str, size: fullsize.Size, dtype: torch.dtype, batch: int) -> dict:
    channels, text, context, pooled = (
        (4, fullsize.SDXL_TEXT, fullsize.SDXL_CONTEXT, fullsize.SDXL_POOLED)
        if family == "unet"
        else (16, fullsize.FLUX_TEXT, fullsize.FLUX_CONTEXT, fullsize.FLUX_POOLED)
    )

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty((batch, *shape), dtype=dtype, device="meta")

    inputs = {"x": empty(channels, size[1] // 8, size[0] // 8), "y": empty(pooled)}
    inputs["context"] = empty(text, context)
    inputs["timesteps" if family == "unet" else "timestep"] = empty()
    return inputs if family == "unet" else {**inputs, "guidance": empty()}
