"""`oat generate --best-of` and `oat chat --best-of`: an ensemble chooses among the responses of a policy or a
model."""

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import Finished, World, kill_at, make_model, oat, write_jsonl
from safetensors.numpy import load_file, save_file
from terminal import in_a_terminal
from tiny_models import build_config, build_tokenizer, save_model
from transformers import AutoModelForCausalLM

from oat.answering.speaker import GenerationOptions, load_speaker
from oat.engines.decoding import Decoding
from oat.rollout.actor import Actor
from oat.types import Message, Prompt, Trajectory

ENSEMBLE = {"members": 3, "hidden": 8, "batch": 6, "steps": 4, "learning_rate": 1e-2}
PROMPTS = [f"{a}+1=" for a in range(6)]
BEST_OF = 4
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}{% if "
    "add_generation_prompt %}assistant {% endif %}"
)
FEATURES: dict[str, dict[str, Any]] = {
    "policy": {"backbone": "policy", "pooling": "last"},
    "reference": {"backbone": "reference", "layer": "all"},
    "own": {"backbone": "{folder}/backbone", "pooling": "last"},
}
"""The features of each run of dpo, by its name. `reference` is not the start model."""


def changes_of(world: World, folder: Path, name: str, **ensemble: Any) -> dict[str, Any]:
    features = {
        field: value.format(folder=folder) if isinstance(value, str) else value
        for field, value in FEATURES[name].items()
    }
    reference = {"model.reference": str(folder / "reference-start")} if name == "reference" else {}
    return {
        "oracle.name": f"{world.folder / 'reward.py'}:first_is_longer",
        "explorer": {"name": "ensemble", "samples": 4, "features": features, "ensemble": ENSEMBLE | ensemble},
        "evaluation": None,
        "learner.learning_rate": 0.05,
        "render.special_tokens": "keep",  # as for an exported model
        **reference,
    }


@pytest.fixture(scope="module")
def folder(world: World, finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three runs, their exported models and ensembles (`<run>-model` and
    `<run>-ensemble`), the backbones of features, and prompts."""
    folder = tmp_path_factory.mktemp("best")
    make_model(folder / "reference-start", seed=9, layers=2)
    make_model(folder / "backbone", seed=8, hidden=8)
    make_model(folder / "wide", seed=7, hidden=32)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt, "answer": "ab"} for prompt in PROMPTS])
    for name in FEATURES:
        run = finished.only_read("dpo", changes_of(world, folder, name))
        (folder / name).symlink_to(run)
        assert oat("export", run, folder / f"{name}-model") == 0
        assert oat("export", run, folder / f"{name}-ensemble", "--ensemble") == 0
    return folder


@pytest.fixture
def generated(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[list[str]]]:
    """Return a function that gives the responses to each prompt. Its arguments are the words of the command
    line, relative to the folder where they are names in it."""

    def run(model: str | Path, *words: object) -> list[list[str]]:
        capsys.readouterr()
        arguments = [folder / word if (folder / str(word)).exists() else word for word in words]
        assert oat("generate", folder / model, "--prompts", folder / "prompts.jsonl", *arguments) == 0
        return [json.loads(line)["responses"] for line in capsys.readouterr().out.splitlines()]

    return run


# a slow version of the choice


def slow_feature(model: Any, response: Trajectory, layer: int | str, pooling: str) -> np.ndarray:
    """Return the feature of a response, by transformers alone. `last` is the state from which its last token
    was drawn, as the policy's features are."""
    ids = torch.from_numpy(response.ids.astype(np.int64))[None]
    states = model(input_ids=ids, output_hidden_states=True).hidden_states[1:]
    states_TD = (torch.cat(states, dim=-1) if layer == "all" else states[-1])[0].detach().numpy()
    read = states_TD[len(response.segments[0].ids) - 1 : -1]
    return read[-1] if pooling == "last" else read.mean(axis=0)


def slow_reward(weights: dict[str, np.ndarray], feature: np.ndarray) -> float:
    """Return the mean reward of a response over the members of an ensemble."""
    rewards = []
    for member in range(ENSEMBLE["members"]):
        x = feature.astype(np.float64)
        for layer in (1, 2):
            x = np.maximum(x @ weights[f"weight{layer}"][member] + weights[f"bias{layer}"][member, 0], 0)
        rewards.append(float((x @ weights["weight3"][member] + weights["bias3"][member, 0])[0]))
    return sum(rewards) / len(rewards)


def slow_best(
    responses: Sequence[Trajectory], model: Path, ensemble: Path, layer: int | str = -1, pooling: str = "mean"
) -> str:
    """Return the text of the response with the highest mean reward."""
    module = AutoModelForCausalLM.from_pretrained(model)
    weights = load_file(ensemble / "ensemble.safetensors")
    rewards = [slow_reward(weights, slow_feature(module, each, layer, pooling)) for each in responses]
    return responses[int(np.argmax(rewards))].text


def candidates(model: Path, count: int, **options: Any) -> list[tuple[Trajectory, ...]]:
    """Return the responses among which `oat generate` chooses, for each prompt."""
    speaker = load_speaker(str(model), GenerationOptions(**options))
    prompts = [Prompt(number + 1, number, (Message("user", text),)) for number, text in enumerate(PROMPTS)]
    return [group.trajectories for group in speaker.respond(prompts, count, ("generate",))]


def expected(
    folder: Path, run: str, count: int, ensemble: Path, model: str | None = None, **options: Any
) -> list[list[str]]:
    """Return the best of each `BEST_OF` responses, for each prompt.

    Args:
        run: its features are read, those of the policy or of the reference.
        model: the model that responds; None: the run's policy.
        options: how this model responds.
    """
    backbone = folder / {"policy": "policy-model", "reference": "reference-start"}[run]
    how = {name: value for name, value in FEATURES[run].items() if name != "backbone"}
    return [
        [
            slow_best(responses[start : start + BEST_OF], backbone, ensemble, **how)
            for start in range(0, len(responses), BEST_OF)
        ]
        for responses in candidates(folder / (model or run), count * BEST_OF, **options)
    ]


# the choice


@pytest.mark.sample("reference", seconds=1.5)
@pytest.mark.inventory(74)
@pytest.mark.parametrize("run", ["policy", "reference"])
def test_the_best_of_each_few_is_chosen(
    folder: Path, generated: Callable[..., list[list[str]]], run: str
) -> None:
    """The responses are those of a slow version, which computes features with transformers. They are not the
    first ones."""
    found = generated(run, "--n", 3, "--best-of", BEST_OF)
    assert found == expected(folder, run, 3, folder / f"{run}-ensemble")
    sampled = [[row.text for row in rows] for rows in candidates(folder / run, 3 * BEST_OF)]
    assert sampled == generated(run, "--n", 3 * BEST_OF), "the choice is among what is sampled without it"
    first = [texts[::BEST_OF] for texts in sampled]
    differs = sum(
        a != b for own, others in zip(found, first, strict=True) for a, b in zip(own, others, strict=True)
    )
    assert differs >= len(PROMPTS), "there was something to choose"


def test_the_seed_decides(generated: Callable[..., list[list[str]]]) -> None:
    first, again, other = (generated("reference", "--best-of", BEST_OF, "--seed", seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_the_ensemble_is_that_of_the_checkpoint(
    folder: Path, tmp_path: Path, generated: Callable[..., list[list[str]]]
) -> None:
    assert oat("export", folder / "reference", tmp_path / "early", "--ensemble", "--step", 2) == 0
    flags = ("--n", 3, "--best-of", BEST_OF, "--step", 2)
    found = generated("reference", *flags)
    assert found == generated("reference", *flags, "--ensemble", tmp_path / "early")
    assert found != generated("reference", *flags, "--ensemble", "reference-ensemble")


@pytest.mark.sample("own", seconds=0.6)
@pytest.mark.parametrize("run", FEATURES)
def test_a_given_ensemble_takes_the_place_of_the_runs_own(
    folder: Path, tmp_path: Path, generated: Callable[..., list[list[str]]], run: str
) -> None:
    """The run's own export chooses as the run does. Another ensemble that reads the same features, and whose
    rewards are the opposite, chooses otherwise."""
    flags = ("--best-of", BEST_OF, "--ensemble")
    own = generated(run, "--best-of", BEST_OF)
    assert generated(run, *flags, f"{run}-ensemble") == own
    shutil.copytree(folder / f"{run}-ensemble", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "ensemble.safetensors")
    save_file({**weights, "weight3": -weights["weight3"]}, tmp_path / "other" / "ensemble.safetensors")
    found = generated(run, *flags, tmp_path / "other")
    assert found != own
    if run != "own":
        assert found == expected(folder, run, 1, tmp_path / "other")


@pytest.mark.parametrize("run", ["policy", "own"])
def test_an_exported_model_and_ensemble_answer_as_the_run_does(
    generated: Callable[..., list[list[str]]], run: str
) -> None:
    flags = ("--n", 2, "--best-of", BEST_OF)
    exported = generated(f"{run}-model", *flags, "--max-new-tokens", 4, "--ensemble", f"{run}-ensemble")
    assert exported == generated(run, *flags)


def test_a_model_that_was_the_reference_needs_no_run(
    folder: Path, generated: Callable[..., list[list[str]]]
) -> None:
    ensemble = "reference-ensemble"
    found = generated("reference-start", "--best-of", BEST_OF, "--max-new-tokens", 4, "--ensemble", ensemble)
    assert found == expected(folder, "reference", 1, folder / ensemble, "reference-start", max_new_tokens=4)


def test_a_run_with_an_adapter_has_its_reference(
    world: World, folder: Path, finished: Finished, generated: Callable[..., list[list[str]]]
) -> None:
    """The reference is the policy with the adapter off, as the run began."""
    changes = changes_of(world, folder, "reference") | {"model.lora": {"rank": 4}}
    del changes["model.reference"]
    run = finished.only_read("dpo", changes)
    responses = candidates(run, BEST_OF)
    assert oat("export", run, folder / "lora-ensemble", "--ensemble") == 0
    best = [[slow_best(part, world.folder / "model", folder / "lora-ensemble")] for part in responses]
    assert generated(run, "--best-of", BEST_OF) == best


def test_an_ensemble_that_stays_as_it_started_chooses(
    world: World,
    folder: Path,
    finished: Finished,
    tmp_path: Path,
    generated: Callable[..., list[list[str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The checkpoint of such a run has no ensemble. The one that the run started from is read again, and
    refused if it has changed."""
    shutil.copytree(folder / "policy-ensemble", tmp_path / "start")
    changes = changes_of(world, folder, "policy", start=str(tmp_path / "start"), learn=False)
    run = finished.only_read("dpo", changes)
    found = generated(run, "--best-of", BEST_OF)
    assert found == generated(run, "--best-of", BEST_OF, "--ensemble", "policy-ensemble")
    weights = load_file(tmp_path / "start" / "ensemble.safetensors")
    save_file({**weights, "weight3": -weights["weight3"]}, tmp_path / "start" / "ensemble.safetensors")
    command = ("generate", run, "--prompts", folder / "prompts.jsonl", "--best-of", BEST_OF)
    assert oat(*command) == 2
    assert "what is read of it is not what this run began with" in capsys.readouterr().err


def test_features_of_a_run_that_have_changed_are_refused(
    world: World, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of the reference are others than those that the run began with."""
    changes = changes_of(world, folder, "reference") | {
        "model.reference": str(tmp_path / "reference"),
        "stop.max_steps": 1,
    }
    make_model(tmp_path / "reference", seed=4)
    assert oat("train", world.config("dpo", tmp_path, changes)) == 0
    make_model(tmp_path / "reference", seed=5)
    capsys.readouterr()
    command = ("generate", tmp_path / "dpo", "--prompts", folder / "prompts.jsonl", "--best-of", BEST_OF)
    assert oat(*command) == 1
    assert f"the ensemble of {tmp_path / 'dpo'} has learned from features whose weights" in (
        capsys.readouterr().err
    )


# the chat


@pytest.fixture(scope="module")
def chatty(world: World, finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of a chat model, `run`, and its exports."""
    folder = tmp_path_factory.mktemp("chatty")
    save_model(folder / "start", build_config("llama", context=256))
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "start")
    changes = changes_of(world, folder, "policy")
    changes["explorer"]["features"] = {"backbone": "policy", "layer": "all"}
    run = finished.only_read(
        "dpo",
        changes
        | {
            "model.path": str(folder / "start"),
            "sampling.max_new_tokens": 6,
            "render": {"template": "tokenizer"},
        },
    )
    (folder / "run").symlink_to(run)
    assert oat("export", run, folder / "model") == 0
    assert oat("export", run, folder / "ensemble", "--ensemble") == 0
    return folder


def conversation(chatty: Path, lines: Sequence[str]) -> list[str]:
    """Return the answers of a chat, of which a slow version chooses each."""
    speaker = load_speaker(str(chatty / "run"), GenerationOptions())
    messages: list[Message] = []
    for turn, line in enumerate(lines):
        messages.append(Message("user", line))
        (group,) = speaker.respond([Prompt(turn, turn, tuple(messages))], BEST_OF, ("chat",))
        best = slow_best(group.trajectories, chatty / "model", chatty / "ensemble", "all")
        messages.append(Message("assistant", best))
    return [message.content for message in messages[1::2]]


def test_a_chat_answers_with_the_best(
    chatty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best answer is a part of the conversation, and the others are not. An exported model with an
    exported ensemble answers alike."""
    lines = ("how are you", "why", "so what")
    said = conversation(chatty, lines)
    exported = (chatty / "model", "--ensemble", chatty / "ensemble", "--max-new-tokens", 6)
    for words in ((chatty / "run",), exported):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
        capsys.readouterr()
        assert oat("chat", *words, "--best-of", BEST_OF) == 0
        assert capsys.readouterr().out.splitlines() == said


def test_an_answer_comes_as_a_whole(chatty: Path) -> None:
    """Nothing can be streamed: the best answer is known once all are sampled."""
    speaker = load_speaker(str(chatty / "run"), GenerationOptions(best_of=BEST_OF))
    (answer,) = speaker.answer([Message("user", "how are you")], 0)
    assert speaker.renderer.text(answer.ids) == conversation(chatty, ["how are you"])[0]
    assert answer.finish_reason in ("stop", "length")


def type_in(text: bytes) -> None:
    """Give this process, a forked child, a terminal in which `text` was typed."""
    master, slave = os.openpty()
    os.write(master, text)
    os.dup2(slave, 0)
    sys.stdin = os.fdopen(0, encoding="utf-8")


def test_ctrl_c_ends_the_choice_and_not_the_conversation(chatty: Path) -> None:
    """Nothing is shown of an answer whose candidates were not all sampled. The greeting says what is
    chosen."""

    def child() -> int:
        type_in(b"how are you\nwhy\n/exit\n")
        kill_at(Decoding, "step", 3, signals=(signal.SIGINT,))
        return oat("chat", chatty / "run", "--best-of", BEST_OF)

    seen = in_a_terminal(child)
    assert seen.code == 0, seen.raw
    assert f"answers, and remembers (the best of {BEST_OF} each time)" in " ".join(seen.lines)
    *_, first, second, end = [line for line in seen.lines if line.startswith(">")]
    assert (first, end) == (">", ">")
    assert len(second) > len("> ")


# refusals


@pytest.fixture(scope="module")
def broken(folder: Path) -> Path:
    """Return a folder with ensembles that cannot be used."""
    broken = folder / "broken"

    def change(name: str, source: str, **fields: Any) -> None:
        shutil.copytree(folder / f"{source}-ensemble", broken / name)
        file = broken / name / "ensemble.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    identity = {"backbone": "policy", "layer": -1, "pooling": "last", "width": 16}
    change("nameless", "policy", features={})
    change("placeless", "own", backbone=None)
    change("deep", "policy", features=identity | {"layer": 5})
    change("odd", "policy", features=identity | {"pooling": "first"})
    change("small", "policy", hidden=9)
    make_model(broken / "backbone", seed=4, hidden=8)
    change("changed", "own", backbone=str(broken / "backbone"))
    return broken


PLAIN = ("{world}/model", "--best-of", "4")
REFUSALS: dict[str, tuple[Sequence[str], str]] = {
    "one": (["{folder}/policy", "--best-of", "1"], "--best-of is 1; give at least 2 responses"),
    "none": (["{folder}/policy", "--best-of", "0"], "--best-of is 0; give at least 2 responses"),
    "nothing to choose": (
        ["{folder}/policy", "--ensemble", "{folder}/policy-ensemble"],
        "--best-of is not given; give both, or leave both out",
    ),
    "a run without an ensemble": (
        ["{folder}/plain", "--best-of", "4"],
        "plain: the run's explorer (none) has no ensemble that could choose the best response; give one by "
        "--ensemble",
    ),
    "a model without an ensemble": (PLAIN, "it is no run, so it has no ensemble that could choose"),
    "no directory": ((*PLAIN, "--ensemble", "{folder}/absent"), "absent has no ensemble that can be read"),
    "features without a name": (
        (*PLAIN, "--ensemble", "{folder}/broken/nameless"),
        "ensemble.json does not say where the backbone of its features is",
    ),
    "a backbone without a place": (
        (*PLAIN, "--ensemble", "{folder}/broken/placeless"),
        "ensemble.json does not say where the backbone of its features is",
    ),
    "another backbone": (
        (*PLAIN, "--ensemble", "{folder}/broken/changed"),
        "broken/changed has learned from features whose backbone is",
    ),
    "another layer": (
        (*PLAIN, "--ensemble", "{folder}/broken/deep"),
        "broken/deep reads layer 5 of the policy, and that of {world}/model has 1 layers; give the run",
    ),
    "another pooling": (
        (*PLAIN, "--ensemble", "{folder}/broken/odd"),
        "ensemble.json: the field `features.pooling` is 'first'",
    ),
    "another shape": ((*PLAIN, "--ensemble", "{folder}/broken/small"), "small have the shapes"),
    "another width": (
        ["{folder}/wide", "--best-of", "4", "--ensemble", "{folder}/policy-ensemble"],
        "policy-ensemble has learned from features whose width is 16, and that of the features of "
        "{folder}/wide is 32; give the run",
    ),
    "another reference": (
        (*PLAIN, "--ensemble", "{folder}/reference-ensemble"),
        "reference-ensemble has learned from features whose weights is",
    ),
    "another reference of a run": (
        ["{folder}/policy", "--best-of", "4", "--ensemble", "{folder}/reference-ensemble"],
        "give the model that was the reference, in its precision (--dtype), or a run that has it",
    ),
    "another precision": (
        [
            "{folder}/reference-start",
            *("--best-of", "4", "--dtype", "bfloat16", "--ensemble", "{folder}/reference-ensemble"),
        ],
        "give the model that was the reference, in its precision (--dtype)",
    ),
}


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("case", REFUSALS)
@pytest.mark.usefixtures("broken")
def test_what_cannot_be_chosen_is_one_message(
    world: World,
    folder: Path,
    finished: Finished,
    command: str,
    case: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is sampled before."""

    def forbidden(*_: object) -> None:
        raise AssertionError("nothing may be sampled")

    words, said = REFUSALS[case]
    if not (folder / "plain").exists():
        (folder / "plain").symlink_to(finished.only_read("dpo"))
    monkeypatch.setattr(Actor, "sample", forbidden)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1+1=\n")))
    places = {"world": world.folder, "folder": folder}
    own = ["--prompts", folder / "prompts.jsonl"] if command == "generate" else ["--template", "none"]
    capsys.readouterr()
    assert oat(command, *(word.format(**places) for word in words), *own) in (1, 2)
    found = capsys.readouterr()
    assert said.format(**places) in found.err
    assert (found.out, found.err.count("\n"), found.err.count("Traceback")) == ("", 1, 0)
