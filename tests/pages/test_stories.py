"""The recipes of stories: the reward computed by hand, the openings, two small steps of each recipe, and the
benchmark's figures."""

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from fixtures import oat, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from oat.config.load import load_config
from oat.errors import OracleError
from oat.oracles.make import build_oracle
from oat.oracles.rules import sentiment
from oat.oracles.rules.sentiment import cheerful, sentences

ROOT = Path(__file__).resolve().parents[2]
ALGORITHMS = ("dpo", "grpo")
DEFAULT = ROOT.parent / "shared" / "real" / "tinystories656k"
HAPPY = 2.7
SAD = -2.1
VERY = 0.293
"""Valences of the lexicon, and the amount that `very` adds."""


def compound(valence: float) -> float:
    """Return VADER's normalised sum of valences, to its four digits."""
    return round(valence / math.sqrt(valence**2 + 15), 4)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("They were happy.", [compound(HAPPY)]),
        ("They were very happy.", [compound(HAPPY + VERY)]),
        ("She was not happy.", [compound(-0.74 * HAPPY)]),
        ("They were happy! Lily was sad. The dog ran", [compound(HAPPY + 0.292), compound(SAD), 0.0]),
        ("...", [0.0]),
        (" \n", [0.0]),
        ("", [0.0]),
    ],
)
def test_a_story_is_worth_the_mean_of_its_sentences(text: str, values: list[float]) -> None:
    assert cheerful(["p"], [text]) == [pytest.approx(sum(values) / len(values), abs=1e-9)]


def test_conversations_and_a_batch() -> None:
    told = [[{"role": "assistant", "content": "They were happy."}]]
    assert cheerful([[{"role": "user", "content": "Lily was sad."}]], told) == [compound(HAPPY)]
    assert cheerful(["p"] * 3, ["sad", "", "happy"], topic=["a", "b", "c"]) == [
        compound(SAD),
        0.0,
        compound(HAPPY),
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('"Hi!" said Tom. He ran.', ['"Hi!', "said Tom.", "He ran."]),
        ("He said, “Run!”\nThey ran", ["He said, “Run!", "They ran"]),
        ("The first line\nthe second", ["The first line", "the second"]),
        ("It was 3.5 feet. 7! ... And", ["It was 3.5 feet.", "And"]),
        ("No!! (Why?) Oh", ["No!!", "(Why?", "Oh"]),
    ],
)
def test_sentences(text: str, pieces: list[str]) -> None:
    assert sentences(text) == pieces


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.text(max_size=80))
def test_any_text_has_a_reward_between_minus_one_and_one(text: str) -> None:
    (value,) = cheerful(["p"], [text])
    assert value is not None
    assert -1 <= value <= 1


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    sentiment._analyser.cache_clear()
    with pytest.raises(OracleError, match=r"pip install 'oat-align\[sentiment\]'"):
        cheerful(["p"], ["They were happy."])


@pytest.mark.parametrize("kind", ["", "_said"])
def test_the_openings(kind: str) -> None:
    files = [
        (ROOT / "configs" / "stories" / f"{name}{kind}.jsonl").read_text(encoding="utf-8")
        for name in ("train", "heldout")
    ]
    train, held_out = ([json.loads(line)["prompt"] for line in file.splitlines()] for file in files)
    assert len(held_out) == len(set(held_out)) == 200
    assert len(train) == len(set(train)) == 800
    assert not set(train) & set(held_out)
    assert all(opening.endswith(' said, "') for opening in train + held_out) == bool(kind)
    assert build_oracle("cheerful", {}).answers == "score"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_recipes_openings_end_where_tokens_of_both_kinds_end(algorithm: str) -> None:
    """The openings of the recipes end with a quotation mark, which ends a token in all tokenizers. A blank
    belongs to the next word in most tokenizers, and to the previous word in others."""
    config = load_config(ROOT / "configs" / f"stories_{algorithm}.yaml")[0]
    assert config.evaluation is not None
    for path in (config.prompts.path, config.evaluation.path):
        assert Path(str(path)).stem.endswith("_said")


@pytest.mark.slow(instead="the other tests of the stories, with a tiny model", seconds=8.2)
def test_the_default_model_goes_on_after_the_openings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default model continues the recipes' openings. After openings that end with a full stop it ends the
    story."""
    if not (DEFAULT / "config.json").exists():
        pytest.skip(
            "the default model of the recipes is not at ../shared/real/tinystories656k; what it does "
            "after the openings was not looked at"
        )
    monkeypatch.chdir(ROOT)
    shares = []
    for openings in ("train_said", "train"):
        path = ROOT / "configs" / "stories" / f"{openings}.jsonl"
        flags = ["--prompts.path", path, "--run_dir", tmp_path / "run", "--show-tokens"]
        assert oat("check", ROOT / "configs" / "stories_dpo.yaml", "--model", DEFAULT, *flags) == 0
        shares.append(float(capsys.readouterr().out.split("ends soon")[1].split()[0]))
    assert shares[0] < 0.01
    assert shares[1] > 0.1


def test_the_pages_figures_are_within_its_bounds(benchmark: ModuleType) -> None:
    """The figures in docs/stories.md keep the benchmark's bounds. The page has three seeds of DPO on both
    models."""
    page = (ROOT / "docs" / "stories.md").read_text(encoding="utf-8")
    rows = [
        line.strip("| ").split(" | ")
        for line in page.splitlines()
        if re.match(r"\| \d+K \| \w+, \d \|", line)
    ]
    seeds = {(model, name) for model, name, *_ in rows}
    assert {(model, f"DPO, {seed}") for model in ("656K", "260K") for seed in range(3)} <= seeds
    for _, _, _, _, closed, stopped, distinct, rise in rows:
        before, after = map(float, stopped.split(" → "))
        assert float(closed) >= benchmark.LEAST_CLOSED
        assert after >= before
        assert float(distinct.split(": ")[1]) >= benchmark.LEAST_DISTINCT
        assert float(rise) <= benchmark.MOST_NATS


def test_model_is_short_for_the_path_of_the_model(tmp_path: Path) -> None:
    recipe = ROOT / "configs" / "stories_dpo.yaml"
    config, origins = load_config(recipe, ["--model.reference", "other", "--model", "mine"])
    assert (config.model.path, config.model.reference) == ("mine", "other")
    assert origins["model", "path"] == "--model"
    assert load_config(recipe, ["--model={path: mine, dtype: bfloat16}"])[0].model.dtype == "bfloat16"
    assert load_config(recipe)[0].model.path == "raincandy-u/TinyStories-656K"


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of a few words, some of them cheerful. Return its path."""
    words = ["<eos>", "?", "happy", "sad", "fun", "lost", "dog", "the", "ran", "."]
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("writer")
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>", unk_token="?").save_pretrained(folder)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(vocab_size=len(words), bos_token_id=0, eos_token_id=0, **shape)
        ).save_pretrained(folder)
    return folder


def train(algorithm: str, writer: Path, run_dir: Path, *flags: object) -> None:
    small = [
        "--sampling.max_new_tokens",
        12,
        "--algorithm.prompts",
        6,
        "--evaluation.max_prompts",
        3,
        "--stop.max_steps",
        2,
    ]
    assert (
        oat(
            "train",
            ROOT / "configs" / f"stories_{algorithm}.yaml",
            "--model",
            writer,
            "--run_dir",
            run_dir,
            *small,
            *flags,
        )
        == 0
    )


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import stories

    return stories


@pytest.mark.sample("dpo", seconds=0.8)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_recipe_runs_and_can_be_measured(
    algorithm: str,
    writer: Path,
    tmp_path: Path,
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    train(algorithm, writer, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["optim/grad_norm"] > 0
    assert "eval/sampled" in rows[-1]
    assert benchmark.main([str(tmp_path / "run"), "--openings", "3", "--samples", "2", "--best", "4"]) in (
        0,
        1,
    )
    printed = capsys.readouterr().out
    for figure in ("reward", "ceiling", "gap closed", "stopped", "distinct-2", "nats"):
        assert figure in printed
    assert printed.count("\nbefore ") == printed.count("\nafter ") == 3


def test_a_run_that_learned_nothing_closes_nothing(
    writer: Path,
    tmp_path: Path,
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The benchmark reports that a run with learning rate 0 closes no gap. Its nats, scored by the start
    model, equal those recorded at sampling."""
    monkeypatch.chdir(ROOT)
    train("grpo", writer, tmp_path / "run", "--learner.learning_rate", 0)
    capsys.readouterr()
    assert benchmark.main([str(tmp_path / "run"), "--openings", "3", "--samples", "2", "--best", "4"]) == 1
    printed = capsys.readouterr().out
    assert "gap closed   0.00, at least 0.5: NO" in printed
    assert "1.00 of the start's, at least 0.8: yes" in printed
    assert abs(float(printed.split("a rise of ")[1].split(",")[0])) < 1e-3
    before, after = (
        [line.split(maxsplit=1)[1] for line in printed.splitlines() if line.startswith(when)]
        for when in ("before", "after")
    )
    assert before == after


def test_distinct_2_by_hand(benchmark: ModuleType) -> None:
    assert benchmark.distinct_2(["The dog ran the dog", "ran the cat", "", "one"]) == pytest.approx(4 / 6)
    assert benchmark.distinct_2(["one", ""]) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("", 0.0), ("rewards", 0.29), ("stopped_frac", 0.19), ("distinct_2", 0.3), ("nats", 1.4)],
)
def test_every_figure_can_fail(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], field: str, value: float
) -> None:
    """Each bound of the benchmark can fail. There are two openings with two stories each. The mean reward of
    the first stories is 0.1 and of the best 0.5, so half of the gap is at 0.3."""
    start = benchmark.Stories(np.array([[0.0, 0.4], [0.2, 0.6]]), 0.2, 0.4, 1.0, ())
    end = {
        "rewards_BG": np.full((2, 1), 0.31),
        "stopped_frac": 0.2,
        "distinct_2": 0.33,
        "nats": 1.29,
        "shown": (),
    }
    if field:
        end |= {"rewards_BG": np.full((2, 1), value)} if field == "rewards" else {field: value}
    assert benchmark.report("run", start, benchmark.Stories(**end), 1) == (not field)
    assert capsys.readouterr().out.count(": NO") == bool(field)


def test_a_folder_without_a_run(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [])
    assert benchmark.main([str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
