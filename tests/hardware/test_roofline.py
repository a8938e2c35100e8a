"""The cost of a pass, compared with torch's own counter and with plain arithmetic over the sampled and
learned tokens; and the measured rates."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import KEYS, build_engine, run
from fixtures import World, forked, oat
from objectives import row
from tiny_models import FAMILIES, NUM_TOKENS, build_config, save_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, MixtralConfig

from oat.engines.paged_cache import PAGE
from oat.hardware.roofline import LARGEST, Cost, Rates, Stopwatch, bandwidth, cost_of, matrix_rate, rates_of
from oat.learner.models import Critic, LanguageModel
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm
from oat.models.lora import add_adapter
from oat.rollout.recorded import RecordedActor
from oat.types import Request, Sampling, Segment, Trajectory

INFINITE = float("inf")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    configs = {family: build_config(family) for family in FAMILIES}
    configs["gpt2"] = GPT2Config(
        vocab_size=44, n_positions=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return {
        name: save_model(tmp_path_factory.mktemp(name), config, scale=1.0) for name, config in configs.items()
    }


def counted(lm: CausalLM, tokens: int, *, learning: bool) -> int:
    """Return the operations of matrix products in a pass over one sequence, as torch counts them during the
    pass. Every token sees every token."""
    lm.module.set_attn_implementation("eager")
    ids = torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(learning):
        logits = lm.head(lm.hidden(ids))
        if learning:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("learning", [False, True], ids=["forward", "learning"])
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2"])
def test_operations_are_those_that_torch_counts(paths: dict[str, str], family: str, learning: bool) -> None:
    lm = load_lm(paths[family])
    assert cost_of(lm).flops(20, 400, 20, learning=learning) == counted(lm, 20, learning=learning)


def test_an_adapter_costs_its_own_matrices_and_no_gradient_of_others(paths: dict[str, str]) -> None:
    """A forward pass with an adapter costs what torch counts. A learning pass also counts some gradients that
    the first layer does not need: those of its input, of keys and of values."""
    plain = cost_of(load_lm(paths["llama"]))
    lm = add_adapter(load_lm(paths["llama"]), rank=4, alpha=8, targets=("q_proj", "down_proj"), seed=0)
    for name, parameter in lm.module.named_parameters():
        parameter.requires_grad_(name in lm.trainable())
    adapted, adapter = cost_of(lm), 2 * (4 * (32 + 32) + 4 * (45 + 32))
    assert (adapted.backbone, adapted.head) == (plain.backbone + adapter, plain.head)
    assert (adapted.trained_backbone, adapted.trained_head) == (adapter, 0)
    assert cost_of(lm.base()) == replace(plain, trained_backbone=0, trained_head=0)
    assert adapted.flops(20, 400, 20) == counted(lm, 20, learning=False)
    query_key_value, attended = 2 * 20 * (32 * 32 + 2 * 16 * 32 + 4 * 32), 2 * 2 * 4 * 8 * 400
    assert (
        adapted.flops(20, 400, 20, learning=True)
        == counted(lm, 20, learning=True) + query_key_value + attended
    )


def test_of_experts_only_those_that_a_token_goes_through_count(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    config = MixtralConfig(
        vocab_size=44, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=48, **shape
    )
    cost = cost_of(load_lm(save_model(tmp_path, config)))
    a_layer = 2 * 32 * 32 + 2 * 16 * 32 + 4 * 32 + 2 * 3 * 32 * 48
    assert (cost.backbone, cost.head, cost.attention) == (2 * a_layer, 44 * 32, 4 * 2 * 4 * 8)


def engine_work(
    monkeypatch: pytest.MonkeyPatch, engine: Any, rates: Rates, requests: list[Request]
) -> tuple[float, list[int]]:
    """Return the least seconds at the given rates, and the length of each completion."""
    monkeypatch.setattr("oat.hardware.roofline.rates_of", lambda *_: rates)
    before = engine.work()
    lengths = [len(completion.ids) for completion in run(engine, requests)]
    after = engine.work()
    assert after.seconds > before.seconds
    return after.least_s - before.least_s, lengths


PROMPTS = (19, 5, 3)


def requests() -> list[Request]:
    """Return three samples of each prompt."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, NUM_TOKENS, length).astype(np.int32) for length in PROMPTS]
    return [
        Request(ids, Sampling(12), KEYS.key("rates", place, sample))
        for place, ids in enumerate(prompts)
        for sample in range(3)
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_engine_counts_what_its_completions_need(
    paths: dict[str, str], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine counts the operations of a prompt once for all its samples. In fixed batches it counts them
    for each sample. Idle rows and padding do not count."""
    lm = load_lm(paths["llama"])
    cost, engine = cost_of(lm), build_engine(lm, deterministic=deterministic)
    flops, lengths = engine_work(monkeypatch, engine, Rates(INFINITE, 1.0), requests())
    assert len(set(lengths)) > 2
    prompts = [length for length in PROMPTS for _ in range(3 if deterministic else 1)]
    expected = sum(cost.flops(length, length * (length + 1) // 2, 0) for length in prompts)
    for prompt, made in zip(np.repeat(PROMPTS, 3), lengths, strict=True):
        expected += made * cost.flops(0, 0, 1) + sum(
            cost.flops(1, int(prompt) + token, 0) for token in range(1, made)
        )
    assert flops == expected


def test_the_engine_counts_the_bytes_that_a_step_reads(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine counts the bytes of the weights and of the keys that rows read. Full pages of a common
    prompt count once."""
    lm = load_lm(paths["llama"])
    cost, engine = cost_of(lm), build_engine(lm)
    size, lengths = engine_work(monkeypatch, engine, Rates(1.0, INFINITE), requests())
    steps, keys = max(lengths), 0
    for token in range(1, steps):
        for place, prompt in enumerate(PROMPTS):
            alive = sum(made > token for made in lengths[3 * place : 3 * place + 3])
            common = prompt // PAGE * PAGE
            keys += (common if alive else 0) + alive * (prompt + token - common)
    key_bytes = 2 * 2 * 2 * 8 * 4
    assert size == 4 * (steps * (cost.backbone + cost.head)) + keys * key_bytes


def test_a_step_takes_the_larger_of_both_times(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, all_of_them = build_engine(load_lm(paths["llama"])), requests()
    rates = (Rates(INFINITE, 4.0), Rates(1.0, INFINITE), Rates(1.0, 4.0))
    parts = [engine_work(monkeypatch, engine, both, all_of_them)[0] for both in rates]
    assert max(parts[:2]) < parts[2] < sum(parts[:2])


def test_nothing_is_counted_before_somebody_asks(paths: dict[str, str]) -> None:
    engine = build_engine(load_lm(paths["llama"]))
    run(engine, requests())
    assert (engine.work().seconds, engine.work().least_s) == (0.0, 0.0)
    assert RecordedActor(None, ()).work().seconds == 0.0  # type: ignore[arg-type]


def prompted(prompt: np.ndarray, responses: list[int]) -> list[Trajectory]:
    rows = [row(np.random.default_rng(number), 1, size) for number, size in enumerate(responses)]
    return [
        Trajectory("sampler", (Segment("context", prompt), rows[number].segments[1]), "stop", "")
        for number in range(len(rows))
    ]


MODELS: dict[str, Callable[[CausalLM], Any]] = {
    "policy": lambda lm: LanguageModel(lm, num_tokens=NUM_TOKENS, chunk=64),
    "critic": lambda lm: Critic(lm, np.random.default_rng(0)),
}


@pytest.mark.parametrize("takes_layouts", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_counts_the_tokens_of_its_passes(
    paths: dict[str, str], name: str, takes_layouts: bool
) -> None:
    """A model counts the operations of the tokens in its passes. If rows are packed, their common prompt is
    one sequence. Padding does not count."""
    lm = load_lm(paths["llama"])
    lm.takes_layouts = takes_layouts
    model = MODELS[name](lm)
    rows = prompted(np.arange(20), [6, 2])
    wants = {"value" if name == "critic" else "raw"}
    prompts = [20] if takes_layouts else [20, 20]
    tokens = sum(prompts) + 8
    pairs = sum(n * (n + 1) // 2 for n in prompts) + sum(range(21, 27)) + sum(range(21, 23))
    heads = 0 if name == "critic" else 8
    with torch.no_grad():
        model.outputs(rows, {}, wants)
    assert model.work_counter.flops == model.work_counter.cost.flops(tokens, pairs, heads)
    before = model.work_counter.flops
    model.outputs(rows, {}, wants)
    assert model.work_counter.flops - before == model.work_counter.cost.flops(
        tokens, pairs, heads, learning=True
    )


def test_a_stopwatch_adds_up_what_is_within_it(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stopwatch adds up the work within it, each model at the rate of its precision. Work outside does
    not count."""
    rates, clock = {torch.float32: 1000.0, torch.bfloat16: 4000.0}, iter(range(100))
    models = [
        LanguageModel(load_lm(paths["llama"]), num_tokens=NUM_TOKENS, chunk=64, autocast=autocast)
        for autocast in (False, True)
    ]
    stopwatch, rows = Stopwatch([model.work_counter for model in models]), prompted(np.arange(4), [3])
    flops = models[0].work_counter.cost.flops(7, 28, 3, learning=True)
    monkeypatch.setattr("oat.hardware.roofline.matrix_rate", lambda device, threads, dtype: rates[dtype])
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    for _ in range(2):
        for model in models:
            model.outputs(rows, {}, {"raw"})
            with stopwatch:
                model.outputs(rows, {}, {"raw"})
        assert stopwatch.end() == pytest.approx(flops * (1 / 1000 + 1 / 4000) / 2)
        assert stopwatch.end() is None


def test_rates_are_measured_once_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for measured in (bandwidth, matrix_rate):
        measured.cache_clear()
    found = [
        bandwidth("cpu", 1, 2**20),
        *(matrix_rate("cpu", 1, dtype) for dtype in (torch.float32, torch.bfloat16)),
    ]
    assert all(10**6 < rate < 10**16 for rate in found)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    monkeypatch.setattr("oat.hardware.roofline._least_s", lambda *_: pytest.fail("measured again"))
    assert [
        bandwidth("cpu", 1, 2**20),
        *(matrix_rate("cpu", 1, dtype) for dtype in (torch.float32, torch.bfloat16)),
    ] == found


def test_weights_are_read_from_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oat.hardware.roofline.bandwidth", lambda device, threads, size: float(size))
    monkeypatch.setattr("oat.hardware.roofline.matrix_rate", lambda device, threads, dtype: 1.0)
    for elements, size in ((1, 2**20), (2**20, 2**22), (2**20 + 2**19, 2**22), (10**9, LARGEST)):
        cost = Cost(elements, 0, 0, 0, 0, torch.float32)
        assert rates_of(torch.device("cpu"), 1, cost).bandwidth == size


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.sample("grpo-True", seconds=0.6)
@pytest.mark.parametrize(("algorithm", "serialise"), [("dpo", False), ("grpo", False), ("grpo", True)])
def test_every_step_of_a_run_says_what_share_it_reached(
    algorithm: str, serialise: bool, world: World, tmp_path: Path
) -> None:
    assert oat("train", world.config(algorithm, tmp_path, {"compute.serialise": serialise})) == 0
    rows = rows_of(tmp_path / algorithm)
    assert [name for name in rows[0] if name.startswith("roofline/")] == []
    assert all(
        0 < row[name] < 1
        for row in rows[1:]
        for name in ("roofline/decode", "roofline/update", "roofline/padded_keys")
    )


def test_a_replayed_step_sampled_nothing(world: World, tmp_path: Path) -> None:
    config, log = world.config("grpo", tmp_path, {"tracking.keep_trajectories": True}), tmp_path / "log"
    assert forked(lambda: oat("train", config), log) == 0
    shutil.rmtree(tmp_path / "grpo" / "checkpoints")
    assert forked(lambda: oat("train", config), log) == 0, log.read_text()
    rows = rows_of(tmp_path / "grpo")[1:]
    assert ["roofline/decode" in row for row in rows] == [False] * 4
    assert all("roofline/update" in row for row in rows)
