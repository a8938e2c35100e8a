import math

import pytest
import torch

from oat.errors import ConfigError, ShapeError
from oat.functional.head import linear_functionals
from oat.functional.logprobs import sampled_logps, token_entropy, token_logps
from oat.learner.limits import LiveBytes

K = 11
D = 5
V = 7


def inputs(
    seed: int = 0, dtype: torch.dtype = torch.float64, *, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(K, D, generator=generator, dtype=dtype),
        torch.randn(V, D, generator=generator, dtype=dtype),
    )
    shift = torch.randn(V, generator=generator, dtype=dtype) if bias else None
    return hidden, weight, shift, torch.randint(V - 1, (K,), generator=generator)


def tempered(ids: torch.Tensor):
    return {
        "sampled": lambda logits, span: sampled_logps(
            logits, ids[span], torch.full((len(logits),), 0.7, dtype=logits.dtype), V - 1
        )
    }


def whole(hidden, weight, bias, ids):
    """Return the same functionals, through the full logits and autograd."""
    logits = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    return {
        "raw": token_logps(logits, ids),
        "entropy": token_entropy(logits),
        **{name: f(logits, slice(None)) for name, f in tempered(ids).items()},
    }


def test_by_hand():
    """Two ids have odds of 3 : 1 and 1 : 1, with the logarithm of the odds as hidden state. Values and
    gradients equal those computed by hand."""
    hidden, weight = (
        torch.tensor([[math.log(3)], [0.0]], requires_grad=True),
        torch.tensor([[1.0], [0.0]], requires_grad=True),
    )
    found = linear_functionals(hidden, weight, None, torch.tensor([0, 1]), chunk=1, entropy=True)
    assert found["raw"].tolist() == pytest.approx([math.log(3 / 4), math.log(1 / 2)])
    assert found["entropy"].tolist() == pytest.approx([math.log(4) - 3 / 4 * math.log(3), math.log(2)])
    # d raw / d hidden = w[y] - sum p w: 1 - 3/4 and 0 - 1/2.
    found["raw"].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[:, 0].tolist() == pytest.approx([1 / 4, -1 / 2])
    # d raw / d weight = (onehot - p) h, and the second hidden state is 0.
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([math.log(3) / 4, -math.log(3) / 4])


@pytest.mark.parametrize("chunk", [1, 4, K, 100])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_whole_matrix(chunk, bias):
    *tensors, ids = inputs(bias=bias)
    slopes = torch.randn(3, K, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    both = []
    for function in ("ours", "whole"):
        leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in tensors]
        values = (
            linear_functionals(*leaves, ids, chunk, entropy=True, others=tempered(ids))
            if function == "ours"
            else whole(*leaves, ids)
        )
        assert list(values) == ["raw", "entropy", "sampled"]
        finite = [torch.where(value.isfinite(), value, 0.0) for value in values.values()]
        sum((slope * value).sum() for slope, value in zip(slopes, finite, strict=True)).backward()
        both.append((list(values.values()), [leaf.grad for leaf in leaves if leaf is not None]))
    torch.testing.assert_close(both[0], both[1], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize(
    "wanted", [("raw",), ("entropy",), ("sampled",), ("raw", "entropy"), ("entropy", "sampled")]
)
def test_gradient_of_some_of_the_values(wanted):
    *tensors, ids = inputs(3)

    def function(*leaves):
        values = linear_functionals(*leaves, ids, 4, entropy=True, others=tempered(ids))
        return tuple(values[name] for name in wanted)

    assert torch.autograd.gradcheck(function, [tensor.requires_grad_() for tensor in tensors])


def test_only_what_is_trained_gets_a_gradient():
    hidden, weight, bias, ids = inputs()
    hidden.requires_grad_()
    linear_functionals(hidden, weight, bias, ids, 4)["raw"].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_functionals(hidden, weight, bias, ids, 4)["raw"].requires_grad


def test_impossible_ids():
    """A bias of -inf gives an id the probability 0. Entropy and gradients are finite."""
    *tensors, ids = inputs(5)
    tensors[2][3] = -math.inf
    ids[ids == 3] = 4
    leaves = [tensor.requires_grad_() for tensor in tensors]
    values = linear_functionals(*leaves, ids, 4, entropy=True)
    torch.testing.assert_close(values["entropy"], token_entropy(leaves[0] @ leaves[1].t() + leaves[2]))
    (values["raw"] + values["entropy"]).sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_products_in_bfloat16_are_near_and_gradients_keep_the_weights_type():
    *tensors, ids = inputs(7, torch.float32, bias=False)
    leaves = [tensor.requires_grad_() for tensor in tensors[:2]]
    near = linear_functionals(*leaves, None, ids, 4, dtype=torch.bfloat16)["raw"]
    exact = linear_functionals(*leaves, None, ids, 4)["raw"]
    assert near.dtype == torch.float32
    assert 0 < (near - exact).abs().max() < 0.1
    near.sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.float32] * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = (leaves[0] @ leaves[1].t()).float().log_softmax(-1)[torch.arange(K), ids]
    torch.testing.assert_close(near, expected)


def test_the_entropy_of_a_nearly_certain_token_keeps_its_digits():
    """The logits lie around 30; the largest is 10 or 14 above the others."""
    logits = torch.full((2, V), 30.0)
    logits[:, 0] += torch.tensor([10.0, 14.0])
    ids = torch.zeros(2, dtype=torch.long)
    found = linear_functionals(logits, torch.eye(V), None, ids, 4, entropy=True)["entropy"]
    torch.testing.assert_close(found.double(), token_entropy(logits.double()), rtol=1e-3, atol=0)


def test_no_tokens():
    hidden, weight, bias, _ = inputs()
    leaf = weight.requires_grad_()
    values = linear_functionals(hidden[:0], leaf, bias, torch.empty(0, dtype=torch.long), 4, entropy=True)
    assert [len(value) for value in values.values()] == [0, 0]
    values["raw"].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() == 0


def test_neither_logits_nor_their_gradient_is_ever_whole():
    """The head is computed in 64 chunks of 2 tokens, and only a few tensors of a chunk's size exist at once.
    The gradient of the weights is the only larger tensor."""
    hidden, weight = torch.randn(128, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with LiveBytes() as bytes_:
        values = linear_functionals(
            hidden, weight, None, torch.zeros(128, dtype=torch.int64), 2, entropy=True
        )
        (values["raw"] + values["entropy"]).sum().backward()
    assert bytes_.peak < 2 * weight.nbytes + 8 * 2 * 1000 * 4


def test_refusals(unchecked):
    hidden, weight, bias, ids = inputs()
    with pytest.raises(ShapeError, match="give"):
        linear_functionals(hidden[:, :4], weight, bias, ids, 4)
    with pytest.raises(ConfigError, match="chunk is 0"):
        linear_functionals(hidden, weight, bias, ids, 0)
