"""The Python API makes the same run as the command line, with objects in the places of names."""

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset
from fixtures import World, make_model, oat
from trainers import letters, lines, objects
from transformers import AutoModelForCausalLM

from oat import Trainer
from oat.commands.digest import digest_run
from oat.errors import ConfigError, DataError, OatWarning
from oat.explore.base import NoExploration
from oat.oracles.callables import CallableOracle
from oat.plugins.loading import load_symbol

EXACT = {"compute": {"threads": 1}, "engine": {"threads": 1}}


def test_the_router_of_older_lines_is_left_out(world: World, tmp_path: Path) -> None:
    without = Trainer(**lines(world, tmp_path / "run")).config
    for router in ("one", {"name": "one"}):
        assert Trainer(**lines(world, tmp_path / "run", router=router)).config == without
    with pytest.raises(
        ConfigError, match=r"oat.Trainer\(router=...\): router.name is 'two', and there are no"
    ):
        Trainer(**lines(world, tmp_path / "run", router="two"))


def test_it_is_the_run_of_the_command_line(world: World, tmp_path: Path) -> None:
    """The run of a Trainer is bitwise the run of the command line, except for the oracle's name in the
    ledger. This also holds if a model, records and functions are given as objects."""
    assert oat("train", world.config("grpo", tmp_path, {"engine.threads": 1})) == 0
    expected = digest_run(tmp_path / "grpo")
    given = objects(world)
    before = {name: tensor.clone() for name, tensor in given["model"].state_dict().items()}
    for name, changes in {"names": {}, "objects": given}.items():
        trainer = Trainer(**lines(world, tmp_path / name, **changes))
        assert trainer.train().reason == "all 4 steps are done"
        found = digest_run(tmp_path / name)
        assert {part for part in expected if found[part] != expected[part]} == {"ledger"}
        assert [row["weights/version"] for row in trainer.metrics[1:]] == [1, 2, 3, 4]
    assert all(torch.equal(tensor, before[name]) for name, tensor in given["model"].state_dict().items()), (
        "a copy learns"
    )
    assert trainer.save_model(tmp_path / "out") == 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_same_lines_go_on_with_it(world: World, tmp_path: Path) -> None:
    """A callback ends the run after step 1, at which no checkpoint is due. Continued, the run equals one
    without the callback."""
    seen: list[int] = []

    def enough(step: int, metrics: dict[str, float]) -> bool:
        metrics.clear()
        seen.append(step)
        return step == 1

    unbroken = Trainer(**lines(world, tmp_path / "unbroken"))
    unbroken.train()
    broken = lines(world, tmp_path / "broken", **objects(world))
    assert Trainer(**broken, callbacks=[enough]).train().reason == "a callback ended it"
    assert seen == [0, 1]
    assert (
        Trainer(**broken, callbacks=[lambda step, metrics: seen.append(step)]).train().reason
        == "all 4 steps are done"
    )
    assert seen == [0, 1, 2, 3, 4]
    assert digest_run(tmp_path / "broken") == digest_run(tmp_path / "unbroken")


def test_what_was_given_must_be_the_same_when_it_goes_on(world: World, tmp_path: Path) -> None:
    given = lines(world, tmp_path / "run", **objects(world))
    Trainer(**given).train()
    settings = tmp_path / "run" / "given" / "model" / "tokenizer_config.json"
    held = json.loads(settings.read_text())
    is_offline = held.get("local_files_only")  # transformers writes HF_HUB_OFFLINE there
    settings.write_text(json.dumps({**held, "local_files_only": not is_offline}))
    Trainer(**given).train()
    fewer = {"path": given["prompts"]["path"][1:], "reference_key": "answer"}
    with pytest.raises(ConfigError, match=r"prompts.jsonl: the run in .* was begun with other records"):
        Trainer(**given | {"prompts": fewer}).train()
    make_model(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="was begun with another model"):
        Trainer(**given | {"model": AutoModelForCausalLM.from_pretrained(tmp_path / "other")}).train()
    assert sorted(path.name for path in (tmp_path / "run" / "given").iterdir()) == ["model", "prompts.jsonl"]


def test_a_first_mistake_in_the_records_does_not_lock_the_directory(world: World, tmp_path: Path) -> None:
    """The first attempt fails at a wrong record, so no run began. The corrected lines begin a run in the same
    directory."""
    good = [{"prompt": f"{number}+1=", "answer": number} for number in range(8)]
    bad = [*good, {"prompt": "1+1=", "answer": [{"deep": None}]}]
    prompts = {"reference_key": "answer"}
    for records, expected in (
        (bad, "field 'answer', message 1"),
        ([{"question": "1"}], "field 'prompt': expected"),
    ):
        with pytest.raises(DataError, match=expected):
            Trainer(**lines(world, tmp_path / "run", prompts={"path": records, **prompts})).train()
    trainer = Trainer(**lines(world, tmp_path / "run", prompts={"path": good, **prompts}))
    assert trainer.train().reason == "all 4 steps are done"
    assert len((tmp_path / "run" / "given" / "prompts.jsonl").read_text().splitlines()) == 8


@pytest.mark.slow(instead="test_records_of_many_kinds", seconds=1.4)
def test_records_of_numpy_and_of_a_frame_with_what_is_missing(world: World, tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(
        prompts: Sequence[str], completions: Sequence[str], level: Sequence[Any], marks: Sequence[Any]
    ) -> list[float]:
        seen.extend(zip(level, marks, strict=True))
        return [float(len(text)) for text in completions]

    frame = pandas.DataFrame(
        {"prompt": ["1+1=", "2+2="], "level": [1.5, None], "marks": [[1, 2], np.array([3])]}
    )
    mine = [
        {"prompt": "1+1=", "level": np.int64(4), "marks": np.array([1, 2])},
        {"prompt": "2+2=", "level": np.float32(0.5), "marks": (3,)},
    ]
    changes: dict[str, Any] = {"oracle": reward, "evaluation": None, "stop": {}}
    for name, prompts in {"frame": frame, "records": mine, "function": lambda: iter(mine)}.items():
        seen.clear()
        Trainer(
            **lines(
                world,
                tmp_path / name,
                prompts=prompts,
                algorithm={"name": "grpo", "prompts": 2, "samples": 2},
                **changes,
            )
        ).train()
        levels = (1.5, None) if name == "frame" else (4, 0.5)
        assert {(level, tuple(marks)) for level, marks in seen} == {(levels[0], (1, 2)), (levels[1], (3,))}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "1+1=", "level": float("nan")},
            "record 2: field 'level': .*got a number that is not finite",
        ),
        (
            {"prompt": "1+1=", "when": pandas.Timestamp(0)},
            "record 2: field 'when': .*got a value of the type Timestamp",
        ),
        (["1+1="], "record 2: expected a JSON object, got a list"),
    ],
)
def test_a_record_is_named_before_anything_is_written(
    world: World, tmp_path: Path, record: Any, message: str
) -> None:
    with pytest.raises(DataError, match=rf"^oat\.Trainer\(prompts=\.\.\.\): {message}"):
        Trainer(**lines(world, tmp_path, prompts=[{"prompt": "1+1="}, record])).train()


def test_such_records_are_left_out_where_malformed_ones_are(world: World, tmp_path: Path) -> None:
    prompts = {
        "path": [{"prompt": "1+1="}] * 4 + [{"prompt": "1+1=", "level": float("nan")}],
        "on_bad_record": "skip",
    }
    trainer = Trainer(**lines(world, tmp_path, prompts=prompts, evaluation=None))
    trainer.train()
    assert trainer.metrics[0]["prompts/skipped"] == 1


def test_what_trl_takes_and_a_run_does_not(world: World, tmp_path: Path) -> None:
    """TRL accepts lists of texts as prompts. Here such texts are names of sources, and the error explains
    it."""
    for prompts in (["1+1="], {"path": ["1+1=", "2+2="]}):
        with pytest.raises(
            DataError, match=r'got the text \'1\+1=\'; give prompts as records, \{"prompt": "1\+1="\}'
        ):
            Trainer(**lines(world, tmp_path, prompts=prompts))
    names = [str(world.folder / "train.jsonl"), "org/name", "mine.py:records"]
    assert len(Trainer(**lines(world, tmp_path, prompts=names)).config.prompts.path) == 3


def test_three_lines_are_enough(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer with few arguments works by its defaults: one pass over the prompts, in runs/grpo."""
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": f"{number}+1="} for number in range(9)]
    trainer = Trainer(
        model=world.folder / "model",
        oracle=letters,
        prompts=lambda: iter(records),
        sampling={"max_new_tokens": 4},
    )
    assert trainer.train().reason == "its only step is done"
    assert trainer.run_dir == Path("runs/grpo")
    assert len((tmp_path / "runs/grpo/given/prompts.jsonl").read_text().splitlines()) == 9


def test_parts_are_given_as_objects(world: World, tmp_path: Path) -> None:
    """A Trainer gets its parts as objects: an oracle, an explorer's class, held-out records, a dataset by
    splits, and another oracle for the evaluation."""
    splits = {"train": [{"prompt": "1+1="}], "test": [{"prompt": "2+2="}, {"prompt": "3+3="}]}

    def other(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    changes: dict[str, Any] = {
        "oracle": CallableOracle(letters, "letters"),
        "explorer": NoExploration,
        "prompts": {"path": splits, "split": "test"},
        "algorithm": {"name": "dpo", "prompts": 2},
        "evaluation": {"path": splits["train"], "oracle": other, "samples": 1},
    }
    trainer = Trainer(**lines(world, tmp_path / "run", **changes))
    trainer.train()
    assert (trainer.config.oracle.name, trainer.config.explorer.name) == (
        "python:CallableOracle",
        "python:NoExploration",
    )
    assert trainer.metrics[0]["eval/sampled"] > 0
    assert len((tmp_path / "run" / "given" / "prompts.jsonl").read_text().splitlines()) == 2


def test_a_finished_run_says_so_and_how_to_go_on(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Calling a finished run prints why it ended and how to continue it. One run ended by its steps, which
    can be raised, and one by its prompts, which cannot."""
    runs = {
        "steps": {"stop": {"max_steps": 2}},
        "prompts": {"stop": {}, "prompts": [{"prompt": "1+1="}] * 8, "evaluation": None},
    }
    for name, changes in runs.items():
        given = lines(world, tmp_path / name, **changes)
        Trainer(**given).train()
        first = capsys.readouterr().out
        assert first.startswith(f"oat.Trainer: 2 steps in {tmp_path / name}\n")
        assert first.endswith(
            f"oat.Trainer: finished, all 2 steps are done; the run lies in {tmp_path / name}\n"
        )
        assert Trainer(**given).train().reason == "all 2 steps are done"
        again = capsys.readouterr().out
        assert f"finished, all 2 steps are done; the run lies in {tmp_path / name}\n" in again
        assert "it had ended before, and nothing was left to do" in again
        assert ("raise what ended it (stop.max_steps" in again) == (name == "steps")
        assert ("its prompts are used up (prompts.epochs)" in again) == (name == "prompts")
        Trainer(**given, quiet=True).train()
        assert capsys.readouterr().out == ""
    Trainer(**lines(world, tmp_path / "steps", stop={"max_steps": 3})).train()
    on = capsys.readouterr().out
    assert on.startswith(
        f"oat.Trainer: 3 steps in {tmp_path / 'steps'}; the run goes on from its checkpoint after 2 steps\n"
    )
    assert "nothing was left" not in on


def test_a_warning_stands_at_the_line_of_whoever_trains(world: World, tmp_path: Path) -> None:
    def down(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        return [None] * len(completions)

    trainer = Trainer(
        **lines(world, tmp_path / "run", evaluation=None, oracle=down, stop={"max_steps": 1}), quiet=True
    )
    with pytest.warns(OatWarning, match="no usable answer") as seen:
        trainer.train()
    (warning,) = (warning for warning in seen.list if "no usable answer" in str(warning.message))
    assert (warning.filename, Path(__file__).read_text().splitlines()[warning.lineno - 1].strip()) == (
        __file__,
        "trainer.train()",
    )


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_model_with_adapters_is_refused_and_a_merged_one_is_trained(
    world: World, tmp_path: Path, is_wrapped: bool
) -> None:
    peft = pytest.importorskip("peft")
    given, adapter = objects(world), peft.LoraConfig(r=2, target_modules="all-linear")
    if is_wrapped:
        given["model"] = peft.get_peft_model(given["model"], adapter)
    else:
        given["model"].add_adapter(adapter)
    with pytest.raises(
        ConfigError,
        match=(
            r"^oat.Trainer\(model=...\): a \w+ has adapters of PEFT .* model=\{.path.: base, .lora.: "
            r".*merge_and_unload"
        ),
    ):
        Trainer(**lines(world, tmp_path / "run", **given))
    if is_wrapped:
        base = given["model"].merge_and_unload()
        model = {"path": base, "lora": {"rank": 2}}
        Trainer(
            **lines(world, tmp_path / "run", **given | {"model": model}, stop={"max_steps": 1}), quiet=True
        ).train()


def test_records_of_many_kinds(world: World, tmp_path: Path) -> None:
    """Records are given as an iterator, as a data set of tensors, or as a data frame, with numbers of numpy.
    The iterator can be read only once, but the run is trained twice."""
    records = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+1=", "answer": "3"}]
    many = {
        "an iterator": iter(records),
        "a data set": Dataset.from_list([{**record, "weight": 1.0} for record in records]).with_format(
            "torch"
        ),
        "a data frame": pandas.DataFrame(records),
    }
    for name, given in many.items():
        changes = {
            "prompts": given,
            "learner": {"learning_rate": np.float64(1e-3)},
            "seed": np.int64(1),
            "evaluation": None,
        }
        trainer = Trainer(**lines(world, tmp_path / name, **changes), quiet=True)
        assert [trainer.train().reason, trainer.train().reason] == ["all 4 steps are done"] * 2
        assert trainer.config.seed == 1


@pytest.mark.slow(instead="test_it_is_the_run_of_the_command_line", seconds=1.2)
def test_seeds_of_runs_with_given_records_are_one_line(world: World, tmp_path: Path) -> None:
    for seed in (0, 1):
        Trainer(
            **lines(world, tmp_path / f"run{seed}", **objects(world)) | {"seed": seed}, quiet=True
        ).train()
    assert oat("plot", tmp_path / "run0", tmp_path / "run1", "--out", tmp_path / "x.csv") == 0
    assert {row["runs"] for row in csv.DictReader((tmp_path / "x.csv").open())} == {"2"}


def test_mistakes(world: World, tmp_path: Path) -> None:
    good = lines(world, tmp_path / "run")

    def reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return [0.0] * len(prompts)

    first = reward

    def reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:  # type: ignore[no-redef]
        return [1.0] * len(prompts)

    mistakes: list[tuple[dict[str, Any], str]] = [
        (
            {"learner": {"learning_rat": 1.0}},
            r"oat.Trainer\(learner=...\): nothing reads .*learning_rat`; did you mean `learning_rate`",
        ),
        ({"lerner": {}}, "did you mean `learner`"),
        (
            {"learning_rate": 1.0},
            r"did you mean `learner.learning_rate` \(from Python: learner=\{\"learning_rate\": ...\}\)\?",
        ),
        ({"learner": {"sed": 1}}, r"did you mean `seed` \(from Python: seed=...\)\?"),
        ({"algorithm": "grop"}, "did you mean `grpo`"),
        ({"model": objects(world)["model"]}, "needs its tokenizer"),
        (
            {"oracle": first, "evaluation": {"path": good["evaluation"]["path"], "oracle": reward}},
            "two different objects are called reward",
        ),
        ({"oracle": object()}, "the oracle python:object is object, neither a function nor a class"),
        ({"prompts": {"path": {"train": []}, "split": "tset"}}, "no split 'tset' among train"),
    ]
    for changes, words in mistakes:
        with pytest.raises((ConfigError, DataError), match=words):
            Trainer(**good | changes).train()
    with pytest.raises(DataError, match=r"record 2: field 'prompt': .*a value of the type object"):
        Trainer(**good | {"prompts": [{"prompt": "1"}, {"prompt": object()}]}).train()


def test_the_command_line_cannot_go_on_with_a_function_of_python(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(**lines(world, tmp_path / "run")).train()
    assert (
        oat("train", tmp_path / "run" / "config.yaml", "--run_dir", tmp_path / "run", "--stop.max_steps", "5")
        == 2
    )
    assert "python:letters: the run was begun from Python" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        load_symbol("python:letters")


def test_importing_it_brings_no_torch() -> None:
    code = "import oat, sys; assert not {'torch', 'numpy', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert Trainer.__module__ == "oat.trainer"
    with pytest.raises(ImportError, match="cannot import name 'Triner' from 'oat'"):
        from oat import Triner  # type: ignore[attr-defined]  # noqa: F401
