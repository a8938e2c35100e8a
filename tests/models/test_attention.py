"""Packed attention, compared with plain matrix products for each sequence alone."""

import numpy as np
import pytest
import torch

from oat.errors import ModelError
from oat.models.attention import Packed, Rows, Span, attention, pack, pack_groups
from oat.models.causal_lm import NO_MASK

CPU = torch.device("cpu")
SCALE = 0.3


def plainly(spans: list[Span], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return (1, T, heads, width): each span attends to its prefix and itself, one span after the other."""
    seen = query.new_zeros(query.shape[2], query.shape[1], value.shape[3])
    shared = query.shape[1] // key.shape[1]
    for span in spans:
        own = list(range(span.start, span.stop))
        prefix = [] if span.prefix is None else list(range(spans[span.prefix].start, spans[span.prefix].stop))
        keys, values = (tensor[0][:, prefix + own].repeat_interleave(shared, 0) for tensor in (key, value))
        later = torch.ones(len(own), len(prefix + own), dtype=torch.bool).triu(len(prefix) + 1)
        scores = (query[0][:, own] @ keys.transpose(1, 2) * SCALE).masked_fill(later, -torch.inf)
        seen[own] = (scores.softmax(-1) @ values).transpose(0, 1)
    return seen[None]


@pytest.mark.sample("4-*", "2-*-30", seconds=1.7)
@pytest.mark.parametrize("longest", [30, 700])
@pytest.mark.parametrize("shares", [False, True], ids=["each alone", "common prompts"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_values_and_gradients_are_those_of_each_sequence_alone(
    longest: int, shares: bool, key_heads: int
) -> None:
    generator = np.random.default_rng(longest)
    sequences, prefixes = [], []
    for _ in range(4):
        prompt = generator.integers(0, 50, generator.integers(0, 40))
        for length in generator.integers(0 if shares and len(prompt) else 1, longest, 3):
            sequences.append(np.concatenate([prompt, generator.integers(0, 50, length)]))
            prefixes.append(len(prompt) if shares else 0)
    ids_1T, _, spans, _ = pack_groups(sequences, prefixes, CPU)
    torch.manual_seed(0)
    shapes = [(1, heads, ids_1T.shape[1], 8) for heads in (4, key_heads, key_heads)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(1, ids_1T.shape[1], 4, 8, dtype=torch.float64)
    found, right = Packed(spans).attend(torch.nn.Identity(), *inputs, SCALE), plainly(spans, *inputs)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((right * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_with_a_width_a_sequence_gets_bitwise_the_same_beside_any_others() -> None:
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    first = torch.randn(3, 1, 2, 16, 8)

    def with_others(lengths: list[int]) -> torch.Tensor:
        sequences = [generator.integers(0, 50, length) for length in (11, *lengths)]
        ids_1T, _, spans = pack(sequences, CPU, width=16)
        inputs = torch.randn(3, 1, 2, ids_1T.shape[1], 8)
        inputs[:, :, :, :11] = first[:, :, :, :11]
        return Packed(spans, width=16).attend(torch.nn.Identity(), *inputs, SCALE)[:, :11]

    assert torch.equal(with_others([16, 3, 1]), with_others([5, 11, 12]))


def test_rows_taken_several_times_add_up_in_the_gradient() -> None:
    matrix = torch.arange(12.0).view(4, 3).requires_grad_()
    taken = Rows(np.array([2, 0, 2]), 4, CPU).take(matrix)
    assert taken.tolist() == [[6, 7, 8], [0, 1, 2], [6, 7, 8]]
    taken.backward(torch.tensor([[1.0], [10.0], [100.0]]).expand(3, 3))
    assert matrix.grad is not None
    assert matrix.grad[:, 0].tolist() == [10, 0, 101, 0]


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (torch.ones(1, 1, 3, 3, dtype=torch.bool), {}),
        (NO_MASK, {"indices": torch.zeros(1, 3, 2)}),
        (NO_MASK, {"s_aux": torch.zeros(2)}),
        (NO_MASK, {"position_bias": torch.zeros(1, 2, 3, 3)}),
        (NO_MASK, {"softcap": 30.0}),
    ],
)
def test_attention_that_is_more_than_a_layout_is_refused(
    mask: torch.Tensor, given: dict[str, object]
) -> None:
    layout, tensors = Packed([Span(0, 3)]), [torch.zeros(1, 2, 3, 4) for _ in range(3)]
    module = torch.nn.Identity()
    with pytest.raises(ModelError, match="not done here"):
        attention(module, *tensors, mask, layout=layout, **given)
    known = {"position_ids": torch.arange(3)[None], "use_cache": False, "softcap": None}
    assert attention(module, *tensors, NO_MASK, layout=layout, **known)[0].shape == (1, 3, 2, 4)
