"""What happens to tokens on their way through the network, from call to call of one sampling run.

`begin` says of what kind the answer is that the guider is asked for; `apply_model` then meets each batch on its way
into the network. The run itself, which asks, is in run.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from threading import Lock

from torch import Tensor, nn

from ..chunks import ChunkState
from ..clean import latent_of, tokens_of, unmerged
from ..evaluation import Evaluation, Unmergeable
from ..merge import Select
from ..plan import Action, Kind
from ..settings import Settings
from .account import Account
from .dynamo import as_a_call_of_its_own, keep_out_of_graphs, room_for_graphs, without_compile
from .families.base import KEY, Family, seams_on
from .families.dit import DiTFamily
from .memory import guarded, raise_unless_out_of_memory

NOT_TOLD = "another node runs the blocks without their transformer_options, or does not run them"
TRIES = 3  # calls that could not go on merged and were run again in full, before no more are tried


class Merging:
    """What the chunks of a batch (cond, uncond, ...) keep between the calls of one run, apart by key."""

    def __init__(self, settings: Settings, family: Family, account: Account, select: Select) -> None:
        self.settings = settings
        self.family = family
        self.account = account
        self.select = select
        # A DiT whose kept tokens ride through the whole network: the rest is done in the space of clean estimates, x0.
        self.dit = family if isinstance(family, DiTFamily) and settings.rides else None
        self.merges_none = all(block.skipped for block in family.blocks)
        self.kind: Kind | None = None  # of the answer that is asked for; None: of none
        self.merged = False  # whether any call for it has merged
        self.states: dict[Hashable, tuple[ChunkState, int]] = {}
        self.passes: dict[Hashable, int] = {}
        self.merged_steps: set[int] = set()
        self.answers = 0  # of the guider that ran, the one under way included
        self.run_again = 0  # calls that could not go on merged
        self.networks: dict[int, ExitStack] = {}  # whose forwards are wrapped
        self.lock = Lock()  # several devices evaluate chunks of one batch at a time, each on a thread of its own
        keep_out_of_graphs(Merging)

    def __deepcopy__(self, memo: dict) -> Merging:
        return self  # packs copy the options of a model deeply, at each step

    def begin(self, kind: Kind | None) -> None:
        """An answer of this kind is asked for, or, with None, was given."""
        self.kind = kind
        if kind is not None:
            self.passes, self.merged = {}, False
            self.answers += 1
            # Windows that slide on, and are never seen again, must not pile up.
            horizon = self.answers - 2 * max(2, self.settings.reselect_every)
            self.states = {key: part for key, part in self.states.items() if part[0].used_at >= horizon}

    def end(self) -> None:
        """Puts the forwards back and drops all that was kept."""
        for seams in self.networks.values():
            seams.close()
        self.states.clear()
        self.passes.clear()

    def apply_model(
        self,
        executor,
        x,
        t,
        c_concat=None,
        c_crossattn=None,
        control=None,
        transformer_options=None,
        **inputs,
    ):
        """Wraps BaseModel.apply_model: says what the blocks do with their tokens, runs the model, keeps what was
        renewed. What can't go on merged is run again in full."""
        if self.kind is None:  # not for an answer of the guider: in training, or by a node of its own
            return executor(x, t, c_concat, c_crossattn, control, transformer_options, **inputs)
        options = dict(transformer_options or {})
        network = executor.class_obj.diffusion_model
        with self.lock:
            self._wrap(without_compile(network))
            keys = self._keys(x, options)
        evaluation = self._evaluation(x, keys, options, inputs, merges=self._runs_as_written(network))
        inputs = as_a_call_of_its_own(network, inputs)
        try:
            out = self._network(evaluation, executor, x, t, c_concat, c_crossattn, control, options, inputs)
        except Unmergeable as stop:
            self.account.note(f"left unmerged because {stop}", Kind.MERGED)
            with self.lock:
                self.run_again += 1
            out = None
        if out is None:  # outside of `except`, which would hold on to memory
            evaluation = self._evaluation(x, keys, options, inputs, merges=False)
            out = self._network(evaluation, executor, x, t, c_concat, c_crossattn, control, options, inputs)
        with self.lock:
            self.merged = self.merged or evaluation.merged_any
            self._keep(evaluation, keys, out)
            self.account.picks(evaluation, options.get("cond_or_uncond") or [0])
            self.account.count(evaluation, x)
        return out

    def _network(self, evaluation: Evaluation, executor, x, t, c_concat, c_crossattn, control, options, inputs):
        options = {**options, KEY: evaluation}
        # A UNet takes residuals out of these lists, and a call that is run again needs them once more.
        control = control and {name: list(adds) if isinstance(adds, list) else adds for name, adds in control.items()}
        in_x0 = evaluation.in_x0 and evaluation.merges
        if in_x0:
            assert self.dit is not None
            options, control = guarded(self.dit.shorter_inputs, evaluation, options, control)
        with room_for_graphs(self.family.compiles):
            out = executor(x, t, c_concat, c_crossattn, control, options, **inputs)
        if in_x0 and evaluation.merged_any:
            out = guarded(self._unmerged, evaluation, out)
        elif in_x0 and (control is not None or "double_block" in options.get("patches", {})):
            raise Unmergeable(NOT_TOLD)  # what was made shorter for the kept tokens has met all of them
        elif in_x0:
            self.account.note(f"left unmerged because {NOT_TOLD}", Kind.MERGED)
        return out

    def _runs_as_written(self, network: nn.Module) -> bool:
        """Whether ComfyUI's own code runs the blocks, as far as that matters."""
        if self.dit is None or self.kind is not Kind.MERGED:
            return True
        foreign = self.dit.runs_blocks(without_compile(network))
        if foreign:
            self.account.note(
                f"tokens are not merged: another node runs the blocks by code of its own ({foreign})", Kind.MERGED
            )
        return not foreign

    def _unmerged(self, evaluation: Evaluation, out: Tensor) -> Tensor:
        """x0 [B, C, ...] of all tokens, from x0 of the kept ones."""
        assert self.dit is not None and evaluation.before is not None and evaluation.before.clean is not None
        merge, patch = next(iter(evaluation.state.merges.values())), self.dit.patch
        clean = unmerged(tokens_of(out, patch), evaluation.before.clean, merge)
        return latent_of(clean, out, patch)

    def _wrap(self, network: nn.Module) -> None:
        if id(network) not in self.networks:
            self.networks[id(network)] = seams_on(self.family, network)

    def _keys(self, x: Tensor, options: dict) -> list[Hashable]:
        """One key a chunk of the batch. Guidance nodes (PAG, SLG) evaluate a prompt a second time in one answer, with
        blocks changed: that pass is told from the first, so that neither takes what belongs to the other."""
        uuids, frames = options.get("uuids") or [None], _frames(options)
        keys: list[Hashable] = []
        for uuid in uuids:
            chunk = (uuid, x.shape[0] // len(uuids), *x.shape[1:], x.dtype, x.device, frames)
            self.passes[chunk] = self.passes.get(chunk, -1) + 1
            keys.append((*chunk, self.passes[chunk]))
        return keys

    def _evaluation(
        self, x: Tensor, keys: Sequence[Hashable], options: dict, inputs: dict, merges: bool = True
    ) -> Evaluation:
        """What the blocks of this call do with their tokens."""
        grid, in_x0 = self.family.grid(tuple(x.shape)), self.dit is not None
        # Gathered only if this step merges, or a later one may reuse these merges: it can cost a copy.
        before = self._before(keys) if self.kind is Kind.MERGED or self.settings.reselect_every > 1 else None
        unchanged = before if before is not None and in_x0 else ChunkState(len(keys))
        in_full = Evaluation(self.settings, Action.NONE, unchanged, in_x0=in_x0, grid=grid, inputs=inputs)
        if not merges or self.kind is not Kind.MERGED or self.merges_none or self.run_again >= TRIES:
            return in_full
        why = self.family.why_not(x, options, inputs)
        if why:
            self.account.note(f"tokens are not merged: {why}", Kind.MERGED)
            return in_full
        if in_x0 and (before is None or before.clean is None):
            return in_full  # the first evaluation of a chunk: there is no clean estimate yet
        action, state = self._turn(before, len(keys))
        evaluation = Evaluation(self.settings, action, state, before, in_x0, self.select, grid, inputs)
        return self._chosen(evaluation) or in_full if in_x0 else evaluation

    def _before(self, keys: Sequence[Hashable]) -> ChunkState | None:
        """What these chunks kept from the call before; None if one of them has not come by yet."""
        parts = [part for part in map(self.states.get, keys) if part is not None]
        try:
            return ChunkState.gather(parts) if len(parts) == len(keys) else None
        except RuntimeError as error:
            raise_unless_out_of_memory(error)
            return None

    def _turn(self, before: ChunkState | None, chunks: int) -> tuple[Action, ChunkState]:
        """What is to be renewed, counted in merged steps, and what the call starts with. A chunk that missed its turn
        (its prompt starts later) takes it now."""
        now = len(self.merged_steps - {self.account.step})
        selected, weighed = self.settings.schedule.turns(now)
        if before is None or not before.merges or before.selected_at < selected:
            return Action.RESELECT, ChunkState(chunks, now, now)
        if before.weighed_at < weighed:
            return Action.REWEIGHT, ChunkState(chunks, before.selected_at, now, dict(before.merges))
        return Action.REUSE, ChunkState(chunks, before.selected_at, before.weighed_at, dict(before.merges))

    def _chosen(self, evaluation: Evaluation) -> Evaluation | None:
        """Kept tokens that ride through the whole network are chosen before it, by the last clean estimate."""
        assert evaluation.before is not None
        try:
            guarded(evaluation.merge_for, self.family.blocks[-1], evaluation.before.clean, evaluation.grid)
        except Unmergeable as stop:
            self.account.note(f"left unmerged because {stop}", Kind.MERGED)
            return None
        return evaluation

    def _keep(self, evaluation: Evaluation, keys: Sequence[Hashable], out: Tensor) -> None:
        if evaluation.merges:
            self.merged_steps.add(self.account.step)
        elif not (evaluation.in_x0 and self.settings.ratio):
            return
        state = evaluation.state
        if self.dit:
            try:
                state.clean = tokens_of(out.detach(), self.dit.patch)
            except RuntimeError as error:
                raise_unless_out_of_memory(error)
        state.used_at = self.answers
        self.states.update({key: (state, slot) for slot, key in enumerate(keys)})


def _frames(options: dict) -> tuple | None:
    """What a sliding window shows of a longer latent: ComfyUI's own, or AnimateDiff-Evolved's."""
    window = options.get("context_window")
    shown = window.index_list if window is not None else (options.get("ad_params") or {}).get("sub_idxs")
    return tuple(shown) if shown is not None else None
