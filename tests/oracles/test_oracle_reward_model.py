"""The oracle `reward_model` alone and in runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures import World, make_group, make_questions, oat
from tiny_models import build_config, build_tokenizer, save_reward_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig

from oat.errors import ConfigError, OracleError
from oat.oracles.make import build_oracle
from oat.quickstart.task import build_tokenizer as quickstart_tokenizer
from oat.testing import check_oracle
from oat.types import Answer, Question


def asked(oracle: object, questions: list[Question]) -> list[Answer]:
    tickets = oracle.submit(questions)  # type: ignore[attr-defined]
    found = dict(oracle.collect(tickets, 1.0))  # type: ignore[attr-defined]
    return [found[ticket] for ticket in tickets]


@pytest.fixture(scope="module")
def judge(world: World) -> str:
    """Save a reward model that can read the texts of the world's policy. Return its path."""
    tokenizer = AutoTokenizer.from_pretrained(world.folder / "model")
    shape = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return save_reward_model(
        world.folder / "judge", LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, **shape), tokenizer
    )


def test_it_keeps_the_protocol(judge: str) -> None:
    check_oracle("reward_model", options={"path": judge})


@pytest.mark.inventory(45)
def test_ranks_are_those_of_one_row_at_a_time(judge: str) -> None:
    """The scores of batches order responses like the scores of transformers for single rows without
    padding."""
    texts = ["a", "bb", "ab+1", "9=8", "", "aaaaaaaa", "b+b", "0"]
    groups = [make_group(number, *texts[number:]) for number in range(3)]
    answers = asked(
        build_oracle("reward_model", {"path": judge, "batch_tokens": 20}),
        make_questions(groups, "score", 0, oracle="reward_model"),
    )
    module, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(judge).eval(),
        AutoTokenizer.from_pretrained(judge),
    )
    for number, answer in enumerate(answers):
        alone = []
        for text in texts[number:]:
            ids = tokenizer(f"p{number}" + text, add_special_tokens=False)["input_ids"] + [
                tokenizer.eos_token_id
            ]
            with torch.no_grad():
                alone.append(module(input_ids=torch.tensor([ids])).logits.item())
        assert np.argsort(answer.values).tolist() == np.argsort(alone).tolist()
        assert answer.values == pytest.approx(alone, abs=1e-5)
        assert (answer.queries, answer.by) == (len(alone), "reward_model")


def test_what_is_too_long_abstains_or_is_refused(judge: str) -> None:
    questions = make_questions([make_group(0, "a", "b" * 80)], "score", 0, oracle="reward_model")
    (answer,) = asked(build_oracle("reward_model", {"path": judge}), questions)
    assert answer.marks == ("ok", "abstain")
    with pytest.raises(
        OracleError, match=r"has 83 tokens of the reward model .*, and may have 64; set prompts.max_tokens"
    ):
        asked(build_oracle("reward_model", {"path": judge, "overflow": "refuse"}), questions)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "missing a required argument: 'path'"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"max_tokens": "many"}, "max_tokens is 'many'"),
        ({"overflow": "cut"}, "overflow is 'cut'; give abstain or refuse"),
        ({"dtype": "float16"}, "give float32 or bfloat16"),
        ({"label": "good"}, "label is 'good'"),
        ({"batch_token": 3}, "did you mean `batch_tokens`"),
    ],
)
def test_settings_without_a_meaning_are_refused(judge: str, options: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        build_oracle("reward_model", {**({"path": judge} if options else {}), **options})


def test_other_weights_are_another_version(tmp_path: Path) -> None:
    versions = set()
    for scale in (1.0, 2.0):
        path = save_reward_model(tmp_path, build_config("llama"), scale=scale)
        versions |= {
            build_oracle("reward_model", {"path": path, "dtype": dtype}).version
            for dtype in ("float32", "bfloat16")
        }
    assert len(versions) == 4


def test_a_template_that_refuses_a_prompt_is_named(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['content'] == 'p0' %}{{ raise_exception('no') "
        "}}{% endif %}{% endfor %}"
    )
    oracle = build_oracle(
        "reward_model", {"path": save_reward_model(tmp_path, build_config("llama"), tokenizer)}
    )
    with pytest.raises(OracleError, match="cannot be asked: the chat template cannot render"):
        asked(oracle, make_questions([make_group(0, "a")], "score", 0, oracle="reward_model"))


def test_special_tokens_that_the_reward_model_cannot_read_are_named(tmp_path: Path) -> None:
    """The quickstart's tokenizer has whole words only, and no unknown token."""
    tokenizer = quickstart_tokenizer()
    path = save_reward_model(tmp_path, build_config("llama", len(tokenizer)), tokenizer)
    oracle = build_oracle("reward_model", {"path": path})
    for response, hint in (
        ("5<pad>", "; render.special_tokens: drop takes `<pad>` out of responses"),
        ("?", ""),
    ):
        with pytest.raises(OracleError, match=rf"cannot encode .*, or change the text{hint}$"):
            asked(oracle, make_questions([make_group(0, response)], "score", 0, oracle="reward_model"))


@pytest.mark.sample("grpo", seconds=1.0)
@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_runs_learn_from_it_and_are_watched_by_it(
    world: World, judge: str, tmp_path: Path, algorithm: str
) -> None:
    """A reward model is the oracle of training and evaluation, and in another run the gold oracle. Values are
    serialised, as in a cluster."""
    changes = {
        "oracle": {"name": "reward_model", "path": judge},
        "stop.max_steps": 2,
        "compute.serialise": True,
    }
    assert oat("train", world.config(algorithm, tmp_path, changes)) == 0
    rows = [json.loads(line) for line in (tmp_path / algorithm / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert rows[-1]["reward/std_within"] > 0
    watched = {
        "run_dir": str(tmp_path / "gold"),
        "stop.max_steps": 2,
        "evaluation.gold": {"name": "reward_model", "path": judge},
    }
    assert oat("train", world.config(algorithm, tmp_path, watched)) == 0
    rows = [json.loads(line) for line in (tmp_path / "gold" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/gold_sampled"] != 0


def test_a_wrong_path_is_found_by_check(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.config(
        "grpo", tmp_path, {"oracle": {"name": "reward_model", "path": str(tmp_path / "none")}}
    )
    assert oat("check", config) == oat("train", config) == 2
    assert capsys.readouterr().err.count("there is no directory") == 2
