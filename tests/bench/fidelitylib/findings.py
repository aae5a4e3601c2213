"""What the rows say about the aims of the fidelity work: met, missed, or even within what chance explains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, stdev

from scipy.stats import t as students_t

from .points import FEW, OURS, STEPS

MODELS = {"flux": "Flux", "unet": "SDXL's UNet"}
Find = Callable[..., "dict | None"]


def findings(rows: list[dict]) -> list[str]:
    """One line for each aim, with its figures and, where it is not the model's, its number of prompts."""
    lines = []
    for run in dict.fromkeys((row["model"], row["tokens"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["tokens"]) == run]
        most = max(row["prompts"] for row in mine)
        lines.append(f"{MODELS[run[0]]}, {run[1]} tokens, {most} prompts")

        def find(method: str, against: str = "", of_steps: int = STEPS, mine=mine) -> dict | None:
            about = (method, against, of_steps)
            return next((r for r in mine if (r["method"], r["against"], r["of_steps"]) == about), None)

        for said in (_against(mine, find), _aims(find), _short_runs(find), _stacking(find)):
            for verdict, text, count in said:
                lines.append(f"  {verdict:6} {text}" + (f" ({count} prompts)" if count < most else ""))
    return lines


def _against(rows: list[dict], find: Find) -> Iterator[tuple[str, str, int]]:
    for row in rows:
        ours = find(row["against"]) if row["against"] else None
        if ours:
            lpips, psnr = (paired(ours, row, measure) for measure in ("lpips", "psnr"))
            yield (
                _closer(lpips, psnr),
                f"{ours['method']} closer than {row['method']} at {row['speedup']:.2f}x: {_told(lpips, psnr)}",
                len(psnr),
            )


def _aims(find: Find) -> Iterator[tuple[str, str, int]]:
    quality, balanced, fast = (find(name) for name in OURS)
    if quality and (paper := find("paper", "quality")):
        quality, paper = over_same_prompts(quality, paper)
        share = quality["lpips"] / paper["lpips"]
        text = f"quality at {quality['speedup']:.2f}x has {share:.3f} of paper's LPIPS"
        yield _met(quality["speedup"] >= 1.2 and share <= 0.5), text, quality["prompts"]
    if balanced and (paper := find("paper", "1.25x")):
        ours, paper = over_same_prompts(balanced, paper)
        text = f"balanced at {ours['speedup']:.2f}x: {_distance(ours)}; "
        text += f"paper at {paper['speedup']:.2f}x: {_distance(paper)}"
        closer = ours["lpips"] <= paper["lpips"] and ours["psnr"] >= paper["psnr"]
        yield _met(ours["speedup"] >= 1.4 and closer), text, ours["prompts"]
    if fast and (paper := find("paper", "fast")):
        gain = paired(fast, paper, "psnr")
        text = f"fast at {fast['speedup']:.2f}x is {mean(gain):.1f} dB above paper"
        yield _met(fast["speedup"] >= 1.8 and mean(gain) >= 2), text, len(gain)
    if balanced:
        times = speckle(balanced)
        text = f"balanced adds {times - 1:.2f} times the unmerged speckle ({times:.2f} times in all)"
        yield _met(times <= 3), text, balanced["prompts"]


def _short_runs(find: Find) -> Iterator[tuple[str, str, int]]:
    for short, dropped in FEW:
        merged, fewer = find("short run", "", short), find("short run, fewer steps", "", short)
        if merged and fewer:
            merged, fewer = over_same_prompts(merged, fewer)
            lpips, psnr = (paired(merged, fewer, measure) for measure in ("lpips", "psnr"))
            text = f"of {short} steps, merged at {merged['speedup']:.2f}x: {_distance(merged)}; {dropped} steps "
            text += f"({fewer['speedup']:.2f}x): {_distance(fewer)}; {_told(lpips, psnr)}"
            yield _closer(lpips, psnr), text, merged["prompts"]


def _stacking(find: Find) -> Iterator[tuple[str, str, int]]:
    for first in ("easycache", "60 % of the steps"):
        found = find(first), find("balanced"), find(f"balanced on {first}")
        if not all(found):
            continue
        alone, merged, both = over_same_prompts(*found)
        kept = both["speedup"] / alone["speedup"]
        far = [root_error(row) for row in (alone, merged, both)]
        over = [b - a - m for a, m, b in zip(*(row["each"]["lpips"] for row in (alone, merged, both)))]
        text = f"balanced on {first}: {kept:.2f}x on top of {alone['speedup']:.2f}x; LPIPS {both['lpips']:.4f} "
        text += f"of {alone['lpips']:.4f} + {merged['lpips']:.4f} ({mean(over):+.4f} ± {standard_error(over):.4f}), "
        text += f"root mean square {far[2]:.4f} of {far[0]:.4f} + {far[1]:.4f}"
        bounded = kept >= 0.9 * merged["speedup"] and far[2] < far[0] + far[1]
        verdict = "even" if bounded and not beyond_chance(over) else _met(bounded and mean(over) < 0)
        yield verdict, text, both["prompts"]


def _met(yes: bool) -> str:
    return "met" if yes else "MISSED"


def _closer(lpips: list[float], psnr: list[float]) -> str:
    """Of differences ours - theirs, prompt by prompt."""
    decided = beyond_chance(lpips) and beyond_chance(psnr)
    return _met(mean(lpips) < 0 < mean(psnr)) if decided else "even"


def _told(lpips: list[float], psnr: list[float]) -> str:
    return (
        f"LPIPS {mean(lpips):+.4f} ± {standard_error(lpips):.4f}, "
        f"PSNR {mean(psnr):+.1f} ± {standard_error(psnr):.1f} dB"
    )


def _distance(row: dict) -> str:
    return f"LPIPS {row['lpips']:.4f}, {row['psnr']:.1f} dB"


# --------------------------------------------------------------------------- statistics


def paired(ours: dict, other: dict, measure: str) -> list[float]:
    """ours - other, prompt by prompt of those that both have."""
    return [a - b for a, b in zip(ours["each"][measure], other["each"][measure])]


def standard_error(values: list[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def beyond_chance(values: list[float]) -> bool:
    """Whether zero is outside of the 95 % interval of the mean of these differences (Student's t)."""
    if len(values) < 2:
        return False
    return abs(mean(values)) > students_t.ppf(0.975, len(values) - 1) * standard_error(values)


def over_same_prompts(*rows: dict) -> list[dict]:
    """The rows with their means over the prompts that all of them have."""
    count = min(row["prompts"] for row in rows)
    cut = [{name: values[:count] for name, values in row["each"].items()} for row in rows]
    return [
        {**row, **{name: mean(values) for name, values in each.items()}, "each": each, "prompts": count}
        for row, each in zip(rows, cut)
    ]


def speckle(row: dict) -> float:
    """Variance between neighbouring tokens on flat background, over that of the unmerged picture."""
    return row["speckle"] / max(row["speckle_unmerged"], 1e-12)


def root_error(row: dict) -> float:
    return mean(10 ** (-value / 20) for value in row["each"]["psnr"])
