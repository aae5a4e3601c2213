"""The fidelity benchmark's own arithmetic: equal speed-ups, speckle, paired errors, the README's table."""

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
        from bench.fidelitylib import distances, points, report

        yield {"distances": distances, "points": points, "report": report}
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
    assert {p.method for p in against} == {"paper", *points.RIVALS}
    for point in against:
        slack = 0.05 if point.method == "pooling" else 0.002  # pooling can only end a step earlier or later
        assert points.speedup(family, point.settings) == pytest.approx(presets[point.against], rel=slack)
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


def row(method: str, lpips: list[float], psnr: list[float], against: str = "", speedup: float = 1.3) -> dict:
    each = {"lpips": lpips, "psnr": psnr}
    return {
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


def test_rows_are_compared_over_the_prompts_they_share(lib):
    many, few = row("quality", [0.1, 0.3, 0.8], [30.0, 31.0, 32.0]), row("paper", [0.2, 0.4], [29.0, 30.0])
    left, right = lib["report"].over_same_prompts(many, few)
    assert (left["prompts"], right["prompts"]) == (2, 2)
    assert (left["lpips"], right["lpips"]) == (pytest.approx(0.2), pytest.approx(0.3))


def test_readme_table_goes_between_its_markers(lib, tmp_path):
    report, path = lib["report"], tmp_path / "README.md"
    path.write_text("before\n<!-- fidelity -->\nold\n<!-- /fidelity -->\nafter\n", encoding="utf-8")
    report.write_table([row("quality", [0.0123], [30.04])], path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- fidelity -->\n| | Flux, 1024 tokens |") and text.endswith("after\n")
    assert "| `quality` | 1.30x: 30.0 dB, .012 |" in text and "old" not in text
