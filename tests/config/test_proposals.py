"""Messages about unknown fields: what they propose is accepted, and no value can forge or end them."""

import dataclasses
import itertools
import re
import sys
from typing import Any

import pytest

import oat as package
from oat.config.load import load_tree
from oat.config.part_names import fields_of_parts, readers_of
from oat.config.peers.objects import plain
from oat.errors import ConfigError, OatError

TREE = {"model": {"path": "m"}, "prompts": {"path": "p"}, "oracle": {"name": "exact_match"}}
TYPOS = ("betaa", "bata", "kl_coeff", "sampels", "promts", "clip", "gama", "tempreture", "steps", "rank")
NAMES = sorted({name.rpartition(".")[2] for name in fields_of_parts("algorithm")} | {*TYPOS})
PLACES = ("learner", "args", "sampling", "")
_PROPOSED = re.compile(r"did you mean ((?:`[a-z_.]+`(?: or )?)+)")


def said(algorithm: str, path: str, value: Any = 1) -> str:
    """Return the message about a field that no configuration has; "": there is such a field."""
    from oat.config.parts import with_settings

    section, _, last = path.rpartition(".")
    tree: dict[str, Any] = {**TREE, "algorithm": {"name": algorithm}}
    inner = tree.setdefault(section, {}) if section else tree
    inner[last] = value
    try:
        config, origins = load_tree(tree, {(): "run.yaml"}, "run.yaml", [])
        with_settings(config, origins)
    except ConfigError as error:
        return str(error) if "nothing reads" in str(error) else ""
    return ""


def proposed(message: str) -> list[str]:
    return [
        name for group in _PROPOSED.findall(message) for name in re.findall(r"algorithm\.([a-z_.]+)", group)
    ]


def strangers(algorithm: str, names: list[str], place: str) -> list[str]:
    """Return the messages that propose what the algorithm does not read."""
    messages = [said(algorithm, f"{place}.{name}".strip(".")) for name in names]
    return [text for text in messages if any(algorithm not in readers_of(name) for name in proposed(text))]


@pytest.mark.sample("-grpo", "learner-dpo", seconds=20)
@pytest.mark.parametrize(
    ("place", "algorithm"),
    [
        pytest.param(place, name, id=f"{place}-{name}")
        for place, name in itertools.product(
            PLACES, ("grpo", "dpo", "ppo", "rloo", "simpo", "sft", "dr_grpo", "reward_model")
        )
    ],
)
def test_what_is_proposed_is_read_by_the_algorithm(place: str, algorithm: str) -> None:
    assert strangers(algorithm, NAMES, place) == []


def test_a_setting_of_another_algorithm_is_named_with_its_algorithm() -> None:
    message = said("grpo", "learner.centring")
    assert proposed(message) == []
    assert "`algorithm.centring` is read by reward_model" in message


@pytest.mark.parametrize("name", ["betaa", "beta0", "Beta", "bata"])
@pytest.mark.parametrize("place", ["algorithm.", "args.", "learner.", ""])
def test_a_near_miss_of_a_peers_name_is_that_name(place: str, name: str) -> None:
    message = said("grpo", f"{place}{name}")
    assert "`beta`" in message
    assert "algorithm.kl_coef" in message
    assert "learner.betas" not in message


def test_names_and_values_cannot_forge_lines() -> None:
    for path, value in (("learner.lear\nning", 1), ("args.beta", "x\n\nFAKE: ok"), ("a\u2028\x85b", 1)):
        assert said("grpo", path, value).isprintable(), path


class Raising:
    """An object that raises whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    __hash__ = None  # type: ignore[assignment]


def fails() -> Any:
    raise RuntimeError("factory")


@dataclasses.dataclass
class Hostile:
    made: list[int] = dataclasses.field(default_factory=fails)
    beta: Any = 0.1
    lr: float = 0.1

    def __post_init__(self) -> None:
        sys.exit(7)


def hostile(**given: Any) -> Hostile:
    it = object.__new__(Hostile)
    vars(it).update({"made": [1], "beta": 0.5, "lr": 0.2, **given})
    return it


def within_itself() -> Any:
    tree: dict[str, Any] = {}
    tree["args"] = tree
    return tree


def deep() -> Any:
    tree: Any = {}
    for _ in range(5000):
        tree = {"args": tree}
    return tree


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize("module", [__name__, "trl.trainer.grpo_config"])
def test_no_object_ends_a_message_with_its_own_error(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hostile, "__module__", module)
    given = [Raising(), {"beta": Raising()}, within_itself(), deep(), hostile(), hostile(beta=ITSELF)]
    for args in [*given, hostile(beta=Raising()), hostile(beta=10**5000), {"beta": 10**5000}]:
        with pytest.raises(OatError):
            package.Trainer(model="m", oracle="exact_match", prompts="p", args=args)


def test_a_users_class_is_not_constructed() -> None:
    made = []

    @dataclasses.dataclass
    class Own:
        beta: float = 0.1
        lr: float | None = None

        def __post_init__(self) -> None:
            made.append(self)

    given = Own(0.2, 0.3)
    assert plain(given) == {"beta": 0.2, "lr": 0.3}
    assert made == [given]
    Own.__module__ = "trl.trainer"
    assert plain(given) == {"beta": 0.2, "lr": 0.3}
    assert len(made) == 2
