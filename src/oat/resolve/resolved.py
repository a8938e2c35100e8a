"""A resolved configuration: every setting filled in, and the parts and numbers that follow from the settings.

`resolve/resolve.py` makes one `Resolved` for each configuration and each process. Every function that makes a
run reads it instead of computing the same values again. If a configuration is compared with that of an
existing run, each of the two has a `Resolved` of its own.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

from oat.algorithms.base import OF_RESPONSES, Objective, StepSettings
from oat.config.load import Origins, blaming, to_yaml, where
from oat.config.parts import find_part, settings_of
from oat.config.settings import Component, Config, GoldConfig, OracleConfig
from oat.control.alarms import GOLD
from oat.control.silence import MISSING, WASTED
from oat.engines.kind import EngineKind, Traits
from oat.errors import ConfigError
from oat.explore.base import Explorer
from oat.explore.settings import FeaturesConfig, features_of
from oat.learner.replay_buffer import optimiser_steps
from oat.models.outlines import Outlines
from oat.oracles.builtin import BUILTIN
from oat.resolve.about import RunSummary, about
from oat.resolve.environment import has_async_methods
from oat.resolve.model_starts import has_own_reference
from oat.resolve.oracles import evaluation_oracles_of, shows_groups
from oat.resolve.parts import part_checks, run_facts
from oat.resolve.placement import placement_of
from oat.text.question_forms import FORMS
from oat.tracking.sinks import refuse_missing
from oat.types import Plan, Requires
from oat.types.part import Check
from oat.types.questions import Budget


@dataclass(frozen=True, eq=False)
class Resolved:
    """A configuration, and the values that follow from it.

    `dataclasses.replace(resolved, config=...)` keeps the objective and the explorer, and computes all other
    values again. So the new configuration may differ only in settings that neither the objective nor the
    explorer reads.

    Attributes:
        config: the configuration with every default filled in.
        origins: the place where each setting was set, for messages.
        objective: the objective of the one run that is made with this object. It has a state, such as an
            adapted weight of the KL, so a second run needs a new `Resolved`.
        explorer: the explorer that the run calls.
        derived: by setting, such as "engine.threads", what a part's default follows from, in words.
        outlines: the models without weights that were made so far.
    """

    config: Config
    origins: Origins
    objective: Objective
    explorer: Explorer
    derived: Mapping[str, str] = field(default_factory=dict)
    outlines: Outlines = field(default_factory=Outlines)

    def error_context(self, field: str) -> AbstractContextManager[None]:
        """Return a context in which errors say where `field` was set (`config.load.blaming`)."""
        return blaming(self.config, self.origins, field)

    @cached_property
    def about(self) -> RunSummary:
        return about(self.config)

    def refuse_missing_sinks(self) -> None:
        """Refuse sinks of metrics that cannot be made on this machine.

        Raises:
            ConfigError: the library or the file of a sink is missing.
        """
        refuse_missing(self.config.tracking, self.origins)

    def without_wire(self) -> "Resolved":
        """Return the same with `compute.serialise` off, so that boxes can be looked into."""
        compute = replace(self.config.compute, serialise=False)
        return replace(self, config=replace(self.config, compute=compute))

    def as_yaml(self) -> str:
        """Return every setting as YAML. `load_config` reads an equal configuration from this text."""
        return to_yaml(self.config)

    @property
    def requires(self) -> Requires:
        return self.objective.requires

    @cached_property
    def plan(self) -> Plan:
        """The objective's plan of the first step."""
        return self.objective.plan(0)

    @cached_property
    def widened(self) -> Plan:
        """The plan of the first step, as the explorer's `widen` returns it."""
        return self.explorer.widen(self.plan)

    @cached_property
    def asked(self) -> frozenset[str]:
        """Names of the oracles of training and of evaluations, without those that cost nothing."""
        named = {self.config.oracle.name, *(each.name for each in self.evaluation_oracles.values())}
        return frozenset(named - {*BUILTIN})

    @property
    def learns_pairs(self) -> bool:
        return self.requires.feedback == "compare"

    @property
    def has_critic(self) -> bool:
        return "critic" in self.requires.models

    @property
    def has_reference(self) -> bool:
        """True if a reference computes: for the algorithm, the explorer, an evaluation, or features."""
        return "reference" in self.models

    @property
    def learns_with_reference(self) -> bool:
        return "reference" in self.requires.models

    @property
    def learns_reward(self) -> bool:
        return "reward" in self.requires.models

    @cached_property
    def shows_groups(self) -> bool:
        return shows_groups(self.config)

    @property
    def has_own_reference(self) -> bool:
        return self.has_reference and has_own_reference(self.config.model)

    @property
    def question_stop(self) -> tuple[str, ...] | None:
        question = self.config.render.question
        return None if question is None else FORMS[question].stop

    @property
    def placed_actors(self) -> int | None:
        placed = placement_of(self.config.compute)
        return None if placed is None else len(placed.actors)

    @property
    def policy_steps(self) -> int | None:
        learner = self.config.learner
        return self._falling_steps("", learner.schedule, learner.critic_only_steps)

    @property
    def critic_steps(self) -> int | None:
        learner = self.config.learner
        if not self.has_critic or (schedule := learner.critic_schedule or learner.schedule) == "constant":
            return None
        return learner.schedule_steps or self._falling_steps("critic_", schedule)

    def _falling_steps(self, of: str, schedule: str, skipped: int = 0) -> int | None:
        """Return the number of optimiser steps over which a schedule falls; None if it does not.

        Raises:
            ConfigError: nothing says when the run ends.
        """
        last = self.config.stop.max_steps
        if schedule == "constant":
            return None
        if last is None:
            place = where(("learner", f"{of}schedule"), self.origins)
            raise ConfigError(
                f"{place}: a {schedule} schedule ends at a step; set learner.{of}schedule_steps, or "
                "stop.max_steps"
            )
        return self.optimiser_steps(last) - self.optimiser_steps(skipped)

    @property
    def waits_for_environment(self) -> bool:
        return has_async_methods(self.config)

    @property
    def most_rounds(self) -> int:
        """Largest number of times that a step asks as many questions as its plan has. It is 1, or more with
        `sampling.refill_rounds`."""
        return 1 + self.config.sampling.refill_rounds

    @cached_property
    def engine(self) -> Traits:
        """What the configured engine can do, and what it takes."""
        return engine_traits(self.config)

    @cached_property
    def step(self) -> StepSettings:
        return StepSettings.of(self.config.algorithm.options)

    @cached_property
    def part_checks(self) -> list[Check]:
        """The checks that the parts make before the prompts and the oracle are known."""
        return part_checks(self.config, replace(run_facts(self.config), slots=self.slots))

    @cached_property
    def evaluation_oracles(self) -> dict[str, OracleConfig | Component]:
        return evaluation_oracles_of(self.config)

    @cached_property
    def budgets(self) -> dict[str, Budget]:
        """The budgets, by the purpose of the questions: "train", and the purposes of `evaluation_budgets`."""
        stop = self.config.stop
        training = Budget(stop.max_queries, stop.max_tokens, stop.max_cost)
        return {"train": training, **evaluation_budgets(self.config)}

    @cached_property
    def slots(self) -> frozenset[str]:
        """The slots that the algorithm, the explorer or evaluations use. If the explorer needs an ensemble,
        `ENSEMBLE` is among them."""
        e = self.config.answering
        evaluated = {e.slot, *(["reference"] if e.kl else [])} if e else set()
        return frozenset({*self.requires.slots, *self.explorer.needs, *evaluated} - {"features"})

    @cached_property
    def models(self) -> frozenset[str]:
        """Names of the models that the run has. The reference is among them if it computes the features that
        the explorer reads."""
        features = self.features
        backbone = {"reference"} if features is not None and features.backbone == "reference" else set()
        return frozenset({*self.requires.models, *self.slots, *backbone})

    @cached_property
    def features(self) -> FeaturesConfig | None:
        """The settings of the features that the explorer reads; None if it reads none."""
        return features_of(self.explorer)

    @cached_property
    def watched(self) -> frozenset[str]:
        return watched_metrics(self.config, self.objective)

    def last_step(self, prompts: int) -> int | None:
        """Return the number of steps of the run; None if there is no limit. It is `stop.max_steps`, or fewer
        if the prompts are used up earlier.

        Args:
            prompts: number of prompts of an epoch.
        """
        most, epochs = self.config.stop.max_steps, self.config.prompts.epochs
        if epochs is None:
            return most
        left, step = prompts * epochs, 0
        while left > 0 and (most is None or step < most):
            left -= self.explorer.widen(self.objective.plan(step)).prompts
            step += 1
        return step

    def optimiser_steps(self, steps: int) -> int:
        """Return the number of optimiser steps planned for the first `steps` steps of the run together. An
        objective may leave some of them out (`Objective.ends_passes`)."""
        learner = self.config.learner
        return optimiser_steps(
            steps,
            questions=self.widened.questions,
            epochs=self.step.epochs,
            of_a_step=self.step.minibatches,
            config=learner.buffer,
            most=learner.max_updates,
        )


def engine_traits(config: Config) -> Traits:
    """Return what the engine of a configuration can do under its settings."""
    kind: EngineKind = find_part(config, "engine", {})
    return kind.traits(settings_of(config, "engine"))


def evaluation_budgets(config: Config) -> dict[str, Budget]:
    """Return the budgets of evaluations, by the purpose of the questions: "eval" and "gold". Each budget is
    for all evaluations of a run together."""
    e = config.answering
    if e is None:
        return {}
    gold = (
        Budget(e.gold.max_queries, e.gold.max_tokens, e.gold.max_cost)
        if isinstance(e.gold, GoldConfig)
        else Budget()
    )
    return {"eval": Budget(e.max_queries, e.max_tokens, e.max_cost), "gold": gold}


def watched_metrics(config: Config, objective: Objective) -> frozenset[str]:
    """Return the names of the metrics that alarms may watch: those of the objective, with these changes:

    * If responses are recorded, metrics of responses and `kl/reference` are left out. Recorded responses say
      nothing about the policy.
    * If evaluations have a second oracle, its gold metric is added.
    * If the algorithm reads answers, the shares of missing and of wasted answers are added.
    """
    unknown = OF_RESPONSES | {"kl/reference"} if config.prompts.responses else frozenset()
    watched, e = objective.watched - unknown, config.answering
    watched |= {MISSING, WASTED} if objective.reads_answers else set()
    return watched | ({GOLD[0] if e.samples else GOLD[1]} if e and e.gold else set())
