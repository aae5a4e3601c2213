"""torch.compile: our seams run between its graphs, the blocks inside them.

ComfyUI's TorchCompileModel drops every guard on transformer_options, so whatever a graph reads there stays
what it was at the first call: a compiled seam would never learn that the step has changed (the reason why
EasyCache stops working when compiled). Therefore dynamo steps over our functions. What they do themselves
is not compiled; the block that they call is, as a graph of its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any


def _apply(function: Callable, *args, **kwargs):
    return function(*args, **kwargs)


_kept_out: set[CodeType] = set()
_outside: Callable = _apply


def keep_out_of_graphs(*seams: Callable) -> None:
    """Dynamo steps over these functions (of a class: all its methods), but not over what they call. Where
    nobody compiles nothing is done."""
    global _outside
    if "torch._dynamo" not in sys.modules:  # its import takes seconds, which only those who compile shall pay
        return
    from torch._dynamo import disable
    from torch._dynamo.decorators import skip
    from torch._dynamo.eval_frame import skip_code

    if _outside is _apply:
        _outside = disable(_apply)
        skip(uncompiled)
    for function in _functions(seams):
        if function.__code__ not in _kept_out:
            _kept_out.add(function.__code__)
            skip(function)
            for inner in filter(inspect.iscode, function.__code__.co_consts):
                skip_code(inner)


def _functions(seams: Iterable[Callable]) -> Iterator[Callable]:
    for seam in seams:
        members = vars(seam).values() if inspect.isclass(seam) else [seam]
        yield from filter(inspect.isfunction, members)


def as_a_call_of_its_own(network, inputs: dict) -> dict:
    """Inputs of the network with one more. A run without ToMA may have left a graph that knows no seam, and
    with the options unguarded only an argument tells our call from that one."""
    if "torch._dynamo" not in sys.modules:
        return inputs
    forward = inspect.signature(type(without_compile(network)).forward)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in forward.parameters.values())
    return {**inputs, "toma": True} if takes_any else inputs


def as_written(compile_blocks: bool) -> AbstractContextManager:
    """For one answer of the guider: blocks that can't be compiled (see Family.compiles) run as they are written. The
    stance is one for the whole process, so it is the sampler's thread that takes it, not those of single devices."""
    if compile_blocks or "torch._dynamo" not in sys.modules or not _has_stance():
        return nullcontext()
    import torch

    return torch.compiler.set_stance("force_eager")


def _has_stance() -> bool:
    import torch

    return hasattr(torch.compiler, "set_stance")  # from torch 2.6 on


def room_for_graphs(compile_blocks: bool) -> AbstractContextManager:
    """For one call of the network: block by block an SDXL needs more graphs of one function than the eight that dynamo
    allows."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    from torch._dynamo import config

    if not compile_blocks:
        return nullcontext() if _has_stance() else config.patch(disable=True)
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.6
    return config.patch(**{name: max(64, getattr(config, name))})


def without_compile(module: Any) -> Any:
    """The module itself, where a node has compiled it and put the compiled one in its place."""
    return getattr(module, "_orig_mod", module)


def uncompiled(function: Callable, *args, **kwargs):
    """function(...), without compiling it nor anything that it calls."""
    return _outside(function, *args, **kwargs)


def has_patches(options: dict) -> bool:
    """Whether blocks have patches: what these do may change from block to block, unseen by any guard."""
    replaced = options.get("patches_replace", {})
    return bool(options.get("patches")) or any(replaced[layer] for layer in replaced if layer != "dit")
