"""The command line of `python dev.py bench fidelity`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from comfyui_toma.toma_core.settings import Settings

from . import methods, regimes, tables

QUICK_PROMPTS, PROMPTS, FEW_PROMPTS = 2, 12, 4
FILES = ("json", "read", "write", "plots")


def command_line(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the rows that decide, two prompts, under five minutes")
    parser.add_argument("--regime", nargs="+", metavar="NAME", help="only these; beginnings will do")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="only these methods; beginnings will do")
    parser.add_argument("--prompts", type=int, choices=range(1, regimes.MOST_PROMPTS + 1), metavar="N")
    parser.add_argument("--minutes", type=_not_negative, default=float("inf"), help="draw no longer than that")
    parser.add_argument("--tune", action="store_true", help="the prompts that presets are chosen on, not the others")
    parser.add_argument("--try", dest="tries", action="append", metavar="ratio=0.5,...", help="only these settings")
    parser.add_argument("--no-inception", action="store_true", help="leave these features out: they take longest")
    parser.add_argument("--plan", action="store_true", help="say what is missing and about how long it takes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put the rows there, among those it has")
    parser.add_argument("--read", type=Path, metavar="FILE", help="the rows of such a file; draws nothing")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the tables between their markers there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="where plots and contact sheets go")
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
        _check_files(options, narrowed)
        _check_names(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _check_files(options: argparse.Namespace, narrowed: list[str]) -> None:
    if options.json and not options.json.parent.is_dir():
        raise ValueError(f"--json: there is no folder {options.json.parent}")
    if options.json and options.json.is_dir():
        raise ValueError(f"--json: {options.json} is a folder; name a file")
    if options.read and narrowed:
        raise ValueError(f"--read draws nothing: leave out {', '.join('--' + name for name in narrowed)}")
    if options.read and options.json:
        raise ValueError("--read and --json: there is nothing new to put there")
    if options.json and options.tries:
        raise ValueError("--json and --try: what is only tried is not kept among the rows")
    if options.write:
        if not options.write.is_file():
            raise ValueError(f"--write: there is no file {options.write}")
        if not tables.has_place(options.write.read_text(encoding="utf-8")):
            raise ValueError(f"--write: {options.write} has no {tables.BEGIN} ... {tables.END} to write between")
        if not (options.read or options.json):
            raise ValueError("--write: the tables are made of kept rows: name them by --read, or add to them by --json")


def _check_names(options: argparse.Namespace) -> None:
    for name in options.regime or ():
        if not any(regime.name.startswith(name) for regime in regimes.REGIMES):
            raise ValueError(f"--regime {name}: there are {', '.join(regimes.BY_NAME)}")
    for name in options.only or ():
        if not any(method.startswith(name) for method in methods.NAMES):
            raise ValueError(f"--only {name}: there are {', '.join(methods.NAMES)}")
    if options.tries and options.only:
        raise ValueError("--try and --only: one or the other")
    for text in options.tries or ():
        try:
            Settings(**parsed(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"--try {text}: {error}; write name=value,name=value") from None


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


def chosen_regimes(options: argparse.Namespace) -> list[regimes.Regime]:
    if options.regime:
        exact = [name for name in options.regime if name in regimes.BY_NAME]
        starts = tuple(name for name in options.regime if name not in regimes.BY_NAME)
        return [r for r in regimes.REGIMES if r.name in exact or (starts and r.name.startswith(starts))]
    return [r for r in regimes.REGIMES if r.decides or not options.quick]


def wants(options: argparse.Namespace, point: methods.Point) -> bool:
    """Whether a point is asked for; what others are measured against always is."""
    if point.method == methods.UNMERGED or (point.other_seed and not (options.quick or options.tries)):
        return True
    if point.method.startswith("try "):
        return bool(options.tries)
    if options.tries or (options.quick and not point.decides) or point.other_seed:
        return False
    return not options.only or point.method.startswith(tuple(options.only))


def share_of(prompts: int) -> int:
    """How many prompts points that don't decide are drawn for: a third, at least four where there are four."""
    return max(min(prompts, 4), prompts // 3)


def number_of_prompts(options: argparse.Namespace, regime: regimes.Regime) -> int:
    if options.prompts:
        return options.prompts
    return QUICK_PROMPTS if options.quick else PROMPTS if regime.tokens == 1024 and regime.speeds else FEW_PROMPTS
