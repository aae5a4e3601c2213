"""The fidelity benchmark: its data, its statistics, its tables and what it refuses; and the docs against its rows."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "training")]
RESULTS, DOCS = TESTS / "bench" / "results" / "fidelity.json", TESTS.parent / "docs" / "benchmarks.md"


@pytest.fixture(scope="module")
def lib(comfy):
    import comfyui_toma  # noqa: F401
    from bench.fidelitylib import measures, methods, options, regimes, rows, statistics, studio, tables

    return SimpleNamespace(**{m.__name__.split(".")[-1]: m for m in (
        measures, methods, options, regimes, rows, statistics, studio, tables
    )})  # fmt: skip


def row(lib, method: str, speedup: float, lpips: list[float], regime: str = "flux-20", **more) -> dict:
    count = len(lpips)
    each = {"psnr": [40.0] * count, "lpips": lpips, "subject": [1.0] * count, "colour": [1.0] * count}
    each |= {"likeness": [0.2] * count, "speckle": [0.01] * count, **more.pop("each", {})}
    means = {name: sum(values) / count for name, values in each.items()}
    about = {"regime": regime, "method": method, "setting": "", "held_out": True, "kinds": "", "frechet": {}}
    return {**about, "prompts": count, "speedup": speedup, **means, "each": each, **more}


# --------------------------------------------------------------------------- what is compared


def test_every_regime_has_points_whose_speed_is_near_what_was_wanted(lib):
    for regime in lib.regimes.REGIMES:
        points = lib.methods.points(regime, lambda method, speed: 0.1)
        names = [(point.method, point.setting) for point in points]
        assert len(set(names)) == len(names), regime.name
        if not regime.speeds:
            assert names == [(lib.methods.UNMERGED, ""), (lib.regimes.ONE_TOLERANCE, "")]
            continue
        assert {*lib.methods.OURS, lib.methods.UNMERGED, "fewer steps", "EasyCache", "SADA"} <= {n for n, _ in names}
        assert any(point.decides for point in points)


def test_tuning_and_held_out_prompts_share_no_subject(lib):
    tuned, held_out = ({n.split(" on ")[0] for n in lib.regimes.prompts(32, h)} for h in (False, True))
    assert len(tuned) == len(held_out) == 32 and not tuned & held_out


def test_an_image_is_kept_by_its_settings_and_not_by_the_name_of_a_preset(lib):
    regime = lib.regimes.BY_NAME["flux-20"]
    balanced = next(p for p in lib.methods.presets(regime) if p.method == "balanced")
    curve = lib.methods.tried(regime, "any", balanced.settings)
    assert balanced.key == curve.key
    assert balanced.key != lib.methods.tomesd_at(regime, 1.4).key


@pytest.mark.parametrize("name", ["flux-20", "unet-sde-25"])
def test_merging_as_fast_as_wanted(lib, name):
    from bench import fullsize

    regime = lib.regimes.BY_NAME[name]
    settings = lib.methods.merging(regime, 1.4, lib.methods.PRESETS["balanced"][regime.kind])
    share = fullsize.merged_share(regime.family, settings)
    merged = regime.steps if regime.kind == "unet" else round(settings.end_percent * regime.steps) - 1
    assert regime.steps / (regime.steps - merged * (1 - share)) == pytest.approx(1.4, rel=0.05)


def test_work_counts_what_ran(lib):
    from bench import fullsize

    regime = lib.regimes.BY_NAME["unet-sde-25"]
    point = next(point for point in lib.methods.presets(regime) if point.method == "fast")
    drawn = lib.studio.Drawn(torch.zeros(0), ran=20, merged=10, kinds="", seconds=0)
    share = fullsize.merged_share("unet", point.settings)
    assert 0.5 < share < 0.7
    assert drawn.work(regime, point) == pytest.approx(10 + 10 * share)


def test_a_number_is_found_by_halving(lib):
    asked = []

    def speed_at(value: float) -> float:
        asked.append(value)
        return 1 + 2 * value

    assert 1 + 2 * lib.studio.dialled(2.0, speed_at, (0.01, 3.0)) == pytest.approx(2.0, rel=0.25)
    assert len(set(asked)) <= 8
    assert lib.studio.dialled(20.0, speed_at, (0.01, 3.0)) is None


def test_comments_and_docstrings_are_no_part_of_the_code(lib, tmp_path):
    one, other = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text('"""What."""\ndef f():\n    """Why."""\n    return 1  # one\n')
    other.write_text("def f():\n    return 1\n")
    assert lib.studio._code(one) == lib.studio._code(other)
    other.write_text("def f():\n    return 2\n")
    assert lib.studio._code(one) != lib.studio._code(other)


# --------------------------------------------------------------------------- measures and statistics


def test_frechet_distance_of_normal_distributions(lib):
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    assert lib.measures.frechet(x, x) == pytest.approx(0, abs=1e-9)
    assert lib.measures.frechet(x, x + torch.tensor([3.0, 0, 4.0])) == pytest.approx(25, rel=1e-6)
    a, b = torch.cov(x.T).double(), torch.cov((2 * x).T).double()
    trace = float((a + b).trace() - 2 * (2 * a).trace())
    assert lib.measures.frechet(x - x.mean(0), 2 * (x - x.mean(0))) == pytest.approx(trace, rel=1e-5)


def test_speckle_counts_flat_areas_only(lib):
    colour = torch.tensor([0.2, 0.4, 0.6])
    plain = colour.expand(64, 64, 3).clone()
    shape = plain.clone()
    shape[24:40, 24:40] = 1.0
    flat = lib.measures.flat_areas(shape, colour)
    assert flat[0, 0] and not flat[8, 8] and not flat[5, 5]
    assert lib.measures.speckle(plain, flat) == pytest.approx(0, abs=1e-6)
    rough = plain.clone()
    rough[0:4, 0:4] += 0.1
    assert lib.measures.speckle(rough, flat) > 1e-3


def test_chance(lib):
    assert lib.statistics.differs([1.0, 1.1, 0.9, 1.0]) == 1
    assert lib.statistics.differs([-1.0, -1.1, -0.9]) == -1
    assert lib.statistics.differs([1.0, -1.1, 0.9]) == lib.statistics.differs([]) == lib.statistics.differs([5.0]) == 0


def test_a_curve_is_read_between_its_rows(lib):
    curve = [row(lib, "tolerance", 1.0, [0.01, 0.04]), row(lib, "tolerance", 4.0, [0.04, 0.01])]
    assert lib.statistics.at_speed(curve, 2.0, "lpips", 2) == pytest.approx([0.02, 0.02])
    assert lib.statistics.at_speed(curve, 0.9, "lpips", 2) == [0.01, 0.04]
    assert lib.statistics.at_speed(curve, 5.0, "lpips", 2) is None
    assert lib.statistics.at_speed(curve, 2.0, "lpips", 3) is None


def test_losses_are_beyond_chance_and_worth_the_name(lib):
    base = row(lib, "unmerged", 1.0, [0.0] * 4)
    same = row(lib, "balanced", 2.0, [0.01] * 4)
    assert lib.rows.losses(same, base) == {}
    worse = row(lib, "fast", 2.0, [0.01] * 4, each={"speckle": [0.012, 0.013, 0.012, 0.013], "likeness": [0.201] * 4})
    assert set(lib.rows.losses(worse, base)) == {"speckle"}
    far = row(lib, "fast", 2.0, [0.01] * 4, frechet={"others": {"value": 12.0, "above": 2.0, "error": 0.5}})
    assert lib.rows.losses(far, base) == {"Frechet, others": pytest.approx(0.2)}


# --------------------------------------------------------------------------- tables


def rows(lib) -> list[dict]:
    near = [0.01, 0.011, 0.012, 0.011]
    return [
        row(lib, "unmerged", 1.0, [0.0] * 4),
        row(lib, "balanced", 1.9, near),
        row(lib, "tolerance", 1.5, [0.005] * 4),
        row(lib, "tolerance", 2.5, [0.02] * 4),
        row(lib, "fewer steps", 1.8, [0.03, 0.031, 0.029, 0.03], setting="11 steps"),
        row(lib, "Spectrum", 1.8, [0.001, 0.001, 0.0011, 0.001], setting="growth 0"),
    ]


def test_tables_say_where_ours_is_behind(lib):
    made = lib.tables.markdown(rows(lib))
    assert "1.90x: 40.0 dB, .011" in made
    assert "| fewer steps | 1.80x: .030 / .008 |" in made
    assert "| Spectrum | **1.80x: .001 / .008** |" in made
    said = "\n".join(lib.tables.verdicts(rows(lib)))
    assert "BEHIND Spectrum growth 0 at 1.80x" in said and "BEHIND fewer" not in said


def test_new_rows_take_the_place_of_old_ones_of_their_method(lib, tmp_path):
    old, new = rows(lib), [row(lib, "tolerance", 1.7, [0.006] * 4)]
    joined = lib.rows.joined(old, new)
    assert [r["speedup"] for r in joined if r["method"] == "tolerance"] == [1.7]
    assert len(joined) == len(old) - 1
    path = tmp_path / "rows.json"
    lib.rows.write(joined, path)
    assert lib.rows.read(path) == json.loads(json.dumps(joined))
    path.write_text("{}")
    with pytest.raises(SystemExit, match="not a file that this benchmark wrote"):
        lib.rows.read(path)


def test_tables_go_between_their_markers(lib, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{lib.tables.BEGIN}\nearlier\n{lib.tables.END}\nafter\n")
    lib.tables.write(rows(lib), page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "earlier" not in text
    assert lib.tables.between(text) == lib.tables.markdown(rows(lib)).strip()


def test_the_docs_hold_what_the_rows_say(lib):
    text = DOCS.read_text(encoding="utf-8")
    made = lib.tables.markdown(lib.rows.read(RESULTS)).strip()
    assert lib.tables.between(text) == made, (
        "run: python dev.py bench fidelity --read tests/bench/results/fidelity.json --write docs/benchmarks.md"
    )


def test_the_rows_are_of_the_presets_as_they_are(lib):
    """Who changes a preset has to draw its rows anew."""
    rows = [row for row in lib.rows.read(RESULTS) if row["method"] in lib.methods.OURS]
    assert len(rows) >= 4 * 12
    for row in rows:
        kind = lib.regimes.BY_NAME[row["regime"]].kind
        today = {k: getattr(v, "value", v) for k, v in asdict(lib.methods.PRESETS[row["method"]][kind]).items()}
        assert row["settings"] == today, (row["regime"], row["method"])


# --------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--regime", "nowhere"], "there are flux-20"),
        (["--only", "magic"], "there are"),
        (["--prompts", "33"], "invalid choice"),
        (["--minutes", "-1"], "from 0 up"),
        (["--try", "ratio=2"], "ratio is 2"),
        (["--try", "ratio"], "write name=value"),
        (["--try", "ratio=0.5", "--only", "balanced"], "one or the other"),
        (["--try", "ratio=0.5", "--json", "rows.json"], "not kept"),
        (["--read", "rows.json", "--quick"], "leave out --quick"),
        (["--write", "nowhere.md"], "there is no file"),
        (["--json", "nowhere/rows.json"], "there is no folder"),
    ],
)
def test_options_that_can_not_end_well(lib, capsys, arguments, why):
    with pytest.raises(SystemExit):
        lib.options.checked("about", arguments)
    assert why in capsys.readouterr().err


def test_quick_asks_for_what_decides(lib):
    options = lib.options.checked("about", ["--quick"])
    chosen = lib.options.chosen_regimes(options)
    assert chosen and all(regime.decides for regime in chosen)
    points = lib.methods.points(chosen[0], lambda method, speed: None)
    asked = {p.method for p in points if lib.options.wants(options, p)}
    assert asked == {lib.methods.UNMERGED, *lib.methods.OURS, "fewer steps"}
    only = lib.options.checked("about", ["--regime", "unet-sde-25", "--only", "Taylor"])
    assert [regime.name for regime in lib.options.chosen_regimes(only)] == ["unet-sde-25"]
    asked = {p.method for p in points if lib.options.wants(only, p)}
    assert asked == {lib.methods.UNMERGED, lib.methods.OTHER_SEED, "TaylorSeer 1", "TaylorSeer 2"}


def test_the_readme_holds_what_the_rows_say(lib, tmp_path):
    """Its table of presets: speed-up and LPIPS, regime by regime, as `--write README.md` puts them there."""
    rows = lib.rows.read(Path(__file__).parent / "results" / "fidelity.json")
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    for preset in ("quality", "balanced", "fast", "turbo"):
        assert " | ".join(lib.tables.readme_cells(rows, preset)) in text, preset
    page = tmp_path / "README.md"
    page.write_text(text.replace("x, 0.0", "x, 9.9"), encoding="utf-8")
    lib.tables.write(rows, page)
    assert page.read_text(encoding="utf-8") == text
