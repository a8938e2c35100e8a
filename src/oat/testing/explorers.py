"""The check of an explorer. It lets the explorer choose among made-up responses, and checks the explorer's
questions against the protocol."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from oat import wire
from oat.explore.base import Explorer, Round, candidates_of
from oat.explore.contract import choose_of, needs_faults, plan_faults, question_faults
from oat.plugins.loading import load_symbol
from oat.testing.part import Part
from oat.testing.samples import make_group
from oat.types import ENSEMBLE, UNASKED, Group, Key, Kind, Plan

_MEMBERS, _FEATURES = 5, 8
_STEPS = (0, 1_000)


def check_explorer(
    explorer: Any, kind: Kind = "compare", *, plan: Plan | None = None, **options: Any
) -> None:
    """Let an explorer choose among made-up responses several times, and check its questions against the
    protocol of explorers.

    The check finds these faults:

    * Two calls with the same groups, scores and seed give different questions. The cause is a random number
      from another generator, or a value that is kept between calls.
    * A method changes its arguments.
    * The texts of a question differ from the texts of the responses that the question picks.
    * A question has a key that the explorer did not get, or two questions have the same key.
    * A question has the wrong kind, or asks an oracle to compare two equal texts.
    * The explorer asks no question.
    * `needs` or the result of `widen` is not valid.

    Args:
        explorer: a class, or its name as in a configuration.
        kind: the kind of questions that the explorer has to ask.
        plan: the algorithm's plan. The default has 8 prompts, each with 2 responses for comparisons or 4
            responses for scores.
        options: fields of the explorer's `Config`.

    Raises:
        ContractError: a fault was found.
    """
    cls = load_symbol(explorer) if isinstance(explorer, str) else explorer
    check = _Check(cls, kind, options)
    given = plan or Plan(8, {"sampler": 2 if kind == "compare" else 4}, 8)
    check.members()
    widened = check.widened(given)
    for step in _STEPS:
        check.choice(widened, step)


class _Check(Part):
    def __init__(self, cls: Any, kind: Kind, options: Mapping[str, Any]):
        super().__init__(cls.__qualname__)
        self.cls = cls
        self.kind = kind
        self.options = options

    def fresh(self) -> Explorer:
        """Make a new explorer in the way in which a run makes it."""
        settings = getattr(self.cls, "Config", None)
        takes = settings is not None or not self.options
        self.require(
            takes, f"takes no options, and {', '.join(self.options)} were given; add a dataclass `Config`"
        )
        made: Explorer = self.call(
            "__init__", lambda: self.cls(self.kind, *([settings(**self.options)] if settings else []))
        )
        return made

    def members(self) -> None:
        self.none(needs_faults(getattr(self.fresh(), "needs", None)))

    def none(self, faults: Iterator[str], method: str = "") -> None:
        """If there is a fault, raise an error with the first one.

        Args:
            method: the method's name and a space, with which the message begins.
        """
        for fault in faults:
            self.require(False, method + fault)

    def widened(self, plan: Plan) -> Plan:
        """Return the plan that `widen` makes of a plan. Check that the result is valid, and equal in two
        calls."""
        before = wire.encode(plan)
        one, two = (self.call("widen", self.fresh().widen, plan) for _ in range(2))
        self.require(
            wire.encode(plan) == before,
            "widen changed the plan that it was given; return another: dataclasses.replace(plan, ...)",
        )
        is_same = isinstance(one, Plan) and one == two
        self.require(
            is_same,
            f"widen returned {one} and then {two} for one plan; return a Plan, a function of the argument",
        )
        self.none(plan_faults(one), "widen ")
        return one

    def choice(self, plan: Plan, step: int) -> None:
        """Check the questions about one round. Call `choose` twice on one explorer and once on another
        explorer, and check that all three calls return equal questions."""
        generator = np.random.default_rng(step)
        groups = [
            make_group(n, plan.samples, generator, text="same" if n == 0 else None)
            for n in range(plan.prompts)
        ]
        keys = [Key("train", step, 0, group.prompt.occurrence) for group in groups]
        explorer = self.fresh()
        scores = _scores(groups, explorer.needs, generator)
        candidates = [candidates_of(group, reads_text=True) for group in groups]
        given = {"groups": groups, "keys": keys, "scores": scores, "candidates": candidates}
        before = {name: wire.encode(value) for name, value in given.items()}
        chosen = []
        for each in (explorer, explorer, self.fresh()):
            round = Round(groups, keys, scores, candidates, 16 * step, np.random.default_rng(7))
            chosen.append(self.call("choose", choose_of(each), round))
            for name, value in given.items():
                self.require(
                    wire.encode(value) == before[name],
                    f"choose changed the {name} that it was given; work on copies",
                )
        self.questions(chosen[0], dict(zip(keys, groups, strict=True)), explorer)
        for other, how in ((chosen[1], "asked once more"), (chosen[2], "made anew")):
            self.require(
                wire.encode(other) == wire.encode(chosen[0]),
                f"choose asked other questions about the same groups, scores and seed when it was {how} "
                f"(step {step}); draw numbers from `generator` only, and keep nothing between calls",
            )

    def questions(self, chosen: Any, group_of: Mapping[Key, Group], explorer: Explorer) -> None:
        self.none(question_faults(chosen, group_of, self.kind, explorer.needs), "choose ")
        self.require(len(chosen) > 0, "choose returned []; return a list of questions, at least one a round")
        for question in chosen:
            texts, where = question.candidates, f"question {question.key}"
            is_askable = self.kind != "compare" or question.oracle == UNASKED or texts[0] != texts[1]
            self.require(
                is_askable,
                f"{where} compares {texts[0]!r} with itself; choose another pair, or address it to "
                "oat.types.UNASKED",
            )
            if question.features is not None:
                shape, meant = np.shape(question.features), (len(texts), _FEATURES)
                self.require(
                    shape == meant,
                    f"{where} has features of shape {shape}; give one row a candidate, {meant}",
                )


def _scores(
    groups: Sequence[Group], needs: frozenset[str], generator: np.random.Generator
) -> dict[str, list[np.ndarray]]:
    """Return made-up scores by name, in the form of the result of `Actor.score`."""
    scores: dict[str, list[np.ndarray]] = {}
    for name in sorted(needs - {"features"}):
        shape = (_MEMBERS,) if name == ENSEMBLE else ()
        scores[name] = [
            generator.normal(-5.0, 2.0, size=(*shape, len(group.trajectories))).astype(np.float32)
            for group in groups
        ]
    if needs & {ENSEMBLE, "features"}:
        scores["features"] = [
            generator.normal(size=(len(group.trajectories), _FEATURES)).astype(np.float32) for group in groups
        ]
    return scores
