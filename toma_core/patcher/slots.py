"""What other nodes run in the place of a DiT's blocks. A cache with slots there answers some calls by itself."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from .dynamo import keep_out_of_graphs, uncompiled


class OthersSlots:
    """Counts how many of the blocks whose place other nodes have taken they run themselves."""

    def __init__(self) -> None:
        self.asked = self.run = 0  # since `skipped` was last asked
        self.most = 0.0  # the highest share of blocks that ran
        self.lock = Lock()  # devices that run at a time

    def watch(self, options: dict) -> None:
        """From here on, in the transformer_options of one run. Where nobody has a slot nothing is done."""
        replaced = options.get("patches_replace", {})
        if slots := replaced.get("dit"):
            keep_out_of_graphs(OthersSlots, Watched)
            watched = {where: Watched(self, slot) for where, slot in slots.items()}
            options["patches_replace"] = {**replaced, "dit": watched}

    def count(self, asked: int, run: int) -> None:
        with self.lock:
            self.asked += asked
            self.run += run

    def skipped(self) -> bool:
        """Whether less than half as many of the blocks ran as for an earlier answer. A node that leaves out a few,
        always or for a part of the schedule, still answers by the others."""
        if not self.asked:
            return False
        share, self.asked, self.run = self.run / self.asked, 0, 0
        self.most = max(self.most, share)
        return share < self.most / 2


class Watched:
    """A slot of another node."""

    def __init__(self, slots: OthersSlots, slot: Callable) -> None:
        self.slots, self.slot = slots, slot

    def __deepcopy__(self, memo: dict) -> Watched:
        return self  # packs copy the options of a model deeply, at each step

    def __call__(self, args: dict, extra: dict) -> dict:
        def original(*given, **named):
            self.slots.count(0, 1)
            return extra["original_block"](*given, **named)

        self.slots.count(1, 0)
        return uncompiled(self.slot, args, {**extra, "original_block": original})
