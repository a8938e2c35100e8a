"""From a configuration to a `Resolved`: the options that each part reads, the defaults that follow from other
settings, the objective and the explorer; `build/cross_checks.py` has what contradicts what.

Everything that the configuration alone decides is decided here, before anything is loaded, sampled or paid
for. `config/load.py` checks each field by itself, `build/run_inputs.py` and `build/run.py` check what only the
model and the data can tell.
"""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from oat.algorithms.base import Objective
from oat.algorithms.group import DrGRPOConfig
from oat.build.cross_checks import BUILTIN, check_rules
from oat.build.explorers import Held
from oat.build.resolved import Resolved, judges_of
from oat.config.load import Origins, blaming, convert, refuse_misplaced, unknown_field, where
from oat.config.settings import Component, Config, GoldConfig, OracleConfig, TorchEngineConfig
from oat.errors import ConfigError, did_you_mean
from oat.explore.base import Explorer
from oat.explore.rules import NoExploration
from oat.models.lora import described_adapter, is_adapter_directory
from oat.oracles.registry import oracle_options
from oat.plugins.calls import bare, guarded
from oat.plugins.loading import load_symbol
from oat.plugins.registry import ALGORITHMS
from oat.text.question_forms import FORMS
from oat.tracking.sinks import with_sinks
from oat.types import Requires


@dataclass(frozen=True)
class NoOptions:
    pass


def resolve(config: Config, origins: Origins) -> Resolved:
    """Fill in every default of a configuration's parts, make its objective and its explorer, and check every
    rule between settings.

    Raises:
        ConfigError: names the place, the field, and what to do.
    """
    for field in ("path", "reference", "adapter"):
        with blaming(config, origins, f"model.{field}"):
            refuse_misplaced(getattr(config.model, field), origins)
    config = _with_adapter(config, origins)
    algorithm = algorithm_class(config.algorithm.name, origins)
    with blaming(config, origins, "explorer.name"):
        explorer = load_symbol(config.explorer.name) if ":" in config.explorer.name else NoExploration
    choices = getattr(explorer, "Config", NoOptions)
    known: dict[str, type] = {
        "engine": TorchEngineConfig,
        "explorer": choices,
        "algorithm": algorithm.Config,
    }
    names = {"engine": ["torch"], "explorer": ["none"]}
    parts: dict[str, Any] = {}
    for section, cls in known.items():
        component: Component = getattr(config, section)
        if (
            section in names
            and component.name not in names[section]
            and not (section == "explorer" and ":" in component.name)
        ):
            place = where((section, "name"), origins)
            raise ConfigError(
                f"{place}: there is no {section} {component.name!r}; "
                f"{did_you_mean(component.name, names[section])}"
            )
        with blaming(config, origins, section):
            parts[section] = Component(component.name, _options(section, component, cls, origins))
    given = set(config.algorithm.options)
    config = _with_judges(replace(config, tracking=with_sinks(config.tracking, origins), **parts))
    named: dict[str, OracleConfig | Component] = {"oracle": config.oracle}
    named |= {
        f"evaluation.{'gold' if purpose == 'gold' else 'oracle'}": judge
        for purpose, judge in judges_of(config).items()
    }
    for section, judge in named.items():
        with blaming(config, origins, f"{section}.name"):
            _check_oracle(tuple(section.split(".")), judge, origins)
    if issubclass(algorithm.Config, DrGRPOConfig):
        config = _with_max_length(config, origins)
    objective = make_objective(config)
    config = _with_responses(_with_stop(config), objective)
    with blaming(config, origins, "explorer.name"):
        built = make_explorer(config, objective.requires)
    resolved = Resolved(config, origins, objective, built)
    check_rules(resolved)
    resolved = _with_samples(resolved, given)
    return replace(resolved, config=_with_micro_batch(_with_schedule(resolved)))


def algorithm_class(name: str, origins: Origins) -> Any:
    """The class of an algorithm: ours by name, or a user's by path."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    place = where(("algorithm", "name"), origins)
    if ":" in name:
        try:
            found = load_symbol(name)
        except ConfigError as error:
            raise ConfigError(f"{place}: algorithm.name is {name!r}: {error}") from error
        if Objective not in getattr(found, "__mro__", ()) or not dataclasses.is_dataclass(
            getattr(found, "Config", None)
        ):
            raise ConfigError(
                f"{place}: {name} is no algorithm; subclass Objective of oat/algorithms/base.py, with a "
                "dataclass `Config` in it"
            )
        return found
    raise ConfigError(
        f"{place}: there is no algorithm {name!r}; {did_you_mean(name, ALGORITHMS)}, or path/to/file.py:Name"
    )


def make_objective(config: Config) -> Objective:
    cls = algorithm_class(config.algorithm.name, {})
    objective: Objective = cls(convert(cls.Config, config.algorithm.options, ("algorithm",), {}))
    objective.recorded_is_old = (
        config.learner.autocast is None and TorchEngineConfig(**config.engine.options).dtype == "float32"
    )
    return objective


def make_explorer(config: Config, requires: Requires) -> Explorer:
    """NoExploration, or a user's class: constructed with (kind), or (kind, config) where it has a dataclass
    `Config`."""
    if config.explorer.name == "none":
        return NoExploration(requires.feedback, reads_text=config.oracle.name not in BUILTIN)
    cls: Callable[..., Explorer] = load_symbol(config.explorer.name)
    settings = getattr(cls, "Config", None)
    given = [convert(settings, config.explorer.options, ("explorer",), {})] if settings else []
    name = config.explorer.name
    with guarded(
        name,
        lambda what: ConfigError(
            f"the explorer cannot be made: {bare(what)}; repair its constructor (oat/explore/base.py)"
        ),
    ):
        explorer = cls(requires.feedback, *given)
    return Held(explorer, requires.feedback, name)


def _options(section: str, component: Component, cls: type, origins: Origins) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(cls)}
    for option in component.options:
        if option not in fields:
            readers = [
                name
                for name, other in ALGORITHMS.items()
                if section == "algorithm" and option in other.Config.__dataclass_fields__
            ]
            hint = f" of {component.name}" + (f" (it is read by {', '.join(readers)})" if readers else "")
            raise unknown_field((section, option), fields, origins, hint)
    return dataclasses.asdict(convert(cls, component.options, (section,), origins))


def _with_adapter(config: Config, origins: Origins) -> Config:
    """An adapter that the policy goes on with says itself what it is."""
    model = config.model
    if is_adapter_directory(model.path):
        base = described_adapter(model.path)[1]
        place = where(("model", "path"), origins)
        raise ConfigError(
            f"{place}: {model.path} is an adapter; set model.adapter to it, and model.path to the model "
            f"beside it ({base})"
        )
    if model.adapter is None:
        return config
    with blaming(config, origins, "model.adapter"):
        found, _ = described_adapter(model.adapter)
    if model.lora is not None and model.lora != found:
        place = where(("model", "lora"), origins)
        raise ConfigError(
            f"{place}: model.lora is {model.lora}, and the adapter {model.adapter} is {found}; remove "
            "model.lora, or model.adapter"
        )
    return replace(config, model=replace(model, lora=found))


def _with_judges(config: Config) -> Config:
    """The oracles of evaluations as sections; the name alone of the one that training asks is that one, with
    its options."""
    e = config.evaluation
    if e is None:
        return config
    options = {config.oracle.name: config.oracle.options}
    own = Component(e.oracle, options.get(e.oracle, {})) if isinstance(e.oracle, str) else e.oracle
    gold = GoldConfig(e.gold, options.get(e.gold, {})) if isinstance(e.gold, str) else e.gold
    return replace(config, evaluation=replace(e, oracle=own, gold=gold))


def _check_oracle(path: tuple[str, ...], oracle: OracleConfig | Component, origins: Origins) -> None:
    """Options that the oracle does not take, beside the fields that its section has."""
    if not oracle.options:
        return
    takes = set() if oracle.name in BUILTIN else oracle_options(oracle.name)
    for option in oracle.options:
        if takes is not None and option not in takes:
            valid = {f.name for f in dataclasses.fields(oracle)} | takes
            raise unknown_field((*path, option), valid, origins, f" of {oracle.name}")


def _with_max_length(config: Config, origins: Origins) -> Config:
    """Dr. GRPO's constant: by default the most tokens of a response. Nothing bounds those of an episode of
    several turns, so there it must be set."""
    most, found = config.sampling.max_new_tokens, config.algorithm.options["max_length"]
    place = where(("algorithm", "max_length"), origins)
    if config.sampling.environment is not None:
        if found is None:
            raise ConfigError(
                f"{place}: set algorithm.max_length, the most tokens that the responses of an episode may "
                "have together"
            )
        return config
    if found is not None and found < most:
        raise ConfigError(
            f"{place}: algorithm.max_length is {found}: a response may have sampling.max_new_tokens "
            f"{most}; set as much or more, or leave it out"
        )
    return _with_option(config, "max_length", most if found is None else found)


def _with_stop(config: Config) -> Config:
    """A response to a question of a form ends, by default, where the next question would begin."""
    if config.render.question is None or config.sampling.stop:
        return config
    return replace(config, sampling=replace(config.sampling, stop=FORMS[config.render.question].stop))


def _with_responses(config: Config, objective: Objective) -> Config:
    """The oracle `recorded` answers about recorded responses: by default those that have TRL's names."""
    if config.oracle.name != "recorded" or config.prompts.responses:
        return config
    names = ("chosen", "rejected") if objective.requires.feedback == "compare" else ("completion",)
    return replace(config, prompts=replace(config.prompts, responses=names))


def _with_samples(resolved: Resolved, given: Collection[str]) -> Resolved:
    """A prompt with recorded responses has as many samples as the data name; another number is an error.
    Where it was left open, the objective is made again, of that number."""
    config, samples = resolved.config, resolved.config.algorithm.options.get("samples")
    recorded = len(config.prompts.responses)
    if not recorded or samples is None or samples == recorded:
        return resolved
    if "samples" in given:
        place = where(("algorithm", "samples"), resolved.origins)
        raise ConfigError(
            f"{place}: algorithm.samples is {samples}: prompts.responses names {recorded}, and nothing else "
            "is learned from; remove it"
        )
    config = _with_option(config, "samples", recorded)
    return replace(resolved, config=config, objective=make_objective(config))


def _with_schedule(resolved: Resolved) -> Config:
    """A falling schedule ends, by default, with the run."""
    config = resolved.config
    if config.learner.schedule == "constant" or config.learner.schedule_steps is not None:
        return config
    if config.stop.max_steps is None:
        place = where(("learner", "schedule"), resolved.origins)
        raise ConfigError(
            f"{place}: a {config.learner.schedule} schedule ends at a step; set learner.schedule_steps, "
            "or stop.max_steps"
        )
    steps = resolved.optimiser_steps(config.stop.max_steps)
    return replace(config, learner=replace(config.learner, schedule_steps=steps))


def _with_micro_batch(config: Config) -> Config:
    """A pass has at most 8 rows, unless the configuration limits its rows or its tokens."""
    if config.learner.micro_batch_size is None and config.learner.micro_batch_tokens is None:
        return replace(config, learner=replace(config.learner, micro_batch_size=8))
    return config


def _with_option(config: Config, name: str, value: object) -> Config:
    return replace(
        config, algorithm=replace(config.algorithm, options={**config.algorithm.options, name: value})
    )
