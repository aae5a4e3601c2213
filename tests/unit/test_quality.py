from math import inf, log10

import numpy
import pytest
import torch
from comfyui_toma.toma_core.quality import difference, embedding_distance, psnr, ssim


def slow_ssim(a: numpy.ndarray, b: numpy.ndarray) -> float:
    """Window by window from the definition, one channel [H, W]."""
    at = numpy.arange(11) - 5
    bell = numpy.exp(-(at[:, None] ** 2 + at[None] ** 2) / (2 * 1.5**2))
    bell /= bell.sum()
    values = []
    for y in range(a.shape[0] - 10):
        for x in range(a.shape[1] - 10):
            p, q = a[y : y + 11, x : x + 11], b[y : y + 11, x : x + 11]
            mp, mq = (bell * p).sum(), (bell * q).sum()
            vp, vq = (bell * (p - mp) ** 2).sum(), (bell * (q - mq) ** 2).sum()
            cov = (bell * (p - mp) * (q - mq)).sum()
            c1, c2 = 0.01**2, 0.03**2
            values.append((2 * mp * mq + c1) * (2 * cov + c2) / ((mp**2 + mq**2 + c1) * (vp + vq + c2)))
    return float(numpy.mean(values))


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_ssim_against_the_definition(noise):
    torch.manual_seed(0)
    a = torch.rand(2, 24, 31, 3)
    b = (a + noise * torch.randn_like(a)).clamp(0, 1)
    each = [slow_ssim(a[i, ..., c].double().numpy(), b[i, ..., c].double().numpy()) for i in (0, 1) for c in range(3)]
    assert ssim(a, b) == pytest.approx(numpy.mean(each), abs=1e-6)
    assert ssim(a[0], b[0]) == pytest.approx(numpy.mean(each[:3]), abs=1e-6)


def test_ssim_falls_with_noise_and_is_1_for_equal_pictures():
    torch.manual_seed(1)
    a, noise = torch.rand(32, 32, 3), torch.randn(32, 32, 3)
    assert ssim(a, a) == pytest.approx(1)
    values = [ssim(a, a + s * noise) for s in (0.01, 0.05, 0.2)]
    assert values == sorted(values, reverse=True)
    assert ssim(torch.ones(5, 4, 3), torch.ones(5, 4, 3)) == pytest.approx(1), "smaller than a window"
    assert ssim(torch.full((20, 20, 3), 0.5), torch.full((20, 20, 3), 0.5001)) == pytest.approx(1, abs=1e-6)


def test_psnr():
    a = torch.zeros(2, 8, 8, 3)
    assert psnr(a, a) == inf
    assert psnr(a, a + 0.1) == pytest.approx(20)
    b = torch.stack([torch.full((8, 8, 3), 0.1), torch.full((8, 8, 3), 0.01)])
    assert psnr(a, b) == pytest.approx((20 + 40) / 2), "picture by picture"
    assert psnr(a[0], b[1].half()) == pytest.approx(-20 * log10(0.01), abs=0.01)


def test_difference():
    a, b = torch.zeros(2, 4, 5, 3), torch.zeros(2, 4, 5, 3)
    b[1, 2, 3] = torch.tensor([0.3, -0.6, 0.0])
    assert difference(a, b).shape == (2, 4, 5)
    assert difference(a, b)[1, 2, 3] == pytest.approx(0.3) and difference(a, b).sum() == pytest.approx(0.3)


def test_embedding_distance():
    a = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert embedding_distance(a, 5 * a) == pytest.approx(0)
    assert embedding_distance(a, a.flip(0)) == pytest.approx(1)
    assert embedding_distance(a, -a) == pytest.approx(2)
    assert embedding_distance(a, torch.stack([a[0], -a[1]])) == pytest.approx(1)
