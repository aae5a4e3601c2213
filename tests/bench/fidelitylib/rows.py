"""Rows: what was measured of one point in one regime, over the prompts that it was drawn for."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from statistics import mean

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .measures import BETTER_HIGH, GOOD, VERSION, Measures, frechet
from .methods import OTHER_SEED, UNMERGED, Point, unmerged
from .regimes import PIXELS, Regime
from .statistics import differs
from .studio import Studio, digest

RESAMPLES = 200
LEAST_FOR_FRECHET = 8  # images
WORTH_THE_NAME = 0.05  # a loss of less than that share of the unmerged value is none, however sure


class Measured:
    """Measures of drawn images, kept beside them."""

    def __init__(self, studio: Studio, measures: Measures) -> None:
        self.studio, self.measures = studio, measures

    def of(self, point: Point, name: str) -> tuple[dict[str, float], Tensor | None]:
        """Measures of an image, and its Inception features."""
        studio, reference = self.studio, unmerged(self.studio.regime)
        keys = (studio.key(point, name), studio.key(reference, name)[:8], f"v{VERSION}")
        path = studio.folder / "measured" / ("-".join(keys) + ".safetensors")
        if path.is_file():
            with safe_open(path, "pt") as file:
                features = file.get_tensor("features") if "features" in set(file.keys()) else None
                if features is not None or self.measures.inception is None:
                    return json.loads(file.metadata()["each"]), features
        base, image = studio.drawn(reference, name).image, studio.drawn(point, name).image
        features = self.measures.features(image)
        both = None
        if features is not None:
            both = (features if point.method == UNMERGED else self.of(reference, name)[1], features)
        each = {**self.measures.close(base, image, both), **self.measures.good(base, image, name)}
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"image size": torch.tensor(image.shape)} | ({} if features is None else {"features": features})
        save_file(tensors, path, {"each": json.dumps(each)})
        return each, features

    def of_training(self, name: str) -> Tensor | None:
        """Inception features of the training image of a caption."""
        pixels = PIXELS[self.studio.regime.tokens]
        path = self.studio.folder / "training" / f"{name.replace(' ', '-')}-{pixels}.safetensors"
        if not path.is_file():
            features = self.measures.features(self.measures.wanted(name, pixels))
            if features is None:
                return None
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"features": features}, path)
        with safe_open(path, "pt") as file:
            return file.get_tensor("features")


def row_of(measured: Measured, point: Point, held_out: bool) -> dict | None:
    """None if not even the first prompt is drawn."""
    studio, regime = measured.studio, measured.studio.regime
    reference = unmerged(regime)
    names = []
    for name in studio.names:
        if not (studio.is_drawn(point, name) and studio.is_drawn(reference, name)):
            break
        names.append(name)
    if not names:
        return None
    found = [measured.of(point, name) for name in names]
    each = {measure: [values[measure] for values, _ in found] for measure in found[0][0]}
    drawn = [studio.drawn(point, name) for name in names]
    full, work = _work(studio, point, names)
    return {
        "regime": regime.name,
        "method": point.method,
        "setting": point.setting,
        "wanted": point.wanted,
        "held_out": held_out,
        "prompts": len(names),
        "speedup": _round(sum(full) / sum(work)),
        "kinds": drawn[0].kinds,
        "settings": {k: getattr(v, "value", v) for k, v in asdict(point.settings).items()} if point.settings else {},
        "code": {source: digest(source)[:12] for source in point.sources},
        **{measure: _round(mean(values)) for measure, values in each.items()},
        "each": {
            "speedup": [_round(plain / faster) for plain, faster in zip(full, work)],
            **{measure: [_round(value) for value in values] for measure, values in each.items()},
        },
        "frechet": _frechets(measured, point, names) if len(names) >= LEAST_FOR_FRECHET else {},
    }


def _work(studio: Studio, point: Point, names: list[str]) -> tuple[list[float], list[float]]:
    """What each image took unmerged and so, in full evaluations of the full-size model."""
    full = [studio.drawn(unmerged(studio.regime), name).ran for name in names]
    return full, [studio.drawn(point, name).work(studio.regime, point) for name in names]


def over_first(row: dict, count: int) -> dict:
    """The row over its first prompts only, to stand beside one that was drawn for no more."""
    first = {measure: row["each"][measure][:count] for measure in ("speedup", "psnr", "lpips")}
    means = {measure: mean(values) for measure, values in first.items()}
    return {**row, **means, "speedup": 1 / mean(1 / value for value in first["speedup"]), "prompts": count}


def _frechets(measured: Measured, point: Point, names: list[str]) -> dict[str, dict[str, float]]:
    """To the training images of the same captions, and to the unmerged images of other seeds: the distance, how much it
    is above that of the unmerged images, and the standard error of that (bootstrap over prompts)."""
    regime = measured.studio.regime
    other = unmerged(regime, other_seed=True)
    if measured.measures.inception is None or not all(measured.studio.is_drawn(other, name) for name in names):
        return {}

    def features(of: Point) -> Tensor:
        return torch.stack([measured.of(of, name)[1] for name in names])

    mine, base = features(point), features(unmerged(regime))
    against = {"training": torch.stack([measured.of_training(name) for name in names]), "others": features(other)}
    chance = torch.Generator().manual_seed(0)
    picks = [torch.randint(len(names), (len(names),), generator=chance) for _ in range(RESAMPLES)]
    found = {}
    for name, target in against.items():
        above = [frechet(mine[p], target[p]) - frechet(base[p], target[p]) for p in picks]
        value, unchanged = frechet(mine, target), frechet(base, target)
        error = float(torch.tensor(above).std())
        found[name] = {"value": _round(value), "above": _round(value - unchanged), "error": _round(error)}
    return found


def losses(row: dict, base: dict) -> dict[str, float]:
    """In which measures of goodness a row is worse than the unmerged images beyond chance, and by how much: the share
    of images for retrieval, of the unmerged value for the others."""
    found = {}
    count = min(row["prompts"], base["prompts"])
    for measure in GOOD:
        mine, other = (r["each"][measure][:count] for r in (row, base))
        apart = [(b - a if measure in BETTER_HIGH else a - b) for a, b in zip(mine, other)]
        lost = mean(apart) if measure in BETTER_HIGH else mean(apart) / max(mean(other), 1e-9)
        if differs(apart) > 0 and (measure in BETTER_HIGH or lost > WORTH_THE_NAME):
            found[measure] = lost
    for name, told in row["frechet"].items():
        lost = told["above"] / max(told["value"] - told["above"], 1e-9)
        if told["above"] > 1.96 * told["error"] and lost > WORTH_THE_NAME:
            found[f"Frechet, {name}"] = lost
    return found


def base_of(rows: list[dict], row: dict) -> dict | None:
    wanted = (row["regime"], UNMERGED, row["held_out"])
    return next((r for r in rows if (r["regime"], r["method"], r["held_out"]) == wanted), None)


def joined(old: list[dict], new: list[dict]) -> list[dict]:
    """New rows in the place of the old ones of the same regime and method."""
    drawn = {(row["regime"], row["method"], row["held_out"]) for row in new}
    return [row for row in old if (row["regime"], row["method"], row["held_out"]) not in drawn] + new


def read(path: Path) -> list[dict]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [row for row in found if row["each"]["lpips"] and row["regime"] and row["method"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path}: not a file that this benchmark wrote ({error!r})") from None


def write(rows: list[dict], path: Path) -> None:
    """One row a line, so that a change can be read."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def _round(value: float) -> float:
    return float(f"{value:.4g}") if isfinite(value) else 0.0


def of_regime(rows: list[dict], regime: Regime | str, held_out: bool = True) -> list[dict]:
    name = regime if isinstance(regime, str) else regime.name
    return [row for row in rows if row["regime"] == name and row["held_out"] == held_out]


NOT_COMPARED = (UNMERGED, OTHER_SEED)
