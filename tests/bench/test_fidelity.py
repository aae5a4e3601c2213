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
        from bench.fidelitylib import distances, findings, options, parts, points, report

        modules = distances, findings, options, parts, points, report
        yield {module.__name__.rpartition(".")[2]: module for module in modules}
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
    findings = lib["findings"]
    ours = row("quality", [0.1, 0.3, 0.5], [30.0, 31.0, 32.0])
    paper = row("paper", [0.2, 0.4, 0.6], [29.0, 30.0, 31.0], "quality")
    assert findings.paired(ours, paper, "lpips") == pytest.approx([-0.1] * 3)
    text = "\n".join(findings.findings([ours, paper]))
    assert "met    quality closer than paper at 1.30x: LPIPS -0.1000 ± 0.0000, PSNR +1.0 ± 0.0 dB\n" in text
    assert "MISSED quality at 1.30x has 0.750 of paper's LPIPS" in text


def test_findings_say_how_many_prompts_they_are_of_whichever_side_has_fewer(lib):
    ours = row("quality", [0.1, 0.1], [30.0, 31.0])
    paper = row("paper", [0.2, 0.21, 0.9], [29.0, 29.9, 10.0], "quality")
    heading, *lines = lib["findings"].findings([ours, paper])
    assert heading == "Flux, 1024 tokens, 3 prompts" and len(lines) == 2
    assert all(line.endswith(" (2 prompts)") for line in lines)
    assert "has 0.488 of paper's LPIPS" in lines[1], "over the prompts that both have"


def test_few_prompts_have_to_differ_by_more(lib):
    """Two standard errors are enough with 32 prompts, not with 4: there it takes 3.2."""
    beyond_chance = lib["findings"].beyond_chance
    assert not beyond_chance([1.0]) and not beyond_chance([0.0, 3.0, 3.0, 3.0][:2])
    assert not beyond_chance([0.2, 0.4, 1.6, 1.8])  # 1.0 ± 0.41
    assert beyond_chance([0.2, 0.4, 1.6, 1.8] * 8)  # 1.0 ± 0.13
    assert beyond_chance([-0.6, -0.8, -1.2, -1.4])  # -1.0 ± 0.18


def test_parts_of_a_row_are_put_together_and_the_later_one_counts_where_they_overlap(lib):
    joined = lib["parts"].joined
    begin = row("quality", [0.1, 0.3, 0.9], [30.0, 31.0, 99.0], speedup=1.0)
    other = row("paper", [0.2] * 4, [20.0] * 4, "quality")
    more = row("quality", [0.5, 0.7], [32.0, 33.0], speedup=2.0, first=2)
    del begin["first"]  # as in files from before --from
    quality, paper = joined([more, other, begin])
    assert quality["each"]["lpips"] == [0.1, 0.3, 0.5, 0.7]
    assert quality["each"]["psnr"] == [30.0, 31.0, 32.0, 33.0]
    assert (quality["prompts"], quality["lpips"], quality["psnr"]) == (4, pytest.approx(0.4), 31.5)
    assert quality["speedup"] == pytest.approx(4 / 3) and quality["measured_spread"] == [1.0, 2.0]
    assert paper == other


def test_a_part_inside_of_a_row_takes_its_place_there(lib):
    whole, part = row("quality", [0.1] * 4, [30.0] * 4), row("quality", [0.5], [31.0], first=2)
    (found,) = lib["parts"].joined([whole, part])
    assert found["each"]["lpips"] == [0.1, 0.1, 0.5, 0.1] and found["prompts"] == 4


@pytest.mark.parametrize("without", [0, 1])
def test_parts_have_the_measures_that_both_have(lib, without):
    """With --no-inception one part has a measure less."""
    parts = [row("quality", [0.1], [30.0]), row("quality", [0.5], [31.0], first=1)]
    parts[1 - without]["inception"], parts[1 - without]["each"]["inception"] = 0.3, [0.3]
    (found,) = lib["parts"].joined(parts)
    assert "inception" not in found and "inception" not in found["each"] and found["psnr"] == 30.5


@pytest.mark.parametrize(
    "other, why",
    [
        (dict(first=2), "prompts 1 to 1 are missing"),
        (dict(first=0), "comes twice from prompt 0 on"),
        (dict(first=1, method="paper"), r"first prompts are \[0, 1\]"),
        (dict(first=1, settings={"ratio": 0.5}), "comes with settings {} and with {'ratio': 0.5}"),
        (dict(first=1, held_out=False), "comes with held_out True and with False"),
        (dict(first=1, version="b"), "comes with version a and with b"),
    ],
)
def test_parts_that_do_not_fit_are_refused(lib, other, why):
    begin = row("quality", [0.1], [30.0]) | {"version": "a"}
    with pytest.raises(SystemExit, match=why):
        lib["parts"].joined([begin, row("quality", [0.5], [32.0]) | other])


def test_stacking_within_what_chance_explains_is_called_even(lib):
    balanced, alone = row("balanced", [0.1] * 4, [30.0] * 4), row("easycache", [0.2] * 4, [30.0] * 4)

    def said(lpips: list[float]) -> str:
        both = row("balanced on easycache", lpips, [30.0] * 4, speedup=1.7)
        lines = lib["findings"].findings([balanced, alone, both])
        return next(line for line in lines if "on top of" in line).split()[0]

    below, above, either = [0.2, 0.21, 0.2, 0.2], [0.4, 0.41, 0.4, 0.4], [0.2, 0.42, 0.3, 0.32]
    assert [said(lpips) for lpips in (below, above, either)] == ["met", "MISSED", "even"]


def test_rows_are_compared_over_the_prompts_they_share(lib):
    many, few = row("quality", [0.1, 0.3, 0.8], [30.0, 31.0, 32.0]), row("paper", [0.2, 0.4], [29.0, 30.0])
    left, right = lib["findings"].over_same_prompts(many, few)
    assert (left["prompts"], right["prompts"]) == (2, 2)
    assert (left["lpips"], right["lpips"]) == (pytest.approx(0.2), pytest.approx(0.3))


@pytest.mark.parametrize(
    "given, why",
    [
        ("--read x.json --only balanced --from 4", "--read draws nothing: leave out --from, --only"),
        ("--write {readme} --model flux", "leave out --model"),
        ("--write {readme} --json {readme}", "name two files"),
        ("--write {plain}", "to write between"),
        ("--write nowhere.md", "there is no file"),
        ("--only balanced easycahe", "--only 'easycahe': no such method"),
        ("--only balanced --try ratio=0.5", "one or the other"),
        ("--try ratio", "write name=value"),
        ("--try ratio=2", "ratio is 2"),
        ("--prompts 4 --from 4", "there are only 4 prompts"),
        ("--from 3", "invalid choice"),
        ("--minutes nan", "a number from 0 up"),
        ("--weights nowhere --model flux", "an existing file"),
    ],
)
def test_options_that_can_not_end_well_are_refused_at_once(lib, tmp_path, capsys, given, why):
    (tmp_path / "readme.md").write_text("<!-- fidelity --><!-- /fidelity -->", encoding="utf-8")
    (tmp_path / "plain.md").write_text("<!-- /fidelity --><!-- fidelity -->", encoding="utf-8")
    words = given.format(readme=tmp_path / "readme.md", plain=tmp_path / "plain.md").split()
    with pytest.raises(SystemExit):
        lib["options"].checked("about", words)
    assert why in capsys.readouterr().err


def test_readme_table_goes_between_its_markers(lib, tmp_path):
    report, path = lib["report"], tmp_path / "README.md"
    path.write_text("before\n<!-- fidelity -->\nold\n<!-- /fidelity -->\nafter\n", encoding="utf-8")
    report.write_table([row("quality", [0.0123] * 2, [30.04] * 2), row("paper", [0.2], [20.0], "quality")], path)
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
