"""The tables of other libraries' names (`oat.config.peers`), and the messages that are made of them."""

import ast
import dataclasses
import fnmatch
import inspect
import itertools
import json
import random
import re
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from configurations import MINIMAL
from fixtures import oat

import oat as package
from oat.config import flags
from oat.config.load import load_tree
from oat.config.parts import with_settings
from oat.config.peers.table import UNNAMED, Row, family_of, find, is_listed, names, rows, values
from oat.config.peers.translated import settings_of, translated
from oat.config.settings import Config
from oat.errors import ConfigError
from oat.plugins.registry import ALGORITHMS, ENGINES

ROOT = Path(__file__).parents[2]
FIELDS = ROOT / "src" / "oat" / "config" / "peers" / "trl_fields.json"
TRL: dict[str, dict[str, dict[str, Any]]] = json.loads(FIELDS.read_text(encoding="utf-8"))
SHARED = "TrainingArguments"
ALGORITHM = {"GRPO": "grpo", "DPO": "dpo", "Reward": "reward_model", "SFT": "sft"}
"""Our algorithm for each family of TRL's classes."""
TREE: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "prompts": {"path": "train.jsonl"},
    "oracle": {"name": "exact_match"},
    "stop": {"max_steps": 1},
}
SOURCES = ("oracle.sources",)
"""Settings of oracles that rows name."""
Field = tuple[str, str, Row, Any]
"""A field of one of TRL's classes: name, our algorithm, row, and default."""


def classes() -> list[str]:
    return [name for name in TRL if name not in ("versions", SHARED)]


def algorithm_of(cls: str) -> str:
    return next((ours for begin, ours in ALGORITHM.items() if cls.startswith(begin)), "grpo")


def row_of(cls: str, field: str, algorithm: str = "") -> Row:
    """Return the row of a field of one of TRL's classes."""
    found = [row for row in rows() if row.peer == "TRL" and row.field == field]
    own = [row for row in found if f"{cls}:{algorithm}" in row.groups]
    return next((row for row in (*own, *found) if cls in row.groups or row in own), found[0])


def fields_of_trl() -> list[Field]:
    """Return every field of TRL's classes. A field that they all inherit stands once, with any algorithm."""
    turns = itertools.cycle(ALGORITHM.values())
    found = [
        (field, next(turns), row_of(SHARED, field), what["default"]) for field, what in TRL[SHARED].items()
    ]
    for cls in classes():
        for field, what in TRL[cls].items():
            found.append(
                (field, algorithm_of(cls), row_of(cls, field, algorithm_of(cls)), what.get("default", "x"))
            )
    return found


def our_fields(cls: Any = Config, above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, type and default of every section and field, our algorithms' and engines' too."""
    registries = {"algorithm": ALGORITHMS, "engine": ENGINES}
    hints = typing.get_type_hints(cls, include_extras=True)
    for f in dataclasses.fields(cls):
        kinds = (hints[f.name], *typing.get_args(hints[f.name]))
        parts = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        if cls is Config and f.name in registries:
            parts += [part.Config for part in registries[f.name].values()]
        yield f"{above}{f.name}", hints[f.name], f.default
        for part in dict.fromkeys(parts):
            yield from our_fields(part, f"{above}{f.name}.")


OURS: dict[str, list[tuple[Any, Any]]] = {}
for _name, _type, _default in our_fields():
    OURS.setdefault(_name, []).append((_type, _default))


def accepts(setting: str, value: Any) -> bool:
    """Return True if a setting may have a value, with one of our algorithms at least."""
    if setting == "algorithm.name":
        return value in ALGORITHMS
    if value is ...:
        return setting in {*OURS, *SOURCES}
    for annotation, _ in OURS[setting]:
        try:
            msgspec.convert(value, annotation)
        except msgspec.ValidationError:
            continue
        return True
    return False


def message(given: list[str], algorithm: str) -> str:
    """Return the message with which a configuration is refused, in which flags set further fields."""
    tree = {**{name: {**section} for name, section in TREE.items()}, "algorithm": {"name": algorithm}}
    try:
        config, origins = load_tree(tree, {(): "run.yaml"}, "run.yaml", given)
        with_settings(config, origins)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"nothing refuses {given}")


def lacks(said: str, row: Row, value: Any) -> str:
    """Return what a message should have and has not; "": it has a row's answer."""
    ours = row.converted(value)
    for setting in row.settings if ours is None else ours:
        if setting not in said:
            return setting
    return "" if row.remark[1:].rstrip(".") in said else row.remark


def written(value: Any) -> str:
    return json.dumps(value) if value not in ("", [], {}) else "x"


def test_every_field_of_trl_has_a_row_and_every_row_a_field() -> None:
    known = {(SHARED, field) for field in TRL[SHARED]}
    known |= {(cls, field) for cls in classes() for field in TRL[cls] if field not in TRL[SHARED]}
    found = {
        (group.partition(":")[0], row.field) for row in rows() if row.peer == "TRL" for group in row.groups
    }
    assert {each for each in found if each[0] != "older"} == known
    assert not {field for group, field in found if group == "older"} & {field for _, field in known}


def test_no_table_has_a_name_twice() -> None:
    for file in {row.peer for row in rows()}:
        found = [(group, row.field) for row in rows() if row.peer == file for group in row.groups]
        assert len(found) == len(set(found))


def read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_the_rows_are_well_formed() -> None:
    """The settings of a row exist, and may have the values that the row gives them."""
    arguments = inspect.signature(package.Trainer).parameters
    for row in (*rows(), *values().values()):
        for setting in row.settings:
            argument = re.fullmatch(r"oat\.Trainer\((\w+)\)", setting)
            assert argument[1] in arguments if argument else setting in OURS, row
        assert row.remark.endswith("."), row
        assert len(row.remark) < 250, row
        entries = [] if row.conversion in ("", "=", "whole") else row.conversion.split("; ")
        for entry in entries:
            key, ours = entry.split(" -> ")
            if key in UNNAMED:
                pairs = [pair.split("=")[0].rstrip("?") for pair in ours.split(" & ")]
                assert ours in ("=", "-") or all(setting in {*OURS, *SOURCES} for setting in pairs), row
                continue
            given = row.converted(read(key)) or {}
            assert ours in ("=", "-") or row.claimed(read(key)), row
            assert ours == "=" or all(accepts(*pair) for pair in given.items()), row


def test_defaults_are_accepted_and_are_what_the_remarks_say() -> None:
    """A default of TRL's, converted, is a value that our setting may have. If a remark says that defaults are
    equal, or what they are, it is so."""
    for field, algorithm, row, default in fields_of_trl():
        if row.groups[0].endswith("Trainer") or default is None:
            continue
        for setting, value in (row.converted(default) or {}).items():
            assert accepts(setting, value), (field, setting, value)
            ours = None if value is ... else ours_by_default(setting, algorithm)
            if "same default" in row.remark and setting in row.settings:
                assert value == ours, (field, value, ours)
        there = re.search(r"default is (\S+) here and (\S+) there", row.remark)
        if there:
            assert float(there[2]) == default, field
            assert float(there[1]) in [ours_by_default(setting, algorithm) for setting in row.settings], field


def ours_by_default(setting: str, algorithm: str) -> Any:
    """Return the default of a setting; of an algorithm's option, that of the algorithm, or of any if it has
    none."""
    section, _, name = setting.partition(".")
    own = getattr(ALGORITHMS[algorithm].Config, name, None) if section == "algorithm" else None
    return own if own is not None else OURS[setting][0][1]


def test_the_families_of_algorithms_are_all_there() -> None:
    families = {name: family_of(name) for name in ALGORITHMS}
    assert {families[name] for name in ("dpo", "kto", "bnf", "frozen", "xpo")} == {"pairs"}
    assert {families[name] for name in ("grpo", "rloo", "ppo", "reinforce_pp")} == {"group"}
    assert (families["sft"], families["reward_model"]) == ("sft", "reward")


ARGUMENTS = ("args.", "training_args.", "trainer.args.")


@pytest.mark.parametrize("place", ["", "args.", "learner.", "algorithm.", "sampling."])
def test_a_name_of_trl_is_translated_wherever_it_stands(place: str) -> None:
    """Every field of TRL's, at every place of a file or flag, gets its row's answer, except where a setting
    of ours has the name."""
    answered = 0
    for number, (field, algorithm, row, default) in enumerate(fields_of_trl()):
        section = {"learner": "learner", "sampling": "sampling", "algorithm": "algorithm"}.get(place[:-1])
        own = f"{section}.{field}" if section else field
        is_own = (
            own in OURS or (own,) == row.settings or (section is not None and is_listed([section, field]))
        )
        if (place == "" or section) and is_own:
            continue
        name = field.replace("_", "-") if number % 2 else field
        stands = ARGUMENTS[number % 3] if place == "args." else place
        said = message([f"--{stands}{name}", written(default)], algorithm)
        value = flags.parse_flag("", written(default))
        assert not lacks(said, row, value), (said, row)
        assert said.count("\n") == 0
        answered += 1
    assert answered > 200


def test_other_peers_names_are_translated() -> None:
    """So is every other name, with the answer of the library that comes first in the tables."""
    for row in rows():
        if row.peer == "TRL" or row.settings == (row.field,) or row.field in OURS:
            continue
        own = {"dpo": "dpo", "sft": "sft", "rm": "reward_model", "pairs": "dpo", "reward": "reward_model"}
        algorithm = own.get(row.groups[0].rpartition(":")[2], "grpo")
        first = find(row.field.split("."), algorithm)[0]
        assert first.field == row.field
        said = message([f"--{row.field}", "1"], algorithm)
        assert not lacks(said, first, 1), (said, row)


def test_a_last_part_alone_is_enough_where_it_is_unambiguous() -> None:
    assert "algorithm.minibatches" in message(["--ppo_mini_batch_size", "64"], "grpo")
    assert not find(["path"], "grpo")
    assert not find(["oracle", "name"], "grpo")


@dataclasses.dataclass
class Arguments:
    """Stands for an object of TRL's configuration, which has values that a constructor filled in."""

    num_generations: int | None = 8
    learning_rate: float = 1e-6
    use_vllm: bool = False
    debug: Any = ""
    accelerator_config: Any = None


Arguments.__module__ = "trl.trainer"


def trainer_message(**given: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        package.Trainer(**{"model": "m", "oracle": "exact_match", "prompts": "p.jsonl", **given})
    return str(refused.value)


def test_a_name_of_trl_is_translated_from_python() -> None:
    """Every field and argument of TRL's: as an argument of oat.Trainer, in `args`, and in a section."""
    taken = set(inspect.signature(package.Trainer).parameters) | {f.name for f in dataclasses.fields(Config)}
    for field, algorithm, row, default in fields_of_trl():
        part = {"algorithm": {"name": algorithm}}
        forms = [{**part, "args": {field: default}}]
        forms += [{**part, field: default}] if field not in taken else []
        if f"learner.{field}" not in OURS and not is_listed(["learner", field]):
            forms.append({**part, "learner": {field: default}})
        for given in forms:
            said = trainer_message(**given)
            assert not lacks(said, row, default), (said, row)
            assert said.startswith("oat.Trainer(")


def test_the_arguments_of_trls_trainer_are_all_named_at_once() -> None:
    args = Arguments(num_generations=4, use_vllm=True, debug=[], accelerator_config=object())
    given: dict[str, Any] = {"model": "m", "reward_funcs": max, "train_dataset": [], "args": args}
    with pytest.raises(ConfigError) as refused:
        package.Trainer(**given, peft_config=object(), nothing=1)
    together, other = re.split(r"\n(?=oat)", str(refused.value))
    assert together.startswith("oat.Trainer(args=...): ")
    assert other.startswith("oat.Trainer(nothing=...): ")
    for expected in (
        "\n  oracle=max,",
        "# what you gave as train_dataset",
        '"samples": 4',
        "model.lora",
        "use_vllm",
    ):
        assert expected in together
    assert "debug" not in together
    assert "accelerator_config" not in together
    assert 'algorithm={"kl_coef": 0.04, "kl_unbiased": True}' in trainer_message(
        algorithm={"name": "grpo", "beta": 0.04}
    )


def test_several_fields_of_an_unknown_section_are_a_list() -> None:
    flags = [
        "--args.beta",
        "0.04",
        "--args.use_vllm",
        "true",
        "--args.save_steps",
        "5",
        "--args.loss_type",
        "dapo",
    ]
    said = message(flags, "grpo")
    for expected in ("algorithm.kl_coef 0.04", "checkpoint.every 5", "algorithm.reduction token", "use_vllm"):
        assert expected in said


def test_a_whole_file_of_trl_is_translated_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = "num_generations: 4\nbeta: 0.04\nuse_vllm: true\nsave_steps: 5\n"
    (here / "run.yaml").write_text(MINIMAL + theirs, encoding="utf-8")
    assert oat("train", "run.yaml") == 2
    said = capsys.readouterr().err
    assert said.startswith("oat train: run.yaml:17: ")
    for expected in ("algorithm.samples: 4", "algorithm.kl_coef: 0.04", "checkpoint.every: 5", "use_vllm"):
        assert expected in said
    _, *lines = said.partition("\nwrite")[0].splitlines()
    assert [line.split(" -> ")[0].strip() for line in lines] == theirs.replace(": true", "").splitlines()
    assert len({line.index(" -> ") for line in lines}) == 1
    block = said.partition("\nwrite:\n")[2].rpartition("docs/names.md says")[0]
    ours = yaml.safe_load(block)
    own = yaml.safe_load(MINIMAL)["algorithm"]
    assert ours["algorithm"] == {**own, "samples": 4, "kl_coef": 0.04, "kl_unbiased": True}
    assert ours["checkpoint"] == {"every": 5}


def test_steps_of_the_optimiser_become_steps_of_the_run() -> None:
    theirs = {"max_steps": 10, "save_steps": 8, "num_iterations": 2, "adam_beta1": 0.8}
    sizes = {"steps_per_generation": 4, "gradient_accumulation_steps": 2}
    ours = settings_of([((name,), value) for name, value in {**theirs, **sizes}.items()], "grpo")
    assert ours == {
        "stop.max_steps": 3,
        "checkpoint.every": 2,
        "algorithm.epochs": 2,
        "algorithm.prompts": 4,
        "algorithm.minibatches": 2,
        "learner.betas": [0.8, 0.999],
    }
    undivided = settings_of([(("max_steps",), 10), (("steps_per_generation",), "some")], "grpo")
    assert "stop.max_steps" not in undivided
    several = translated("run.yaml:1", [(("beta",), 0.1), (("num_generations",), 4)], None)
    block = several.partition("\nwrite")[2]
    assert "algorithm.beta" in several
    assert "samples: 4" in block
    assert "kl_coef" not in block


def test_the_algorithm_decides_what_a_name_means() -> None:
    assert "algorithm.kl_coef" in message(["--beta", "0.1"], "grpo")
    assert "learner.betas" not in message(["--algorithm.beta", "0.1"], "grpo")
    assert "algorithm.kl_coef" not in message(["--beta", "0.1"], "dpo")
    assert "algorithm.beta" in message(["--beta", "0.1"], "dpo")
    assert "alarms" not in message(["--args", "x"], "grpo")


def typos(name: str) -> Iterator[str]:
    for place in range(len(name)):
        yield name[:place] + name[place + 1 :]
        yield name[:place] + name[place] + name[place:]


def test_typos_of_our_names_that_are_names_elsewhere_get_ours_first() -> None:
    """A typo of a setting may be a name of a peer's. The message then has the setting too."""
    met = set()
    for setting in OURS:
        section, _, name = setting.rpartition(".")
        for typo in typos(name):
            path = f"{section}.{typo}".strip(".")
            if "." not in section and path not in OURS and find(path.split("."), "grpo"):
                met.add(path)
                part = next((a for a in ALGORITHMS if hasattr(ALGORITHMS[a].Config, name)), "grpo")
                assert name in message([f"--{path}", "1"], part if section == "algorithm" else "grpo"), path
    assert "learner.beta" in met


def test_a_typo_of_a_peers_name_is_translated() -> None:
    assert "algorithm.samples" in message(["--num_generatons", "8"], "grpo")
    assert all("." not in name for name in names())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--algorithm.name", "GRPOConfig"], "algorithm.name: grpo"),
        (["--algorithm.name", "online_dpo"], "algorithm.name: dpo"),
        (["--algorithm.name", "dapo"], "algorithm.reduction: token"),
        (["--learner.schedule", "cosine_with_restarts"], "restarts"),
        (["--learner.schedule", "constant_with_warmup"], "learner.schedule: constant"),
        (["--compute.profile", "cuda"], "compute.profile: gpu"),
        (["--algorithm.reduction", "token-mean"], "algorithm.reduction: token"),
    ],
)
def test_values_of_other_libraries_are_translated(
    here: Path, capsys: pytest.CaptureFixture[str], flags: list[str], expected: str
) -> None:
    assert oat("train", "run.yaml", *flags) == 2
    assert expected in capsys.readouterr().err


def test_fifty_names_given_to_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fifty fields of TRL's at random, as flags or as lines of the file, refused by `oat train`."""
    drawn = random.Random(0).sample([each for each in fields_of_trl() if each[0] not in OURS], 50)
    for number, (field, algorithm, row, default) in enumerate(drawn):
        text = MINIMAL.replace("name: grpo", f"name: {algorithm}")
        flags = [f"--{field}", written(default)] if number % 2 else []
        Path("run.yaml").write_text(
            text + ("" if flags else f"{field}: {written(default)}\n"), encoding="utf-8"
        )
        assert oat("train", "run.yaml", *flags) == 2
        said = capsys.readouterr().err
        assert not lacks(said, row, default), (said, row)
        assert said.startswith(f"oat train: --{field}: " if flags else "oat train: run.yaml:"), said


def test_the_tables_are_read_only_for_a_message() -> None:
    for file in ("load", "settings", "stored"):
        tree = ast.parse((ROOT / "src" / "oat" / "config" / f"{file}.py").read_text(encoding="utf-8"))
        imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert not imported & {"oat.config.peers.translated", "oat.config.unknown", "oat.config.peers.table"}


def test_the_wheel_has_every_file_that_is_no_code() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    source = ROOT / "src" / "oat"
    for file in source.rglob("*"):
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            name = file.relative_to(source).as_posix()
            assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns["package-data"]["oat"]), name


@pytest.mark.slow(instead="test_every_field_of_trl_has_a_row_and_every_row_a_field", seconds=15)
def test_the_fields_of_trl_are_those_of_its_environment(tmp_path: Path) -> None:
    python = ROOT / ".venv-peers" / "trl" / "bin" / "python"
    assert python.exists(), "run: make .venv-peers/trl/.installed"
    subprocess.run(
        [python, ROOT / "benchmarks" / "sides" / "trl_fields.py", tmp_path / "new.json"], check=True
    )
    assert (tmp_path / "new.json").read_text(encoding="utf-8") == FIELDS.read_text(encoding="utf-8")


@pytest.mark.slow(instead="test_fifty_names_given_to_the_command", seconds=10)
@pytest.mark.parametrize("field", ["num_generations", "max_completion_length", "use_vllm"])
def test_the_command_alone_translates(here: Path, field: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oat", "train", "run.yaml", f"--{field}", "8"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert not lacks(done.stderr, row_of("GRPOConfig", field), 8)
