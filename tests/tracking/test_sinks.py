"""`tracking.sinks`: each row of a run once, in a process that may do what it likes, without a secret."""

import importlib.util
import json
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fixtures import World, forked, kill_at, named, oat, told

from oat import Trainer
from oat.commands.export import digest_run
from oat.config.secrets import Hider
from oat.errors import ConfigError
from oat.metrics import repeatable
from oat.tracking import child
from oat.tracking.child import Described, SinkProcess, finish_all
from oat.tracking.leftovers import VARIABLE, marked

OWN = Path(__file__).parents[1] / "support" / "sinks.py"
MOMENTS = ("open", "2", "close")
WAYS = ("raises", "exits", "dies", "is killed", "hangs", "hangs deaf")


def own(**options: Any) -> dict[str, Any]:
    return {"name": f"{OWN}:Rows", "wait_s": 60.0, **options}


def written(run_dir: Path, file: str = "rows.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / file).read_text().splitlines()]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def are_its_rows(found: list[dict[str, Any]], run_dir: Path) -> bool:
    """Each once, in order; steps that were done again after a kill may have taken other seconds."""
    own, expected = [record for record in found if "step" in record], rows_of(run_dir)
    assert [record["step"] for record in own] == [row["step"] for row in expected]
    for record, row in zip(own, expected, strict=True):
        assert {**repeatable(record["values"]), "step": record["step"]} == repeatable(row)
    return True


def process(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    key: str = "mine",
    wait_s: float = 60.0,
    **options: Any,
) -> SinkProcess:
    described = Described(
        key, f"{OWN}:Rows", {"file": f"{key}.jsonl", **options}, options, config is not None, wait_s
    )
    return SinkProcess(described, folder, config or {})


def give(sink: SinkProcess, steps: range) -> None:
    for step in steps:
        sink.row(step, json.dumps({"step": step, "a": 1.5}), [json.dumps({"step": step, "prompt": "p"})])


def test_a_sink_gets_the_rows_the_configuration_and_only_where_asked_the_texts(
    world: World, tmp_path: Path
) -> None:
    sinks = ["files", own(samples=True), {**own(), "name": f"{tmp_path / 'quiet.py'}:Quiet"}]
    (tmp_path / "quiet.py").write_text(
        OWN.read_text()
        + '\n\nclass Quiet(Rows):\n    def __init__(self):\n        super().__init__("quiet.jsonl")\n'
    )
    config, run_dir = (
        world.config("grpo", tmp_path, {"tracking.sinks": sinks, "tracking.samples": 2}),
        tmp_path / "grpo",
    )
    assert forked(lambda: oat("train", config), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    loud, quiet = written(run_dir), written(run_dir, "quiet.jsonl")
    assert are_its_rows(loud, run_dir)
    assert are_its_rows(quiet, run_dir)
    assert [record["values"] for record in loud if "step" in record] == [
        {k: v for k, v in row.items() if k != "step"} for row in rows_of(run_dir)
    ]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert [sample for record in loud for sample in record.get("samples", [])] == samples != []
    assert not any(record.get("samples") for record in quiet)
    assert loud[0]["config"]["stop"]["max_steps"] == 4
    assert (loud[0]["id"], loud[-1]) == (None, {"closed": True})
    assert "warning" not in (tmp_path / "log").read_text()


@pytest.mark.sample("oat.tracking.files:Tracking.row-4", seconds=3.1)
@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("oat.learner.learner:Learner.update", 1),
        ("oat.learner.learner:Learner.update", 4),
        ("oat.tracking.files:Tracking.row", 4),
    ],
)
def test_each_row_once_over_a_kill_and_a_fork_begins_its_own(
    world: World, tmp_path: Path, place: str, call: int
) -> None:
    config = world.config("grpo", tmp_path, {"tracking.sinks": [own()]})
    run_dir = tmp_path / "grpo"
    log = tmp_path / "log"
    assert (
        forked(lambda: kill_at(*named(place), call, after=True) or oat("train", config), log)
        == -signal.SIGKILL
    )
    assert forked(lambda: oat("train", config), log) == 0, log.read_text()
    found = written(run_dir)
    assert are_its_rows(found, run_dir)
    ids = [record["id"] for record in found if "id" in record]
    assert ids[0] is None
    assert re.fullmatch(r"run-\d+", ids[1])
    if call == 4:
        fork = tmp_path / "fork"
        assert (
            forked(
                lambda: oat("train", config, "--from", f"{run_dir}@2", "--run_dir", fork, "--seed", 7), log
            )
            == 0
        ), log.read_text()
        assert are_its_rows(written(fork), fork)
        assert written(fork)[0]["id"] is None
    assert "warning: the sink" not in log.read_text()


def test_a_sink_that_comes_late_has_all_rows_and_one_that_was_away_what_it_missed(tmp_path: Path) -> None:
    """Lives of two steps each: without the sink, with it, without it, with it and texts, and with another
    place."""
    lives: list[SinkProcess | None] = [
        None,
        process(tmp_path),
        None,
        process(tmp_path, config={}),
        process(tmp_path, fails="never"),
    ]
    for number, sink in enumerate(lives):
        if sink is not None:
            sink.open(2 * number)
        for step in (2 * number, 2 * number + 1):
            for name, record in {
                "metrics": {"step": step, "a": 1.5, "time/step_s": 100.0},
                "samples": {"step": step, "prompt": f"p{step}"},
            }.items():
                with (tmp_path / f"{name}.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
            if sink is not None:
                give(sink, range(step, step + 1))
        finish_all([sink] if sink is not None else [])
    found = written(tmp_path, "mine.jsonl")
    steps = [record.get("step", "closed" if "closed" in record else "open") for record in found]
    assert steps == [
        "open",
        *range(4),
        "closed",
        "open",
        *range(4, 8),
        "closed",
        "open",
        *range(10),
        "closed",
    ]
    assert [record["samples"] for record in found if "step" in record][:8] == [
        [],
        [],
        [],
        [],
        *([{"step": n, "prompt": f"p{n}"}] for n in (4, 5)),
        *([{"step": n, "prompt": "p"}] for n in (6, 7)),
    ]
    assert [record["id"] is None for record in found if "config" in record] == [True, False, True]
    times = [record["seconds"] for record in found if "step" in record][:3]
    assert [later - sooner for sooner, later in pairwise(times)] == pytest.approx([100, 0], abs=20)


@pytest.mark.slow(instead="test_every_way_at_every_moment_is_told_of_once_and_leaves_nothing", seconds=1.9)
def test_no_way_to_fail_touches_training(world: World, tmp_path: Path) -> None:
    """Three sinks at once: the run ends as one without them, bitwise, and each is told of once."""
    plain = world.config("grpo", tmp_path)
    run_dir = tmp_path / "with"
    log = tmp_path / "log"
    (tmp_path / "three.py").write_text(
        OWN.read_text() + "".join(f"\n\nclass {name}(Rows):\n    pass\n" for name in "ABC")
    )
    sinks = [
        {"name": f"{tmp_path / 'three.py'}:A", "file": "A.jsonl", "fails": "dies", "at": 2, "wait_s": 120},
        {
            "name": f"{tmp_path / 'three.py'}:B",
            "file": "B.jsonl",
            "fails": "hangs deaf",
            "at": "open",
            "wait_s": 1,
        },
        {
            "name": f"{tmp_path / 'three.py'}:C",
            "file": "C.jsonl",
            "fails": "raises",
            "at": "close",
            "wait_s": 120,
        },
    ]
    assert forked(lambda: oat("train", plain), tmp_path / "plain") == 0
    flags = ("--run_dir", run_dir, "--tracking.sinks", json.dumps(sinks))
    assert forked(lambda: told("train", plain, *flags), log) == 0, log.read_text()
    assert digest_run(run_dir) == digest_run(tmp_path / "grpo")
    assert sorted(re.findall("warning: (.*?);", log.read_text())) == [
        "the sink three-A lost its process (exit code 3)",
        "the sink three-B was not done 1 s after the last row (its wait_s)",
        "the sink three-C could not be closed: ValueError: no more of this, says nobody",
    ]


@pytest.mark.fault("R4")
def test_every_way_at_every_moment_is_told_of_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-0123456789")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    places = [(way, moment) for way in WAYS for moment in MOMENTS]
    sinks = [
        process(tmp_path, key=f"{way}-{at}", fails=way, at=at, wait_s=2.0 if "hangs" in way else 60.0)
        for way, at in places
    ]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for sink in sinks:
            sink.open(0)
            give(sink, range(4))
        reached = {"open": {"config"}, "2": {"config", 0, 1, 2}, "close": {"config", 0, 1, 2, 3}}
        deadline = time.monotonic() + 60
        while (
            any(reached[at] - seen(tmp_path, f"{way}-{at}.jsonl") for way, at in places)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        finish_all(sinks)
    for (way, moment), sink in zip(places, sinks, strict=True):
        (text,) = [
            str(warning.message) for warning in said if f"the sink {way}-{moment} " in str(warning.message)
        ]
        expected = {
            "raises": "could not",
            "exits": "could not",
            "dies": r"lost its process \(exit code 3\)",
            "is killed": r"process \(SIGSEGV\)",
        }
        assert re.search(expected.get(way, r"was not done 2 s after the last row \(its wait_s\)"), text), text
        assert "sk-0123456789" not in text
        assert marked(sink._mark) == []
        assert seen(tmp_path, f"{way}-{moment}.jsonl") == reached[moment]
        if moment == "2":
            kept = json.loads((tmp_path / "sinks" / f"{way}-2.json").read_text())
            assert kept["next"] == (2 if way in ("raises", "exits") else 3)
    assert list(scratch.iterdir()) == []
    figure(
        f"{len(places)} of {len(places)} ways and moments in which a sink fails: told of once, nothing left"
    )


def seen(folder: Path, file: str) -> set[Any]:
    """The steps, and whether there is a configuration."""
    records = written(folder, file) if (folder / file).exists() else []
    return {
        record["step"] if "step" in record else next(iter(record.keys() & {"config", "closed"}))
        for record in records
    }


def test_a_marked_process_is_found(tmp_path: Path) -> None:
    """Also one that has left the session, and whose parent has gone."""
    sink = process(tmp_path, fails="hangs deaf", at="open", wait_s=0.0)
    sink.open(0)
    deadline = time.monotonic() + 30
    while len(marked(sink._mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    found = marked(sink._mark)
    assert len(found) == 2
    assert all(VARIABLE.encode() in Path(f"/proc/{number}/environ").read_bytes() for number in found)
    sink.end()
    while marked(sink._mark) and time.monotonic() < deadline:  # killed, and not yet gone on a busy machine
        time.sleep(0.02)
    assert marked(sink._mark) == []


@pytest.mark.parametrize("bound", ["_MOST_ROWS", "_MOST_BYTES"])
def test_a_sink_that_hangs_is_given_up_when_too_much_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(child, bound, 20 if bound == "_MOST_ROWS" else 2_000)
    sink = process(tmp_path, fails="hangs", at=1)
    sink.open(0)
    with pytest.warns(
        match=(
            r"the sink mine has not taken the row of step \d+ yet, and \d+ rows wait; the run goes on "
            r"without "
            r"it, and rows from"
        )
    ):
        give(sink, range(60))
    assert marked(sink._mark) == []
    finish_all([sink])


def test_a_hang_holds_up_no_row(tmp_path: Path) -> None:
    """4 MB, which no pipe takes: handing over a row takes microseconds, and not the time of the sink."""
    sink = process(tmp_path, fails="hangs", at="open", wait_s=0.0)
    sink.open(0)
    begin = time.monotonic()
    for step in range(1000):
        sink.row(step, json.dumps({"step": step, "a": "x" * 4000}), [])
    assert time.monotonic() - begin < 2
    with pytest.warns(match="the sink mine was not done"):
        finish_all([sink])


def test_the_sink_of_the_life_before_is_waited_for(tmp_path: Path) -> None:
    """Training was killed, and its sink still takes rows: the next one begins when that has closed."""
    (tmp_path / "slow.py").write_text(
        OWN.read_text()
        + (
            "\n\nclass Slow(Rows):\n    def row(self, row):\n        time.sleep(0.2)\n        "
            "super().row(row)\n"
        )
    )
    lives = [
        SinkProcess(Described("slow", f"{tmp_path / 'slow.py'}:Slow", {}, {}, False, 60.0), tmp_path, {})
        for _ in range(2)
    ]
    lives[0].open(0)
    give(lives[0], range(6))
    deadline = time.monotonic() + 60
    while not (tmp_path / "rows.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    lives[0].let_go()  # as a kill would
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "a": 1.5}) + "\n" for step in range(3))
    )
    lives[1].open(3)
    give(lives[1], range(3, 8))
    finish_all(lives[1:])
    found = written(tmp_path)
    steps = [record.get("step", "closed" if "closed" in record else "open") for record in found]
    assert steps == ["open", *range(6), "closed", "open", 6, 7, "closed"]


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
    figure(f"{len(secrets)} of {len(secrets)} planted secrets that no sink got")


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
    """Also in a field of any name, and in a text of which no configuration knows."""
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
    assert (
        oat("check", world.config("dpo", tmp_path, {"tracking.sinks": sinks, "tracking.tensorboard": True}))
        == 0
    )
    assert re.search(
        rf"sinks +{re.escape(str(OWN))}:Rows \(with texts\), tensorboard\n", capsys.readouterr().out
    )


@pytest.mark.slow(
    instead="tests/build/test_places.py::test_a_run_directory_moves_between_two_lives", seconds=1.2
)
def test_a_run_directory_may_be_moved(world: World, tmp_path: Path) -> None:
    """What a sink keeps goes with it."""
    config, log = (
        world.config("grpo", tmp_path, {"tracking.sinks": [own()], "stop.max_steps": 2, "evaluation": None}),
        tmp_path / "log",
    )
    assert forked(lambda: oat("train", config), log) == 0
    shutil.move(tmp_path / "grpo", tmp_path / "moved")
    assert (
        forked(lambda: oat("train", config, "--run_dir", tmp_path / "moved", "--stop.max_steps", 3), log) == 0
    ), log.read_text()
    assert are_its_rows(written(tmp_path / "moved"), tmp_path / "moved")
