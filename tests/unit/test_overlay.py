import pytest
import torch
from comfyui_toma.toma_core.overlay import DOT, SCALE, density, kept_tokens, regions

GREY = torch.full((128, 96, 3), 0.5)
HALVES = torch.arange(16 * 12).view(16, 12) % 12 // 6  # left and right


def centre(drawn, token, columns, cell=8):
    return drawn[token // columns * cell + cell // 2, token % columns * cell + cell // 2]


def test_dots_are_where_the_kept_tokens_are():
    drawn = kept_tokens(GREY, (16, 12), torch.tensor([0, 17, 191]))
    for token in range(192):
        colour = centre(drawn, token, 12)
        expected = torch.tensor(DOT) if token in (0, 17, 191) else torch.full((3,), 0.225)
        assert torch.allclose(colour, expected, atol=0.02), token


def test_regions_have_their_mean_colour_and_an_outline():
    picture = torch.rand(128, 96, 3) * 0.5
    drawn = regions(picture, (16, 12), HALVES.flatten())
    assert torch.allclose(drawn[64, 20], picture[:, :48].mean((0, 1)), atol=1e-5)
    assert torch.allclose(drawn[64, 80], picture[:, 48:].mean((0, 1)), atol=1e-5)
    assert (drawn[:, 47:49].mean(-1) > drawn[64, 20].mean() + 0.2).all(), "a line where they meet"
    assert torch.allclose(drawn[:, :46], drawn[64, 20].expand(128, 46, 3), atol=1e-5), "and nowhere else"


def test_outlines_lie_on_borders_in_both_directions():
    picture = torch.zeros(128, 96, 3)
    for groups in (HALVES, torch.arange(16 * 12).view(16, 12) // 96):
        lines = regions(picture, (16, 12), groups.flatten()).mean(-1) > 0
        border = groups.repeat_interleave(8, 0).repeat_interleave(8, 1)
        expected = torch.zeros_like(lines)
        expected[1:] |= border[1:] != border[:-1]
        expected[:, 1:] |= border[:, 1:] != border[:, :-1]
        expected[:-1] |= border[1:] != border[:-1]
        expected[:, :-1] |= border[:, 1:] != border[:, :-1]
        assert torch.equal(lines, expected)


def test_density_colours_go_by_group_size():
    groups = torch.cat([torch.zeros(160, dtype=torch.long), torch.arange(1, 33)])  # one of 160, 32 of 1
    drawn = density(torch.ones(256, 192, 3), (16, 12), groups)
    low, high = torch.tensor(SCALE[0]) / 255, torch.tensor(SCALE[-1]) / 255
    assert torch.allclose(centre(drawn, 5, 12, 16), high, atol=0.01)
    assert torch.allclose(centre(drawn, 191, 12, 16), low, atol=0.01)


def test_legend_is_there_where_there_is_room():
    groups = torch.arange(64) // 2
    big, small = (density(torch.full((s, s, 3), 0.5), (8, 8), groups) for s in (512, 64))
    ground = torch.tensor([20, 22, 26]) / 255
    assert (torch.isclose(big, ground).all(-1)).sum() > 500
    assert not torch.isclose(small, ground).all(-1).any()


@pytest.mark.parametrize(
    "shape, grid", [((100, 75), (13, 10)), ((7, 5), (16, 12)), ((64, 512), (4, 32)), ((33, 33), (1, 1))]
)
def test_any_size_of_picture_and_grid(shape, grid):
    tokens = grid[0] * grid[1]
    picture, groups = torch.rand(*shape, 3), torch.arange(tokens) // 3
    for drawn in (
        kept_tokens(picture, grid, torch.arange(0, tokens, 3)),
        regions(picture, grid, groups),
        density(picture, grid, groups),
    ):
        assert drawn.shape == picture.shape
        assert drawn.min() >= 0 and drawn.max() <= 1 + 1e-6


def test_the_picture_itself_stays_as_it_is():
    picture = torch.rand(64, 64, 3)
    before = picture.clone()
    kept_tokens(picture, (8, 8), torch.arange(9)), regions(picture, (8, 8), torch.arange(64) // 4)
    density(picture, (8, 8), torch.arange(64) // 4)
    assert torch.equal(picture, before)
