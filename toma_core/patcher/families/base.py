"""What a run has to know of a model's architecture."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property

from torch import Tensor, nn

from ...evaluation import Block, Counted, Grid
from ...settings import Settings
from ..dynamo import without_compile

KEY = "toma"  # of what is ours in the options of a model


def network_of(model):
    """The network of a ModelPatcher. Nodes that compile it as a whole leave theirs on the loaded model, where
    the next patcher finds it: it holds the network that was there before. None if there is no network."""
    network = getattr(getattr(model, "model", None), "diffusion_model", None)
    return without_compile(network)


class Family(ABC):
    """The blocks of one network, in rows, for one way to merge (`arrange`)."""

    name: str
    kind: str  # "unet", "dit" or "none": which settings a preset has for it
    why_unmerged: str = ""  # why no tokens of this model can be merged
    compiles: bool = True  # whether torch.compile may have the blocks

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.settings = Settings()

    def __deepcopy__(self, memo: dict) -> Family:
        return self  # packs copy the options of a model deeply, at each step

    @cached_property
    def by_name(self) -> dict[tuple[str, int], Block]:
        """The blocks by row and index."""
        return {(block.row, block.index): block for block in self.blocks}

    @abstractmethod
    def arrange(self, settings: Settings) -> Family:
        """The same network, with rows for these settings. Raises SettingsError where they can't work on it."""

    def install(self, options: dict) -> None:
        """Puts the seams into the transformer_options of one run, if they have a place there."""

    def seams(self, network: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Callable], Callable]]]:
        """The modules whose forward is wrapped during a run, and what wraps it."""
        return iter(())

    def why_not(self, x: Tensor, options: dict, inputs: dict) -> str | None:
        """Why this call (latent x) can't be merged, or None."""
        return None

    def grid(self, latent: tuple[int, ...]) -> Grid:
        """Rows and columns of the tokens, where all blocks have the same."""
        return 0, 0

    def label(self, block: Block, grid: Grid) -> str:
        """The group under which a block's tokens are reported."""
        return block.row

    def block_flops(self, block: Block, counted: Counted, after: int) -> float:
        """FLOPs of one block for one image whose tokens are merged to `after`."""
        return 0.0

    def other_flops(self, latent: tuple[int, ...]) -> float:
        """FLOPs of one evaluation for one image [..., H, W] that are not in its transformer blocks."""
        return 0.0


class Unmerged(Family):
    """A network whose tokens can't be merged. It can still be forecast."""

    kind = "none"

    def __init__(self, model: str, why: str) -> None:
        super().__init__()
        self.name = model
        self.why_unmerged = why

    def arrange(self, settings: Settings) -> Unmerged:
        return self

    @classmethod
    def without_seams(cls, family: Family) -> Unmerged:
        """For a run that merges nothing: its blocks need not be touched."""
        return cls(family.name, family.why_unmerged)


@contextmanager
def wrapped(module: nn.Module, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    """While active, the module's forward is wrapped. Another node's forward on it is wrapped with it and put back."""
    attributes = module.__dict__
    before = attributes.get("forward")
    attributes["forward"] = wrap(_CallsForward(module) if before is None else before)
    try:
        yield
    finally:
        if before is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = before


class _CallsForward:
    """The forward of a module's class, looked up when it is called: nodes swap classes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args, **kwargs):
        return type(self.module).forward(self.module, *args, **kwargs)


def seams_on(family: Family, network: nn.Module) -> ExitStack:
    """Wraps the forwards that the family asks for; closing the stack puts them back."""
    with ExitStack() as stack:
        for module, wrap in family.seams(network):
            stack.enter_context(wrapped(module, wrap))
        return stack.pop_all()
