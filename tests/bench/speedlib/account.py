"""From samples to rows: what was measured, what was computed from it, and how near it is to what is possible."""

from __future__ import annotations

from statistics import median

import fullsize

from .methods import CARRIED_TILE, Method
from .plan import Group
from .row import CHOOSING, FLUX_DEPTH, evaluation_of, failed, make, of_shorter, unet_shares, unmerged_blocks

STEPS = 20


def rows(groups: list[Group], samples: dict) -> list[dict]:
    """All rows of the samples {group: {method: [evaluations of a sample]}}."""
    found, halves = [], {}
    for group in groups:
        measured = {m.key: _good(samples.get(group.name, {}).get(m.key, [])) for m in group.methods}
        if not measured.get("none"):
            continue
        for method in group.methods:
            there = samples.get(group.name, {}).get(method.key, [])
            if there and "error" in there[0]:
                found.append(failed(group, method, there[0]["error"]))
            elif there:
                found += _rows(group, method, measured)
        if group.scope.isdigit():
            halves.setdefault((group.size, group.batch), {})[int(group.scope)] = (group, measured)
    for both in halves.values():
        if set(both) == {640, 1280}:
            found += _whole_unet(both)
    for row in found:
        of_shorter(row, found)
    return found


def _good(there: list) -> list:
    return [sample for sample in there if "error" not in sample]


def _rows(group: Group, method: Method, measured: dict) -> list[dict]:
    """The whole step, if the model is whole or can be computed, and a row for each kind of block."""
    made = []
    mine = measured[method.key]
    none = _beside(measured["none"], mine)
    if not group.scope.isdigit():
        step = _flux_step if group.family == "flux" else _unet_step
        seconds, base = step(group, method, mine, none), step(group, _NONE, none, none)
        made.append(make(group, method, "step", seconds, base, mine, none))
        first = median(step(group, method, mine, none, at=0))
        made += _runs(made[-1], group.family, median(base), first, median(seconds))
    for kind in none[0][-1]["blocks"]:
        if kind == "res block" or kind not in mine[0][-1]["blocks"]:
            continue
        made.append(make(group, method, kind, _block(mine, kind), _block(none, kind), mine, none))
    return made


_NONE = Method("none", lambda model: model)


def _beside(none: list, mine: list) -> list:
    """Of the samples without any node those that were measured in the same sessions."""
    sessions = {sample[0].get("session") for sample in mine}
    return [sample for sample in none if sample[0].get("session") in sessions] or none


def _unet_step(group: Group, method: Method, mine: list, none: list, at: int = -1) -> list[float]:
    if method.name == "EasyCache":  # what it skips is spread over the run
        return [sum(e["seconds"] for e in sample) / len(sample) for sample in mine]
    return [evaluation_of(sample, at)["seconds"] for sample in mine]


def _block(mine: list, kind: str, at: int = -1) -> list[float]:
    """Seconds of one block, without choosing, which only one block of the step does."""
    found = []
    for sample in mine:
        evaluation = evaluation_of(sample, at)
        times = evaluation["blocks"][kind]
        found.append((sum(times) - _choosing(evaluation, kind)) / len(times))
    return found


def _choosing(evaluation: dict, kind: str) -> float:
    return sum(evaluation["ours"].get(kind, {}).get(name, 0.0) for name in CHOOSING)


def _flux_step(group: Group, method: Method, mine: list, none: list, at: int = -1) -> list[float]:
    """The 19 + 38 model, computed: its inputs and output, so many blocks of each kind, choosing once a kind."""
    if method.name == "EasyCache":
        whole = median(_flux_step(group, _NONE, none, none))
        ran = [sum(1 for e in sample if e["blocks"]) / len(sample) for sample in mine]
        return [whole * share for share in ran]
    skip = unmerged_blocks(method)
    found = []
    for i, sample in enumerate(mine):
        evaluation = evaluation_of(sample, at)
        total = evaluation["seconds"] - sum(sum(times) for times in evaluation["blocks"].values())
        for kind, depth in FLUX_DEPTH.items():
            total += skip * median(_block(none, kind)) if skip else 0.0
            total += (depth - skip) * _block(mine, kind, at)[i] + _choosing(evaluation, kind)
        found.append(total)
    return found


def _whole_unet(halves: dict) -> list[dict]:
    """SDXL's step computed from its two kinds of blocks and the speed of a res block."""
    made, group = [], halves[640][0]
    depth = {640: 10, 1280: 60}
    outside = fullsize.parts("unet", group.size)
    outside = group.batch * sum(flops for part, flops in outside.items() if not part.startswith("blocks"))

    def step(samples: dict[int, list], at: int = -1) -> list[float]:
        """Seconds of each round, from the samples {width: ...} of one method."""
        count = min(len(there) for there in samples.values())
        rest = [_convolutions(halves, i) * outside for i in range(count)]
        for channels, there in samples.items():
            kind = f"block {channels}"
            for i, (seconds, sample) in enumerate(zip(_block(there[:count], kind, at), there)):
                rest[i] += depth[channels] * seconds + _choosing(evaluation_of(sample, at), kind)
        return rest

    for method in group.methods:
        mine = {c: halves[c][1].get(method.key, []) for c in depth}
        seconds = step(mine)
        if not seconds:
            continue
        none = step({c: _beside(halves[c][1]["none"], mine[c]) for c in depth})
        row = make(group, method, "step", seconds, none, None, None)
        row["shares"] = unet_shares(halves, method.key, median(none))
        row.update(basis="computed from one block of each kind", group="SDXL")
        if all(_no_effect(measured, method.key) for _, measured in halves.values()):
            row["note"] = f"no effect; {method.note}"
        made.append(row)
        made += _runs(row, "unet", median(none), median(step(mine, at=0)), median(seconds))
    return made


def _no_effect(measured: dict, method: str) -> bool:
    mine, none = (evaluation_of(measured[m][0]) for m in (method, "none"))
    return method != "none" and mine["check"] == none["check"]


def _convolutions(halves: dict, i: int) -> float:
    """Seconds a FLOP of a res block, of both widths."""
    seconds = flops = 0.0
    for channels, (group, measured) in halves.items():
        tokens = (group.latent_size[0] // 8) * (group.latent_size[1] // 8)
        none = measured["none"]
        seconds += none[min(i, len(none) - 1)][-1]["blocks"]["res block"][0]
        flops += 36 * group.batch * tokens * channels**2
    return seconds / flops


def _runs(row: dict, family: str, full: float, first: float, merged: float) -> list[dict]:
    """The presets over a run of STEPS, by their schedule, from their two kinds of steps."""
    from comfyui_toma.toma_core.settings import PRESETS

    if row["method"] not in ("toma carried", "toma paper"):
        return []
    made = []
    for name, by_family in PRESETS.items():
        settings = by_family[family]
        if settings.ratio != row["ratio"] or settings.carries != (row["method"] == "toma carried"):
            continue
        if settings.carries and settings.tile_size != CARRIED_TILE:
            continue
        table = [action.value for action in settings.schedule.table(STEPS)]
        cost = {"leave": full, "reselect": first if settings.carries else merged}
        run = {
            **row,
            "part": f"run of {STEPS} steps",
            "method": f"preset {name}",
            "spread": None,
            "memory": None,
        }
        run.update(seconds=sum(cost.get(action, merged) for action in table), shares=None, of_shorter=None)
        run["speedup"] = STEPS * full / run["seconds"]
        run["ideal"] = fullsize.speedup_by_flops(family, settings, STEPS, _size(row), merging=False)
        run.update(of_ideal=run["speedup"] / run["ideal"], basis=f"{row['basis']}, by the schedule", note="")
        made.append(run)
    return made


def _size(row: dict) -> fullsize.Size:
    width, height = row["size"].split("x")
    return int(width), int(height)
