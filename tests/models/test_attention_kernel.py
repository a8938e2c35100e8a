"""Variable-length attention: the kernel's arguments, the cases in which it is used, and equal results with
and without it. The real kernel runs only on a GPU (tests/test_gpu.py). These tests replace it by a slow one
with the same contract."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_heads import GROUPED
from tiny_models import FAMILIES, VOCAB_ROWS, build_config, save_model
from torch import Tensor

from oat.models import attention
from oat.models import attention as packing
from oat.models.attention import Bounds, Packed, Span
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm


def slow_kernel(
    query_THd: Tensor,
    key_SHd: Tensor,
    value_SHd: Tensor,
    bounds: Bounds,
    scale: float,
    *,
    at_right: bool = True,
) -> Tensor:
    """Compute attention by sequence and head. The last query sees every key, and each earlier query one key
    less. With `at_right` False, the mask is wrongly aligned to the upper left."""
    seen = torch.zeros(*query_THd.shape[:2], value_SHd.shape[2], dtype=query_THd.dtype)
    groups = query_THd.shape[1] // key_SHd.shape[1]
    places = zip(
        bounds.queries.tolist()[:-1],
        bounds.queries.tolist()[1:],
        bounds.keys.tolist()[:-1],
        bounds.keys.tolist()[1:],
        strict=True,
    )
    for first, last, first_key, last_key in places:
        for row in range(first, last):
            most = last_key - (last - 1 - row) if at_right else first_key + row - first + 1
            for head in range(query_THd.shape[1]):
                keys, values = (
                    key_SHd[first_key:most, head // groups],
                    value_SHd[first_key:most, head // groups],
                )
                weights = (keys @ query_THd[row, head] * scale).softmax(0)
                seen = seen.index_put((torch.tensor(row), torch.tensor(head)), weights @ values)
    return seen


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    attention.kernel_agrees.cache_clear()
    yield
    attention.kernel_agrees.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use the slow kernel as on a GPU, and return the list of token counts of its calls."""
    calls: list[int] = []

    def counted(query_THd: Tensor, *rest: Any) -> Tensor:
        calls.append(len(query_THd))
        return slow_kernel(query_THd, *rest)

    monkeypatch.setattr(attention, "half_dtype", lambda like: like.dtype)
    monkeypatch.setattr(attention, "variable_length", counted)
    return calls


def heads_of(generator: np.random.Generator, tokens: int, count: int, width: int) -> Tensor:
    return torch.from_numpy(generator.normal(size=(1, count, tokens, width))).requires_grad_()


def test_bounds_by_hand() -> None:
    bounds = Packed(GROUPED).bounds(torch.device("cpu"))
    assert bounds.queries.tolist() == [0, 4, 6, 7, 12, 15, 16]
    assert bounds.keys.tolist() == [0, 4, 10, 15, 20, 28, 29]
    assert (bounds.longest_query, bounds.longest_key) == (5, 8)
    assert (bounds.queries.dtype, bounds.keys.dtype) == (torch.int32, torch.int32)
    assert bounds.tokens is not None
    assert bounds.tokens.tolist() == [
        *range(4), *(0, 1, 2, 3, 4, 5), *(0, 1, 2, 3, 6), *range(7, 12), *(7, 8, 9, 10, 11, 12, 13, 14), 15
    ]  # fmt: skip
    assert Packed([Span(0, 3), Span(3, 5)]).bounds(torch.device("cpu")).tokens is None


@pytest.mark.parametrize(
    "spans", [GROUPED, [Span(0, 4), Span(4, 9), Span(9, 16)], [Span(0, 16)]], ids=["grouped", "apart", "one"]
)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_at_once_is_in_buckets(spans: list[Span], key_heads: int, asked: list[int]) -> None:
    """Attention in one call of the kernel and attention in buckets give equal values and gradients, in
    float64."""
    generator = np.random.default_rng(key_heads)
    tensors = [
        heads_of(generator, 16, 4, 3),
        heads_of(generator, 16, key_heads, 3),
        heads_of(generator, 16, key_heads, 5),
    ]
    slopes = torch.from_numpy(generator.normal(size=(1, 16, 4, 5)))
    found = []
    for attend in (Packed(spans).at_once, Packed(spans).in_buckets):
        seen = attend(*tensors, 0.7)  # type: ignore[arg-type]
        found.append([seen, *torch.autograd.grad((seen * slopes).sum(), tensors)])
    assert asked == [16]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.fixture(scope="module")
def lms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    return {
        family: load_lm(save_model(tmp_path_factory.mktemp(family), build_config(family)))
        for family in FAMILIES
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_goes_through_the_kernel_where_no_token_lies_between_spans(
    family: str, lms: dict[str, CausalLM], asked: list[int]
) -> None:
    lm, generator = lms[family], np.random.default_rng(0)
    sequences = [generator.integers(0, VOCAB_ROWS, length) for length in (5, 7, 3)]
    sequences.append(np.concatenate([sequences[0][:4], sequences[1]]))
    hidden_TD, places = lm.hidden_of(sequences, [4, 0, 0, 4])
    assert asked[0] == 20, "the trial before it is taken"
    assert asked[1:] == [4 + 1 + 7 + 3 + 7] * 2
    for sequence, place in zip(sequences, places, strict=True):
        torch.testing.assert_close(
            hidden_TD[place], lm.hidden(torch.from_numpy(sequence)[None])[0], atol=2e-5, rtol=0
        )
    del asked[:]
    ids_1T, positions_1T, spans = packing.pack(sequences, lm.device, width=16)
    lm.hidden(ids_1T, positions=positions_1T, layout=Packed(spans))
    assert asked == []


def from_the_upper_left(*given: Any) -> Tensor:
    return slow_kernel(*given, at_right=False)


def without_gradient(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return slow_kernel(query, key.detach(), value, *rest) + 0 * key.sum()


def not_a_number(*given: Any) -> Tensor:
    return slow_kernel(*given) * torch.nan


def another_signature(query: Tensor) -> Tensor:
    return query


def no_such_device(*given: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")


@pytest.mark.parametrize(
    "kernel", [from_the_upper_left, without_gradient, not_a_number, another_signature, no_such_device]
)
def test_a_kernel_that_is_not_right_is_left_alone(
    kernel: Callable[..., Tensor], lms: dict[str, CausalLM], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, shape = torch.device("cpu"), (torch.float32, 4, 2, 8, 8)
    assert attention.kernel_agrees(device, *shape)
    attention.kernel_agrees.cache_clear()
    monkeypatch.setattr(attention, "variable_length", kernel)
    assert not attention.kernel_agrees(device, *shape)
    ids = np.arange(6)
    hidden_TD, places = lms["llama"].hidden_of([ids, ids[:3]], [2, 2])
    torch.testing.assert_close(
        hidden_TD[places[0]], lms["llama"].hidden(torch.from_numpy(ids)[None])[0], atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("mode", ["checkpointing", "inference", "plain"])
def test_the_trial_shows_in_nothing_around_it(mode: str, tmp_path: Path, asked: list[int]) -> None:
    """The kernel's first call is a trial against the slow path. It changes no result, even in a layer that is
    recomputed or in inference mode."""
    lm = load_lm(save_model(tmp_path, build_config("llama")))
    attention.kernel_agrees.cache_clear()
    del asked[:]
    if mode == "inference":
        with torch.inference_mode():
            lm.hidden_of([np.arange(5)])
        assert asked == [20, 5, 5]
        return
    if mode == "checkpointing":
        lm.checkpoint_gradients()
        lm.module.train()
    lm.hidden_of([np.arange(5), np.arange(3)])[0].square().sum().backward()
    assert asked == [20, *[8] * (4 if mode == "checkpointing" else 2)]
    assert all(
        parameter.grad is not None
        for name, parameter in lm.module.named_parameters()
        if "lm_head" not in name
    )


def test_the_call_is_one_that_torch_takes() -> None:
    """Torch's description of its own kernel accepts the arguments and shapes of the call, forward and
    backward."""
    pytest.importorskip("torch.nn.attention.varlen")
    packed = Packed(GROUPED)
    query, key, value = (
        torch.empty(1, heads, 16, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    seen = packed.at_once(query, key, value, 0.5)
    assert (seen.shape, seen.dtype) == ((1, 16, 4, 8), torch.bfloat16)
    seen.sum().backward()
    assert [tensor.grad.shape for tensor in (query, key, value) if tensor.grad is not None] == [
        query.shape,
        key.shape,
        value.shape,
    ]


def test_on_a_cpu_no_kernel_is_asked() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert attention.half_dtype(torch.zeros(1, dtype=dtype)) is None
