"""The values that no sink gets, and the mistakes in a configuration of sinks."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, checked, oat
from sink_runs import OWN, process

from oat import Trainer
from oat.config.secrets import Hider
from oat.errors import ConfigError
from oat.tracking.sink_process import finish_all

CONFIG = {
    "oracle": {
        "name": "remote",
        "url": "https://me:hunter22@host/score?x=1&token=abcdef&n=2",
        "key_env": "JUDGE",
        "template_tokens": 3,
    },
    "engine": {
        "headers": {"X-Mine": "secret-of-mine", "Authorization": "Bearer abc.def"},
        "api_key": "literal-key",
        "password": None,
    },
    "prompts": [{"path": "a", "Api-Key": "another-key"}, "with sk-env-value inside"],
    "sampling": {"stop": ["a@b://c"], "max_tokens": 3},
}


@pytest.mark.fault("R29")
def test_no_sink_gets_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    planted = {"WANDB_API_KEY": "sk-env-value", "JUDGE": "judges-own-key", "HF_TOKEN": "hf_abcdefgh"}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    sink = process(tmp_path, config=CONFIG)
    sink.open(0)
    said = (
        "sk-env-value and judges-own-key at https://a:b@c/?key=hf_abcdefgh and "
        f"{CONFIG['engine']['headers']['X-Mine']}"
    )
    sink.row(0, '{"step": 0}', [json.dumps({"step": 0, "responses": [said]})])
    finish_all([sink])
    got = (tmp_path / "mine.jsonl").read_text()
    secrets = [
        *planted.values(),
        "hunter22",
        "abcdef",
        "secret-of-mine",
        "abc.def",
        "literal-key",
        "another-key",
        "a:b@",
    ]
    assert [secret for secret in secrets if secret in got] == []
    config = json.loads(got.splitlines()[0])["config"]
    assert config["oracle"] == {
        "name": "remote",
        "url": "https://***@host/score?x=1&token=***&n=2",
        "key_env": "JUDGE",
        "template_tokens": 3,
    }
    assert config["engine"] == {
        "headers": {"X-Mine": "***", "Authorization": "***"},
        "api_key": "***",
        "password": None,
    }
    assert config["prompts"] == [{"path": "a", "Api-Key": "***"}, "with *** inside"]
    assert config["sampling"] == {"stop": ["a@b://c"], "max_tokens": 3}
    figure(f"{len(secrets)} of {len(secrets)} planted secrets withheld from every sink")


def test_what_is_no_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT_KEY", "abc")
    monkeypatch.setenv("MONKEYS", "bananas")
    monkeypatch.setenv("KEYBOARD", "qwerty")
    tree = {
        "text": "abc bananas qwerty token=abcdef ftp://host/a@b",
        "eos_token": None,
        "tokens": 3,
        "max_tokens": 5,
        "keys": ["a"],
    }
    hider = Hider(tree)
    assert hider.tree == tree
    assert (
        hider.text("mail me@host, see http://host:80/a?page=2") == "mail me@host, see http://host:80/a?page=2"
    )


@pytest.mark.parametrize("field", ["key", "auth", "pwd", "bearer", "judges_bearer"])
def test_what_is_called_shortly_is_a_secret(field: str) -> None:
    assert Hider({"oracle": {field: "abcdefgh"}}).tree == {"oracle": {field: "***"}}


@pytest.mark.parametrize(
    "key",
    [
        "sk-proj-abcd1234",
        "hf_abcdefghijklmnop",
        "ghp_abcdefghijklmnop",
        "xoxb-12345678",
        "AKIAABCDEFGHIJKLMNOP",
    ],
)
def test_a_key_is_known_from_its_form(key: str) -> None:
    """A key is hidden in a field of any name, and in a text that is in no configuration."""
    hider = Hider({"oracle": {"openai_key": key, "reference_key": "solution"}})
    assert hider.tree == {"oracle": {"openai_key": "***", "reference_key": "solution"}}
    assert hider.text(f"refused {key}, sent as Bearer abc.def-1") == "refused ***, sent as Bearer ***"
    assert (
        hider.text("a task-oriented desk-lamp, sk-learn-estimators, hf_tokenizer_name, the bearer of news")
        == "a task-oriented desk-lamp, sk-learn-estimators, hf_tokenizer_name, the bearer of news"
    )


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        (
            ["wandbb"],
            r"there is no sink 'wandbb'; did you mean `wandb`\? .* or your own as path/to/file.py:Class",
        ),
        (
            [{"name": "wandb", "projct": "x"}],
            r"nothing reads the field `tracking.sinks.0.projct` of wandb.* did you mean `project`",
        ),
        ([{"name": "wandb", "mode": "maybe"}], r"`tracking.sinks.0.mode` is 'maybe'"),
        (["tensorboard", {"name": "tensorboard"}], r"tracking.sinks has 'tensorboard' twice"),
        ([{"name": "files", "samples": True}], r"the sink files has no options"),
        (["nowhere.py:Sink"], r"tracking.sinks has 'nowhere.py:Sink': nowhere.py cannot be read as Python"),
        ([f"{OWN}:Row"], r"has no Row; did you mean `Rows`\?"),
        (["no.such.module:Sink"], r"there is no module no.such.module here"),
        ([{"wait_s": 3}], r"the field `tracking.sinks.0.name` is missing"),
    ],
)
def test_mistakes(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], sinks: list[Any], said: str
) -> None:
    config = world.config("dpo", tmp_path, {"tracking.sinks": sinks})
    for command in ("train", "check"):
        assert oat(command, config) == 2
        assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "dpo").exists()


@pytest.mark.parametrize(
    ("name", "extra"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow")]
)
def test_a_missing_library_is_named_and_missed_only_by_those_who_train(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    extra: str,
) -> None:
    config, find = world.config("dpo", tmp_path, {"stop.max_steps": 1}), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module, *rest: None if module == name else find(module, *rest)
    )
    flags = ("--tracking.sinks", f"[{name}]")
    for command in ("train", "check"):
        assert oat(command, config, *flags) == 2
        assert (
            f"tracking.sinks has {name}, and its library is missing: pip install 'oat-align[{extra}]'"
            in capsys.readouterr().err
        )
    assert oat("eval", config, *flags) == 0


def test_an_object_of_python_is_refused(world: World, tmp_path: Path) -> None:
    class Mine:
        pass

    with pytest.raises(ConfigError, match=r"a sink lives in one of its own; write its class into a file"):
        Trainer(
            model=str(world.folder / "model"),
            oracle=world.oracle,
            prompts=str(world.folder / "train.jsonl"),
            tracking={"sinks": [Mine]},
        )


def test_check_says_where_the_rows_go(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinks = ["files", {"name": f"{OWN}:Rows", "samples": True}]
    changes = {"tracking.sinks": sinks, "tracking.tensorboard": True}
    said, _ = checked(capsys, world.config("dpo", tmp_path, changes))
    assert said["sinks"] == f"{OWN}:Rows (with texts), tensorboard"
