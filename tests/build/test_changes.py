"""A run that an earlier version of `oat` began says once what is computed otherwise now, and keeps what that
version did where a setting says it."""

import warnings
from pathlib import Path

import pytest
import yaml
from fixtures import World, oat

from oat.build import changes
from oat.config import stored


def changes_said(config: Path, max_steps: int, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Continue a run with a version of `oat` that knows the changes `names`; return those that it told.
    `elsewhere` concerns another configuration."""
    known = tuple(
        changes.Change(name, f"change <{name}>", lambda config, name=name: name != "elsewhere")
        for name in names
    )
    monkeypatch.setattr(changes, "CHANGES", known)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert oat("train", config, "--stop.max_steps", max_steps) == 0
    said = "\n".join(str(warning.message) for warning in caught)
    return [name for name in names if f"<{name}>" in said]


def test_a_begun_run_says_once_what_has_changed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = world.config("grpo", tmp_path, {"evaluation": None, "checkpoint.every": 1})
    assert changes_said(config, 1, monkeypatch, "first") == []
    assert changes_said(config, 2, monkeypatch, "first", "second", "elsewhere") == ["second"]
    assert changes_said(config, 3, monkeypatch, "first", "second", "elsewhere") == []


def test_what_a_run_lacks_is_what_its_version_did(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that a run's file lacks, or leaves open, has the earlier value."""
    earlier = {("render", "date"): "2020-02-02", ("learner", "betas"): [0.5, 0.6]}
    monkeypatch.setattr(stored, "EARLIER", earlier)
    tree = world.tree("grpo", tmp_path / "run")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    config = stored.load_stored(file)[0]
    assert (str(config.render.date), list(config.learner.betas)) == ("2020-02-02", [0.5, 0.6])
    tree["learner"]["betas"] = [0.1, 0.2]
    file.write_text(yaml.safe_dump({**tree, "render": None}))
    config = stored.load_stored(file)[0]
    assert (str(config.render.date), list(config.learner.betas)) == ("2020-02-02", [0.1, 0.2])
