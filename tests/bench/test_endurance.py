"""The bench of endurance: what it measures in a real server, and that it finds what grows."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

MB = 1 << 20


@pytest.fixture(scope="module")
def endurance():
    import endurance

    return endurance


def held(**changes) -> dict:
    return {"entries": {"tiles._tiles": 3}, "alive": {}, "process": {"graphs": 2, "threads": 9}, **changes}


def measured(endurance, **changes):
    kept = endurance.Kept([700 * MB] * 20, [0.1] * 20, held=[(10, held()), (20, held())])
    for name, value in changes.items():
        setattr(kept, name, value)
    return endurance.judge(endurance.MIXED, kept)


def test_what_stays_flat_is_right(endurance):
    text, wrong = measured(endurance)
    assert not wrong
    assert "memory: 700 MB after run 10, 700 MB at the end (+0.0%)" in text and "graphs: 2, then 2" in text


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"memory": [700 * MB] * 10 + [720 * MB] * 10}, "memory changed by +2.9%"),
        ({"held": [(10, held()), (20, held(entries={"tiles._tiles": 4}))]}, "tiles._tiles: 3, then 4"),
        ({"held": [(10, held()), (20, held(entries={"a._new": 1}))]}, "a._new: 0, then 1"),
        ({"held": [(10, held()), (20, held(process={"graphs": 5, "threads": 9}))]}, "graphs: 2, then 5"),
        ({"held": [(10, held(alive={"Handle": 1})), (20, held())]}, "alive after run 10: {'Handle': 1}"),
    ],
)
def test_what_grows_is_found(endurance, changes, said):
    (wrong,) = measured(endurance, **changes)[1]
    assert said in wrong


def test_node_ids_of_its_own(endurance):
    first, second = (endurance.renamed(endurance.TINY.prompt(n), n) for n in (4, 11))
    assert set(first) & set(second) == {"5"} and "4-6" in first
    links = [given[0] for node in first.values() for given in node["inputs"].values() if isinstance(given, list)]
    assert set(links) <= set(first) and len(links) == 9


def test_tiny_runs_in_a_server(endurance, tmp_path, capsys):
    """Too few to call anything flat, but merged, forecast and compiled, counted, and nothing left alive."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    runs = 2 * len(endurance.TINY.combinations)
    endurance.main([str(runs), "--tiny", "--write", str(page)])
    said = capsys.readouterr().out
    assert f"- {runs} runs " in said and "forecast" in said and "merged" in said
    assert "at 2 looks: 0" in said and " 0 merged" not in said
    wrong = [line for line in said.splitlines() if line.startswith("WRONG") and "memory" not in line]
    assert all("unsampled._before" in line for line in wrong), wrong
    assert (page.read_text() == "# Title\n") == ("WRONG" in said)
