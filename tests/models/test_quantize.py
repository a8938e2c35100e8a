"""QLoRA: four-bit weights beside an adapter, in learner, engine, checkpoints and exports, with the real
bitsandbytes."""

import builtins
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters import bend, built, engine_in, learner_in, logits
from fixtures import NO_BITSANDBYTES, World, checked, forked, kill_at, logged, make_model, oat
from objectives import row
from tiny_models import FAMILIES, VOCAB_ROWS, build_config, save_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from oat.commands.digest import digest_run
from oat.config.settings import LoraConfig, ModelConfig
from oat.errors import ConfigError
from oat.hardware.roofline import cost_of
from oat.learner.learner import Learner
from oat.learner.models import Critic, LanguageModel
from oat.learner.optimiser import OptimiserSettings
from oat.loop import restore
from oat.models.loading import load_lm
from oat.models.lora import load_model, merged, share_base
from oat.models.nf4 import Nf4Linear, count, functional_of_bitsandbytes
from oat.seeds import Seeds

QLORA = {"model.lora": {"rank": 4, "alpha": 8}, "model.quantize": "nf4"}
NF4 = (
    -1.0,
    -0.6962,
    -0.5251,
    -0.3949,
    -0.2844,
    -0.1848,
    -0.0911,
    0.0,
    0.0796,
    0.1609,
    0.2461,
    0.3379,
    0.4407,
    0.5626,
    0.7230,
    1.0,
)
"""The sixteen values of the paper's Appendix E, to four digits."""


@pytest.fixture(scope="module", autouse=True)
def _bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes", reason=NO_BITSANDBYTES)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return {family: save_model(tmp_path_factory.mktemp(family), build_config(family)) for family in FAMILIES}


def packed(path: str, **lora: Any) -> Any:
    return load_model(ModelConfig(path, lora=LoraConfig(**lora), quantize="nf4"), 3)


def slow_nf4(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the weights in NF4: each block of 64 numbers is divided by its largest and rounded to the
    sixteen values. The scales are not rounded."""
    blocks = weight_OI.flatten().view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = ((blocks / scales)[..., None] - torch.tensor(NF4)).abs().argmin(-1)
    return (torch.tensor(NF4)[nearest] * scales).view_as(weight_OI)


def test_what_is_packed_is_the_papers_format() -> None:
    """Packed weights equal a slow version of the paper's format. The slow version does not round scales to
    eight bits, so a few numbers have a neighbouring value. A weight takes 4.13 bits."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 128)
    made = Nf4Linear(layer)
    expected = slow_nf4(layer.weight.detach())
    is_far = (made.unpacked(torch.float32) - expected).abs() > 0.02 * layer.weight.abs().max()
    assert is_far.float().mean() < 0.01
    assert (made.unpacked(torch.float32) - layer.weight).abs().max() < 0.16 * layer.weight.abs().max()
    bits = 8 * sum(p.nbytes for name, p in made.named_parameters() if name != "bias") / layer.weight.numel()
    assert 4.12 < bits < 4.14


def test_what_is_packed_is_the_same_for_any_number_of_threads() -> None:
    """Packing gives the same bits for any number of threads, although torch adds up 65,536 scales in one part
    per thread. The result also equals bitsandbytes' own, except for the rounding of the scales' mean."""
    torch.manual_seed(0)
    layer, threads = torch.nn.Linear(2048, 2048, bias=False), torch.get_num_threads()
    made = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            made.append(dict(Nf4Linear(layer).named_parameters()))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    functional = functional_of_bitsandbytes()
    packed, state = functional.quantize_4bit(
        layer.weight.detach(), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    assert torch.equal(made[0]["weight"], packed)
    theirs = functional.dequantize_4bit(packed, state)
    torch.testing.assert_close(
        Nf4Linear(layer).unpacked(torch.float32),
        theirs,
        rtol=0,
        atol=0.01 * float(layer.weight.detach().abs().max()),
    )


@pytest.mark.parametrize("shape", [(7, 256), (2, 3, 256), (1, 256)])
def test_product_and_gradient_are_those_of_the_unpacked_weight(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    made = Nf4Linear(torch.nn.Linear(256, 192))
    plain = made.plain()
    x = torch.randn(shape, requires_grad=True)
    y = torch.randn(*shape[:-1], 192)
    found = made(x)
    (found * y).sum().backward()
    ours, x.grad = x.grad, None
    expected = torch.nn.functional.linear(x, plain.weight, plain.bias)
    (expected * y).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, x.grad, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = made(x)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=5e-2, rtol=5e-2)


def test_the_backward_pass_keeps_no_unpacked_weight() -> None:
    made, x = Nf4Linear(torch.nn.Linear(256, 192)), torch.randn(3, 256, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        made(x).sum()
    assert max(kept, default=0) < 256 * 192 // 2


@pytest.mark.sample("qwen3", "llama", seconds=1.5)
@pytest.mark.inventory(112)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_is_the_model_of_its_unpacked_weights(paths: Mapping[str, str], family: str) -> None:
    """A packed model gives the logits of its unpacked weights, in its own attention, with and without an
    adapter. Head and embeddings are bitwise those of the files. Merged, it is a plain model with the same
    logits."""
    ids = torch.randint(0, VOCAB_ROWS, (3, 9), generator=torch.Generator().manual_seed(0))
    whole, lm = load_lm(paths[family]), packed(paths[family], rank=4)
    assert lm.takes_layouts
    layers = [module for module in lm.module.modules() if isinstance(module, Nf4Linear)]
    assert len(layers) == len([m for m in whole.module.modules() if isinstance(m, torch.nn.Linear)]) - 1
    assert torch.equal(lm.module.get_output_embeddings().weight, whole.module.get_output_embeddings().weight)
    start = logits(lm, ids)
    assert (start - logits(whole, ids)).abs().max() > 1e-3
    bend(lm)
    assert torch.equal(logits(lm.base(), ids), start)
    found = logits(lm, ids)
    one = merged(lm)
    assert not [module for module in one.module.modules() if isinstance(module, Nf4Linear)]
    torch.testing.assert_close(logits(one, ids), found, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_compiled_functions_unpack_the_same_weights(tmp_path: Path) -> None:
    """bitsandbytes compiles its functions where the machine has a compiler. All other tests here run them
    uncompiled."""
    unpack = """
import sys, torch
from oat.models.nf4 import Nf4Linear
torch.manual_seed(0)
torch.save(Nf4Linear(torch.nn.Linear(256, 192)).unpacked(torch.float32), sys.argv[1])
"""
    for name, disabled in (("plain", "1"), ("compiled", "0")):
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": disabled}
        subprocess.run([sys.executable, "-c", unpack, str(tmp_path / name)], env=environment, check=True)
    plain, compiled = (torch.load(tmp_path / name) for name in ("plain", "compiled"))
    torch.testing.assert_close(compiled, plain, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("shape", [(192, 256), (1024, 512), (3, 5)])
def test_an_outline_has_the_shapes(shape: tuple[int, int]) -> None:
    layer = torch.nn.Linear(shape[1], shape[0])
    made = Nf4Linear(layer)
    with torch.device("meta"):
        outlined = Nf4Linear(torch.nn.Linear(shape[1], shape[0]))
    assert outlined.unpacked(torch.bfloat16).shape == shape

    def told(of: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {
            name: (tensor.shape, tensor.dtype)
            for name, tensor in (*of.named_parameters(), *of.named_buffers())
        }

    assert told(outlined) == told(made)
    assert made.unpacked(torch.float32).shape == shape


def test_numbers_are_counted_as_they_were_packed(paths: Mapping[str, str]) -> None:
    whole, lm = load_model(ModelConfig(paths["llama"], lora=LoraConfig())), packed(paths["llama"])
    assert {name: n for name, n in count(lm).items() if n} == count(whole)
    assert cost_of(lm) == cost_of(whole)


@pytest.mark.inventory(112)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_step_moves_adapters_and_heads_only(paths: Mapping[str, str], checkpointing: bool) -> None:
    """Policy and critic have their own adapters on the same packed weights. An update changes only adapters
    and heads. Gradient checkpointing gives the same gradient."""
    policy, backbone = packed(paths["llama"], rank=2), packed(paths["llama"], rank=2)
    share_base(backbone, policy)
    critic = Critic(backbone, np.random.default_rng(0))
    models = {"policy": LanguageModel(policy, num_tokens=VOCAB_ROWS), "critic": critic}
    rates = dict.fromkeys(models, OptimiserSettings(1e-2, max_grad_norm=1.0))
    learner = Learner(models, rates, micro_batch_size=8, gradient_checkpointing=checkpointing, seeds=Seeds(0))
    if checkpointing:
        policy.checkpoint_gradients()
        backbone.checkpoint_gradients()
    before = {
        (name, key): p.detach().clone()
        for name, model in models.items()
        for key, p in model.module.named_parameters()
    }
    rows = [row(np.random.default_rng(seed), 4, 3) for seed in range(3)]
    for model in models.values():
        model.module.train(checkpointing)
    for _ in range(2):
        (
            models["policy"].outputs(rows, {}, {"raw"})["raw"].mean()
            + critic.outputs(rows, {}, {"value"})["value"].square().mean()
        ).backward()
        for part in learner.trained.values():
            part.optimiser.step()
    after = {(name, key): p for name, model in models.items() for key, p in model.module.named_parameters()}
    moved = {place for place, tensor in after.items() if not torch.equal(tensor, before[place])}
    assert moved == {place for place in after if "lora_" in place[1]} | {("critic", "score.weight")}
    shared = {p.data_ptr() for name, p in policy.module.named_parameters() if "lora_" not in name}
    assert shared == {p.data_ptr() for name, p in backbone.module.named_parameters() if "lora_" not in name}


@pytest.mark.parametrize("sync_every", [1, 2])
def test_after_a_push_the_engine_answers_as_the_learner(
    world: World, tmp_path: Path, sync_every: int
) -> None:
    """After a push, the engine gives the learner's log-probabilities, and the receipt also covers the packed
    weights. The reference is the packed model with its adapter off."""
    run = built(world, tmp_path, {**QLORA, "learner.sync_every": sync_every})
    learner, engine = learner_in(run), engine_in(run)
    restore(run)
    sequences = [np.array([2, 3, 4, 12, 13, 1], dtype=np.int32)]
    start = engine.logps(sequences, "sampler")[0]
    policy: Any = learner.models["policy"]
    bend(policy.lm)
    run.weights.sync(run.learner, 1)
    ids = torch.from_numpy(sequences[0].astype(np.int64))[None]
    expected = logits(policy.lm, ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(engine.logps(sequences, "sampler")[0], expected, atol=1e-5)
    assert np.abs(expected - start).max() > 1e-3
    assert np.array_equal(engine.logps(sequences, "reference")[0], start)
    assert {name for name in engine.tensors("sampler") if name.endswith(".base_layer.scales")}
    run.ledger.close()


@pytest.fixture(scope="module")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run with a KL to the reference and gradient checkpointing. Tests must not change
    it."""
    folder = tmp_path_factory.mktemp("run")
    assert logged(folder / "log", "train", configuration(world, folder)) == 0, (folder / "log").read_text()
    return folder / "grpo"


def configuration(world: World, folder: Path) -> Path:
    lora = {"rank": 4, "targets": ["q_proj", "down_proj", "lm_head"]}
    changes = {
        **QLORA,
        "model.lora": lora,
        "algorithm.kl_coef": 0.01,
        "learner.gradient_checkpointing": True,
        "checkpoint.every": 1,
    }
    return world.config("grpo", folder, {**changes, "learner.learning_rate": 0.03})


@pytest.mark.slow(instead="tests/learner/test_reference_update.py::test_killed_and_continued", seconds=2.5)
def test_a_killed_run_is_the_unbroken_one(world: World, finished: Path, tmp_path: Path) -> None:
    config = configuration(world, tmp_path)

    def run(kill: int | None = None) -> int:
        def action() -> int:
            if kill:
                kill_at(Learner, "update", kill)
            return oat("train", config)

        return forked(action, tmp_path / "log")

    assert [run(kill=2), run()] == [-signal.SIGKILL, 0], (tmp_path / "log").read_text()
    assert digest_run(tmp_path / "grpo") == digest_run(finished)


def test_what_is_exported(world: World, finished: Path, tmp_path: Path) -> None:
    """The merged export, read by transformers, is the model that learned. The exported adapter belongs to the
    original model files, from which the weights were packed."""
    assert oat("export", finished, tmp_path / "merged") == 0
    assert oat("export", finished, tmp_path / "adapter", "--adapter") == 0
    ids = torch.tensor([[2, 3, 4, 12, 13, 1]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not list((tmp_path / "merged").glob("adapter*"))
    with torch.no_grad():
        plain = theirs(ids).logits
    lora = LoraConfig(4, targets=("down_proj", "lm_head", "q_proj"))
    taken_up = ModelConfig(str(world.folder / "model"), lora=lora, adapter=str(tmp_path / "adapter"))
    quantised = load_model(ModelConfig(taken_up.path, lora=lora, adapter=taken_up.adapter, quantize="nf4"))
    torch.testing.assert_close(logits(quantised, ids), plain, atol=1e-4, rtol=1e-4)
    assert (logits(load_model(taken_up), ids) - plain).abs().max() > 1e-4


@pytest.mark.slow(instead="test_an_outline_has_the_shapes", seconds=7.3)
def test_an_outline_knows_its_size(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`oat check --memory` estimates a four-bit model without loading it. In a wide model, the weights beside
    the adapter take an eighth of those in float32."""
    make_model(tmp_path / "wide", hidden=256, layers=4)

    def held(changes: Mapping[str, Any]) -> tuple[float, tuple[int, int]]:
        config = world.config(
            "dpo", tmp_path, {**changes, "model.path": str(tmp_path / "wide"), "evaluation": None}
        )
        said, _ = checked(capsys, config, "--memory")
        return said["other weights"], (said["parameters"], said["parameters that learn"])

    whole, before = held({"model.lora": {"rank": 4}})
    four, after = held({"model.lora": {"rank": 4}, "model.quantize": "nf4"})
    assert four < 0.2 * whole
    assert before == after


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.quantize": "nf4"}, "weights in four bits cannot be trained; set model.lora"),
        ({**QLORA, "engine.dtype": "bfloat16"}, "the engine would have to pack other weights"),
    ],
)
def test_what_cannot_be(
    world: World, tmp_path: Path, changes: Mapping[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("check", "train"):
        assert oat(command, world.config("dpo", tmp_path, changes)) == 2
        assert words in capsys.readouterr().err


def test_a_model_without_linear_layers(tmp_path: Path) -> None:
    """Quantisation of GPT-2 is refused: it has its own class of layers instead of linear layers."""
    make_model(tmp_path / "model")
    GPT2LMHeadModel(
        GPT2Config(vocab_size=18, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    ).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="a gpt2 has no linear layer besides its head"):
        packed(str(tmp_path / "model"))


def test_without_bitsandbytes_the_message_says_what_to_install(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def lacking(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "bitsandbytes":
            raise ModuleNotFoundError("No module named 'bitsandbytes'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", lacking)
    for command in ("check", "train"):
        assert oat(command, world.config("dpo", tmp_path, QLORA)) == 2
        assert "pip install 'oat-align[quantize]'" in capsys.readouterr().err


def told_by(code: str, folder: Path) -> tuple[int, str, str]:
    """Run code in a process, and return its exit code, output and errors. A package `kernels` there ends the
    process when it is asked for code, as bitsandbytes asks it on processors with AVX-512 for bfloat16."""
    text = "def get_kernel(*_, **__):\n    raise SystemExit('fetched')\n\n\ndef __getattr__(name):\n"
    (folder / "kernels.py").write_text(
        text
        + (
            "    if name.startswith('__'):\n        raise AttributeError(name)\n    return type(name, (), "
            "{})\n"
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.returncode, said.stdout.strip(), said.stderr


@pytest.mark.slow(instead="nothing: a new process has to import bitsandbytes", seconds=6.5)
def test_no_code_is_fetched_when_it_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from oat.models.nf4 import functional_of_bitsandbytes as load; before = "
        "sys.modules.get('kernels'); load(); "
    )
    assert told_by(code + "print(sys.modules.get('kernels') is before)", tmp_path) == (0, "True", "")


@pytest.mark.slow(instead="nothing: a new process has to import bitsandbytes", seconds=6.7)
def test_an_adapter_alone_fetches_no_code_either(paths: Mapping[str, str], tmp_path: Path) -> None:
    """PEFT imports bitsandbytes if it is installed. Loading an adapter must still fetch no code."""
    code = (
        "import sys; from oat.models.lora import load_model; from oat.config.settings import LoraConfig, "
        "ModelConfig; "
    )
    code += (
        f"load_model(ModelConfig({paths['llama']!r}, lora=LoraConfig())); print('bitsandbytes' in "
        "sys.modules)"
    )
    assert told_by(code, tmp_path) == (0, "True", "")
