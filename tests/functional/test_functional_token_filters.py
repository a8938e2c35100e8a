"""Filters of tokens by entropy and covariance: by hand, and against plain sorting."""

import math
from collections.abc import Callable

import pytest
import torch

from oat.errors import ShapeError
from oat.functional.token_filters import covariances, outside_covariance_band, top_share, top_share_of_rows

VALUES = torch.tensor([0.1, 0.9, 0.5, 0.9, 0.2, 0.7, 0.3, 0.4, 0.6, 0.8])


@pytest.mark.parametrize(
    ("share", "kept"),
    [
        (0.0, []),
        (0.05, [1]),  # rounded up, and the earlier of two equal ones
        (0.1, [1]),
        (0.2, [1, 3]),
        (0.3, [1, 3, 9]),
        (0.31, [1, 3, 5, 9]),
        (1.0, list(range(10))),
    ],
)
def test_the_top_share_by_hand(share: float, kept: list[int]) -> None:
    assert top_share(VALUES, share=share).nonzero()[:, 0].tolist() == kept


@pytest.mark.inventory(52)
@pytest.mark.parametrize("count", [1, 2, 5, 10, 99, 100])
@pytest.mark.parametrize("percent", [1, 7, 20, 29, 50, 99])
def test_exactly_the_top_fraction_is_kept(count: int, percent: int) -> None:
    """In whole numbers: the least number of tokens that is at least the percentage. With ties as well."""
    torch.manual_seed(count)
    number = -(-count * percent // 100)
    for values in (torch.rand(count), torch.zeros(count), torch.randint(0, 3, (count,)).float()):
        kept = top_share(values, share=percent / 100)
        assert int(kept.sum()) == number
        assert max([-1.0, *values[kept == 0].tolist()]) <= values[kept > 0].min().item()


def slow_top(values: list[float], places: list[int], share: float) -> set[int]:
    """Return the places of the largest values, found by sorting pairs."""
    number = math.ceil(round(share * len(places), 9))
    return set(sorted(places, key=lambda k: (-values[k], k))[:number])


@pytest.mark.parametrize("seed", range(6))
def test_filters_are_those_of_plain_sorting(seed: int) -> None:
    """Rows in any order, rows without tokens, ties, and masked tokens whose value is NaN."""
    torch.manual_seed(seed)
    row_of_K = torch.randint(0, 7, (40,))
    mask_K = (torch.rand(40) < 0.8).float()
    values = torch.randint(0, 6, (40,)).float() if seed % 2 else torch.rand(40)
    given = torch.where(mask_K > 0, values, float("nan"))
    places = mask_K.nonzero()[:, 0].tolist()
    for share in (0.2, 0.5):
        whole = slow_top(values.tolist(), places, share)
        assert set(top_share(given, share=share, mask_K=mask_K).nonzero()[:, 0].tolist()) == whole
        of_rows: set[int] = set()
        for row in range(7):
            of_rows |= slow_top(values.tolist(), [k for k in places if row_of_K[k] == row], share)
        found = top_share_of_rows(given, row_of_K, 7, share=share, mask_K=mask_K)
        assert set(found.nonzero()[:, 0].tolist()) == of_rows
        assert of_rows != whole


def test_one_quantile_and_one_per_row_differ() -> None:
    """Row 1 has the two largest values; by rows, each row keeps one of two."""
    values, rows = torch.tensor([0.1, 0.2, 0.8, 0.9]), torch.tensor([0, 0, 1, 1])
    assert top_share(values, share=0.5).tolist() == [0, 0, 1, 1]
    assert top_share_of_rows(values, rows, 2, share=0.5).tolist() == [0, 1, 0, 1]


def test_other_signs_choose_other_tokens() -> None:
    lowest = top_share(-VALUES, share=0.2).nonzero()[:, 0].tolist()
    assert lowest == [0, 4]


def test_covariances_by_hand() -> None:
    """Means -2 and 1: (1)(2) = 2, (-1)(-2) = 2, (0)(0) = 0; the last token does not count."""
    logps = torch.tensor([-1.0, -3.0, -2.0, float("nan")], requires_grad=True)
    advantages = torch.tensor([3.0, -1.0, 1.0, 50.0])
    found = covariances(logps, advantages, mask_K=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert found.tolist() == [2.0, 2.0, 0.0, 0.0]
    assert not found.requires_grad
    assert covariances(logps, -advantages, mask_K=torch.tensor([1.0, 1.0, 1.0, 0.0])).tolist() == [
        -2,
        -2,
        0,
        0,
    ]
    assert covariances(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_the_mean_is_the_covariance() -> None:
    torch.manual_seed(0)
    logps, advantages = torch.randn(2, 50, dtype=torch.float64)
    expected = torch.cov(torch.stack((logps, advantages)), correction=0)[0, 1]
    torch.testing.assert_close(covariances(logps, advantages).mean(), expected, rtol=0, atol=1e-12)


def test_covariances_over_several_parts_are_those_of_the_whole() -> None:
    """Two parts whose sums are added, as over ranks."""
    torch.manual_seed(0)
    logps, advantages = torch.randn(2, 10, dtype=torch.float64)
    sums: list[torch.Tensor] = []

    def note(own: torch.Tensor) -> torch.Tensor:
        sums.append(own)
        return own

    parts = [(logps[:3], advantages[:3]), (logps[3:], advantages[3:])]
    for part in parts:
        covariances(*part, reduce=note)
    others: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda own: own + sums[1],
        lambda own: own + sums[0],
    ]
    found = [covariances(*part, reduce=other) for part, other in zip(parts, others, strict=True)]
    torch.testing.assert_close(torch.cat(found), covariances(logps, advantages), rtol=0, atol=1e-12)


def test_the_covariance_band_by_hand() -> None:
    """Of eight tokens a quarter is stopped: two of the four in [1, 5], those with the smallest numbers."""
    given = torch.tensor([0.5, 1.0, 5.0, 6.0, 2.0, -3.0, 3.0, 0.0])
    uniforms = torch.tensor([0.0, 0.9, 0.2, 0.0, 0.3, 0.0, 0.5, 0.0])
    found = outside_covariance_band(given, uniforms, share=0.25)
    assert found.tolist() == [1, 1, 0, 1, 0, 1, 1, 1]
    # a share of more tokens than the band has, and one of less than one token
    assert outside_covariance_band(given, uniforms, share=0.9).tolist() == [1, 0, 0, 1, 0, 1, 0, 1]
    assert outside_covariance_band(given, uniforms).tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert outside_covariance_band(given, uniforms, share=0.0).tolist() == [1] * 8
    assert outside_covariance_band(-given, uniforms, share=0.25).tolist() == [1, 1, 1, 1, 1, 0, 1, 1]
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert outside_covariance_band(given, uniforms, share=0.25, mask_K=mask).tolist() == [
        1,
        1,
        1,
        1,
        0,
        1,
        0,
        1,
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_covariance_band_is_that_of_plain_sorting(seed: int) -> None:
    torch.manual_seed(seed)
    given, uniforms = 3 * torch.randn(60), torch.rand(60)
    band = [k for k, value in enumerate(given.tolist()) if 1 <= value <= 5]
    stopped = sorted(band, key=lambda k: float(uniforms[k]))[: math.ceil(60 * 0.1)]
    found = outside_covariance_band(given, uniforms, share=0.1)
    assert (found == 0).nonzero()[:, 0].tolist() == sorted(stopped)
    assert len(stopped) == 6


def test_each_token_of_the_band_is_drawn_as_often() -> None:
    torch.manual_seed(0)
    given = torch.tensor([0.0, 2.0, 2.0, 2.0, 0.0])
    times = sum(outside_covariance_band(given, torch.rand(5), share=0.2) == 0 for _ in range(900))
    assert isinstance(times, torch.Tensor)
    assert times[[0, 4]].tolist() == [0, 0]
    assert times.sum() == 900
    assert (times[1:4] - 300).abs().max() < 60


def test_a_filter_of_no_tokens() -> None:
    none = torch.zeros(0)
    assert top_share(none, share=0.5).shape == (0,)
    assert outside_covariance_band(none, none).shape == (0,)
    assert top_share(torch.ones(3), share=1.0, mask_K=torch.zeros(3)).tolist() == [0, 0, 0]


def test_wrong_shapes_are_refused(unchecked: None) -> None:
    with pytest.raises(ShapeError, match="row_of_K"):
        top_share_of_rows(torch.zeros(3), torch.zeros(2, dtype=torch.long), 1, share=0.5)
    with pytest.raises(ShapeError, match="mask_K"):
        top_share(torch.zeros(3), share=0.5, mask_K=torch.zeros(2))
    with pytest.raises(ShapeError, match="advantages_K"):
        covariances(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ShapeError, match="uniforms_K"):
        outside_covariance_band(torch.zeros(3), torch.zeros(2))
