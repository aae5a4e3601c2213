"""What came of each pack, counted, as JSON rows and as a marked section of a Markdown file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

GOOD, NOTHING, OWN = "composes", "no effect of its own here", "is run in full"
ALONE, BAD, UNMADE = "fails without us too", "fails only with us", "not tried"
STATUSES = (GOOD, NOTHING, OWN, ALONE, BAD, UNMADE)
SHORT = {GOOD: "compose", NOTHING: "no effect here", OWN: "run in full", ALONE: "fail without ToMA",
         BAD: "fail only with ToMA", UNMADE: "not tried"}  # fmt: skip
BEGIN, END = "<!-- packs -->", "<!-- /packs -->"
# Of a node's outcomes on both models the one that says most about it.
WEIGHT = (BAD, OWN, GOOD, NOTHING, ALONE, UNMADE)


def outcome_of(node: dict) -> str:
    """A node's outcome over the models it was tried on."""
    statuses = {result["status"] for result in node["models"].values()}
    return next((status for status in WEIGHT if status in statuses), UNMADE)


def count(rows: Sequence[dict]) -> Counter:
    return Counter(outcome_of(node) for row in rows for node in row["nodes"])


def totals(rows: Sequence[dict]) -> str:
    counted = count(rows)
    loaded = [row for row in rows if row["loaded"] == "yes"]
    with_nodes = sum(bool(row["nodes"]) for row in loaded)
    return (
        f"{len(loaded)} of {len(rows)} packs loaded, {with_nodes} of them with nodes that take and give a MODEL; "
        f"of {sum(counted.values())} such nodes "
        + ", ".join(f"{counted[status]} {SHORT[status]}" for status in STATUSES)
    )


def table(rows: Sequence[dict]) -> str:
    """A row for each pack, then what is worth telling of single nodes."""
    header = ["Pack", "Commit", "Date", "Nodes", *(SHORT[status] for status in STATUSES), "Remark"]
    lines = [f"| {' | '.join(header)} |", "|---|---|---|" + "--:|" * (1 + len(STATUSES)) + "---|"]
    for row in rows:
        counted = count([row])
        remark = "" if row["loaded"] == "yes" else f"not loaded: {row['loaded']}"
        remark = "; ".join(filter(None, (remark, row.get("plain", ""), *changes(row))))
        cells = [row["source"] or row["pack"], row["commit"][:7], row["date"], str(len(row["nodes"]))]
        cells += [str(counted[status] or "") for status in STATUSES]
        lines.append(f"| {' | '.join(cells)} | {in_a_cell(remark)} |")
    told = [(BAD, "Fail only with ToMA"), (OWN, "Run in full")]
    for status, title in told:
        lines += single_nodes(rows, status, title)
    return "\n".join(lines)


def changes(row: dict) -> list[str]:
    """Which nodes change what a plain run gives afterwards, without ToMA."""
    found: dict[str, list[str]] = {}
    for node in row["nodes"]:
        for what in {r["changes"] for r in node["models"].values() if r.get("changes")}:
            found.setdefault(what, []).append(node["node"])
    return [f"{', '.join(nodes)} {what}" for what, nodes in found.items()]


def single_nodes(rows: Sequence[dict], status: str, title: str) -> list[str]:
    """A line for each thing that runs with nodes of a pack say."""
    said: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        for node in row["nodes"]:
            for model, result in node["models"].items():
                if result["status"] == status:
                    nodes = said.setdefault((row["pack"], in_a_cell(result["note"])), {})
                    nodes.setdefault(node["node"], []).append(model)
    lines = []
    for (pack, note), nodes in said.items():
        named = ", ".join(f"{node} ({' and '.join(models)})" for node, models in nodes.items())
        lines.append(f"| {pack} | {named} | {note.removeprefix('not merged: ')} |")
    head = ["", f"{title}:", "", "| Pack | Nodes | What the run says |", "|---|---|---|"]
    return head + lines if lines else []


def in_a_cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ").replace("<", "&lt;")


def section(rows: Sequence[dict], about: str) -> str:
    return f"{BEGIN}\n{about}\n\n{totals(rows)}.\n\n{table(rows)}\n{END}"


def put_section(text: str, new: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with its marked section replaced, or with the section at its end."""
    if begin in text and end in text:
        before, _, rest = text.partition(begin)
        return before + new + rest.partition(end)[2]
    return f"{text.rstrip()}\n\n{new}\n" if text.strip() else f"{new}\n"
