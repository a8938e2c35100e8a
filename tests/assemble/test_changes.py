"""A run that an earlier version of `oat` began says once what is computed otherwise now, and keeps what that
version did where a setting says it."""

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixtures import World, oat
from tokenizers_of_all_kinds import save_kind

from oat.assemble import changes
from oat.config import stored
from oat.config.load import load_config
from oat.rundir.mark import MARK


def changes_said(
    config: Path, max_steps: int, monkeypatch: pytest.MonkeyPatch, *names: str, words: Sequence[object] = ()
) -> list[str]:
    """Continue a run with a version of `oat` that knows the changes `names`; return those that it told.
    `elsewhere` concerns another configuration."""
    known = tuple(
        changes.Change(name, f"change <{name}>", lambda config, name=name: name != "elsewhere")
        for name in names
    )
    monkeypatch.setattr(changes, "CHANGES", known)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert oat("train", config, "--stop.max_steps", max_steps, *words) == 0
    said = "\n".join(str(warning.message) for warning in caught)
    return [name for name in names if f"<{name}>" in said]


def test_a_begun_run_says_once_what_has_changed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = world.config("grpo", tmp_path, {"evaluation": None, "checkpoint.every": 1})
    assert changes_said(config, 1, monkeypatch, "first") == []
    assert changes_said(config, 2, monkeypatch, "first", "second", "elsewhere") == ["second"]
    assert changes_said(config, 3, monkeypatch, "first", "second", "elsewhere") == []


@pytest.mark.parametrize("written", [pytest.param("rows", marks=pytest.mark.slow), "answers"])
def test_a_run_killed_before_its_first_checkpoint_says_so_too(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """It learns again from what its ledger has. A run of this version that is killed there says nothing."""
    changes = {"evaluation": None, "tracking.keep_trajectories": True}
    config, run = world.config("grpo", tmp_path, changes), tmp_path / "grpo"
    assert changes_said(config, 2, monkeypatch, "first") == []
    shutil.rmtree(run / "checkpoints")
    if written == "answers":
        for name in ("environment.json", "metrics.jsonl", "samples.jsonl"):
            (run / name).unlink()
        assert changes_said(config, 2, monkeypatch, "first", "second") == []
        shutil.rmtree(run / "checkpoints")
        for name in ("environment.json", "metrics.jsonl", "samples.jsonl", MARK):
            (run / name).unlink()
    assert changes_said(config, 2, monkeypatch, "first", "second") == (
        ["first", "second"] if written == "answers" else ["second"]
    )
    assert changes_said(config, 3, monkeypatch, "first", "second") == []


@pytest.mark.parametrize(
    "left", [None, *(pytest.param(text, marks=pytest.mark.slow) for text in ("[]", '[{"changes": null}]'))]
)
def test_an_environment_that_was_removed_is_no_earlier_version(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None
) -> None:
    """If an entry has no names, the version that wrote it knew no changes."""
    config, file = world.config("grpo", tmp_path, {"evaluation": None}), tmp_path / "grpo/environment.json"
    assert changes_said(config, 1, monkeypatch, "first") == []
    file.unlink() if left is None else file.write_text(left)
    said = ["first"] if left and "changes" in left else []
    assert changes_said(config, 2, monkeypatch, "first") == said


def test_a_fork_that_is_killed_before_its_first_row_is_told_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, fork = world.config("grpo", tmp_path, {"evaluation": None}), ("--run_dir", tmp_path / "fork")
    assert changes_said(config, 1, monkeypatch, "first") == []
    words = (*fork, "--from", f"{tmp_path / 'grpo'}@1")
    assert changes_said(config, 1, monkeypatch, "first", "second", words=words) == ["second"]
    assert not (tmp_path / "fork" / "environment.json").exists()
    assert changes_said(config, 2, monkeypatch, "first", "second", words=words) == []


def test_what_a_run_lacks_is_what_its_version_did(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that a run's file lacks has the earlier value. One that it leaves open stays so."""
    earlier = {("render", "date"): "2020-02-02", ("learner", "betas"): [0.5, 0.6]}
    monkeypatch.setattr(stored, "earlier", lambda: earlier)
    tree = world.tree("grpo", tmp_path / "run")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    config = stored.load_stored(file)[0]
    assert (str(config.render.date), list(config.learner.betas)) == ("2020-02-02", [0.5, 0.6])
    tree["learner"]["betas"] = [0.1, 0.2]
    file.write_text(yaml.safe_dump({**tree, "render": {"date": None}}))
    config = stored.load_stored(file)[0]
    assert (config.render.date, list(config.learner.betas)) == (None, [0.1, 0.2])
    file.write_text(yaml.safe_dump({**tree, "render": None}))
    assert str(stored.load_stored(file)[0].render.date) == "2020-02-02"


@pytest.mark.parametrize("oracle", [pytest.param("exact_match", marks=pytest.mark.slow), "own"])
def test_a_run_from_before_a_setting_goes_on(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], oracle: str
) -> None:
    """The run's file lacks settings, as an earlier version wrote it (`Said.earlier`). Continued twice, it has
    the values that are read, and keeps them. If this version began the run, a user removed them."""
    changes = {"oracle.name": world.oracle if oracle == "own" else oracle, "evaluation": None, "render": None}
    config, file = world.config("grpo", tmp_path, changes), tmp_path / "grpo" / "config.yaml"
    assert oat("train", config, "--stop.max_steps", 1) == 0
    tree = yaml.safe_load(file.read_text())
    for section, field in stored.earlier():
        del tree[section][field]
    file.write_text(yaml.safe_dump(tree))
    assert oat("train", config, "--stop.max_steps", 2) == 2
    assert "which the run wrote there when it began" in capsys.readouterr().err
    told = file.with_name("environment.json")
    told.write_text(told.read_text().replace('"changes"', '"others"'))
    for max_steps in (2, 3):
        assert oat("train", config, "--stop.max_steps", max_steps, "--compute.serialise", "true") == 0
        tree = yaml.safe_load(file.read_text())
        read = {name: tree[name[0]][name[1]] for name in stored.earlier()}
        assert read == {**stored.earlier(), ("oracle", "whole_groups"): False if oracle == "own" else None}


def written(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def with_ends(folder: Path) -> None:
    tokenizer = save_kind("byte-level", folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>"]})
    tokenizer.save_pretrained(folder)
    written(
        folder, "generation_config.json", {"eos_token_id": [2, tokenizer.convert_tokens_to_ids("</answer>")]}
    )


def with_tags(folder: Path) -> None:
    tokenizer = save_kind("byte-level", folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]"]})
    tokenizer.save_pretrained(folder)


def with_dropout(folder: Path) -> None:
    save_kind("byte-level", folder)
    found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    found["model"]["dropout"] = 0.1
    written(folder, "tokenizer.json", found)


def with_adapter(folder: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors", "model.safetensors"):
        written(folder, name, {})


TEMPLATE, RECORDED = {"render.template": "tokenizer"}, {"prompts.responses": ["answer"]}
ENVIRONMENT = {"sampling.environment": "sums.py:make"}
CONCERNED: dict[str, list[dict[str, Any] | Callable[[Path], object]]] = {
    "judge_readings_agree": [{"oracle.name": "judge"}],
    "gradient_norm_in_float64": [{}],
    "unbiased_kl_slope": [{"algorithm.kl_unbiased": True}],
    "left_over_adapters": [with_adapter],
    "whole_groups": [{"oracle.whole_groups": False}],
    "tools": [ENVIRONMENT],
    "recorded_calls": [TEMPLATE],
    "calls_are_read_back": [TEMPLATE],
    "strict_calls": [ENVIRONMENT],
    "texts_in_pieces": [partial(save_kind, "Llama 2")],
    "ends_of_plain_texts": [RECORDED, partial(save_kind, "byte-level", ends="<|user|>")],
    "one_beginning": [partial(save_kind, "byte-level")],
    "own_tokens": [with_tags],
    "kept_blanks": [partial(save_kind, "byte-level", takes="lstrip")],
    "sampled_ends": [ENVIRONMENT | TEMPLATE],
    "numbers_as_numbers": [{"oracle.name": "exact_match"}, {"evaluation.oracle": {"name": "math"}}],
    "opened_responses": [{"oracle.name": "format"}, {"oracle.name": "regex"}],
    "opened_records": [RECORDED | TEMPLATE],
    "stops_that_close": [{"sampling.stop": ["</answer>"]}],
    "answers_behind_thoughts": [{"oracle": {"name": "mixture", "sources": [{"name": "exact_match"}]}}],
    "whole_responses": [{"oracle.name": "reward_model"}],
    "ends_that_close": [with_ends],
    "no_dropout_of_merges": [with_dropout],
    "whole_calls": [ENVIRONMENT],
    "sent_fields": [{"oracle.name": "remote"}],
    "opened_answers": [{"oracle.name": "countdown"}],
    "far_ratios": [{"algorithm.name": "cpgd"}],
}
"""For each change, settings or models of runs that it concerns."""


@pytest.mark.parametrize("change", changes.CHANGES, ids=lambda change: change.name)
def test_a_change_is_told_to_whom_it_concerns(world: World, tmp_path: Path, change: changes.Change) -> None:
    """It is not told to a run that has none of this."""
    usual = load_config(world.config("grpo", tmp_path))[0]
    assert change.concerns(usual) == ({} in CONCERNED[change.name])
    for place, given in enumerate(CONCERNED[change.name]):
        settings = given
        if callable(given):
            folder = tmp_path / str(place)
            folder.mkdir()
            given(folder)
            settings = {"model.path": str(folder)} | (TEMPLATE if given is with_tags else {})
        assert change.concerns(load_config(world.config("grpo", tmp_path, settings))[0])
