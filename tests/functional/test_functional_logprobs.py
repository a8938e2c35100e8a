import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from oat.errors import ConfigError, ShapeError
from oat.functional.logprobs import chunked_head, sampled_logps, token_entropy, token_logps

INF = math.inf


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def slow_logps(logits):
    top = max(logits)
    log_total = top + math.log(sum(math.exp(logit - top) for logit in logits))
    return [logit - log_total for logit in logits]


def slow_entropy(logits):
    return -sum(math.exp(logp) * logp for logp in slow_logps(logits) if logp > -INF)


def slow_sampled(logits, token, temperature, num_tokens, kept):
    allowed = sorted(kept) if kept else list(range(num_tokens))
    if token not in allowed:
        return -INF
    return slow_logps([logits[v] / temperature for v in allowed])[allowed.index(token)]


# Probabilities (1/2, 1/4, 1/4) and (1/8, 7/8, 0), shifted by a constant each.
LOGITS = float64([[math.log(2) + 5, 5.0, 5.0], [-3.0, math.log(7) - 3, -INF]])


def test_logps_by_hand():
    assert token_logps(LOGITS, torch.tensor([0, 1])).tolist() == pytest.approx(
        [math.log(1 / 2), math.log(7 / 8)]
    )
    assert token_logps(LOGITS, torch.tensor([2, 2])).tolist() == [pytest.approx(math.log(1 / 4)), -INF]


def test_entropy_by_hand():
    # 1/2 log 2 + 2 (1/4 log 4) = 3/2 log 2; 1/8 log 8 + 7/8 log(8/7), the impossible token counting 0.
    expected = [1.5 * math.log(2), math.log(8) / 8 + 7 / 8 * math.log(8 / 7)]
    assert token_entropy(LOGITS).tolist() == pytest.approx(expected)
    assert token_entropy(torch.tensor([[0.0, -INF, -INF]])).tolist() == [0.0]
    assert token_entropy(torch.zeros(1, 16)).item() == pytest.approx(math.log(16))


def test_sampled_by_hand():
    # Temperature 1/2 squares the odds: 4 : 1 : 1. Without the last column 4 : 1. Over {0, 2}: 4 : 1. Over
    #     {1}: certain.
    logits, half = LOGITS[:1], float64([0.5])
    first = torch.tensor([0])
    assert sampled_logps(logits, first, half, 3).item() == pytest.approx(math.log(4 / 6))
    assert sampled_logps(logits, first, half, 2).item() == pytest.approx(math.log(4 / 5))
    assert sampled_logps(
        logits, first, half, 3, (torch.tensor([2, 0]), torch.tensor([0, 0]))
    ).item() == pytest.approx(math.log(4 / 5))
    assert (
        sampled_logps(logits, torch.tensor([1]), half, 3, (torch.tensor([1]), torch.tensor([0]))).item()
        == 0.0
    )
    assert sampled_logps(logits, first, half, 3, (torch.tensor([1]), torch.tensor([0]))).item() == -INF


@st.composite
def tokens(draw):
    """Draw rows of 5 logits, each with an id, a temperature, and a kept set that is empty or contains the id;
    and the number of ids of the tokenizer."""
    num_tokens = draw(st.integers(1, 5))
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        logits = draw(st.lists(st.floats(-30, 30), min_size=5, max_size=5))
        token = draw(st.integers(0, num_tokens - 1))
        kept = draw(st.just(set()) | st.sets(st.integers(0, num_tokens - 1)).map(lambda s, t=token: s | {t}))
        rows.append((logits, token, draw(st.floats(0.1, 3)), kept))
    return num_tokens, rows


@settings(derandomize=True, deadline=None, max_examples=50)
@given(tokens(), st.randoms(use_true_random=False))
def test_equals_slow_version(drawn, random):
    num_tokens, rows = drawn
    logits = float64([row[0] for row in rows]).view(len(rows), 5)
    ids = torch.tensor([row[1] for row in rows], dtype=torch.int64)
    temperature = float64([row[2] for row in rows])
    pairs = [(v, k) for k, row in enumerate(rows) for v in row[3]]
    random.shuffle(pairs)
    kept = (
        torch.tensor([v for v, _ in pairs], dtype=torch.int64),
        torch.tensor([k for _, k in pairs], dtype=torch.int64),
    )
    for fast, slow in [
        (token_logps(logits, ids), [slow_logps(row[0])[row[1]] for row in rows]),
        (token_entropy(logits), [slow_entropy(row[0]) for row in rows]),
        (
            sampled_logps(logits, ids, temperature, num_tokens),
            [slow_sampled(*row[:3], num_tokens, None) for row in rows],
        ),
        (
            sampled_logps(logits, ids, temperature, num_tokens, kept),
            [slow_sampled(*row[:3], num_tokens, row[3]) for row in rows],
        ),
    ]:
        torch.testing.assert_close(fast, float64(slow), rtol=1e-9, atol=1e-9)


def random_case(rows=6, width=7, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, width, generator=generator, dtype=dtype)
    ids = torch.randint(0, width - 2, (rows,), generator=generator)
    temperature = 0.5 + torch.rand(rows, generator=generator, dtype=dtype)
    # Rows 0 to rows - 2 keep their id and the next two; the last row keeps nothing.
    token_of = torch.arange(rows - 1).repeat_interleave(3)
    kept = ((ids[:-1, None] + torch.arange(3)) % (width - 1)).flatten(), token_of
    return logits, ids, temperature, width - 1, kept


def test_gradients():
    logits, ids, temperature, num_tokens, kept = random_case()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_logps(x, ids), logits)
    assert torch.autograd.gradcheck(token_entropy, logits)
    assert torch.autograd.gradcheck(lambda x: sampled_logps(x, ids, temperature, num_tokens), logits)
    assert torch.autograd.gradcheck(lambda x: sampled_logps(x, ids, temperature, num_tokens, kept), logits)


def test_gradient_is_one_hot_minus_probabilities():
    # d log p_i / d z_v = ([i = v] - p_v) / temperature, with p over the kept ids only and 0 elsewhere.
    logits = LOGITS[:1].clone().requires_grad_()
    sampled_logps(
        logits, torch.tensor([0]), float64([0.5]), 3, (torch.tensor([0, 2]), torch.tensor([0, 0]))
    ).sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([2 * (1 - 4 / 5), 0.0, -2 * (1 / 5)])


def test_gradient_with_impossible_tokens():
    # Entropy of (1/2, 1/2, 0) is at its largest: gradient 0 everywhere. Log-probability: one-hot minus
    #     probabilities.
    logits = torch.tensor([[1.0, 1.0, -INF]], requires_grad=True)
    token_entropy(logits).sum().backward()
    assert logits.grad.tolist() == [pytest.approx([0.0, 0.0, 0.0], abs=1e-7)]
    logits.grad = None
    token_logps(logits, torch.tensor([0])).sum().backward()
    assert logits.grad.tolist() == [pytest.approx([0.5, -0.5, 0.0])]
    logits.grad = None
    kept = torch.tensor([0, 1]), torch.tensor([0, 0])
    outside = sampled_logps(logits, torch.tensor([2]), torch.ones(1), 3, kept)
    assert outside.tolist() == [-INF]
    outside.sum().backward()
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_invariances():
    logits, ids, temperature, num_tokens, kept = random_case()
    plain = sampled_logps(logits, ids, temperature, num_tokens)
    truncated = sampled_logps(logits, ids, temperature, num_tokens, kept)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    moved = kept[0], order.argsort()[kept[1]]
    torch.testing.assert_close(token_logps(logits[order], ids[order]), token_logps(logits, ids)[order])
    torch.testing.assert_close(
        sampled_logps(logits[order], ids[order], temperature[order], num_tokens, moved), truncated[order]
    )
    for function in (
        lambda x: token_logps(x, ids),
        token_entropy,
        lambda x: sampled_logps(x, ids, temperature, num_tokens, kept),
    ):
        torch.testing.assert_close(function(logits + 40.0), function(logits))
    padded = torch.cat([logits[:, :num_tokens], torch.full((len(ids), 5), 50.0, dtype=torch.float64)], 1)
    assert torch.equal(sampled_logps(padded, ids, temperature, num_tokens), plain)
    assert torch.equal(sampled_logps(padded, ids, temperature, num_tokens, kept), truncated)
    assert truncated[-1] == plain[-1]
    assert (truncated[:-1] >= plain[:-1]).all()
    everything = (
        torch.arange(num_tokens).repeat(len(ids)),
        torch.arange(len(ids)).repeat_interleave(num_tokens),
    )
    torch.testing.assert_close(sampled_logps(logits, ids, temperature, num_tokens, everything), plain)
    no_kept = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    assert torch.equal(sampled_logps(logits, ids, temperature, num_tokens, no_kept), plain)


def test_temperature_one_and_the_whole_vocabulary_are_the_raw_values_bitwise():
    logits, ids, *_ = random_case(dtype=torch.float32)
    assert torch.equal(
        sampled_logps(logits, ids, torch.ones(len(ids)), logits.shape[1]), token_logps(logits, ids)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_computes_in_float32(dtype):
    logits, ids, temperature, num_tokens, kept = random_case(dtype=torch.float32)
    logits = logits.to(dtype)
    for function in (
        lambda x: token_logps(x, ids),
        token_entropy,
        lambda x: sampled_logps(x, ids, temperature, num_tokens),
        lambda x: sampled_logps(x, ids, temperature, num_tokens, kept),
    ):
        assert function(logits).dtype == torch.float32
        torch.testing.assert_close(function(logits).double(), function(logits.double()), rtol=1e-5, atol=1e-5)


def test_extremes():
    logits = torch.tensor([[0.0, -1e4, -INF]], requires_grad=True)
    unlikely = torch.tensor([1])
    kept = torch.tensor([0, 1]), torch.tensor([0, 0])
    values = [
        token_logps(logits, unlikely),
        sampled_logps(logits, unlikely, torch.ones(1), 3),
        sampled_logps(logits, unlikely, torch.ones(1), 3, kept),
    ]
    assert [value.item() for value in values] == [-1e4] * 3
    assert token_entropy(logits).item() == 0.0
    (sum(values) + token_entropy(logits)).sum().backward()
    assert logits.grad.tolist() == [[-3.0, 3.0, 0.0]]
    assert sampled_logps(logits, unlikely, torch.tensor([1e-3]), 3).item() == pytest.approx(-1e7)


def test_empty():
    logits, ids = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    kept = ids, ids
    for values in (
        token_logps(logits, ids),
        token_entropy(logits),
        sampled_logps(logits, ids, torch.zeros(0), 4, kept),
    ):
        assert values.shape == (0,)
        values.sum().backward()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ConfigError, match="temperature 0"):
        sampled_logps(
            torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.tensor([1.0, temperature]), 3
        )


def test_shapes(unchecked):
    logits = torch.zeros(2, 3)
    ids = torch.zeros(2, dtype=torch.int64)
    ones = torch.ones(2)
    for function in (lambda x: token_logps(x, ids), token_entropy, lambda x: sampled_logps(x, ids, ones, 3)):
        with pytest.raises(ShapeError, match=r"\(1, 2, 3\)"):
            function(logits[None])
    with pytest.raises(ShapeError, match="ids_K"):
        token_logps(logits, ids[:1])
    with pytest.raises(ShapeError, match="ids_K"):
        sampled_logps(logits, ids[:1], ones, 3)
    with pytest.raises(ShapeError, match="temperature_K"):
        sampled_logps(logits, ids, ones[:1], 3)
    with pytest.raises(ShapeError, match="kept_ids_S"):
        sampled_logps(logits, ids, ones, 3, (ids, ids[:1]))
    for num_tokens in (0, 4):
        with pytest.raises(ShapeError, match="num_tokens"):
            sampled_logps(logits, ids, ones, num_tokens)


# The chunked head.


def head_case(num_tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(num_tokens, 4, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(9, 4, generator=generator, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, 9, (num_tokens,), generator=generator)
    functionals = {
        "raw": lambda logits, span: token_logps(logits, ids[span]),
        "entropy": lambda logits, span: token_entropy(logits),
    }
    return hidden, weight, ids, functionals


@pytest.mark.parametrize("num_tokens", [1, 7, 8])
@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 100])
def test_chunks_equal_the_whole(num_tokens, chunk):
    hidden, weight, ids, functionals = head_case(num_tokens)
    outputs = chunked_head(hidden, lambda h: h @ weight.T, functionals, chunk)
    whole = {"raw": token_logps(hidden @ weight.T, ids), "entropy": token_entropy(hidden @ weight.T)}
    coefficients = torch.linspace(-1, 1, num_tokens, dtype=torch.float64)
    gradients = []
    for values in (outputs, whole):
        gradients.append(
            torch.autograd.grad(
                (values["raw"] * coefficients).sum() + values["entropy"].square().sum(), (hidden, weight)
            )
        )
    assert list(outputs) == ["raw", "entropy"]
    for name, value in whole.items():
        torch.testing.assert_close(outputs[name], value)
    for chunked, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, plain)


def test_chunked_gradient():
    hidden, weight, _, functionals = head_case(5)
    assert torch.autograd.gradcheck(
        lambda h, w: tuple(chunked_head(h, lambda x: x @ w.T, functionals, 2).values()), (hidden, weight)
    )


def test_functionals_see_float32_and_their_own_slice():
    seen = []
    values = torch.arange(5.0)

    def functional(logits, span):
        seen.append((logits.dtype, span))
        return values[span]

    with torch.no_grad():
        outputs = chunked_head(
            torch.zeros(5, 4, dtype=torch.bfloat16),
            torch.nn.Linear(4, 9, dtype=torch.bfloat16),
            {"values": functional},
            2,
        )
    assert torch.equal(outputs["values"], values)
    assert seen == [(torch.float32, slice(0, 2)), (torch.float32, slice(2, 4)), (torch.float32, slice(4, 5))]


@pytest.mark.parametrize("chunk", [1, 8])
def test_no_tokens(chunk):
    hidden, weight, _, functionals = head_case(0, torch.float32)
    outputs = chunked_head(hidden, lambda h: h @ weight.T, functionals, chunk)
    assert {name: (value.shape, value.dtype) for name, value in outputs.items()} == {
        name: ((0,), torch.float32) for name in functionals
    }
    other = torch.ones(1, requires_grad=True)
    (outputs["raw"].sum() + outputs["entropy"].sum() + other.sum()).backward()
    assert other.grad.item() == 1.0
    assert (weight.grad == 0).all()


class LiveChunks(TorchDispatchMode):
    """Counts the tensors of at least `size` numbers that exist at once, and records the largest size."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.live = weakref.WeakSet()
        self.most = 0
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.size:
                self.live.add(tensor.untyped_storage())
                self.largest = max(self.largest, tensor.numel())
        self.most = max(self.most, len(self.live))
        return result


def test_the_matrix_is_never_whole_forward_or_backward():
    # 64 chunks of 2 tokens. Kept for the backward pass, each would hold at least two (2, 1000) tensors: 128
    # and more at once.
    hidden = torch.randn(128, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    ids = torch.zeros(128, dtype=torch.int64)
    functionals = {
        "raw": lambda logits, span: token_logps(logits, ids[span]),
        "entropy": lambda logits, span: token_entropy(logits),
    }

    def head(hidden_CD):
        return (hidden_CD[:, None, :] * weight).sum(-1)[:, :999]

    with LiveChunks(size=2 * 999) as watch:
        outputs = chunked_head(hidden, head, functionals, 2)
        (outputs["raw"] + outputs["entropy"]).sum().backward()
    assert watch.largest <= 2 * 4 * 1000
    assert 0 < watch.most <= 24


def test_chunked_head_errors(unchecked):
    hidden, weight, _, functionals = head_case(4)
    with pytest.raises(ConfigError, match="chunk is 0"):
        chunked_head(hidden, lambda h: h @ weight.T, functionals, 0)
    with pytest.raises(ShapeError, match="hidden_KD"):
        chunked_head(hidden[None], lambda h: h @ weight.T, functionals, 2)
    with pytest.raises(ShapeError, match="one row of logits a token"):
        chunked_head(hidden, lambda h: (h @ weight.T)[:1], functionals, 2)
    with pytest.raises(ShapeError, match="functional `mean`"):
        chunked_head(hidden, lambda h: h @ weight.T, {"mean": lambda logits, span: logits.mean()}, 2)
