"""docs/commands.md agrees with the parser, and its examples work as typed."""

import argparse
import io
import re
import shlex
from pathlib import Path

import pytest
from readme import files
from tiny_models import build_config, save_model

from oat.cli.entry import COMMANDS, main, parser

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")


def commands() -> dict[str, argparse.ArgumentParser]:
    return {name: command(name) for name in COMMANDS}


def command(name: str) -> argparse.ArgumentParser:
    (choices,) = [
        action for action in parser(name)._actions if isinstance(action, argparse._SubParsersAction)
    ]
    found: argparse.ArgumentParser = choices.choices[name]
    return found


def sections() -> dict[str, tuple[str, str]]:
    """Return, by command, the arguments in its heading and its text."""
    parts = re.split(r"^## oat (\S+)(.*)$", PAGE, flags=re.MULTILINE)[1:]
    return {
        name: (arguments.strip(), text)
        for name, arguments, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    }


def examples() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def test_every_command_has_its_section() -> None:
    assert sections().keys() == commands().keys()
    assert {words[1] for words in examples()} == commands().keys()


@pytest.mark.parametrize("name", commands())
def test_a_section_has_the_arguments_and_flags_of_its_command(name: str) -> None:
    actions = [action for action in commands()[name]._actions if not isinstance(action, argparse._HelpAction)]
    arguments, text = sections()[name]
    positional = [action for action in actions if not action.option_strings]
    assert arguments == " ".join(
        f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar) for action in positional
    )
    flags = {action.option_strings[0]: action.metavar for action in actions if action.option_strings}
    written = dict(re.findall(r"^\| `(--\S+?)(?: (\S+))?` \|", text, flags=re.MULTILINE))
    assert written.keys() == flags.keys()
    for flag, metavar in flags.items():
        assert bool(written[flag]) == (metavar is not None)
        assert not metavar or written[flag] in str(metavar).split("|")


def test_the_examples_work_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's examples work as typed. The quickstart, which takes minutes, the server, which does not end,
    and the actors of a run on a cluster have their own tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"What is 1 + 1?\n")))
    for name, text in files().items():
        Path(name).write_text(text, encoding="utf-8")
    save_model(tmp_path / "quickstart" / "start", build_config("llama"))
    for program, *words in examples():
        assert program == "oat"
        if words[0] not in ("actors", "quickstart", "serve"):
            assert main(words) == 0, capsys.readouterr().err
    assert Path("answers.jsonl").exists()
    assert Path("responses.jsonl").exists()
    assert Path("exported/model.safetensors").exists()
