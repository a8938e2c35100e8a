"""R26: text from data, a model, a service or a name cannot control a terminal, reorder a line, or choose a
file's path."""

import contextlib
import io
import json
import re
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_server import Reply, serving
from fixtures import World, make_model, oat, write_jsonl
from openai_server import completion

from oat.errors import ConfigError, RefusalError, printable

pytestmark = pytest.mark.fault("R26")

Figure = Callable[[str], None]

HOSTILE = {
    "escape": "\x1b[2J\x1b]0;title\x07",
    "one-byte escape": "\x9b31m",
    "carriage return": "fine\roat: error",
    "backspace": "abc\b\b\b",
    "bell and delete": "\x07\x7f",
    "right to left": "\u202egnp.exe",
    "isolates": "\u2066a\u2069\u200f",
    "line separators": "a\u2028b\u0085c",
    "no width": "a\u200b\ufeffb",
    "script": "<script>alert(1)</script>",
    "markup": "[bold red]x[/] **x** `x` | x |",
    "formula": "$\\frac{1}$",
    "path": "../../../tmp/oat-planted",
    "absolute path": "/tmp/oat-planted",
    "template": "{0.__class__} %s %n $(touch oat-planted) `touch oat-planted`",
}
CHECKED = re.compile(
    r"[^\n\t "
    r"-~\u00a1-\u00ac\u00ae-\u1fff\u2010-\u2027\u2030-\u205e\u20a0-\ud7ff\uf900-\ufefe\uff01-\uffef\U0001f300-\U0001faff]"
)
"""Characters that no terminal should get: control codes, format characters, marks of direction, unusual
spaces. The list is independent of the code that escapes them."""

REWARD = """
def reward(prompts, completions, note, **columns):
    return [float(len(text)) for text in completions]


def angry(prompts, completions, note, **columns):
    raise ValueError(f"no score for {note[0]}")
"""


@pytest.fixture
def told(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: "".join(capfd.readouterr())


@pytest.fixture
def hostile(world: World, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with a model and data that contain hostile text. At the end, check that no file was
    planted."""
    (tmp_path / "reward.py").write_text(REWARD)
    texts = [*HOSTILE.values()]
    make_model(tmp_path / "model", tokens=[*dict.fromkeys([*"0123456789+=ab", *texts])])
    for name in ("train", "held_out"):
        write_jsonl(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"{place}+1=", "answer": text, "note": text} for place, text in enumerate(texts)],
        )
    yield tmp_path
    assert not Path("/tmp/oat-planted").exists()
    assert [path.name for path in tmp_path.rglob("*") if "planted" in path.name] == []


def config(world: World, folder: Path, **changes: object) -> Path:
    own = {
        "model.path": str(folder / "model"),
        "prompts.path": str(folder / "train.jsonl"),
        "evaluation.path": str(folder / "held_out.jsonl"),
    }
    own |= {
        "oracle.name": f"{folder / 'reward.py'}:reward",
        "sampling.max_new_tokens": 8,
        "algorithm.prompts": len(HOSTILE),
        "stop.max_steps": 2,
    }
    return world.config(
        "grpo", folder, {**own, **{name.replace("__", "."): value for name, value in changes.items()}}
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_printed_is_plain_and_says_what_was_there(name: str) -> None:
    text = HOSTILE[name]
    shown = printable(text)
    assert CHECKED.search(shown) is None
    assert json.loads(f'"{json.dumps(shown, ensure_ascii=False)[1:-1]}"') == shown
    assert all(letter in shown for letter in text if letter.isalnum())
    with pytest.raises(ConfigError) as error:
        raise ConfigError(text)
    assert str(error.value) == shown
    assert printable(json.dumps([text], ensure_ascii=False)) == printable(
        printable(json.dumps([text], ensure_ascii=False))
    )
    assert json.loads(printable(json.dumps([text], ensure_ascii=False))) == [text]
    assert str(RefusalError(text, 400, "")) == shown


def test_ordinary_text_stays_as_it_is() -> None:
    text = "naïve café, 你好, שלום, مرحبا, 🙂\n\tline two"
    assert printable(text) == text
    assert printable("\ud800 half") == "\\ud800 half"


def test_nothing_of_a_run_speaks_to_the_terminal(
    world: World, hostile: Path, told: Callable[[], str], figure: Figure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command that reports on a run with hostile text prints plain text, and so do the files for
    people."""
    file, run = config(world, hostile), hostile / "grpo"
    before = {path for path in hostile.rglob("*")}
    commands: list[tuple[object, ...]] = [
        ("check", file, "--show-tokens"),
        ("train", file),
        ("train", file),
        ("eval", run),
    ]
    commands += [
        ("ledger", run),
        ("ledger", run, "--check"),
        ("eval", run, "--against", hostile / "model"),
        ("digest", run),
    ]
    commands += [("plot", run, "--out", hostile / "a.png"), ("export", run, hostile / "out")]
    commands += [
        ("generate", run, "--prompts", hostile / "train.jsonl", "--out", hostile / "said.jsonl"),
        ("chat", run, "--template", "none"),
    ]
    commands += [("samples", run), ("samples", run, "--eval"), ("samples", run, "--step", 2)]
    commands += [("ledger", run, "--export", hostile / "answers.jsonl", "--layout", "scored")]
    monkeypatch.setattr(
        "sys.stdin",
        io.TextIOWrapper(io.BytesIO("\n".join(HOSTILE["isolates"] + str(n) for n in range(40)).encode())),
    )
    for words in commands:
        assert oat(*words) == 0, words
    assert CHECKED.findall(told()) == []
    pages = [
        hostile / "said.jsonl",
        hostile / "answers.jsonl",
        run / "samples.jsonl",
        run / "environment.json",
        *sorted((run / "evaluations").iterdir()),
        hostile / "out" / "README.md",
        hostile / "a.csv",
    ]
    for page in pages:
        assert CHECKED.findall(page.read_text(encoding="utf-8")) == [], page
    responses = [
        text
        for line in (run / "samples.jsonl").read_text().splitlines()
        for text in json.loads(line)["responses"]
    ]
    assert any("\x1b" in text for text in responses), "nothing is lost, and the model did say it"
    assert "<script>" not in (hostile / "out" / "README.md").read_text()
    new = {path for path in hostile.rglob("*") if "__pycache__" not in path.parts} - before
    top = {path.relative_to(hostile).parts[0] for path in new}
    assert top == {"grpo", "out", "a.png", "a.csv", "answers.jsonl", "said.jsonl"}
    figure(f"0 of {len(commands) + len(pages)} outputs and pages of a run contain a control character")


@pytest.mark.slow(instead="test_nothing_of_a_run_speaks_to_the_terminal", seconds=1.7)
def test_errors_and_warnings_that_quote_are_plain(
    world: World, hostile: Path, told: Callable[[], str], figure: Figure
) -> None:
    """Errors and warnings quote hostile text from a reward function, from refused records, and from a
    service. Only plain text is printed."""
    assert (
        oat(
            "train",
            config(
                world, hostile, oracle__name=f"{hostile / 'reward.py'}:angry", run_dir=str(hostile / "angry")
            ),
        )
        == 1
    )
    rows = [
        {"prompt": [{"role": text, "content": "a"}], "answer": "a", "note": text} for text in HOSTILE.values()
    ]
    for number, row in enumerate(rows):
        write_jsonl(hostile / "bad.jsonl", [row])
        bad = config(
            world, hostile, prompts__path=str(hostile / "bad.jsonl"), run_dir=str(hostile / f"bad{number}")
        )
        with contextlib.suppress(SystemExit):
            oat("train", bad)
    with serving(lambda asked: Reply(HOSTILE["escape"].encode(), status=400)) as server:
        oracle = {"name": "remote", "url": server.url}
        assert oat("train", world.config("dpo", hostile, {"oracle": oracle, "evaluation": None})) == 1
    for name, text in HOSTILE.items():
        unknown = config(world, hostile, run_dir=str(hostile / "unknown"), **{f"algorithm__{text}": 1})
        assert oat("train", unknown) == 2, name
    said = told()
    assert "no score for \\u001b[2J" in said
    assert CHECKED.findall(said) == []
    figure(f"0 of {said.count(chr(10))} lines of errors contain a control character")


LONG = 15_000_000
LONG_REPLIES = {
    "a server that refuses": ("remote", Reply(b"no " * (LONG // 3), status=400), 1),
    "a server that fails": ("remote", Reply(b"no " * (LONG // 3), status=500), 0),
    "a reply without end": ("remote", Reply(b"no " * 7_000_000), 0),
    "a judge that refuses": ("judge", Reply(b"no " * (LONG // 3), status=400), 4),
    "a judge that talks": ("judge", Reply(completion({"no " * (LONG // 3): 1.0}, has_logprobs=False)), 0),
    "a judge of digits": ("judge", Reply(completion({"1" * LONG + ",1": 1.0}, has_logprobs=False)), 0),
    "a judge without end": ("judge", Reply(b"no " * 7_000_000), 0),
}
"""By case: the oracle, its reply to every question, and the exit code."""


@pytest.mark.sample("a server that refuses", "a reply without end", "a judge that talks", seconds=1.3)
@pytest.mark.parametrize("name", LONG_REPLIES)
def test_of_what_a_service_says_at_length_the_beginning_is_shown(
    name: str, world: World, tmp_path: Path, told: Callable[[], str], figure: Figure
) -> None:
    """Messages, warnings and all files of the run, its rows and ledger included, show only the beginning of a
    long reply."""
    kind, reply, code = LONG_REPLIES[name]
    with serving(lambda asked: reply) as server:
        own = {"name": "remote", "url": server.url, "max_tries": 1}
        if kind == "judge":
            own = {
                "name": "judge",
                "url": f"{server.url}/v1",
                "model": "m",
                "reads": "text",
                "mode": "score",
                "tries": 1,
            }
        changes = {
            "oracle": own,
            "evaluation": None,
            "stop.max_steps": 1,
            "algorithm.prompts": 1,
            "algorithm.samples": 2,
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert oat("train", world.config("grpo", tmp_path, changes)) == code
    said = [*told().splitlines(), *(str(warning.message) for warning in caught)]
    assert max(map(len, said)) < 1500
    assert any(
        word in line
        for line in said
        for word in ("no no no", "more than 16777216 bytes", "'1111", "remote left 100% without a value")
    )
    assert all(file.stat().st_size < 2_000_000 for file in (tmp_path / "grpo").rglob("*") if file.is_file())
    figure(
        "a service that replies with 15 MB or more: lines of at most 1,500 characters, files of at most 2 MB"
    )


def test_a_ledger_that_was_written_by_others_is_listed_plainly(
    world: World, hostile: Path, told: Callable[[], str]
) -> None:
    assert oat("train", config(world, hostile)) == 0
    with contextlib.closing(sqlite3.connect(hostile / "grpo" / "ledger.sqlite")) as db, db:
        db.execute("UPDATE questions SET oracle = ?", (HOSTILE["escape"] + HOSTILE["right to left"],))
    told()
    assert oat("ledger", hostile / "grpo") == 0
    oat("ledger", hostile / "grpo", "--check")
    said = told()
    assert "\\u001b[2J" in said
    assert CHECKED.findall(said) == []


@pytest.mark.sample("a*", seconds=1.6)
@pytest.mark.parametrize("name", ["$x$", "_under", "$\\frac{1}$", "a\x1b[2Jb", "\u202eb"])
def test_a_plot_of_a_run_with_such_a_name(
    name: str, world: World, tmp_path: Path, told: Callable[[], str]
) -> None:
    config = world.config(
        "grpo", tmp_path, {"run_dir": str(tmp_path / name), "stop.max_steps": 1, "evaluation": None}
    )
    assert oat("train", config) == 0
    assert oat("plot", tmp_path / name, "--metric", "reward/mean", "--out", tmp_path / "a.png") == 0
    assert oat("plot", tmp_path / name, "--metric", f"$\\frac{name}", "--out", tmp_path / "a.png") == 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert CHECKED.findall(told()) == []
