"""The rows as a table for the terminal, and the bars that the pack has to clear."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .watch import OURS

SPEEDUP = {
    ("SDXL", 0.25): 1.18, ("SDXL", 0.5): 1.58, ("SDXL", 0.75): 2.2,
    ("Flux", 0.25): 1.26, ("Flux", 0.5): 1.67, ("Flux", 0.75): 2.35,
}  # fmt: skip
OF_IDEAL, OF_SHORTER, OVER_TOMESD = 0.96, 0.95, 1.35
MERGING, CHOOSING, WHOLE_IMAGE = 1.0, 0.2, 5.0  # per cent of the unmerged step
PUBLISHED = {"SDXL": 1 / (1 - 0.24), "Flux": 1 / (1 - 0.23)}


@dataclass(frozen=True)
class Bar:
    what: str
    value: float
    least: float
    at_most: bool = False

    @property
    def cleared(self) -> bool:
        return self.value <= self.least if self.at_most else self.value >= self.least

    def line(self) -> str:
        sign = "at most" if self.at_most else "at least"
        return f"{'ok  ' if self.cleared else 'MISS'} {self.what}: {self.value:.3g}, {sign} {self.least:g}"


def bars(rows: list[dict], choosing: list[dict]) -> list[Bar]:
    found = []
    ours = [r for r in rows if r["method"] == "toma" and r["part"] == "step" and r["speedup"]]
    for row in ours:
        what = f"{row['model']} {row['size']}" + (f" batch {row['batch']}" if row["batch"] > 1 else "")
        what += f" ratio {row['ratio']:g}"
        main = row["size"] == "1024x1024" and row["batch"] == 1
        if main and (row["model"], row["ratio"]) in SPEEDUP:
            found.append(Bar(f"{what}: speed-up", row["speedup"], SPEEDUP[row["model"], row["ratio"]]))
            found.append(Bar(f"{what}: of the ideal", row["of_ideal"], OF_IDEAL))
            if row["of_shorter"]:
                found.append(Bar(f"{what}: of the shorter sequence", row["of_shorter"], OF_SHORTER))
            for rival in ("tomesd", "tomesd attention"):
                other = _same(rows, row, rival)
                if other and other["speedup"] and row["model"] == "SDXL":
                    found.append(Bar(f"{what}: over {rival}", row["speedup"] / other["speedup"], OVER_TOMESD))
        if row["shares"]:
            shares = row["shares"]
            found.append(Bar(f"{what}: merge and unmerge, %", shares["merge"] + shares["unmerge"], MERGING, True))
            found.append(Bar(f"{what}: select and weigh, %", shares["select"] + shares["weigh"], CHOOSING, True))
        found.append(Bar(f"{what}: not slower than no node", row["speedup"], 1.0))
    for row in choosing:
        if row["tile"] == 0:
            what = f"{row['model']}: whole-image selection, % of a step"
            found.append(Bar(what, row["share"], WHOLE_IMAGE, True))
    return found


def _same(rows: list[dict], row: dict, method: str) -> dict | None:
    keys = ("model", "part", "size", "batch", "ratio")
    return next((r for r in rows if r["method"] == method and all(r[k] == row[k] for k in keys)), None)


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def table(rows: list[dict]) -> str:
    head = f"{'part':16}{'size':>10}  {'method':18}{'ratio':>6}{'seconds':>9}{'+-%':>5}{'speed-up':>9}{'ideal':>7}"
    head += f"{'of it':>7}{'of short':>9}" + "".join(f"{name + ' %':>10}" for name in OURS) + f"{'MB':>6}  remark"
    lines, title = [], None
    order = list(dict.fromkeys((r["group"], r["basis"]) for r in rows))
    for row in sorted(rows, key=lambda r: order.index((r["group"], r["basis"]))):
        if title != (row["group"], row["basis"]):
            title = (row["group"], row["basis"])
            lines += ["", f"{row['group']}: {row['basis']}", head]
        batch = f" x{row['batch']}" if row["batch"] > 1 else ""
        spread = None if row["spread"] is None else 50 * row["spread"]
        line = f"{row['part']:16}{row['size'] + batch:>10}  {row['method']:18}{_number(row['ratio'], 'g'):>6}"
        line += f"{_number(row['seconds'], '.3f'):>9}{_number(spread, '.0f'):>5}{_number(row['speedup'], '.2f'):>9}"
        line += f"{_number(row['ideal'], '.2f'):>7}{_number(row['of_ideal'], '.2f'):>7}"
        line += f"{_number(row['of_shorter'], '.2f'):>9}"
        shares = row["shares"] or dict.fromkeys(OURS)
        line += "".join(f"{_number(shares[name], '.2f'):>10}" for name in OURS)
        memory = None if row["memory"] is None else row["memory"] / 2**20
        note = row["note"] if row["samples"] in (0, 3) else f"{row['samples']} samples; {row['note']}"
        lines.append(f"{line}{_number(memory, '.0f'):>6}  {note[:60]}")
    return "\n".join(lines)


def choosing_table(found: Iterable[dict]) -> str:
    lines = [f"{'model':6}{'grid':>8}{'tile':>6}{'ratio':>7}{'select ms':>11}{'weigh ms':>10}{'% of a step':>13}"]
    for row in found:
        line = f"{row['model']:6}{row['grid']:>8}{row['tile']:>6}{row['ratio']:>7g}{row['select'] * 1e3:>11.1f}"
        lines.append(f"{line}{row['weigh'] * 1e3:>10.1f}{row['share']:>13.2f}")
    return "\n".join(lines)


def growth(rows: list[dict]) -> str:
    """Seconds of a step and speed-up at ratio 0.5, from the smallest to the largest square."""
    lines = []
    for model in ("SDXL", "Flux"):
        here = [r for r in rows if r["model"] == model and r["part"] == "step" and r["batch"] == 1]
        sizes = sorted(
            {r["size"] for r in here if len(set(r["size"].split("x"))) == 1},
            key=lambda s: int(s.split("x")[0]),
        )
        for size in sizes:
            none = next((r for r in here if r["size"] == size and r["method"] == "none"), None)
            ours = next((r for r in here if r["size"] == size and r["method"] == "toma" and r["ratio"] == 0.5), None)
            if none and ours:
                shares = sum((ours["shares"] or {}).values())
                line = f"{model:6}{size:>10}{none['seconds']:>9.2f} s{ours['seconds']:>9.2f} s{ours['speedup']:>7.2f}x"
                lines.append(f"{line}{ours['ideal']:>7.2f} ideal{shares:>7.2f} % our own work")
    return "\n".join(lines)


def published(rows: list[dict]) -> str:
    """The preset `paper` here, beside what its authors measured on a GPU."""
    found = [r for r in rows if r["method"] == "preset paper" and r["size"] == "1024x1024"]
    line = "preset paper, {model} 1024 px, 20 steps: {speedup:.2f}x here ({basis}), "
    line += "ideal {ideal:.2f}x, published {there:.2f}x"
    return "\n".join(line.format(**r, there=PUBLISHED[r["model"]]) for r in found)
