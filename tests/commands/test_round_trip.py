"""`oat ledger --export` writes the questions and answers of a run, and another run learns from them."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, oat, write_jsonl

from oat.ledger.reader import Reader

ORACLES = '''
def shorter(prompts, first, second, **columns):
    """The shorter of two, or the earlier in the alphabet; equal texts are never asked about."""
    return [0.9 if (len(a), a) < (len(b), b) else 0.2 for a, b in zip(first, second)]


def brevity(prompts, completions, **columns):
    return [-float(len(text)) for text in completions]
'''
FORBIDDEN = [0, 16, 17]
"""Ids that no text has: the padding, and two ids that the tokenizer lacks."""


def make_ending_model(source: Path, folder: Path) -> None:
    """Save the tiny model with a head that never gives an id of `FORBIDDEN` and soon ends. All embeddings
    share one large component, and the head reads it."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(source)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[FORBIDDEN, 0], head[1, 0] = -30.0, 0.1
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


@pytest.fixture(scope="module")
def ending(world: World, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("ending")
    make_ending_model(world.folder / "model", folder / "model")
    for name in ("train.jsonl", "held_out.jsonl"):
        (folder / name).write_bytes((world.folder / name).read_bytes())
    (folder / "reward.py").write_text(ORACLES, encoding="utf-8")
    return World(folder)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def learned(run_dir: Path) -> list[tuple[Any, ...]]:
    """Return, for each step, the prompts with their responses, the better one first, and the values of scored
    responses."""
    found = []
    with closing(Reader(run_dir / "ledger.sqlite")) as store:
        for step in range(len(rows_of(run_dir)) - 1):
            for asked, answer, label in store.answers(store.taken("train", step)):
                texts = asked.question.candidates[::-1] if label == 1 else asked.question.candidates
                found.append(
                    (
                        step,
                        [message.content for message in asked.question.messages],
                        texts,
                        answer.values if label is None else (),
                    )
                )
    return found


SETTINGS = {
    "evaluation": None,
    "sampling.max_new_tokens": 56,
    "learner.learning_rate": 1e-3,
    "stop.max_steps": 3,
    "engine": {"name": "torch", "threads": 1},
}


def offline(ending: World, folder: Path, algorithm: str, data: Path, **prompts: Any) -> Path:
    """Train on an exported file, and return the run directory."""
    folder.mkdir()
    changes = {
        **SETTINGS,
        "prompts": {"path": str(data), "shuffle": False, **prompts},
        "oracle": {"name": "recorded"},
        "algorithm.samples": None,
    }
    sampled = {"sampling": {"max_new_tokens": 56}}
    config = ending.config(
        algorithm, folder, {**changes, **sampled, "algorithm": {"name": algorithm, "prompts": 6}}
    )
    assert oat("train", config) == 0
    return config.with_suffix("")


@pytest.mark.sample("parquet", seconds=1.0)
@pytest.mark.inventory(115)
@pytest.mark.parametrize("ending_of_name", ["jsonl", "parquet"])
def test_what_was_learned_online_is_learned_again_offline(
    ending: World, tmp_path: Path, ending_of_name: str
) -> None:
    """A run is exported and learned again offline. It has the same prompts, responses and preferences in the
    same order, so the same losses. Some responses are empty."""
    changes = {**SETTINGS, "algorithm.prompts": 6, "oracle.name": f"{ending.folder / 'reward.py'}:shorter"}
    for seed in range(5):
        online = tmp_path / f"seed_{seed}"
        assert oat("train", ending.config("dpo", tmp_path, changes), "--run_dir", online, "--seed", seed) == 0
        whole = [
            row["response/truncated_frac"] == 0 == row["answers/tied_frac"] for row in rows_of(online)[1:]
        ]
        if all(whole) and any("" in texts for _, _, texts, _ in learned(online)):
            break
    else:
        pytest.fail("no seed gave whole and different responses")
    data = tmp_path / "data" / f"pairs.{ending_of_name}"
    assert oat("ledger", online, "--export", data) == 0
    again = offline(ending, tmp_path / "again", "dpo", data)
    assert learned(again) == learned(online)
    for name in ("loss/total", "pairs/margin", "logps/chosen", "optim/grad_norm"):
        assert [row[name] for row in rows_of(again)[1:]] == pytest.approx(
            [row[name] for row in rows_of(online)[1:]], rel=1e-5
        )


@pytest.mark.inventory(115)
def test_scores_are_learned_again_offline(ending: World, tmp_path: Path) -> None:
    """Scored responses are exported, each as a record, in the order of the questions. An offline run learns
    the same from them."""
    changes = {
        **SETTINGS,
        "algorithm.prompts": 3,
        "algorithm.samples": 2,
        "algorithm.threshold": -8.0,
        "oracle.name": f"{ending.folder / 'reward.py'}:brevity",
    }
    config = ending.config("sft", tmp_path, changes)
    assert oat("train", config) == 0
    data = tmp_path / "scored.jsonl"
    assert oat("ledger", tmp_path / "sft", "--export", data, "--layout", "scored") == 0
    again = offline(ending, tmp_path / "again", "sft", data, responses=["completion"], score_key="score")
    single = [
        (step, prompt, (text,), (value,))
        for step, prompt, texts, values in learned(tmp_path / "sft")
        for text, value in zip(texts, values, strict=True)
    ]
    assert learned(again) == single


def test_a_text_without_a_prompt_is_left_out_and_counted(world: World, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "texts.jsonl", [{"text": "12+a"}] * 2)
    changes = {
        "prompts": {"path": str(data)},
        "algorithm": {"name": "sft", "prompts": 2},
        "oracle.name": "recorded",
        "evaluation": None,
    }
    config = world.config("sft", tmp_path, {**changes, "stop.max_steps": 1})
    assert oat("train", config) == 0
    with pytest.warns(UserWarning, match="2 answers about texts without a prompt are left out"):
        assert oat("ledger", tmp_path / "sft", "--export", tmp_path / "out.jsonl", "--layout", "scored") == 0
    assert (tmp_path / "out.jsonl").read_text() == ""
