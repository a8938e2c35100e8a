"""Matrix products by oneDNN, compared with torch's own by MKL, for any size, on any processor with oneDNN."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT, NUM_TOKENS, VOCAB_ROWS, build_config, build_tokenizer, save_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from oat.engines.torch import TorchEngine
from oat.functional import products
from oat.functional.head import linear_functionals
from oat.models.linear import use_fast_matmul
from oat.models.loading import load_lm
from oat.models.lora import add_adapter
from oat.seeds import Seeds
from oat.types import Request, Sampling

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)
SHAPES = [(1, 512, 4096), (70, 3, 5), (64, 512, 512), (1030, 40, 90), (1030, 90, 40), (5, 1, 1)]


@pytest.fixture
def onednn(monkeypatch):
    monkeypatch.setattr(products, "_LEAST", 1)
    monkeypatch.setattr(products, "_is_faster", lambda: True)


@pytest.fixture
def calls(monkeypatch):
    """Return the list of shapes for which oneDNN was called."""
    seen, product = [], products._onednn
    monkeypatch.setattr(
        products,
        "_onednn",
        lambda a, b, bias=None: seen.append((len(a), a.shape[1], len(b))) or product(a, b, bias),
    )
    return seen


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return found.shape == exact.shape and bool((found.double() - exact).norm() <= 2e-6 * exact.norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["rows", "columns", "three axes"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, layout, bias, onednn, calls):
    rows, width, out = shape
    generator = torch.Generator().manual_seed(0)
    x, weight, slope = (
        torch.randn(*size, generator=generator) for size in ((rows, width), (out, width), (rows, out))
    )
    if layout == "columns":
        x, weight, slope = (tensor.T.contiguous().T for tensor in (x, weight, slope))
    given = [x, weight, *([torch.randn(out, generator=generator)] if bias else [])]
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    exact = [tensor.double().requires_grad_() for tensor in given]
    made = products.linear(leaves[0][None] if layout == "three axes" else leaves[0], *leaves[1:])
    assert made.shape[:-1] == ((1, rows) if layout == "three axes" else (rows,))
    expected = F.linear(*exact)
    assert near(made.detach().reshape(rows, out), expected.detach())
    gradients = torch.autograd.grad(made, leaves, slope.view_as(made))
    for found, wanted in zip(gradients, torch.autograd.grad(expected, exact, slope.double()), strict=True):
        assert near(found, wanted)
    assert len(calls) == 3
    with torch.no_grad():
        assert torch.equal(products.linear(*leaves), made.detach().reshape(rows, out))
        assert near(products.product(x, weight), x.double() @ weight.double().T)


def test_a_gradient_that_repeats_one_number(onednn):
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    products.linear(x, weight).sum().backward()
    assert near(x.grad, weight.detach().double().sum(0).expand(3, 4))
    assert near(weight.grad, x.detach().double().sum(0).expand(5, 4))


def test_only_what_is_asked_for_is_computed(onednn, calls):
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    products.linear(x.requires_grad_(), weight).sum().backward()
    products.linear(x.detach(), weight.requires_grad_()).sum().backward()
    assert len(calls) == 4


@pytest.mark.parametrize("rows", [1, 700])
def test_a_product_is_added(rows, onednn, monkeypatch):
    monkeypatch.setattr(products, "_BLOCK", 900)
    total = torch.randn(rows, 30)
    a = torch.randn(rows, 20)
    b = torch.randn(30, 20)
    expected = total.double() + a.double() @ b.double().T
    products.add_product(total, a, b)
    assert near(total, expected)


def test_what_is_left_to_torch(onednn, calls, monkeypatch):
    """Torch computes products of other precisions, small products, and all products if oneDNN is turned
    off."""
    for dtype in (torch.float64, torch.bfloat16):
        x, weight = torch.randn(8, 16).to(dtype), torch.randn(4, 16).to(dtype)
        assert torch.equal(products.linear(x, weight), F.linear(x, weight))
        assert torch.equal(products.product(x, weight), x @ weight.T)
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert products.linear(x, weight).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    monkeypatch.setattr(products, "_LEAST", 8 * 16 * 4 + 1)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    assert calls == []


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_where_it_is_faster(vendor, capability, faster, monkeypatch):
    monkeypatch.setattr(products, "_vendor", lambda: f"vendor_id\t: {vendor}")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products._is_faster.__wrapped__() is faster
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not products._is_faster.__wrapped__()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("width", "out"), [(512, 512), (512, 2048), (2048, 512), (256, 4096), (33, 70)])
def test_a_row_does_not_depend_on_the_others_nor_on_its_place(width, out, threads, onednn):
    """A row of a product is bitwise the same at any place and beside any other rows. The numbers of rows are
    those of the deterministic engine."""
    generator = torch.Generator().manual_seed(0)
    torch.set_num_threads(threads)
    try:
        for rows in (64, 128, 256):
            x, weight = (
                torch.randn(rows, width, generator=generator),
                torch.randn(out, width, generator=generator),
            )
            made, order = products.product(x, weight), torch.randperm(rows, generator=generator)
            assert torch.equal(products.product(x[order], weight), made[order])
            assert torch.equal(products.product(torch.cat([x[:1], x[:1] + x[1:]]), weight)[0], made[0])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("entropy", [True, False])
def test_the_head(entropy, onednn, calls):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*size, generator=generator) for size in ((50, 16), (300, 16), (300,)))
    ids = torch.randint(0, 300, (50,), generator=generator)
    found, exact = (
        [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]
        for dtype in (torch.float32, torch.float64)
    )
    values = linear_functionals(*found, ids, 20, entropy=entropy)
    assert calls
    logps = F.linear(*exact).log_softmax(-1)
    expected = {
        "raw": logps.gather(1, ids[:, None])[:, 0],
        **({"entropy": -(logps.exp() * logps).sum(-1)} if entropy else {}),
    }
    for name, wanted in expected.items():
        assert near(values[name].detach(), wanted.detach())
    sums = (sum(value.square().sum() for value in some.values()) for some in (values, expected))
    for gradient, wanted in zip(
        *(torch.autograd.grad(total, leaves) for total, leaves in zip(sums, (found, exact), strict=True)),
        strict=True,
    ):
        assert near(gradient, wanted)


CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=VOCAB_ROWS,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=90,
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_ROWS, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_computes_the_same_and_is_the_same(family, onednn, calls):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    quick = AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    quick.load_state_dict(plain.state_dict())
    use_fast_matmul(quick)
    assert list(quick.state_dict()) == list(plain.state_dict())
    assert all(
        isinstance(layer, type(other)) for layer, other in zip(quick.modules(), plain.modules(), strict=True)
    )
    ids = torch.arange(40)[None] % VOCAB_ROWS
    for module in (quick, plain):
        module(input_ids=ids).logits.log_softmax(-1)[0, :, 1].sum().backward()
        assert calls, "the first of them computes with oneDNN"
    count = len(calls)
    plain(input_ids=ids)
    assert len(calls) == count
    for (name, found), (_, expected) in zip(quick.named_parameters(), plain.named_parameters(), strict=True):
        assert found.grad is not None, name
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-5)


def test_a_loaded_model_has_them_and_lora_goes_on_top(tmp_path, onednn, calls):
    lm = load_lm(save_model(tmp_path, build_config("llama")))
    assert lm.linear_head() is not None
    assert calls
    lm = add_adapter(lm, rank=2, alpha=4.0, targets="all-linear", seed=0)
    lm.hidden(torch.arange(6)[None]).sum().backward()
    learned = [name for name, parameter in lm.module.named_parameters() if parameter.grad is not None]
    assert learned
    assert all("lora_" in name for name in learned)


def test_the_deterministic_engine_stays_so(tmp_path, onednn, calls):
    lm = load_lm(save_model(tmp_path, build_config("qwen3")))
    engine = TorchEngine(
        {"sampler": lm},
        num_tokens=NUM_TOKENS,
        stop_ids=[0],
        decode=build_tokenizer().decode,
        deterministic=True,
    )
    generator = np.random.default_rng(0)
    keys = Seeds(0)
    requests = [
        Request(
            generator.integers(1, NUM_TOKENS, CONTEXT // 4).astype(np.int32),
            Sampling(6),
            keys.key("test", number),
        )
        for number in range(20)
    ]
    together = {completion.index: completion for completion in engine.generate(requests, "sampler")}
    assert calls
    for index in (0, 7, 19):
        (alone,) = engine.generate([requests[index]], "sampler")
        assert alone.ids.tobytes() == together[index].ids.tobytes()
        assert alone.raw_logps.tobytes() == together[index].raw_logps.tobytes()


KERNELS = """
import torch
from oat.functional import products
from oat.hardware.memory import keep_few_kernels
keep_few_kernels()
products._LEAST, products._is_faster = 1, lambda: True
x, weight = torch.randn(600, 64), torch.randn(64, 64)
def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024
def use(counts):
    for count in counts:
        products.product(x[:count], weight)
use(range(1, 150))
before = held()
use(range(150, 600))
print(held() - before)
"""


@pytest.mark.slow(instead="the other tests of tests/functional/test_products.py", seconds=1.9)
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_few_kernels_are_kept():
    """A bounded cache of oneDNN's kernels keeps memory below 60 MB. Without the bound, 450 more kernels would
    take 200 MB."""
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    done = subprocess.run(
        [sys.executable, "-c", KERNELS], capture_output=True, text=True, check=True, env=environment
    )
    assert float(done.stdout) < 60


@pytest.mark.parametrize(
    "bias", [torch.arange(10.0)[::2], torch.tensor([3.0]).expand(5), torch.tensor(2.0), torch.ones(1)]
)
def test_a_bias_that_is_laid_out_otherwise(bias, onednn):
    x, weight = torch.randn(6, 4), torch.randn(5, 4)
    torch.testing.assert_close(products.linear(x, weight, bias), x @ weight.T + bias)
    torch.testing.assert_close(products.linear(x[0], weight, bias), x[0] @ weight.T + bias)


def test_only_what_the_gradient_needs_is_kept(onednn):
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    for given, kept in (
        ((x, weight.detach()), [(5, 4)]),
        ((x.detach(), weight), [(6, 4)]),
        ((x, weight), [(6, 4), (5, 4)]),
    ):
        seen: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, seen=seen: seen.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
        ):
            products.linear(*given)
        assert seen == kept
