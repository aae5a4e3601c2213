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
    """10 s a block; 5 s merged, in which choosing takes 0.03 s; 4.9 s on a shorter sequence."""
    from speedlib import account, methods, models, plan

    compared = [methods.none(), methods.toma(0.5), methods.shorter(0.5), methods.hypertile(), methods.todo()]
    group = plan.Group(
        "Flux 1+1 blocks", "flux", models.flux, "model", fullsize.FULL, compared, double=1, single=1
    )
    samples = {
        "none": [flux_sample(10, 10)] * 3,
        "toma 0.5": [flux_sample(5.03, 5.03, OURS), flux_sample(6, 6, OURS), flux_sample(4, 4, OURS)],
        "shorter 0.5": [flux_sample(4.9, 4.9)] * 3,
        "HyperTile": [{"error": "TypeError: no such argument"}],
        "todo": [flux_sample(10, 10)] * 3,
    }
    return account.rows([group], {group.name: samples})


def row(rows, method, part="step"):
    return next(r for r in rows if r["method"] == method and r["part"] == part)


def test_the_whole_flux_is_computed_with_5_and_5_blocks_unmerged(rows):
    full, merged = 1 + 57 * 10, 1 + 10 * 10 + 47 * 5 + 2 * 0.03
    assert row(rows, "toma")["seconds"] == pytest.approx(merged)
    assert row(rows, "toma")["speedup"] == pytest.approx(full / merged)
    assert row(rows, "toma")["ideal"] == pytest.approx(1.69, abs=0.01)
    assert "computed from 1 + 1 blocks" in row(rows, "toma")["basis"]


def test_of_shorter(rows):
    limit = 1 + 10 * 10 + 47 * 4.9
    assert row(rows, "toma")["of_shorter"] == pytest.approx(limit / row(rows, "toma")["seconds"])
    assert row(rows, "toma", "double block")["of_shorter"] == pytest.approx(4.9 / 5)


def test_shares_are_per_cent_of_the_unmerged_step(rows):
    shares = row(rows, "toma")["shares"]
    assert shares["merge"] == pytest.approx(100 * 47 * 0.1 / 571)
    assert shares["select"] == pytest.approx(100 * 2 * 0.02 / 571)


def test_a_failure_and_no_effect_are_listed(rows):
    assert row(rows, "HyperTile")["note"].startswith("fails: TypeError")
    assert row(rows, "todo")["note"].startswith("no effect")


def test_shape_of_the_json(rows):
    assert all(set(r) >= NEEDED for r in rows)
    json.dumps(rows)
    content = {"rows": rows, "about": {"cpu": "a CPU", "threads": 2}}
    assert "| **ToMA** | 0.5 |" in readme_table.text(content)
    assert readme_table.written("a\n<!-- speed -->\nold\n<!-- /speed -->\nb", "new").split("\n")[2] == "new"


def test_an_interrupted_run_is_taken_up(comfy, tmp_path):
    from speedlib import measure

    book = measure.Book(tmp_path / "speed.json", "wall")
    book.samples("group", "none").append(flux_sample(1, 1))
    book.write()
    assert len(measure.Book(tmp_path / "speed.json", "wall").samples("group", "none")) == 1


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
        fullsize.flux_block(kind, tokens).total()
        - fullsize.flux_block(kind, tokens, kept=tokens // 2).total()
        for kind in ("double", "single")
    )
    merging = 4 * fullsize.merge_products(tokens, tokens // 2, fullsize.FLUX_HIDDEN, 8)
    assert none.flops - ours["reuse"].flops == pytest.approx(saved - merging)
    assert ours["reuse"].launches - none.launches < 40
    assert ours["reselect"].launches > ours["reuse"].launches
