import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import slow_distribution

from oat.errors import ShapeError
from oat.functional.sampling import inverse_cdf, kept_ids, truncated_logits
from oat.types import Sampling

BELOW_ONE = 1 - 2.0**-53


def truncate(logits_RV: torch.Tensor, *samplings: Sampling) -> torch.Tensor:
    return truncated_logits(
        logits_RV,
        torch.tensor([float(sampling.temperature) for sampling in samplings]),
        torch.tensor([sampling.top_k for sampling in samplings]),
        torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float64),
        torch.tensor([sampling.min_p for sampling in samplings], dtype=torch.float64),
    )


def probabilities(masses: list[float], **fields: float) -> list[float]:
    logits = torch.tensor([masses]).log()
    return truncate(logits, Sampling(1, **fields)).softmax(-1)[0].tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.39}, [1, 0, 0, 0]),
        ({"top_p": 0.41}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.56}, [1, 0, 0, 0]),  # 0.4 of the whole, but 4 / 7 of what top-k left
        ({"min_p": 0.49}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"min_p": 0.51}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        # a quarter of the greatest, after the temperature
        ({"temperature": 0.5, "min_p": 0.24}, [16 / 29, 9 / 29, 4 / 29, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.0, "top_p": 0.9, "min_p": 0.1, "top_k": 3}, [1, 0, 0, 0]),
    ],
)
def test_hand_worked_distributions(fields, expected):
    assert probabilities([0.4, 0.3, 0.2, 0.1], **fields) == pytest.approx(expected, abs=1e-6)


def test_equal_logits_favour_the_lower_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert truncate(logits, Sampling(1, top_k=2)).isfinite().tolist() == [[False, True, True, False, False]]
    assert truncate(logits, Sampling(1, top_p=0.4)).isfinite().tolist() == [[False, True, True, False, False]]
    assert truncate(logits, Sampling(1, temperature=0)).tolist() == [
        [-math.inf, 0.0, -math.inf, -math.inf, -math.inf]
    ]


def test_each_row_has_its_own_settings():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().repeat(5, 1)
    rows = [
        Sampling(1),
        Sampling(1, top_k=1),
        Sampling(1, top_p=0.8),
        Sampling(1, min_p=0.6),
        Sampling(1, temperature=0),
    ]
    assert truncate(logits, *rows).isfinite().sum(-1).tolist() == [4, 1, 3, 2, 1]


def test_untouched_rows_are_the_logits_and_inputs_stay():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    out = truncate(logits, Sampling(1), Sampling(1, top_k=5, top_p=0.5, min_p=0.5, temperature=0.3))
    assert torch.equal(out[0], before[0])
    assert torch.equal(logits, before)


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(
        st.sampled_from([-math.inf, -30.0, -1.25, -0.5, 0.0, 0.5, 0.75, 1.0, 3.0]), min_size=1, max_size=30
    ),
    temperature=st.sampled_from([0.0, 0.31, 1.0, 1.7]),
    top_k=st.integers(0, 31),
    top_p=st.sampled_from([0.0371, 0.3713, 0.6371, 0.9137, 1.0]),
    min_p=st.sampled_from([0.0, 0.0371, 0.3713, 0.9137]),
)
def test_equals_the_slow_version(values, temperature, top_k, top_p, min_p):
    values = [*values, 0.25]
    sampling = Sampling(1, temperature, top_k, top_p, min_p)
    expected = slow_distribution(values, sampling)
    out = truncate(torch.tensor([values]), sampling)
    assert out.isfinite().nonzero()[:, 1].tolist() == list(expected)
    logps = out.log_softmax(-1)[0]
    assert [logps[token].item() for token in expected] == pytest.approx(list(expected.values()), abs=2e-5)


@pytest.mark.parametrize(
    "scale", [0.01, 6.0], ids=["nucleus wider than the first ranking", "nucleus within it"]
)
@pytest.mark.parametrize("top_k", [0, 1500])
def test_equals_the_slow_version_on_a_large_vocabulary(scale, top_k):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(3, 4000, generator=generator) * scale).round(decimals=2)  # rounded: many ties
    sampling = Sampling(1, top_k=top_k, top_p=0.8137)
    kept = truncate(logits, *[sampling] * 3).isfinite()
    for row in range(3):
        assert kept[row].nonzero().squeeze(1).tolist() == list(
            slow_distribution(logits[row].double().tolist(), sampling)
        )
    assert (kept.sum() > 3 * 1024) == (scale < 1)


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 1), (0.19, 1), (0.21, 3), (0.49, 3), (0.51, 4), (0.99, 4), (BELOW_ONE, 4), (1.0, 4)],
)
def test_inverse_cdf_by_hand(u, token):
    logits = torch.tensor([[0.0, 0.2, 0.0, 0.3, 0.5, 0.0]]).log()
    assert inverse_cdf(logits, torch.tensor([u], dtype=torch.float64)).tolist() == [token]


def test_inverse_cdf_never_returns_a_dropped_token():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2000, 64, generator=generator) * 8
    logits[torch.rand(2000, 64, generator=generator) < 0.7] = -math.inf
    logits[:, 17] = -20.0
    before = logits.clone()
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-40, BELOW_ONE, 1.0):
        ids = inverse_cdf(logits, torch.full((2000,), u, dtype=torch.float64))
        assert logits.gather(1, ids[:, None]).isfinite().all()
    assert torch.equal(
        inverse_cdf(logits.double(), torch.full((2000,), 0.5).double()),
        inverse_cdf(logits, torch.full((2000,), 0.5)),
    )
    assert torch.equal(logits, before)


def test_inverse_cdf_draws_each_token_as_often_as_its_probability():
    probability = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    ids = inverse_cdf(probability.log().expand(1000, 4), u)
    assert torch.bincount(ids, minlength=4).tolist() == [100, 0, 600, 300]


def test_kept_ids():
    logits = torch.tensor([[-math.inf, 1.0, 2.0], [0.0, -math.inf, -math.inf]])
    ids, counts = kept_ids(logits)
    assert (ids.tolist(), counts.tolist()) == ([1, 2, 0], [2, 1])


@pytest.mark.usefixtures("unchecked")
def test_shapes_that_disagree_are_refused():
    one, two = torch.ones(1), torch.ones(2)
    with pytest.raises(ShapeError, match="top_p_R has shape"):
        truncated_logits(torch.zeros(2, 3), two, two.long(), one, two)
    with pytest.raises(ShapeError, match="logits_RV has shape"):
        truncated_logits(torch.zeros(3), two, two.long(), two, two)
    with pytest.raises(ShapeError, match="one number a row"):
        inverse_cdf(torch.zeros(2, 3), one)
