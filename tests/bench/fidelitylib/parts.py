"""Rows of one point that were drawn in parts, put together (`--from`, `--read`)."""

from __future__ import annotations

import json
from functools import reduce
from statistics import mean

POINT = ("model", "tokens", "method", "against", "steps", "of_steps")  # one row of each, in all
ALIKE = ("settings", "cfg", "held_out", "version")  # what two parts have to agree in
FASTER = ("speedup", "measured")
OLD = {"held_out": True, "version": None}  # what older files leave out; None fits everything


def joined(rows: list[dict]) -> list[dict]:
    """One row a point, in the order of their first parts. SystemExit says why parts don't fit."""
    points: dict[str, list[dict]] = {}
    for row in rows:
        points.setdefault(json.dumps([row[name] for name in POINT]), []).append(row)
    found = [reduce(_followed_by, sorted(parts, key=_first)) for parts in points.values()]
    for model, tokens in dict.fromkeys((row["model"], row["tokens"]) for row in found):
        begin = {_first(row) for row in found if (row["model"], row["tokens"]) == (model, tokens)}
        if len(begin) > 1:
            raise SystemExit(
                f"{model}, {tokens} tokens: the first prompts are {sorted(begin)}, so that rows can't be compared. "
                "Read the files with the prompts from 0 on, too."
            )
    return found


def _first(row: dict) -> int:
    return row.get("first", 0)


def _followed_by(row: dict, more: dict) -> dict:
    """Both as one; of prompts that both have, those of `more` count."""
    begin, end = _first(row), _first(row) + row["prompts"]
    name = f"{row['label']} on {row['model']}, {row['tokens']} tokens"
    for what in ALIKE:
        pair = [part.get(what, OLD.get(what)) for part in (row, more)]
        if pair[0] != pair[1] and None not in pair:
            raise SystemExit(f"{name} comes with {what} {pair[0]} and with {pair[1]}: read only one of the two.")
    if begin == _first(more):
        raise SystemExit(f"{name} comes twice from prompt {begin} on: read only one of the two.")
    if end < _first(more):
        raise SystemExit(f"{name}: prompts {end} to {_first(more) - 1} are missing between two parts.")
    head, tail = _first(more) - begin, _first(more) + more["prompts"] - begin
    each = {
        measure: values[:head] + more["each"][measure] + values[tail:]
        for measure, values in row["each"].items()
        if measure in more["each"]
    }
    known = {key: value for key, value in row.items() if key not in row["each"]}
    count = len(each["psnr"])
    spread = row["measured_spread"] + more["measured_spread"]
    return {
        **known,
        "prompts": count,
        **{key: _faster(row[key], count - more["prompts"], more[key], more["prompts"]) for key in FASTER},
        "measured_spread": [min(spread), max(spread)],
        **{measure: mean(values) for measure, values in each.items()},
        "each": each,
    }


def _faster(first: float, count: int, second: float, more: int) -> float:
    """Speed-up of so many prompts by the one and so many by the other."""
    return (count + more) / (count / first + more / second)
