"""The accounts of the speed benchmark, on samples whose answer is known, and the shape of its JSON."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fullsize
import readme_table
import roofline

NEEDED = {"model", "part", "size", "method", "ratio", "speedup", "ideal", "of_ideal", "of_shorter", "shares"}
OURS = {"select": 0.02, "weigh": 0.01, "merge": 0.1, "unmerge": 0.1, "copies": 0.05}


def flux_sample(double: float, single: float, ours: dict | None = None) -> list[dict]:
    blocks = {"double block": [double], "single block": [single]}
    seconds = 1.0 + double + single  # one second outside of the blocks
    mine = {kind: ours or dict.fromkeys(OURS, 0.0) for kind in blocks}
    return [{"seconds": seconds, "blocks": blocks, "ours": mine, "check": double, "memory": 0}]


@pytest.fixture
def rows(comfy):
    """10 s a double and 8 s a single block; 5 and 4 s merged, in which choosing takes 0.03 s; 4.9 s on a shorter
    sequence."""
    from speedlib import account, methods, models, plan

    compared = [methods.none(), methods.toma(0.5), methods.shorter(0.5), methods.hypertile(), methods.todo()]
    group = plan.Group("Flux 1+1 blocks", "flux", models.flux, "model", fullsize.FULL, compared, double=1, single=1)
    samples = {
        "none": [flux_sample(10, 8)] * 3,
        "toma 0.5": [flux_sample(5.03, 4.03, OURS), flux_sample(6, 5, OURS), flux_sample(4, 3, OURS)],
        "shorter 0.5": [flux_sample(4.9, 3.9)] * 3,
        "HyperTile": [{"error": "TypeError: no such argument"}],
        "todo": [flux_sample(10, 8)] * 3,
    }
    return account.rows([group], {group.name: samples})


def row(rows, method, part="step"):
    return next(r for r in rows if r["method"] == method and r["part"] == part)


def test_the_whole_flux_is_computed_with_5_and_5_blocks_unmerged(rows):
    full, merged = 1 + 19 * 10 + 38 * 8, 1 + 5 * 10 + 5 * 8 + 14 * 5 + 33 * 4 + 2 * 0.03
    assert row(rows, "toma")["seconds"] == pytest.approx(merged)
    assert row(rows, "toma")["speedup"] == pytest.approx(full / merged)
    assert row(rows, "toma")["ideal"] == pytest.approx(1.69, abs=0.01)
    assert "computed from 1 + 1 blocks" in row(rows, "toma")["basis"]


def test_of_shorter(rows):
    limit = 1 + 5 * 10 + 5 * 8 + 14 * 4.9 + 33 * 3.9
    assert row(rows, "toma")["of_shorter"] == pytest.approx(limit / row(rows, "toma")["seconds"])
    assert row(rows, "toma", "double block")["of_shorter"] == pytest.approx(4.9 / 5)


def test_shares_are_per_cent_of_the_unmerged_step(rows):
    shares = row(rows, "toma")["shares"]
    assert shares["merge"] == pytest.approx(100 * 47 * 0.1 / 495)
    assert shares["select"] == pytest.approx(100 * 2 * 0.02 / 495)


def test_a_failure_and_no_effect_are_listed(rows):
    assert row(rows, "HyperTile")["note"].startswith("fails: TypeError")
    assert row(rows, "todo")["note"].startswith("no effect")


def test_shape_of_the_json(rows):
    assert all(set(r) >= NEEDED for r in rows)
    json.dumps(rows)
    content = {"rows": rows, "about": {"cpu": "a CPU", "threads": 2}}
    assert "| **ToMA** | 0.5 |" in readme_table.text(content)
    assert readme_table.written("a\n<!-- speed -->\nold\n<!-- /speed -->\nb", "new").split("\n")[2] == "new"


@pytest.fixture
def group(comfy):
    from speedlib import methods, models, plan

    compared = [methods.none(), methods.toma(0.5), methods.todo()]
    return plan.Group("a group", "flux", models.flux, "model", fullsize.FULL, compared, double=1, single=1)


def in_session(name: str, double: float) -> list[dict]:
    return [{**evaluation, "session": name} for evaluation in flux_sample(double, double)]


def test_a_speed_up_is_of_what_was_measured_together(group):
    """The machine was twice as fast on the second day."""
    from speedlib import account

    samples = {
        "none": [in_session("one", 10), in_session("two", 5), in_session("two", 5)],
        "toma 0.5": [in_session("one", 6)],
        "todo": [in_session("two", 4), in_session("two", 4)],
    }
    rows = account.rows([group], {group.name: samples})
    assert row(rows, "toma", "double block")["speedup"] == pytest.approx(10 / 6)
    assert row(rows, "todo", "double block")["speedup"] == pytest.approx(5 / 4)


def test_an_interrupted_run_is_taken_up(group, tmp_path, monkeypatch):
    """What is there is not measured again, but for the run without any node, beside which the rest is measured."""
    from speedlib import measure

    file = tmp_path / "speed.json"
    book = measure.Book(file, "wall")
    for method, count in (("none", 3), ("toma 0.5", 3), ("todo", 1)):
        book.samples(group.name, method).extend([flux_sample(1, 1)] * count)
    book.write()
    book, taken = measure.Book(file, "wall"), []
    measuring = measure.Measuring(book)
    measuring.built[group.build] = None
    monkeypatch.setattr(measuring, "_forget", lambda: None)
    monkeypatch.setattr(measuring, "_sample", lambda g, method, m: taken.append(method.key) or flux_sample(1, 1))
    measuring.run([group], [], book.write)
    assert taken == ["none", "todo", "none", "todo"]


def test_what_was_measured_otherwise_is_not_mixed(group, tmp_path):
    from speedlib import measure

    file = tmp_path / "speed.json"
    book = measure.Book(file, "cpu")
    book.samples(group.name, "none").append(flux_sample(1, 1))
    book.samples(group.name, "todo").append({"error": "RuntimeError: not enough memory"})
    book.samples(group.name, "toma 0.5").append({"error": "TypeError: no such argument"})
    book.write()
    with pytest.raises(SystemExit, match="clock cpu, now it is wall"):
        measure.Book(file, "wall")
    with pytest.raises(SystemExit, match="quick"):
        measure.Book(file, "cpu", quick=True)
    again = measure.Book(file, "cpu")
    assert not again.samples(group.name, "todo"), "tried again when there may be memory"
    assert again.samples(group.name, "toma 0.5")
    file.write_text("{}")
    with pytest.raises(SystemExit, match="no file of"):
        measure.Book(file, "cpu")


def test_the_readme_says_what_the_rows_say():
    root = Path(__file__).parents[2]
    speed, fidelity = (
        json.loads((root / f"tests/bench/results/{name}.json").read_text(encoding="utf-8"))
        for name in ("speed", "fidelity")
    )
    readme = (root / "README.md").read_text(encoding="utf-8")
    made = readme_table.presets_filled(readme_table.written(readme, readme_table.text(speed)), speed, fidelity)
    assert made == readme, (
        "run: python dev.py bench readme_table tests/bench/results/speed.json "
        "--fidelity tests/bench/results/fidelity.json --write README.md"
    )


def test_roofline_takes_the_slower_of_arithmetic_and_traffic(comfy):
    from speedlib.counting import Work

    card, work = roofline.CARDS[1], Work()
    work.add(1e12, 1)
    arithmetic = 1e12 / (card.flops * roofline.ARITHMETIC)
    assert roofline.seconds(work, card) == pytest.approx(arithmetic)
    work.add(1, 10**9)
    traffic = 1e9 / (card.bandwidth * roofline.TRAFFIC)
    assert roofline.seconds(work, card) == pytest.approx(arithmetic + traffic)


def test_counting_agrees_with_the_formulas(comfy):
    """One merged Flux block of each kind on meta tensors."""
    import torch
    from comfyui_toma.toma_core.settings import Settings
    from speedlib import counting, models

    model = models.flux(1, 1, dtype=torch.bfloat16, device="meta")
    none = counting.evaluations(model, "flux", (512, 512))["leave"]
    settings = Settings(ratio=0.5, carry_detail=False, skip_first_blocks=0)
    ours = counting.evaluations(model, "flux", (512, 512), settings, ("reselect", "reuse"))
    tokens = fullsize.flux_tokens((512, 512))
    saved = sum(
        fullsize.flux_block(kind, tokens).total() - fullsize.flux_block(kind, tokens, kept=tokens // 2).total()
        for kind in ("double", "single")
    )
    merging = 4 * fullsize.merge_products(tokens, tokens // 2, fullsize.FLUX_HIDDEN, 8)
    assert none.flops - ours["reuse"].flops == pytest.approx(saved - merging)
    assert ours["reuse"].launches - none.launches < 40
    assert ours["reselect"].launches > ours["reuse"].launches
