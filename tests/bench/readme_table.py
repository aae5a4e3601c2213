"""README's speed tables and the figures of its presets, made from the JSON files of the benchmarks.

    python dev.py bench readme_table speed.json [--fidelity fidelity.json] [--write README.md]

With --write the lines between <!-- speed --> and <!-- /speed --> are replaced; with --fidelity also what the first
table says of each preset: its measured speed-up, and its distance from the unmerged picture at 1024 tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

BEGIN, END = "<!-- speed -->", "<!-- /speed -->"
METHODS = {
    "toma": "**ToMA**",
    "tomesd": "tomesd's matching, around the whole block",
    "tomesd attention": "tomesd's matching, around self-attention",
    "todo": "ToDo (keys and values of every fourth token)",
    "HyperTile": "HyperTile node, as shipped",
    "HyperTile depth 2": "HyperTile node, max_depth 2",
    "TomePatchModel": "TomePatchModel node, as shipped",
    "shorter": "limit: the same blocks on a shorter sequence",
}
MODELS = ("SDXL", "Flux")
ENOUGH, SHAKY = 3, 0.15  # rounds; their largest distance, as a share of the median


def steps(rows: list[dict], model: str) -> list[dict]:
    """The rows of whole steps at 1024 px; of several, those with most blocks measured come first."""
    return [
        r for r in rows if r["model"] == model and r["part"] == "step" and r["size"] == "1024x1024" and r["batch"] == 1
    ]


def cell(found: list[dict]) -> str:
    if not found:
        return ""
    row = found[0]
    if row["speedup"] is None:
        return "fails"
    return "no effect" if row["note"].startswith("no effect") else f"{row['speedup']:.2f}x"


def table(content: dict) -> str:
    lines = ["| method | ratio | SDXL | Flux |", "|---|---|---|---|"]
    by_model = {model: steps(content["rows"], model) for model in MODELS}
    for method, name in METHODS.items():
        ratios = {r["ratio"] for rows in by_model.values() for r in rows if r["method"] == method}
        for ratio in sorted(ratios, key=lambda ratio: ratio or 0.0):
            cells = [
                cell([r for r in by_model[model] if r["method"] == method and r["ratio"] == ratio]) for model in MODELS
            ]
            lines.append(f"| {name} | {'' if ratio is None else f'{ratio:g}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def presets(content: dict) -> str:
    lines = ["| preset, 20 steps | SDXL | Flux |", "|---|---|---|"]
    runs = [r for r in content["rows"] if r["method"].startswith("preset ") and r["size"] == "1024x1024"]
    for method in dict.fromkeys(r["method"] for r in runs):
        cells = [cell([r for r in runs if r["method"] == method and r["model"] == model]) for model in MODELS]
        lines.append(f"| {method.removeprefix('preset ')} | {' | '.join(cells)} |")
    return "\n".join(lines) if runs else ""


def sizes(content: dict) -> str:
    """Ratio 0.5 from small to large, and in batches."""
    found: dict[tuple[str, int], dict[str, dict]] = {}
    for row in content["rows"]:
        if (row["part"], row["method"], row["ratio"]) == ("step", "toma", 0.5):
            found.setdefault((row["size"], row["batch"]), {}).setdefault(row["model"], row)
    lines = ["| ratio 0.5 at | SDXL | Flux |", "|---|---|---|"]
    for size, batch in sorted(found, key=lambda key: (_pixels(key[0]), key[1])):
        rows = [found[size, batch].get(model) for model in MODELS]
        cells = [f"{row['speedup']:.2f}x (ideal {row['ideal']:.2f}x{_basis(row)})" if row else "" for row in rows]
        lines.append(f"| {size}{f', batch {batch}' if batch > 1 else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _pixels(size: str) -> int:
    width, height = map(int, size.split("x"))
    return width * height


def _basis(row: dict) -> str:
    """What the reader should know of a figure: whether it was computed, and whether it is shaky."""
    told = [row["basis"]] if row["basis"] != "measured" else []
    if row["samples"] < ENOUGH:
        told.append(f"{row['samples']} rounds")
    if row["spread"] and row["spread"] > SHAKY:
        told.append(f"rounds {row['spread']:.0%} apart")
    return "".join(f"; {part}" for part in told)


def _beside_rivals(rows: list[dict]) -> str:
    """Where rivals were measured on fewer blocks than ours: what ours is there."""
    ours = [r for r in steps(rows, "Flux") if (r["method"], r["ratio"]) == ("toma", 0.5)]
    if len(ours) < 2:
        return ""
    return f". The rivals on Flux are {ours[1]['basis']}, where ToMA at 0.5 is {ours[1]['speedup']:.2f}x"


def text(content: dict) -> str:
    about = content["about"]
    bases = {
        model: dict.fromkeys(r["basis"] for r in steps(content["rows"], model) if r["speedup"]) for model in MODELS
    }
    how = "; ".join(f"{model} {' or '.join(found)}" for model, found in bases.items() if found)
    threads = "one thread" if about["threads"] == 1 else f"{about['threads']} threads"
    machine = f"fp32 on a CPU ({about['cpu']}, {threads})"
    said = f"One step at 1024 px, SDPA, {machine}, random weights: {how}. Flux keeps 5 + 5 of its blocks unmerged "
    said += f"here, as the paper does; the presets merge all{_beside_rivals(content['rows'])}."
    return "\n\n".join(part for part in (said, table(content), presets(content), sizes(content)) if part)


def written(readme: str, made: str) -> str:
    """The README with the table in its place."""
    before, found, rest = readme.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        sys.exit(f"The README has no {BEGIN} ... {END} to write between.")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def presets_filled(readme: str, speed: dict, fidelity: dict) -> str:
    """The README with the cells of each preset as the rows say."""
    for name in ("quality", "balanced", "fast"):
        cells = []
        for model, family in (("SDXL", "unet"), ("Flux", "flux")):
            faster = next(r for r in speed["rows"] if (r["method"], r["model"]) == (f"preset {name}", model))
            about = (name, family, 1024)
            far = next(r for r in fidelity["rows"] if (r["method"], r["model"], r["tokens"]) == about)
            distance = f"{far['psnr']:.1f} dB, {far['lpips']:.4f}".replace(" 0.", " .")
            cells.append(f" {faster['speedup']:.2f}x, {distance} |")
        line = rf"(\| `{name}`[^|]*\|)[^|]*\|[^|]*\|"
        readme, found = re.subn(line, r"\1" + "".join(cells), readme, count=1)
        if not found:
            sys.exit(f"The README has no line for the preset {name}.")
    return readme


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("--fidelity", type=Path, metavar="JSON")
    parser.add_argument("--write", type=Path, metavar="README")
    options = parser.parse_args()
    speed = json.loads(options.json.read_text(encoding="utf-8"))
    if not options.write:
        print(text(speed))
        return
    readme = written(options.write.read_text(encoding="utf-8"), text(speed))
    if options.fidelity:
        readme = presets_filled(readme, speed, json.loads(options.fidelity.read_text(encoding="utf-8")))
    options.write.write_text(readme, encoding="utf-8")


if __name__ == "__main__":
    main()
