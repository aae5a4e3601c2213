"""The command line of `python dev.py bench fidelity`, and which points it asks for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from comfyui_toma.toma_core.settings import Settings

from . import report
from .findings import MODELS
from .points import Point, points

FAMILIES = tuple(MODELS)
FILES = ("json", "read", "write")
SPELT = {"first": "from", "tries": "try"}  # options that have the name of a keyword
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
        "--prompts", type=int, choices=range(1, MOST_PROMPTS + 1), metavar="N", help="the first N prompts"
    )
    parser.add_argument(
        "--from", dest="first", type=int, default=0, choices=range(0, MOST_PROMPTS, BATCH), metavar="N",
        help=f"of these leave out the first N, a multiple of {BATCH}; --read puts such parts together",
    )  # fmt: skip
    parser.add_argument("--minutes", type=_not_negative, default=float("inf"), help="draw no longer than that")
    parser.add_argument("--cfg", type=_not_negative, help="guidance; Flux has 1, the UNet 2.5")
    parser.add_argument("--tune", action="store_true", help="the prompts that settings are tuned on, not the others")
    parser.add_argument("--weights", type=Path, help="another checkpoint of the one --model")
    parser.add_argument("--try", dest="tries", action="append", metavar="ratio=0.5,...", help="only these settings")
    parser.add_argument(
        "--only",
        nargs="+",
        help="these methods, or those whose name starts so; 'paper fast' is paper as fast as fast",
    )
    parser.add_argument("--no-inception", action="store_true")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="rows of earlier --json files; draws nothing"
    )
    parser.add_argument("--write", type=Path, metavar="README.md", help="put the table between its markers there")
    return parser


def _not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: a number from 0 up")
    return value


def checked(about: str, argv: list[str] | None) -> argparse.Namespace:
    """The options; what can't end well ends here, before anything is drawn."""
    parser = command_line(about)
    options = parser.parse_args(argv)
    usual = vars(parser.parse_args([]))
    narrowed = [name for name, value in vars(options).items() if name not in FILES and value != usual[name]]
    try:
        _check_files(options, [f"--{SPELT.get(name, name.replace('_', '-'))}" for name in narrowed])
        _check_drawing(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _check_files(options: argparse.Namespace, narrowed: list[str]) -> None:
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"--json: there is no folder {options.json.parent}")
    if options.json and options.json.is_dir():
        raise ValueError(f"--json: {options.json} is a folder; name a file")
    if options.read and narrowed:
        raise ValueError(f"--read draws nothing: leave out {', '.join(narrowed)}")
    if options.write:
        if not options.write.is_file():
            raise ValueError(f"--write: there is no file {options.write}")
        if narrowed:
            raise ValueError(f"--write: the table wants all that can be drawn: leave out {', '.join(narrowed)}")
        if options.json and options.json.resolve() == options.write.resolve():
            raise ValueError("--json and --write: name two files")
        if not report.has_place(options.write.read_text(encoding="utf-8")):
            raise ValueError(f"--write: {options.write} has no {report.BEGIN} ... {report.END} to write between")


def _check_drawing(options: argparse.Namespace) -> None:
    families = options.model or FAMILIES
    if options.weights and (len(families) != 1 or not options.weights.is_file()):
        raise ValueError("--weights: an existing file, and with it one --model")
    if options.first >= number_of_prompts(options):
        raise ValueError(f"--from {options.first}: there are only {number_of_prompts(options)} prompts")
    if options.tries and options.only:
        raise ValueError("--try and --only: one or the other")
    for text in options.tries or []:
        try:
            Settings(**parsed(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"--try {text}: {error}; write name=value,name=value") from None
    for family in families:
        there = points(family, options.quick)
        for name in options.only or ():
            if not name or not called(there, [name]):
                methods = ", ".join(f"'{method}'" for method in dict.fromkeys(p.method for p in there))
                raise ValueError(f"--only '{name}': no such method. There are: {methods}")


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
