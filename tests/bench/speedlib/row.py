"""One row of the account: a method on a part of a model, beside no node and beside what is possible."""

from __future__ import annotations

from statistics import median

import fullsize

from .methods import Method
from .plan import Group
from .watch import OURS

MODELS = {"unet": "SDXL", "flux": "Flux"}
FLUX_DEPTH = {"double block": fullsize.FLUX_DOUBLE, "single block": fullsize.FLUX_SINGLE}
CHOOSING = ("select", "weigh")  # once a step; the rest of what is ours is done in each block


def evaluation_of(sample: list[dict], at: int = -1) -> dict:
    """The merged step of a sample is its last; where detail is carried, the first is the one that chooses."""
    return sample[at]


def make(group: Group, method: Method, part: str, seconds: list, base: list, mine, none) -> dict:
    # Each side by itself: a round takes minutes, so its samples are no nearer to one another than the rounds are.
    speedup = median(base) / median(seconds)
    ideal = _ideal(group, method, part)
    computed = part == "step" and group.family == "flux"
    row = {
        "model": MODELS[group.family],
        "part": part,
        "size": f"{group.size[0]}x{group.size[1]}",
        "batch": group.batch,
        "group": group.name,
        "method": method.name,
        "ratio": method.ratio,
        "seconds": median(seconds),
        "spread": (max(seconds) - min(seconds)) / median(seconds),
        "samples": len(seconds),
        "speedup": speedup,
        "ideal": ideal,
        "of_ideal": speedup / ideal if ideal else None,
        "of_shorter": None,
        "shares": _shares(group, method, part, mine, median(base)) if mine else None,
        "memory": _memory(mine) if mine and part == "step" else None,
        "basis": f"computed from {group.double} + {group.single} blocks" if computed else "measured",
        "note": method.note,
    }
    if method.name == "none":
        row.update(speedup=1.0, ideal=1.0, of_ideal=1.0, shares=None)
    elif mine and method.steps == 1 and evaluation_of(mine[0])["check"] == evaluation_of(none[0])["check"]:
        row["note"] = f"no effect; {method.note}"
    return row


def failed(group: Group, method: Method, error: str) -> dict:
    empty = dict.fromkeys(("seconds", "spread", "speedup", "ideal", "of_ideal", "of_shorter", "shares", "memory"))
    size = f"{group.size[0]}x{group.size[1]}"
    about = {
        "model": MODELS[group.family],
        "part": "step",
        "size": size,
        "batch": group.batch,
        "group": group.name,
    }
    named = {"method": method.name, "ratio": method.ratio, "samples": 0, "basis": "measured"}
    return {**about, **named, **empty, "note": f"fails: {error}"}


def _ideal(group: Group, method: Method, part: str) -> float | None:
    if method.where is None or method.ratio is None:
        return None
    if part == "step":
        skip = unmerged_blocks(method) if group.family == "flux" else 0
        return fullsize.ideal(group.family, method.ratio, group.size, method.where, skip)
    if group.family == "flux":
        tokens = fullsize.flux_tokens(group.size)
        kept = fullsize.keep_count(tokens, method.ratio)
        kind = part.split()[0]
        return fullsize.flux_block(kind, tokens).total() / fullsize.flux_block(kind, tokens, method.where, kept).total()
    channels = int(part.split()[1])
    height, width = fullsize.unet_grids(group.size)[fullsize.SDXL_CHANNELS.index(channels)]
    tokens = height * width
    kept = fullsize.keep_count(tokens, method.ratio)
    return (
        fullsize.unet_block(tokens, channels).total()
        / fullsize.unet_block(tokens, channels, method.where, kept).total()
    )


def _memory(mine: list) -> int | None:
    """Bytes held at most during the step, beyond what was held before it."""
    held = [evaluation_of(sample)["memory"] for sample in mine]
    return None if None in held else median(held)


def unmerged_blocks(method: Method) -> int:
    """Of each kind of Flux block: the paper leaves the first alone, and who is compared with it does so, too."""
    merged = method.name.split()[0] in ("toma", "tomesd", "shorter") and method.name != "toma carried"
    return fullsize.FLUX_SKIP if merged else 0


def _shares(group: Group, method: Method, part: str, mine: list, base: float) -> dict | None:
    """Per cent of the unmerged step (or block): what ToMA itself takes."""
    if not any(any(ours.values()) for ours in evaluation_of(mine[0])["ours"].values()):
        return None
    taken = []
    for sample in mine:
        evaluation = evaluation_of(sample)
        if part == "step" and group.family == "flux":
            taken.append(_flux_ours(evaluation, unmerged_blocks(method)))
        elif part == "step":
            taken.append({name: sum(ours[name] for ours in evaluation["ours"].values()) for name in OURS})
        else:
            times = len(evaluation["blocks"][part])
            taken.append({name: seconds / times for name, seconds in evaluation["ours"][part].items()})
    return {name: 100 * median(t[name] for t in taken) / base for name in OURS}


def _flux_ours(evaluation: dict, skip: int) -> dict:
    """Of the 19 + 38 model: choosing once a kind, the rest in each merged block."""
    total = dict.fromkeys(OURS, 0.0)
    for kind, ours in evaluation["ours"].items():
        merged = FLUX_DEPTH[kind] - skip
        for name, seconds in ours.items():
            total[name] += seconds if name in CHOOSING else seconds / len(evaluation["blocks"][kind]) * merged
    return total


def unet_shares(halves: dict, method: str, base: float) -> dict | None:
    total = dict.fromkeys(OURS, 0.0)
    for channels, depth in ((640, 10), (1280, 60)):
        for name in OURS:
            times = 1 if name in CHOOSING else depth
            found = [
                evaluation_of(s)["ours"].get(f"block {channels}", {}).get(name, 0.0)
                for s in halves[channels][1][method]
            ]
            total[name] += 100 * times * median(found) / base
    return total if any(total.values()) else None


def of_shorter(row: dict, found: list[dict]) -> None:
    """How near a method is to the same blocks on a plainly shorter sequence."""
    if row["method"] not in ("toma", "toma paper", "tomesd") or row["speedup"] is None:
        return
    same = ("group", "part", "size", "batch", "ratio")
    for other in found:
        if other["method"] == "shorter" and all(other[k] == row[k] for k in same) and other["basis"] == row["basis"]:
            row["of_shorter"] = row["speedup"] / other["speedup"]
