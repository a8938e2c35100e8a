"""No message shows a text that may be a secret, whatever its name is and wherever it stands."""

import dataclasses
import itertools
import random
import traceback
from typing import Any

import pytest

import oat as package
from oat.cli.entry import COMMANDS, main, parser
from oat.config.flags import HARMLESS
from oat.config.load import load_tree
from oat.config.peers.rewards import REWARDS
from oat.config.peers.shown import TEXTS
from oat.config.peers.table import find, names, rows
from oat.config.secrets import is_suspect, looks_secret
from oat.config.settings import Config
from oat.config.unknown import field_names
from oat.errors import OatError

MARKER = "Hunter2-SEKRET"
"""A secret that has no known form. It may be shown as the value of a text that is to be copied (`TEXTS`)."""
KEY = "hf_aBcDeFgHiJkLmNoPqRsT0123"
"""A secret of a known form, which no message shows."""
OPEN = {
    field for row in rows() if {*row.settings} & {*TEXTS} or row.field in REWARDS for field in (row.field,)
}
FIELDS = sorted({row.field for row in rows()} | {*names()})
ALGORITHMS = itertools.cycle(("grpo", "dpo", "sft", "reward_model", None))
OURS = {*field_names(), *(field.name for field in dataclasses.fields(Config))}
"""Our own settings: a message about a wrong value of theirs shows it."""
CALLED = ("hub_tokn", "hubtoken", "wandb_token", "hf_token", "token", "api_kye", "passwrd", "openai_apikey")


def misspelt(name: str) -> list[str]:
    """Return near misses of a name: a letter left out, doubled, and exchanged with the next one."""
    at = random.Random(name).randrange(1, max(2, len(name) - 1))
    return [
        name[:at] + name[at + 1 :],
        name[:at] + name[at : at + 1] + name[at:],
        name[: at - 1] + name[at : at + 1] + name[at - 1 : at] + name[at + 1 :],
    ]


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def told(call: Any) -> str:
    """Return what a traceback of an error of a call shows; "": nothing is refused."""
    try:
        call()
    except OatError as error:
        return "".join([*traceback.format_exception_only(error), str(error), str(error.__cause__ or "")])
    return ""


def messages(name: str, value: Any) -> list[str]:
    """Return the messages about a name: in a file, in a section of it, beside others, as a flag, and from
    Python."""
    algorithm = next(ALGORITHMS)
    begun: dict[str, Any] = {
        "model": {"path": "m"},
        "prompts": {"path": "p"},
        "oracle": {"name": "exact_match"},
    }
    begun |= {"algorithm": {"name": algorithm}} if algorithm else {}
    others = {"learning_rate": 1e-5, "num_train_epochs": 1, "max_steps": 5}
    own = nested(name, value)

    def file(**given: Any) -> str:
        return told(lambda: load_tree({**begun, **given}, {(): "run.yaml"}, "run.yaml", []))

    def python(**given: Any) -> str:
        taken = {
            **{
                key: section["path" if key in ("model", "prompts") else "name"]
                for key, section in begun.items()
            }
        }
        return told(lambda: package.Trainer(**{**taken, **given}))

    def flags(*given: str) -> str:
        return told(lambda: load_tree({**begun}, {(): "run.yaml"}, "run.yaml", [*given]))

    text = value if isinstance(value, str) else repr(value)
    section = {"args": {**own, **others}}
    return [
        file(**own),
        file(**section),
        file(learner={**own, "lr": 1}),
        flags(f"--{name}", text),
        flags(f"--{name}={text}", "--beta", "0.1", "--lr", "1"),
        python(**own),
        python(**section),
        python(args=type("Args", (), {**own, **others})()),
    ]


@pytest.mark.sample("7", seconds=240)
@pytest.mark.parametrize("part", range(800))
def test_no_message_shows_a_secret(part: int) -> None:
    for name in FIELDS[part::800]:
        for given in (name, misspelt(name)[part % 3]):
            listed = [field for row in find(given.split("."), None) for field in (row.field,)]
            is_open = bool({*listed, given} & OPEN or {given, f"learner.{given}"} & OURS)
            for value in (KEY,) if is_open else (MARKER, {"inner": [{"token": MARKER}]}, ["a", MARKER]):
                for message in messages(given, value):
                    assert (KEY if is_open else MARKER) not in message, (given, value, message)


@pytest.mark.parametrize("value", ["hunter", 12345678])
def test_the_value_of_a_name_like_that_of_a_secret_is_never_shown(value: Any) -> None:
    for name in CALLED:
        for message in messages(name, value):
            assert "hunter" not in message, name
            assert "12345678" not in message, name


@pytest.mark.parametrize("command", ["train", "samples"])
@pytest.mark.parametrize(
    "words",
    [
        *([f"--{name}", "Bearer", MARKER] for name in ("hub_token", "hub_tokn", "oracle.api_key", "x_token")),
        ["--hub_token=Bearer", MARKER],
        [f"--hub_token={MARKER}"],
        [f"token={MARKER}"],
        [f"Bearer {MARKER}"],
        [KEY],
        ["--beta", "0.1", KEY],
        ["--learner.betas", "0.1", KEY],
        ["--learner.betas", f"[{KEY}"],
        [f"trainer.hf_token={MARKER}", "trainer.total_epochs=1"],
    ],
)
def test_no_refusal_of_a_command_line_shows_a_secret(command: str, words: list[str], capsys: Any) -> None:
    for line in ([command, "c.yaml", *words], [command, *words, "c.yaml"], [*words, command]):
        try:
            code = main(line)
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        said = capsys.readouterr().err
        assert code
        assert MARKER not in said, said
        assert KEY not in said, said
        assert said


def test_no_flag_of_a_command_is_called_as_a_secret_is() -> None:
    for name in COMMANDS:
        choices = next(each for each in parser(name)._actions if each.dest == "command").choices
        for action in choices[name]._actions:  # type: ignore[index, call-overload]
            assert not any(is_suspect(each) and each[2:] not in HARMLESS for each in action.option_strings)


def test_a_secret_in_a_section_of_ours_is_not_copied() -> None:
    own = {"name": "http", "url": "http://x", "api_key": MARKER, "headers": {"a": MARKER}, "model": KEY}
    tree = {"evaluation": {"path": "p", "oracle": own}, "lr": 1, "eval_steps": 3, "eval_strategy": "steps"}
    message = told(lambda: load_tree(tree, {(): "r"}, "r", []))
    assert "url: http://x" in message
    assert MARKER not in message
    assert KEY not in message
    assert KEY not in told(lambda: load_tree({"model": {"path": KEY, "dtype": [KEY]}}, {(): "r"}, "r", []))


@pytest.mark.parametrize(
    ("text", "is_secret"),
    [
        ("hf_aBcDeFgHiJkLmNoPqRsT", True),
        ("http://user:word@host/v1", True),
        ("5f4dcc3b5aa765d61d8327deb882cf99ab12cd34", True),
        ("org/Qwen2.5-0.5B-Instruct-20240701", False),
        ("runs/5f4dcc3b5aa765d61d8327deb882cf99/model", False),
        ("all-linear", False),
    ],
)
def test_what_looks_like_a_secret(text: str, is_secret: bool) -> None:
    assert looks_secret(text) == is_secret


def test_names_of_counts_of_tokens_are_no_secrets() -> None:
    assert not any(is_suspect(name) for name in ("max_tokens", "eos_token_id", "tokenizer", "learning_rate"))
    assert all(is_suspect(name) for name in CALLED)
