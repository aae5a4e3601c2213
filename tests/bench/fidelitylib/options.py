"""The command line of `python dev.py bench fidelity`, and which points it asks for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from comfyui_toma.toma_core.settings import Settings

from .points import Point, points

FAMILIES = ("flux", "unet")
BATCH = 4
MOST_PROMPTS = 32  # a subject each: half of what the models know


def command_line(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 prompts, 1024 tokens, fewer methods")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", choices=FAMILIES, action="append")
    parser.add_argument(
        "--pixels", type=int, action="append", choices=(128, 256), help="128 is 1024 tokens, 256 is 4096"
    )
    parser.add_argument(
        "--prompts", type=int, choices=range(1, MOST_PROMPTS + 1), metavar=f"1..{MOST_PROMPTS}"
    )
    parser.add_argument(
        "--from", dest="first", type=int, default=0, choices=range(0, MOST_PROMPTS, BATCH), metavar="N",
        help=f"leave out the first N prompts, a multiple of {BATCH}; --read puts such parts together",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=float("inf"), help="draw no longer than that")
    parser.add_argument("--cfg", type=float, help="guidance; Flux has 1, the UNet 2.5")
    parser.add_argument(
        "--tune", action="store_true", help="the prompts that settings are tuned on, not the others"
    )
    parser.add_argument("--weights", type=Path, help="another checkpoint of the one --model")
    parser.add_argument(
        "--try", dest="tries", action="append", metavar="ratio=0.5,...", help="only these settings"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        help="these methods, or those whose name starts so; 'paper fast' is paper as fast as fast",
    )
    parser.add_argument("--no-inception", action="store_true")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="rows of earlier --json files; draws nothing"
    )
    parser.add_argument(
        "--write", type=Path, metavar="README.md", help="put the table between its markers there"
    )
    return parser


def checked(about: str, argv: list[str] | None) -> argparse.Namespace:
    """The options; what can't end well ends here, before anything is drawn."""
    parser = command_line(about)
    options = parser.parse_args(argv)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    if options.json and options.json.is_dir():
        parser.error(f"--json: {options.json} is a folder; name a file")
    if options.write and not options.write.is_file():
        parser.error(f"--write: there is no file {options.write}")
    if options.weights and (len(options.model or []) != 1 or not options.weights.is_file()):
        parser.error("--weights: an existing file, and with it one --model")
    if options.write and (options.tries or options.only or options.quick or options.tune or options.first):
        parser.error(
            "--write: the table wants all methods and prompts, not --try, --only, --quick, --tune or --from"
        )
    if options.first >= number_of_prompts(options):
        parser.error(f"--from {options.first}: there are only {number_of_prompts(options)} prompts")
    for text in options.tries or []:
        try:
            Settings(**parsed(text))
        except (TypeError, ValueError) as error:
            parser.error(f"--try {text}: {error}")
    for family in options.model or FAMILIES:
        if options.only is not None and not chosen_points(family, options):
            names = dict.fromkeys(point.method for point in points(family))
            parser.error(f"--only {' '.join(options.only)}: no such method. There are: {', '.join(names)}")
    return options


def number_of_prompts(options: argparse.Namespace) -> int:
    return options.prompts or (BATCH if options.quick else MOST_PROMPTS)


def chosen_points(family: str, options: argparse.Namespace) -> list[Point]:
    if options.tries:
        return [Point("try " + text, Settings(**parsed(text))) for text in options.tries]
    found = points(family, options.quick)
    return found if options.only is None else called(found, options.only)


def called(found: list[Point], names: list[str]) -> list[Point]:
    """The points of these methods, `balanced` without `balanced on easycache`; a name that is no method's stands for
    all that start so."""
    methods = {point.method for point in found}
    starts = tuple(name for name in names if name not in methods)
    return [p for p in found if p.method in names or f"{p.method} {p.against}".startswith(starts)]


def parsed(text: str) -> dict:
    """Settings from "ratio=0.5,merge=each layer": values as JSON where they are, else as text."""
    found = {}
    for pair in text.split(","):
        name, value = pair.split("=")
        try:
            found[name] = json.loads(value.lower())
        except json.JSONDecodeError:
            found[name] = value
    return found
