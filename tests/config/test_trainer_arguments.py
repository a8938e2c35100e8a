"""Arguments and classes of other libraries that a user gives to `oat.Trainer` or looks for in `oat`."""

import argparse
import collections
import dataclasses
import types
from typing import Any

import pydantic
import pytest

import oat as package
from oat.config.load import load_tree
from oat.config.peers.batches import rounded, undivided
from oat.config.peers.copied import MARK
from oat.config.peers.objects import Named, plain
from oat.config.peers.rewards import oracle_of
from oat.config.peers.translated import settings_of
from oat.errors import ConfigError


def right(completions: list[str], **columns: Any) -> list[float]:
    return [float(text == "4") for text in completions]


def brief(completions: list[str], **columns: Any) -> list[float]:
    return [-float(len(text)) for text in completions]


def refused(**given: Any) -> str:
    """Return the message with which `oat.Trainer` refuses arguments."""
    with pytest.raises(ConfigError) as error:
        package.Trainer(**{"model": "m", "oracle": "exact_match", "prompts": "p", **given})
    return str(error.value)


def to_copy(message: str) -> dict[str, Any]:
    """Return the arguments that a message says to write, but for TRL's defaults."""
    said = message.partition("\nwrite")[2].partition("\ndocs/")[0]
    said = "\n".join(line for line in said.splitlines() if not line.endswith(MARK))
    given: dict[str, Any] = eval(f"dict({said[said.index(':') + 1 :]})", globals())
    return {name: section for name, section in given.items() if section != {}}


class Attributes:
    num_generations = 4

    def __init__(self) -> None:
        self.max_steps = 10
        self.epsilon = 0.2
        self.learning_rate: float | None = None

    def method(self) -> None:
        raise RuntimeError

    @property
    def made(self) -> int:
        raise RuntimeError


@dataclasses.dataclass
class Own:
    """The values of a user's own class are the user's, also its defaults."""

    num_generations: int = 4
    max_steps: int = 10
    epsilon: float = 0.2
    learning_rate: float | None = None


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    num_generations: int = 4
    max_steps: int = 10
    epsilon: float = 0.2
    learning_rate: float | None = None


GIVEN: dict[str, Any] = {"num_generations": 4, "max_steps": 10, "epsilon": 0.2}
OURS = {
    "algorithm": {"name": "grpo", "samples": 4, "clip_low": 0.2, "clip_high": 0.2},
    "stop": {"max_steps": 10},
}


@pytest.mark.parametrize(
    "given",
    [
        GIVEN,
        {"args": GIVEN},
        {"args": types.SimpleNamespace(**GIVEN, learning_rate=None)},
        {"args": argparse.Namespace(**GIVEN)},
        {"args": types.MappingProxyType(GIVEN)},
        {"args": Own()},
        {"args": Attributes()},
        {"args": Model()},
        {"hparams": Own()},
        {"num_generations": 4, "args": {"max_steps": 10, "epsilon": 0.2}},
    ],
    ids=lambda given: "-".join((*given, *(type(value).__name__ for value in given.values()))),
)
def test_what_several_arguments_say_is_worked_out_together(given: dict[str, Any]) -> None:
    """Keywords, an object of any kind, and both give one list and the same lines to copy."""
    message = refused(**given)
    assert message.count("oat.Trainer(") == 1
    assert to_copy(message) == OURS


def test_a_class_of_attributes_counts_as_its_fields() -> None:
    assert to_copy(refused(args=Attributes, max_steps=10)) == {
        "algorithm": {"name": "grpo", "samples": 4},
        "stop": {"max_steps": 10},
    }


def test_collections_of_any_kind_are_plain_and_long_ones_are_no_settings() -> None:
    given = {
        "a": collections.UserList([1, {"b", "a"}]),
        "b": collections.ChainMap({"c": right}),
        "d": [0] * 2000,
    }
    assert plain(given) == {"a": [1, ["a", "b"]], "b": {"c": Named("right")}, "d": ...}
    assert plain({"a": lambda: 1}) == {"a": ...}


def test_what_no_table_has_gets_its_own_line() -> None:
    together, other = refused(**GIVEN, nothing=1).rsplit("\noat.Trainer", 1)
    assert to_copy(together) == OURS
    assert other.startswith("(nothing=...): ")


ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}
SECTION = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


def test_the_fields_of_an_adapter_become_the_section() -> None:
    """What is to be copied is accepted, and has the path of the model."""
    message = refused(peft_config=ADAPTER, beta=0.1)
    assert "peft_config.lora_dropout" in message
    ours = to_copy(message)
    assert ours["model"] == {"path": "m", "lora": SECTION}
    lora = package.Trainer(oracle=right, prompts="p", **ours).config.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets) == (4, 8.0, ("q_proj", "v_proj"))
    assert to_copy(refused(model=object(), peft_config=ADAPTER))["model"] == {"path": ..., "lora": SECTION}
    assert "alpha: 8" in load_error({"model": {"path": "m", "lora": ADAPTER}})


@pytest.mark.slow(instead="test_the_fields_of_an_adapter_become_the_section", seconds=2)
def test_an_adapter_of_peft_is_its_fields() -> None:
    from peft import IA3Config, LoraConfig  # which takes most of a second

    given = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    message = refused(peft_config=given, beta=0.1)
    assert to_copy(message)["model"] == {"path": "m", "lora": SECTION}
    assert "peft_version" not in message
    within = refused(model={"path": "m", "lora": given})
    assert within.startswith("oat.Trainer(model=...): `model.lora` ")
    assert to_copy(within)["model"]["lora"] == SECTION
    assert "choose model.lora.targets" in refused(model={"path": "m", "lora": LoraConfig()})
    assert "peft_config.r" not in refused(peft_config=IA3Config(), beta=0.1)


RECORDS = [{"prompt": "2 + 2", "chosen": "4", "rejected": "5"}]
DPO = {"beta": 0.2, "loss_type": "ipo", "learning_rate": 1e-5, "max_steps": 3}


@pytest.mark.parametrize(
    "own",
    [
        {"prompts": "pairs.jsonl", "oracle": "recorded", "algorithm": "dpo"},
        {"prompts": ["a.jsonl", "b.jsonl"], "oracle": "recorded", "algorithm": {"name": "dpo", "epochs": 2}},
        {"prompts": RECORDS, "oracle": "recorded", "algorithm": "dpo"},
        {"prompts": {"path": RECORDS, "max_prompts": 3}, "oracle": "recorded", "algorithm": "dpo"},
        {
            "prompts": {"path": "p", "prompt_key": "q"},
            "oracle": {"name": brief},
            "algorithm": "dpo",
            "learner": {"weight_decay": 0.1},
            "model": {"path": "n", "lora": {"rank": 3}},
            "stop": {"max_queries": 7},
        },
    ],
)
@pytest.mark.parametrize("given", [DPO, {"args": DPO}, {"args": {**DPO, "peft_config": {"lora_alpha": 8}}}])
def test_what_is_to_be_copied_keeps_what_the_user_gave(own: dict[str, Any], given: dict[str, Any]) -> None:
    """The lines, as arguments in place of the user's, are accepted and lose nothing."""
    message = refused(**own, **given)
    said = message.partition("\nwrite")[2].partition("\ndocs/")[0]
    copied = eval(f"dict({said[said.index(':') + 1 :]})", globals())
    for name, section in copied.items():
        main = "path" if name in ("model", "prompts") else "name"
        before = own.get(name, {})
        before = before if isinstance(before, dict) else {main: before}
        section |= {field: before[field] for field in before if section.get(field) is ...}
        kept = {field: section.get(field) for field in before if field != "name" and field != "lora"}
        assert kept == {field: value for field, value in before.items() if field in kept}
        assert section.get("lora", {}).get("rank", 3) == before.get("lora", {}).get("rank", 3)
    if "schedule" in copied["learner"]:
        copied["learner"]["schedule_steps"] = 3
    config = package.Trainer(**{"model": "m", **own, **copied}).config
    assert config.algorithm.name == "ipo"
    assert config.learner.learning_rate == 1e-5


def test_an_object_of_dpo_needs_no_oracle_and_no_further_line() -> None:
    cls = dataclasses.make_dataclass("DPOConfig", [(name, Any, None) for name in DPO])
    cls.__module__ = "trl.trainer"
    message = refused(oracle=..., prompts=..., train_dataset=RECORDS, args=cls(**DPO))
    assert "\n" not in message.rpartition("\ndocs/")[2], "neither oracle nor prompts is missing"
    assert '"name": "recorded"' in message
    assert "\n  prompts={" in message
    assert "# what you gave as train_dataset" in message
    assert "template" not in message, "the first record is text"


class Raising:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def within_itself() -> Any:
    tree: dict[str, Any] = {}
    tree["a"] = tree
    return tree


def deep() -> Any:
    tree: Any = {}
    for _ in range(3000):
        tree = {"a": tree}
    return tree


@pytest.mark.parametrize("make", [Raising, within_itself, deep])
def test_a_value_that_cannot_be_read_is_named_with_its_argument(make: Any) -> None:
    for name, section in (
        ("learner", {"learning_rate": make()}),
        ("model", {"path": "m", "lora": make()}),
        ("evaluation", {"path": "p", "oracle": make()}),
        ("algorithm", make()),
        ("oracle", make()),
        ("seed", make()),
    ):
        assert refused(**{name: section}).startswith(f"oat.Trainer({name}=...): ")


def test_an_oracle_without_its_name_is_answered() -> None:
    for oracle in ({"path": "x"}, {}):
        assert "`oracle.name`" in refused(oracle=oracle)
    assert "`learner" not in refused(learner=1e-5)
    assert 'learner={"' in refused(learner=1e-5)


def load_error(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        load_tree(tree, {(): "run.yaml"}, "run.yaml", [])
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"r": 4}, {"rank": 4, "alpha": 8, "targets": ...}),
        ({"r": 16, "lora_alpha": 32, "use_rslora": True}, {"rank": 16, "alpha": 128.0, "targets": ...}),
        ({"r": 16, "lora_alpha": 32, "use_rslora": False}, {"rank": 16, "alpha": 32, "targets": ...}),
        ({"lora_alpha": 32, "target_modules": "all-linear"}, {"alpha": 32, "targets": "all-linear"}),
        ({"lora_alpha": 32, "target_modules": ".*_proj"}, {"alpha": 32}),
    ],
)
def test_the_scale_of_an_adapter_is_that_of_peft(given: dict[str, Any], expected: dict[str, Any]) -> None:
    ours = settings_of([(("peft_config", name), value) for name, value in given.items()], "grpo")
    assert {name.removeprefix("model.lora."): value for name, value in ours.items()} == expected


SIZE = "per_device_train_batch_size"
SHARES = "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({SIZE: 6, "num_generations": 4}, ("6 x", "= 6", "num_generations 4")),
        ({SIZE: 4, SHARES: 3, "num_generations": 8}, ("4 x", " 3 = 12", "num_generations 8")),
        ({SIZE: 4}, ("= 4", "num_generations 8")),
        ({"generation_batch_size": 12, SIZE: 6}, ("= 12", "num_generations 8")),
        ({"steps_per_generation": 3, SHARES: 2, "num_generations": 4}, ("8 x", " 3 = 24", " 16 ")),
        ({SIZE: 8, SHARES: 2, "num_generations": 4}, ()),
    ],
)
def test_a_step_that_does_not_divide_is_named_with_its_numbers(
    given: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    said = undivided(given, "grpo")
    assert bool(said) == bool(numbers)
    assert not undivided(given, "dpo")
    message = refused(**given, epsilon=0.2)
    assert said in message
    for number in numbers:
        assert number in said
    assert ("choose algorithm.prompts" in message) == bool(numbers)


def test_a_number_of_steps_that_is_rounded_says_so() -> None:
    assert "10 / 4 " in refused(max_steps=10, num_iterations=4)
    assert "8 / 4 " not in refused(max_steps=8, num_iterations=4)
    assert not rounded(10, None)


@pytest.mark.parametrize(
    ("functions", "weights", "python", "file"),
    [
        (Named("right"), None, {"oracle": Named("right")}, None),
        ([Named("right")], [2.0], {"oracle": [{"name": Named("right"), "weight": 2.0}]}, None),
        (
            "a.py:f",
            None,
            {"oracle": "a.py:f"},
            {"oracle.name": "a.py:f"},
        ),
        (
            ["org/model", "pkg.mod.f"],
            [1, 0.5],
            {
                "oracle": [
                    {"name": "reward_model", "path": "org/model", "weight": 1},
                    {"name": "pkg.mod:f", "weight": 0.5},
                ]
            },
            {
                "oracle.name": "mixture",
                "oracle.sources": [
                    {"name": "reward_model", "path": "org/model", "weight": 1},
                    {"name": "pkg.mod:f", "weight": 0.5},
                ],
            },
        ),
        (["a.py:f", "a.py:g"], [1.0], {"oracle": ...}, {"oracle.name": ...}),
        (["accuracy_reward", ...], None, None, None),
        ([], None, None, None),
    ],
)
def test_reward_functions_and_weights_become_an_oracle(
    functions: Any, weights: Any, python: dict[str, Any] | None, file: dict[str, Any] | None
) -> None:
    given = {"reward_funcs": functions, "reward_weights": weights}
    for is_python, expected in ((True, python), (False, file)):
        found = oracle_of(given, is_python=is_python)
        assert (found and found[0]) == expected
        if found:
            assert ("2 functions and 1 weights" in found[1]) == (... in found[0].values())


def test_reward_functions_are_written_by_their_names() -> None:
    """What is to be copied is accepted, and makes the mixture that TRL sums up."""
    ours = to_copy(refused(reward_funcs=[right, brief], args={"reward_weights": [1.0, 0.1]}))
    assert ours == {"oracle": [{"name": right, "weight": 1.0}, {"name": brief, "weight": 0.1}]}
    sources = package.Trainer(model="m", prompts="p", **ours).config.oracle.options["sources"]
    assert [(each["label"], each["weight"]) for each in sources] == [("right", 1.0), ("brief", 0.1)]
    assert to_copy(refused(reward_funcs=brief)) == {"oracle": brief}
    in_file = load_error({"reward_funcs": ["r.py:f", "r.py:g"], "args": {"reward_weights": [1, 2]}})
    assert "name: mixture" in in_file


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GRPOTrainer", 'oat.Trainer(algorithm="grpo", ...)'),
        ("RewardConfig", 'oat.Trainer(algorithm="reward_model", ...)'),
        ("ORPOConfig", 'oat.Trainer(algorithm="orpo", ...)'),
        ("NashMDTrainer", "oat.Trainer (docs/python.md)"),
    ],
)
def test_a_class_of_trl_is_named_as_what_it_is_here(name: str, expected: str) -> None:
    assert not hasattr(package, name)
    for error, line in ((AttributeError, f"oat.{name}"), (ImportError, f"from oat import Trainer, {name}")):
        with pytest.raises(error) as caught:
            exec(line, {"oat": package})
        assert expected in str(caught.value)
        assert "docs/names.md" in str(caught.value)


def test_other_names_and_submodules_are_as_in_any_package() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from oat import nothing")
    with pytest.raises(AttributeError, match=r"'nothing'$"):
        package.nothing  # noqa: B018
    exec("from oat import config, errors")
