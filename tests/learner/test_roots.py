"""The learner's work with a model goes through its root, and in no other way."""

from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from apart_runs import FAMILIES
from fixtures import World, oat

from oat.learner.learner import Learner
from oat.models.root import Root
from oat.plugins.registry import ALGORITHMS
from oat.rollout.features import SecondPass
from oat.types import ENSEMBLE

OF_REFERENCE = {"name": "ensemble", "samples": 4, "features": {"backbone": "reference"}}
BY_FAMILY = {"sft", "reward_model", "frozen"}
"""Algorithms that need other settings, which a family or a run of their own has."""
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {"algorithm": {"name": name, "prompts": 4}})
        for name in ALGORITHMS
        if name not in BY_FAMILY
    },
    **FAMILIES,
    "frozen": (
        "frozen",
        {
            "algorithm": {"name": "frozen", "prompts": 4},
            "explorer": {**OF_REFERENCE, "ensemble": {"members": 2, "hidden": 4}},
        },
    ),
    "old and reference log-probabilities": ("grpo", {"algorithm.kl_coef": 0.1, "learner.sync_every": 2}),
    "LoRA": ("dpo", {"model.lora": {"rank": 2}}),
    "LoRA on the head": ("grpo", {"model.lora": {"rank": 2, "targets": ["lm_head", "q_proj"]}}),
    "a critic with LoRA": ("ppo", {"model.lora": {"rank": 2}}),
    "features of the reference": (
        "dpo",
        {"explorer": {**OF_REFERENCE, "ensemble": {"members": 2, "hidden": 4}}},
    ),
}


class Watch:
    """Watches the roots of a learner's models.

    Attributes:
        passes: how often each kind of work with a model was begun, by root.
        seen: how often a hook of a root has seen a pass.
        outside: parts that computed for the learner outside of their root.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.passes, self.seen = Counter[int](), Counter[int]()
        self.outside: list[str] = []
        self._hooked = set[int]()
        self._is_at_work = self._depth = 0
        self._patched = monkeypatch
        forward = Root.forward

        def within(root: Root, compute: Callable[[], Any]) -> Any:
            self._depth += 1
            try:
                return forward(root, compute)
            finally:
                self._depth -= 1

        monkeypatch.setattr(Root, "forward", within)
        make = Learner.__init__

        def made(learner: Learner, *arguments: Any, **options: Any) -> None:
            make(learner, *arguments, **options)
            self._watch(learner)

        monkeypatch.setattr(Learner, "__init__", made)
        for owner, name in (
            (Learner, "update"),
            (Learner, "forward"),
            (Learner, "measure"),
            (SecondPass, "of"),
        ):
            monkeypatch.setattr(owner, name, self._at_work(getattr(owner, name)))
        for name in ("linear_functionals", "chunked_head"):  # the head's weight is used without its module
            real = getattr(__import__("oat.learner.models", fromlist=[name]), name)
            monkeypatch.setattr(f"oat.learner.models.{name}", self._within(name, real))
        begin, features = SecondPass.__init__, SecondPass._features

        def begun(made: SecondPass, *given: Any, **named: Any) -> None:
            begin(made, *given, **named)
            self._hook(made.lm.root)

        monkeypatch.setattr(SecondPass, "__init__", begun)

        def one(made: SecondPass, rows: Any) -> Any:
            self.passes[id(made.lm.root)] += 1
            return features(made, rows)

        monkeypatch.setattr(SecondPass, "_features", one)

    def _hook(self, root: Root) -> None:
        if id(root) not in self._hooked:
            self._hooked.add(id(root))
            root.register_forward_hook(lambda root, given, found: self.seen.update([id(root)]))

    def _watch(self, learner: Learner) -> None:
        for model in learner.models.values():
            self._hook(model.root)
        for name, model in learner.models.items():
            outputs = model.outputs

            def counted(*given: Any, model: Any = model, outputs: Any = outputs) -> Any:
                self.passes[id(model.root)] += 1
                return outputs(*given)

            self._patched.setattr(model, "outputs", counted)
            parts = [] if name == ENSEMBLE else [model.module]
            for module in parts:
                for place, part in module.named_modules():
                    if not isinstance(part, Root):
                        part.register_forward_pre_hook(self._refuse(f"{name}.{place}"))

    def _refuse(self, what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._is_at_work and not self._depth:
                self.outside.append(what)

        return hook

    def _within(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def called(*given: Any, **named: Any) -> Any:
            self._refuse(what)()
            return real(*given, **named)

        return called

    def _at_work(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(real)
        def called(*given: Any, **named: Any) -> Any:
            self._is_at_work += 1
            try:
                return real(*given, **named)
            finally:
                self._is_at_work -= 1

        return called


@pytest.mark.parametrize("name", RUNS)
def test_hooks_of_each_root_fire_once_a_pass_and_there_is_no_other_way(
    name: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, changes = RUNS[name]
    watch = Watch(monkeypatch)
    assert oat("train", world.config(recipe, tmp_path, {**changes, "stop.max_steps": 2})) == 0
    assert watch.outside == []
    assert sum(watch.passes.values()) > 0
    assert watch.seen == watch.passes


def test_every_algorithm_is_run() -> None:
    assert {changes.get("algorithm", {}).get("name", recipe) for recipe, changes in RUNS.values()} == {
        *ALGORITHMS
    }


def test_the_watch_sees_another_way(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a model computes past its root, the body and the head are named."""
    watch = Watch(monkeypatch)
    monkeypatch.setattr(
        "oat.learner.models.LanguageModel.root", property(lambda model: lambda compute: compute())
    )
    watch._watch = lambda learner: [  # type: ignore[method-assign]
        part.register_forward_pre_hook(watch._refuse(place))
        for place, part in learner.models["policy"].module.named_modules()
    ]
    assert oat("train", world.config("grpo", tmp_path, {"stop.max_steps": 1})) == 0
    assert {"model", "linear_functionals"} <= {*watch.outside}


def test_a_root_may_be_any_module_of_tensors() -> None:
    root = Root(torch.nn.Linear(2, 2))
    with torch.no_grad():
        found = root(lambda: {"a": root.body(torch.ones(1, 2))})
    assert found["a"].shape == (1, 2)
