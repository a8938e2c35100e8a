"""Settings of the learner's computation, and the results that they may not change: bfloat16 autocast,
gradient checkpointing, limits of a forward pass."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, forked, gradient_of, logged, made, oat
from objectives import OBJECTIVES, VOCABULARY, Poisoned, compared_feedback, row, scored_feedback
from tiny_models import FAMILIES, NUM_TOKENS, build_config, save_llama, save_model
from weights import weights_of

from oat.algorithms.direct import DPOConfig
from oat.assemble.run import build
from oat.commands.digest import digest_run
from oat.config.load import load_config, to_yaml
from oat.engines.torch import TorchEngine
from oat.errors import ConfigError, ModelError, NonFiniteError
from oat.learner import limits
from oat.learner.batching import micro_batches
from oat.learner.learner import Learner
from oat.learner.limits import GB, Limits, LiveBytes, measure_tokens, most_within
from oat.learner.models import Critic, LanguageModel
from oat.learner.optimiser import OptimiserSettings, build_optimiser
from oat.models.loading import load_lm
from oat.resolve.fixed import as_stored, with_chosen
from oat.resolve.resolve import resolve
from oat.seeds import Seeds
from oat.types import Batch, Request, Sampling

FEEDBACK = {"dpo": compared_feedback, "grpo": scored_feedback}


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with weights as large as in real models, so that rounding is not amplified. Return its
    path."""
    path = tmp_path_factory.mktemp("smooth")
    return save_llama(path, vocab_size=VOCABULARY, hidden=32, inner=48, spread=0.1)


def learner_of(
    path: Path,
    *,
    autocast: bool = False,
    checkpointing: bool = False,
    chunk: int = 4096,
    tokens: int | None = None,
) -> Learner:
    models = {
        name: LanguageModel(load_lm(str(path)), num_tokens=VOCABULARY, chunk=chunk, autocast=autocast)
        for name in ("policy", "reference")
    }
    with torch.no_grad():
        for parameter in models["reference"].module.parameters():
            parameter.add_(0.05 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    if checkpointing:
        models["policy"].lm.checkpoint_gradients()
    limit: dict[str, Any] = {"micro_batch_size": None, "micro_batch_tokens": tokens}
    return Learner(
        models,
        {"policy": OptimiserSettings(1e-3)},
        gradient_checkpointing=checkpointing,
        seeds=Seeds(0),
        **limit,
    )


def update(learner: Learner, name: str) -> tuple[float, torch.Tensor]:
    """Return the loss and the gradient of one optimiser step."""
    objective: Any = OBJECTIVES[name]()
    batch = objective.prepare(FEEDBACK[name](), learner.forward, np.random.default_rng(0))
    report, found = gradient_of(learner, lambda: learner.update(objective, batch))
    return report["loss/total"], torch.cat([part.flatten() for part in found.values()])


def equal(one: Learner, other: Learner) -> bool:
    mine, theirs = weights_of(one), weights_of(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("chunk", [4096, 5])
@pytest.mark.parametrize("name", FEEDBACK)
def test_the_gradient_in_bfloat16_is_near_that_in_float32(smooth: Path, name: str, chunk: int) -> None:
    """With autocast to bfloat16, the gradient is close to the one in float32. Weights, moments and gradients
    stay float32."""
    loss, exact = update(learner_of(smooth, chunk=chunk), name)
    learner = learner_of(smooth, autocast=True, chunk=chunk)
    rounded_loss, rounded = update(learner, name)
    assert 0 < (rounded - exact).norm() <= 2e-2 * exact.norm()
    assert rounded_loss == pytest.approx(loss, abs=2e-2)
    moments = [
        moment for state in learner.trained["policy"].optimiser.state.values() for moment in state.values()
    ]
    assert {tensor.dtype for tensor in (*weights_of(learner).values(), *moments, rounded)} == {torch.float32}


def test_what_a_model_gives_in_bfloat16_is_float32(smooth: Path) -> None:
    rows = [row(np.random.default_rng(5), 4, 3), row(np.random.default_rng(6), 2, 7)]
    for autocast in (False, True):
        model = LanguageModel(load_lm(str(smooth)), num_tokens=VOCABULARY, chunk=4, autocast=autocast)
        critic = Critic(load_lm(str(smooth)), np.random.default_rng(0), autocast=autocast)
        outputs = {
            **model.outputs(rows, {}, {"raw", "sampled", "entropy"}),
            **critic.outputs(rows, {}, {"value"}),
        }
        assert {values.dtype for values in outputs.values()} == {torch.float32}
        if not autocast:
            exact = outputs
    for want, values in outputs.items():
        assert not torch.equal(values, exact[want])
        torch.testing.assert_close(values, exact[want], atol=3e-2, rtol=0)


def test_bfloat16_is_bitwise_repeatable(smooth: Path) -> None:
    one, other = learner_of(smooth, autocast=True), learner_of(smooth, autocast=True)
    for learner in (one, other):
        for name in FEEDBACK:
            update(learner, name)
    assert equal(one, other)
    assert not equal(one, learner_of(smooth, autocast=True))


@pytest.fixture(scope="module")
def runs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return finished runs of GRPO in float32 and in bfloat16, with many samples and a reward for one
    letter."""
    found = {}
    for name, autocast in (("float32", None), ("bfloat16", "bfloat16")):
        folder = tmp_path_factory.mktemp(name)
        changes = {
            "learner.autocast": autocast,
            "algorithm.samples": 8,
            "stop.max_steps": 12,
            "evaluation.every": 12,
            "evaluation.samples": 16,
        }
        config = world.config("grpo", folder, {**changes, "learner.learning_rate": 0.01})
        assert logged(folder / "log", "train", config) == 0
        found[name] = folder / "grpo"
    return found


@pytest.mark.slow(instead="test_bfloat16_is_bitwise_repeatable, and the numbers of one update", seconds=2.7)
def test_learning_in_bfloat16_raises_the_reward(runs: Mapping[str, Path]) -> None:
    for run in runs.values():
        rows = rows_of(run)
        assert rows[-1]["eval/sampled"] > rows[0]["eval/sampled"] + 0.8


def test_old_log_probabilities_are_the_learners_own(runs: Mapping[str, Path]) -> None:
    """The engine samples in float32. With autocast to bfloat16 the learner computes the old log-probabilities
    itself, so the first ratio is exactly 1. The metric `logps/recorded_gap` is the distance of the learner's
    log-probabilities to the recorded ones."""
    for row_ in rows_of(runs["float32"])[1:]:
        assert row_["logps/recorded_gap"] < 1e-6
        assert row_["logps/recomputed"] == 0
        assert row_["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    for row_ in rows_of(runs["bfloat16"])[1:]:
        assert 0 < row_["logps/recorded_gap"] < 0.05
        assert row_["logps/recomputed"] == 1
        assert (row_["policy/ratio_min"], row_["policy/ratio_max"]) == (1, 1)


def test_weights_in_bfloat16_are_refused_by_name(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config("dpo", tmp_path, {"model.dtype": "bfloat16"})
    assert oat("train", config) == 2
    assert (
        "model.dtype is 'bfloat16': AdamW loses most of its steps on such weights; keep float32, set "
        "learner.autocast"
    ) in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"learner\.autocast: bfloat16"):
        build_optimiser(
            load_lm(str(world.folder / "model"), dtype="bfloat16").module.parameters(),
            OptimiserSettings(1e-3),
        )


def saved_bytes(learner: Learner) -> int:
    """Return the bytes that the forward pass of an update keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        update(learner, "grpo")
    weights = {tensor.untyped_storage().data_ptr() for tensor in weights_of(learner).values()}
    return sum(size for place, size in sizes.items() if place not in weights)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", FEEDBACK)
def test_gradient_checkpointing_changes_neither_loss_nor_gradient(
    smooth: Path, name: str, autocast: bool
) -> None:
    kept, computed = (
        learner_of(smooth, autocast=autocast),
        learner_of(smooth, autocast=autocast, checkpointing=True),
    )
    (loss, gradient), (other_loss, other) = update(kept, name), update(computed, name)
    assert other_loss == loss
    assert (other - gradient).norm() <= 1e-6 * gradient.norm()


def test_gradient_checkpointing_keeps_less(smooth: Path) -> None:
    assert saved_bytes(learner_of(smooth, checkpointing=True)) < 0.5 * saved_bytes(learner_of(smooth))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_leaves_the_engines_cache_alone(family: str, tmp_path: Path) -> None:
    """The engine still uses its cache after a step with gradient checkpointing. Transformers drops the cache
    in training mode, so the learner leaves this mode after each step, even after one that failed."""
    lm = load_lm(save_model(tmp_path, build_config(family)))
    requests = [Request(np.arange(1, 4 + size, dtype=np.int32), Sampling(8), key=size) for size in range(3)]

    def sampled() -> list[list[int]]:
        engine = TorchEngine({"policy": lm}, num_tokens=NUM_TOKENS, stop_ids=[0], decode=lambda ids: "")
        return [
            completion.ids.tolist()
            for completion in sorted(
                engine.generate(requests, "policy"), key=lambda completion: completion.index
            )
        ]

    before = sampled()
    lm.checkpoint_gradients()
    assert sampled() == before
    models = {name: LanguageModel(lm, num_tokens=NUM_TOKENS, chunk=64) for name in ("policy", "reference")}
    options: dict[str, Any] = {"micro_batch_size": 4, "seeds": Seeds(0)}
    learner = Learner(
        models, {"policy": OptimiserSettings(1e-3, max_grad_norm=1.0)}, gradient_checkpointing=True, **options
    )
    objective = Poisoned(DPOConfig(prompts=6), "loss")
    with pytest.raises(NonFiniteError):
        learner.update(
            objective, objective.prepare(compared_feedback(), learner.forward, np.random.default_rng(0))
        )
    assert not lm.module.training
    assert sampled() == before


@pytest.mark.slow(instead="test_gradient_checkpointing_changes_neither_loss_nor_gradient", seconds=1.5)
def test_a_run_with_gradient_checkpointing_is_the_run_without(world: World, tmp_path: Path) -> None:
    """A run alternates sampling, learning and evaluation with gradient checkpointing. Its answers and scores
    equal those of the run without it."""
    ends = []
    for checkpointing in (False, True):
        folder = tmp_path / str(checkpointing)
        folder.mkdir()
        config = world.config("dpo", folder, {"learner.gradient_checkpointing": checkpointing})
        assert logged(folder / "log", "train", config) == 0
        ends.append((digest_run(folder / "dpo")["ledger"], rows_of(folder / "dpo")[-1]["eval/sampled"]))
    assert ends[0] == ends[1]


@pytest.mark.sample("dpo", seconds=0.4)
@pytest.mark.parametrize("name", FEEDBACK)
def test_a_limit_of_tokens_changes_rounding_only(smooth: Path, name: str) -> None:
    loss, whole = update(learner_of(smooth), name)
    for tokens in (1, 40, 10_000):
        other_loss, cut = update(learner_of(smooth, tokens=tokens), name)
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert (cut - whole).norm() <= 1e-5 * whole.norm()


@pytest.mark.parametrize("name", FEEDBACK)
def test_no_pass_is_larger_than_its_limit(smooth: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No forward pass of any model has more tokens than the limit, in `prepare` and in updates. Only a single
    unit may exceed it: a row in `prepare`, a pair in an update."""
    learner, shapes = learner_of(smooth, tokens=40), []
    for model in learner.models.values():
        lm: Any = getattr(model, "lm")  # noqa: B009 (the protocol of models does not have it)

        def hidden_of(sequences: list[np.ndarray], *args: Any, of: Any = lm.hidden_of, **named: Any) -> Any:
            shapes.append((len(sequences), sum(len(ids) for ids in sequences)))
            return of(sequences, *args, **named)

        monkeypatch.setattr(lm, "hidden_of", hidden_of)
    update(learner, name)
    assert len(shapes) > 6
    assert all(tokens <= 40 or rows <= (2 if name == "dpo" else 1) for rows, tokens in shapes)


def test_tokens_of_a_forward_pass_by_hand() -> None:
    """Rows of 4, 6, 2, 2 and 9 tokens are divided into passes by a limit of tokens. A unit is never split,
    and a unit that is too large has a pass of its own."""
    generator = np.random.default_rng(0)
    rows = tuple(row(generator, 1, size - 1) for size in (4, 6, 2, 2, 9))
    singles = Batch(rows, np.arange(5), np.arange(5))
    assert [part.tolist() for part in micro_batches(singles, None, 12)] == [[0, 1, 2], [3, 4]]
    assert [part.tolist() for part in micro_batches(singles, None, 18)] == [[0, 1, 2, 3], [4]]
    assert [part.tolist() for part in micro_batches(singles, 2, 18)] == [[0, 1], [2, 3], [4]]
    assert [part.tolist() for part in micro_batches(singles, None, 1)] == [[0], [1], [2], [3], [4]]
    assert [part.tolist() for part in micro_batches(singles, None)] == [[0, 1, 2, 3, 4]]
    pairs = Batch(rows[:4], np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]))
    assert [part.tolist() for part in micro_batches(pairs, None, 14)] == [[0, 1, 2, 3]]
    assert [part.tolist() for part in micro_batches(pairs, None, 13)] == [[0, 1], [2, 3]]
    assert [part.tolist() for part in micro_batches(pairs, None, 5)] == [[0, 1], [2, 3]]


def test_passes_that_are_counted_stay_in_their_thread() -> None:
    """On a GPU, autograd has a thread for each device. A pass whose bytes are counted has only one, also if
    an earlier one failed; other passes keep their threads."""
    seen = []

    def backward(value: torch.Tensor) -> None:
        seen.append(torch._C._is_multithreading_enabled())

    def failed() -> None:
        with LiveBytes():
            passed()
            raise ZeroDivisionError

    def passed() -> None:
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(backward)
        (weight * 2).sum().backward()

    with LiveBytes():
        passed()
    passed()
    with pytest.raises(ZeroDivisionError):
        failed()
    passed()
    assert seen == [False, True, False, True]


def test_live_bytes_by_hand() -> None:
    """The counter of memory counts no views and no changes in place. Freed tensors make room."""
    weight = torch.ones(1000, requires_grad=True)
    with LiveBytes() as counter:
        a = weight * 2
        b = a.view(10, 100).t()
        b.add_(1)
        assert (counter.live, counter.peak) == (4000, 4000)
        c = b + 1
        assert counter.live == 8000
        del a, b, c
    assert counter.peak == 8000
    with LiveBytes() as counter:
        (weight * weight).sum().backward()
    assert weight.grad is not None
    assert 4000 <= counter.live <= counter.peak <= 5 * 4000


@pytest.mark.parametrize(
    ("most", "budget", "rows"),
    [(64, 99, 0), (64, 100, 1), (64, 149, 1), (64, 150, 2), (64, 1000, 19), (8, 10_000, 8), (1, 10_000, 1)],
)
def test_the_most_rows_of_a_line(most: int, budget: int, rows: int) -> None:
    assert most_within(lambda n: 50 + 50 * n, most, budget) == rows


def test_the_estimate_is_proven() -> None:
    """The search for the most rows in a memory limit uses few measurements. If memory grows faster than the
    first two suggest, it takes fewer rows."""
    tried = []

    def attempt(rows: int) -> int:
        tried.append(rows)
        return 100 * rows + 10 * rows * rows

    rows = most_within(attempt, 1000, 10_000)
    assert attempt(rows) <= 10_000
    assert 20 <= rows <= 27
    assert max(tried) < 100


def test_measured_tokens_fit_and_little_more_would(world: World, tmp_path: Path) -> None:
    """`learner.micro_batch_tokens: auto` measures how many tokens fit in memory. If memory allows, it is all
    tokens of a step: GRPO has groups of 3, and a step has 12 rows of at most 4 + 4 tokens."""
    config, origins = load_config(
        world.config(
            "grpo", tmp_path, {"learner.micro_batch_size": None, "learner.micro_batch_tokens": "auto"}
        )
    )
    config = replace(config, compute=replace(config.compute, memory_gb=1.0))
    run = build(resolve(config, origins), directory=made(tmp_path / "built"))
    run.ledger.close()
    learner: Any = run.parts["learner"]
    if not isinstance(learner, Learner):
        learner = learner._box
    assert learner.micro_batch_tokens == 12 * 8
    assert all(parameter.grad is None for parameter in learner.models["policy"].trainable().values())
    objective = run.objectives[0]
    needed = limits._held(learner) + limits._pass_bytes(
        learner, objective, [limits.row_of(8, 4, number) for number in range(5)]
    )

    def measured(memory: float) -> int:
        return measure_tokens(learner, objective, Limits(memory / GB, 4), Sampling(4), 16)

    assert measured(needed + 1) in (4 * 8, 5 * 8)
    assert measured(needed + 1) == measured(needed + 1)
    with pytest.raises(
        ConfigError, match=r"one row of 8 tokens takes .* GB with weights and optimiser; raise it"
    ):
        measured(1000)


@pytest.mark.slow(
    instead="test_measured_tokens_fit_and_little_more_would, test_the_memory_of_measured_tokens_stays",
    seconds=2.5,
)
def test_auto_is_stored_and_never_measured_again(world: World, tmp_path: Path) -> None:
    changes = {"learner.micro_batch_size": None, "learner.micro_batch_tokens": "auto", "compute.memory_gb": 1}
    config = world.config("grpo", tmp_path, {**changes, "stop.max_steps": 2})
    assert logged(tmp_path / "log", "train", config) == 0
    stored = load_config(tmp_path / "grpo" / "config.yaml")[0]
    assert (stored.learner.micro_batch_tokens, stored.learner.micro_batch_size) == (96, None)

    def continued() -> int:
        del limits.measure_tokens.__globals__["_pass_bytes"]
        return oat("train", config, "--stop.max_steps", "4")

    assert forked(continued, tmp_path / "log") == 0
    assert len(rows_of(tmp_path / "grpo")) == 5
    for flags, words in (
        (["--compute.memory_gb", "2"], "compute.memory_gb: 1.0 -> 2.0"),
        (["--learner.micro_batch_tokens", "8"], "96"),
    ):
        (tmp_path / "log").unlink()
        assert forked(lambda flags=flags: oat("train", config, *flags), tmp_path / "log") == 2
        assert words in (tmp_path / "log").read_text()


def test_the_memory_of_measured_tokens_stays(world: World, tmp_path: Path) -> None:
    """A continued run replaces `micro_batch_tokens: auto` by the number that it measured. `compute.memory_gb`
    must then be the same as at the start."""
    auto = {"learner.micro_batch_size": None, "learner.micro_batch_tokens": "auto", "compute.memory_gb": 1}
    begun = resolve(*load_config(world.config("grpo", tmp_path, auto)))
    file = Path(begun.config.run_dir) / "config.yaml"
    file.parent.mkdir(parents=True)
    stored = replace(begun, config=with_chosen(begun.config, {("learner", "micro_batch_tokens"): 96}))
    file.write_text(to_yaml(stored.config))
    assert as_stored(begun, stored, file, is_fork=False).config.learner.micro_batch_tokens == 96
    more = replace(begun.config, compute=replace(begun.config.compute, memory_gb=2.0))
    with pytest.raises(ConfigError, match=r"compute\.memory_gb: 1\.0 -> 2\.0"):
        as_stored(replace(begun, config=more), stored, file, is_fork=False)
    given = with_chosen(more, {("learner", "micro_batch_tokens"): 96})
    assert as_stored(replace(begun, config=given), stored, file, is_fork=False).config.compute.memory_gb == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"learner.micro_batch_tokens": "auto"},
            "learner.micro_batch_tokens is 'auto': set compute.memory_gb",
        ),
        ({"learner.micro_batch_tokens": 0}, "Expected `int` >= 1"),
        ({"learner.micro_batch_tokens": "some"}, "learner.micro_batch_tokens"),
        ({"learner.autocast": "float16"}, "learner.autocast"),
        ({"learner.micro_batch_tokens": "auto", "compute.memory_gb": 1e-6}, "one row of 8 tokens takes"),
    ],
)
def test_limits_that_make_no_sense(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    assert oat("train", world.config("grpo", tmp_path, changes)) == 2
    assert words in capsys.readouterr().err


def test_eight_rows_are_the_default(world: World, tmp_path: Path) -> None:
    for tokens, rows in ((None, 8), (100, None)):
        config, origins = load_config(
            world.config(
                "dpo", tmp_path, {"learner.micro_batch_size": None, "learner.micro_batch_tokens": tokens}
            )
        )
        assert resolve(config, origins).config.learner.micro_batch_size == rows
