"""The fidelity benchmark's own arithmetic: equal speed-ups, speckle, paired errors, the README's table."""

import json
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def lib(comfy):
    import comfyui_toma  # noqa: F401

    sys.path[:0] = added = [str(TESTS / "training")]
    sys.path.append(str(TESTS))  # last: tests/comfy must not hide ComfyUI's comfy
    try:
        from bench.fidelitylib import distances, options, points, report

        yield {"distances": distances, "options": options, "points": points, "report": report}
    finally:
        for entry in (*added, str(TESTS)):
            sys.path.remove(entry)


@pytest.mark.parametrize("family", ["flux", "unet"])
def test_rivals_have_the_speed_of_the_preset_they_stand_against(lib, family):
    points = lib["points"]
    found = points.points(family)
    curve = (*points.OURS, *points.ENDS)
    presets = {p.method: points.speedup(family, p.settings) for p in found if p.method in curve}
    assert set(presets) == set(curve)
    assert [presets[name] for name in points.ENDS] == pytest.approx([1.15, 2.0], abs=0.01)
    against = [p for p in found if p.against in presets]
    carried = {"random, carried", "regular, carried"}
    assert {p.method for p in against} == {"paper", *points.REUSE.values(), *points.RIVALS, *carried}
    assert all(bool(p.choose) != (p.method in ("paper", *points.REUSE.values())) for p in against)
    for point in against:
        # these can only end a step earlier or later
        slack = 0.08 if point.reuse else {"pooling": 0.05}.get(point.method, 0.002)
        speedup = points.speedup(family, point.settings, reuse=bool(point.reuse))
        assert speedup == pytest.approx(presets[point.against], rel=slack), point
    keys = [point.key for point in found]
    assert len(set(keys)) == len(keys), "each is kept under a name of its own"


def test_speckle_is_what_tokens_differ_from_their_neighbours_on_the_background(lib):
    distances = lib["distances"]
    colour = torch.tensor([[0.2, 0.4, 0.6]])
    plain = colour[:, None, None].expand(1, 64, 64, 3).clone()
    plain[:, 16:32, 16:32] = 1.0  # the subject
    flat = distances.flat_areas(plain, colour)
    assert not flat[0, 3:9, 3:9].any() and flat[0, 9:].all() and flat[0, :3].all()
    assert distances.speckle(plain, flat).item() == pytest.approx(0, abs=1e-12)
    tokens = 0.01 * torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    noise = tokens.repeat_interleave(4, 2).repeat_interleave(4, 3).movedim(1, -1)
    once, twice = (distances.speckle(plain + k * noise, flat).item() for k in (1, 2))
    assert twice == pytest.approx(4 * once, rel=1e-3) and once == pytest.approx(1e-4 * 8 / 9, rel=0.2)
    smooth = torch.linspace(0, 0.05, 64)[None, :, None, None]
    assert distances.speckle(plain + smooth, flat).item() < 0.01 * once


@pytest.mark.parametrize(
    "names, methods",
    [
        (["balanced", "fast"], {"balanced", "fast"}),
        (["paper"], {"paper"}),
        (["balanced on"], {"balanced on easycache", "balanced on 60 % of the steps"}),
        (["nothing"], set()),
    ],
)
def test_only_takes_a_method_by_its_name_or_all_that_start_so(lib, names, methods):
    found = lib["options"].called(lib["points"].points("flux"), names)
    assert {point.method for point in found} == methods


def test_only_takes_one_of_the_speeds_of_a_method(lib):
    found = lib["options"].called(lib["points"].points("flux"), ["paper fast", "paper 1.25x"])
    assert [(point.method, point.against) for point in found] == [("paper", "fast"), ("paper", "1.25x")]


def row(
    method: str,
    lpips: list[float],
    psnr: list[float],
    against: str = "",
    speedup: float = 1.3,
    first: int = 0,
) -> dict:
    each = {"lpips": lpips, "psnr": psnr, "speckle": [3.0] * len(psnr), "speckle_unmerged": [2.0] * len(psnr)}
    return {
        "label": method, "settings": {}, "cfg": 1.0, "measured": speedup, "measured_spread": [speedup, speedup],
        "first": first,
        "model": "flux", "tokens": 1024, "method": method, "against": against, "of_steps": 20, "steps": 20,
        "prompts": len(lpips), "speedup": speedup, "lpips": sum(lpips) / len(lpips),
        "psnr": sum(psnr) / len(psnr), "speckle": 3.0, "speckle_unmerged": 2.0, "each": each,
    }  # fmt: skip


def test_findings_are_paired_and_say_what_was_missed(lib):
    report = lib["report"]
    ours = row("quality", [0.1, 0.3, 0.5], [30.0, 31.0, 32.0])
    paper = row("paper", [0.2, 0.4, 0.6], [29.0, 30.0, 31.0], "quality")
    assert report.paired(ours, paper, "lpips") == (pytest.approx(-0.1), pytest.approx(0, abs=1e-9))
    text = "\n".join(report.findings([ours, paper]))
    assert "met    quality closer than paper at 1.30x: LPIPS -0.1000 ± 0.0000, PSNR +1.0 ± 0.0 dB" in text
    assert "MISSED quality at 1.30x has 0.75 of paper's LPIPS" in text


def test_parts_of_a_row_are_put_together_and_the_later_one_counts_where_they_overlap(lib):
    joined = lib["report"].joined
    begin = row("quality", [0.1, 0.3, 0.9], [30.0, 31.0, 99.0], speedup=1.0)
    other = row("paper", [0.2] * 4, [20.0] * 4, "quality")
    more = row("quality", [0.5, 0.7], [32.0, 33.0], speedup=2.0, first=2)
    del begin["first"]  # as in files from before --from
    quality, paper = joined([more, other, begin])
    assert quality["each"]["lpips"] == [0.1, 0.3, 0.5, 0.7] and quality["each"]["psnr"] == [
        30.0,
        31.0,
        32.0,
        33.0,
    ]
    assert (quality["prompts"], quality["lpips"], quality["psnr"]) == (4, pytest.approx(0.4), 31.5)
    assert quality["speedup"] == pytest.approx(4 / 3) and quality["measured_spread"] == [1.0, 2.0]
    assert paper == other


def test_parts_with_a_gap_or_of_other_prompts_are_refused(lib):
    joined = lib["report"].joined
    begin, end = row("quality", [0.1], [30.0]), row("quality", [0.5], [32.0], first=2)
    with pytest.raises(SystemExit, match="prompts 0 to 1 and from 2 on are no parts of one row"):
        joined([begin, end])
    with pytest.raises(SystemExit, match="no parts of one row"):
        joined([begin, begin])
    with pytest.raises(SystemExit, match=r"begin at different prompts \(\[0, 2\]\)"):
        joined([row("paper", [0.1], [30.0], "quality"), end])


def test_stacking_within_its_error_is_called_even(lib):
    report = lib["report"]
    balanced, alone = row("balanced", [0.1, 0.1], [30.0, 30.0]), row("easycache", [0.2, 0.2], [30.0, 30.0])

    def said(lpips: list[float]) -> str:
        both = row("balanced on easycache", lpips, [30.0, 30.0], speedup=1.7)
        return next(line for line in report.findings([balanced, alone, both]) if "on top of" in line).split()[
            0
        ]

    assert [said(lpips) for lpips in ([0.2, 0.21], [0.4, 0.41], [0.2, 0.42])] == ["met", "MISSED", "even"]


def test_rows_are_compared_over_the_prompts_they_share(lib):
    many, few = row("quality", [0.1, 0.3, 0.8], [30.0, 31.0, 32.0]), row("paper", [0.2, 0.4], [29.0, 30.0])
    left, right = lib["report"].over_same_prompts(many, few)
    assert (left["prompts"], right["prompts"]) == (2, 2)
    assert (left["lpips"], right["lpips"]) == (pytest.approx(0.2), pytest.approx(0.3))


def test_readme_table_goes_between_its_markers(lib, tmp_path):
    report, path = lib["report"], tmp_path / "README.md"
    path.write_text("before\n<!-- fidelity -->\nold\n<!-- /fidelity -->\nafter\n", encoding="utf-8")
    report.write_table(
        [row("quality", [0.0123] * 2, [30.04] * 2), row("paper", [0.2], [20.0], "quality")], path
    )
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- fidelity -->\n| | Flux, 1024 tokens, 2 prompts |")
    assert text.endswith("after\n") and "old" not in text
    assert "| `quality` | 1.30x: 30.0 dB, .012 |" in text
    assert "| `paper`, as fast as `quality` | 1.30x: 20.0 dB, .200 (1) |" in text


def test_the_readme_says_what_the_rows_say(lib, tmp_path):
    root = Path(__file__).parents[2]
    rows = json.loads((root / "tests/bench/results/fidelity.json").read_text(encoding="utf-8"))["rows"]
    readme = tmp_path / "README.md"
    readme.write_text((root / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    lib["report"].write_table(rows, readme)
    assert readme.read_text(encoding="utf-8") == (root / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["random", "regular"])
def test_rivals_keep_as_many_tokens_as_ours_and_each_its_own(lib, name):
    """What is kept goes into the row that it names, and comes back from it."""
    from comfyui_toma.toma_core.tiles import Tiles

    torch.manual_seed(0)
    tiles, keep = Tiles.of(16, 16, 4), 100
    x = torch.randn(2, 256, 8)
    merge = lib["points"].RIVALS[name](tiles.split(x), keep, tiles, 1000.0)
    assert merge.kept.shape == (2, keep)
    assert all(len(set(kept.tolist())) == keep for kept in merge.kept)
    rows = torch.randn(2, keep, 3)
    back = merge.unmerge(rows)
    of_kept = back.gather(1, merge.kept[..., None].expand(-1, -1, 3))
    assert torch.allclose(of_kept, rows, atol=1e-4)


def test_keys_and_values_save_their_products(lib):
    from bench import fullsize

    full = fullsize.parts("unet")
    products = sum(flops for part, flops in full.items() if part.endswith("self-attention products"))
    linear = sum(flops for part, flops in full.items() if part.endswith("self-attention linear"))
    assert fullsize.saved_by_keys_and_values("unet", 1.0) == pytest.approx(products + linear / 2)
    flux = sum(flops for part, flops in fullsize.parts("flux").items() if part.endswith("attention products"))
    assert fullsize.saved_by_keys_and_values("flux", 0.5) == pytest.approx(flux * 0.5 * 4096 / 4608)
