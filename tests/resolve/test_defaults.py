"""Defaults that follow from other settings: the engine's threads, and the lines of `oat check` about all
derived defaults; and the note about `render.template`, which is null by default."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from fixtures import World, forked, oat, write_jsonl
from inputs import TEMPLATE, edit

from oat.assemble.fingerprints import Inputs
from oat.assemble.run import _notes
from oat.assemble.run_inputs import gather_inputs
from oat.config.load import load_config
from oat.errors import ConfigError
from oat.opening.open_run import outlined
from oat.resolve.defaults import derived
from oat.resolve.resolve import resolve


def said_of(config: Path, *flags: object) -> dict[str, str]:
    """Return the lines of `oat check` about derived defaults, by setting."""
    tree, origins = load_config(config, [str(flag) for flag in flags])
    return dict(line.split(": ", 1) for line in derived(resolve(tree, origins)))


@pytest.mark.parametrize(("flags", "expected"), [((), 3), (("--engine.threads", 2), 2)])
def test_the_engine_computes_on_the_threads_of_the_run(
    world: World, tmp_path: Path, flags: tuple[object, ...], expected: int
) -> None:
    """The engine uses the run's number of threads if it has no number of its own. Nothing is computed here,
    since a process whose kernels used several threads cannot be forked."""
    config, before = world.config("grpo", tmp_path, {"compute.threads": 3}), torch.get_num_threads()
    try:
        resolved = resolve(*load_config(config, [str(flag) for flag in flags]))
        with outlined(resolved, gather_inputs(resolved)) as run:
            pass
    finally:
        torch.set_num_threads(before)
    assert (run.chosen["compute", "threads"], run.chosen["engine", "threads"]) == (3, expected)


def test_a_run_that_was_begun_before_keeps_its_number(world: World, tmp_path: Path) -> None:
    """A continued run uses the number of threads that it measured at its start."""
    config, stored = (
        world.config("grpo", tmp_path, {"stop.max_steps": 1, "evaluation": None}),
        tmp_path / "grpo" / "config.yaml",
    )
    assert oat("train", config) == 0
    tree = yaml.safe_load(stored.read_text())
    assert (tree["compute"]["threads"], tree["engine"]["threads"]) == (1, 1)
    tree["engine"]["threads"] = 2
    stored.write_text(yaml.safe_dump(tree))
    assert oat("train", config) == 0
    assert yaml.safe_load(stored.read_text())["engine"]["threads"] == 2


def test_what_follows_from_what(world: World, tmp_path: Path) -> None:
    changes = {
        "learner": {"schedule": "linear"},
        "algorithm.kl_coef": 0.1,
        "algorithm.epochs": 3,
        "compute.threads": 2,
    }
    config = world.config("grpo", tmp_path, changes)
    expected = {
        "model.reference": "the policy's start, as model.path",
        "model.reference_dtype": "float32, as model.dtype",
        "learner.schedule_steps": "12, the optimiser steps of stop.max_steps 4",
        "learner.micro_batch_size": "8, since learner.micro_batch_tokens is not set",
        "evaluation.oracle": f"{world.oracle}, as oracle.name, with its options",
        "engine.threads": "2, as compute.threads",
    }
    assert said_of(config) == expected
    assert forked(lambda: oat("check", config, "--json"), tmp_path / "log") == 0
    log = (tmp_path / "log").read_text()
    found = json.loads(log[log.index("{\n") :])
    notes, said = found["notes"], {row["name"]: row["number"] for row in found["rows"]}
    by_default = [note.removeprefix("by default ") for note in notes if note.startswith("by default ")]
    assert sorted(by_default) == sorted(f"{name}: {value}" for name, value in expected.items())
    assert said["threads of the engine"] == 2
    assert "learner.micro_batch_size" not in said_of(config, "--learner.micro_batch_tokens", 64)
    given = {
        "learner.schedule_steps": 12,
        "learner.micro_batch_size": 8,
        "evaluation.oracle": world.oracle,
        "engine.threads": 2,
    }
    given |= {"model.reference": world.folder / "model", "model.reference_dtype": "float32"}
    assert said_of(config, *(part for name, value in given.items() for part in (f"--{name}", value))) == {}
    assert "engine.threads" not in said_of(config, "--engine.threads", 1)


def test_what_follows_from_recorded_data_and_forms(world: World, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    offline = {
        "prompts": {"path": str(data)},
        "oracle": {"name": "recorded"},
        "algorithm": {"name": "dpo", "prompts": 1},
        "evaluation": None,
    }
    said = said_of(world.config("dpo", tmp_path, offline))
    assert said["prompts.responses"] == "chosen, rejected, what oracle.name recorded reads"
    assert said["algorithm.samples"] == "2, as many as prompts.responses has"
    said = said_of(world.config("dr_grpo", tmp_path, {"render.question": "gsm8k", "evaluation": None}))
    assert said["algorithm.max_length"] == "4, as sampling.max_new_tokens"
    assert said["sampling.stop"].endswith(", where a question of render.question gsm8k begins")


def test_what_a_users_explorer_says_of_its_own_settings(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from oat.explore.base import NoExploration\n"
        "from oat.types.part import Check, Derived\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n    longest: int | None = None\n"
        "class Mine(NoExploration):\n"
        "    Config = Config\n"
        "    def __init__(self, feedback, config):\n"
        "        super().__init__(feedback, reads_text=True)\n"
        "    @staticmethod\n"
        "    def defaults(config, run):\n"
        "        if config.longest is not None:\n            return {}\n"
        "        return {'longest': Derived(run.max_new_tokens, 'as sampling.max_new_tokens')}\n"
        "    @staticmethod\n"
        "    def checks(config, run):\n"
        "        yield Check('explorer.longest', config.longest > run.max_new_tokens, 'it is too long')\n"
        "        yield Check('sampling.max_new_tokens', config.longest == 2, 'it is too many')\n"
        "        if config.longest == 1:\n"
        "            yield Check('sampling.nothing', False, '')\n"
    )
    config = world.config("grpo", tmp_path, {"explorer": {"name": f"{tmp_path / 'mine.py'}:Mine"}})
    assert said_of(config)["explorer.longest"] == "4, as sampling.max_new_tokens"
    assert "explorer.longest" not in said_of(config, "--explorer.longest", 3)
    with pytest.raises(ConfigError, match="it is too long"):
        said_of(config, "--explorer.longest", 5)
    with pytest.raises(ConfigError, match=r"sampling.max_new_tokens is 4: it is too many"):
        said_of(config, "--explorer.longest", 2)
    with pytest.raises(ConfigError, match=r"`checks` of .*:Mine checks 'sampling.nothing'"):
        said_of(config, "--explorer.longest", 1)


def test_a_chat_without_a_template_is_told(world: World, tmp_path: Path) -> None:
    """A new run says that it writes prompts as plain text if the model has a chat template, or if prompts are
    messages; not if the configuration says so itself."""
    shutil.copytree(world.folder / "model", tmp_path / "chat")
    edit(tmp_path / "chat" / "tokenizer_config.json", chat_template=TEMPLATE)
    config = world.config("grpo", tmp_path, {"evaluation": None, "prompts.reference_key": None})
    record = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "a"}
    chat = ["--model.path", str(tmp_path / "chat")]
    messages = ["--prompts.path", str(write_jsonl(tmp_path / "messages.jsonl", [record]))]

    def advice(*flags: str, known: Inputs | None = None) -> list[str]:
        resolved = resolve(*load_config(config, flags))
        run_inputs = gather_inputs(resolved)
        notes = _notes(resolved, replace(run_inputs, known=known))
        return [found[0] for note in notes if (found := re.search(r"set `?render.template\S*", note))]

    assert advice() == []
    assert advice(*chat) == ["set render.template:"]
    assert advice(*chat, known=Inputs()) == [], "a continued run"
    assert advice(*chat, "--render.template", "null") == []
    assert advice(*messages) == ["set `render.template`"]
    assert advice(*chat, *messages, "--render.template", "tokenizer") == []
