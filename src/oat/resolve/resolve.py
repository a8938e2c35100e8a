"""Resolving a configuration. The options of each part and other defaults are filled in, the objective and the
explorer are made, and settings that contradict each other are refused (`resolve/cross_checks/`).

This step needs only the configuration. Before it, `config/load.py` checks each field by itself. After it,
`assemble/run_inputs.py` and `assemble/run.py` make the checks that need the model or the data.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from oat.algorithms.base import Objective
from oat.config.fields import UNSAID, settings_below
from oat.config.load import Origins, blaming, refuse_misplaced, unknown_field, where
from oat.config.part_names import REGISTRIES
from oat.config.parts import filled, find_part, own_settings, with_settings
from oat.config.settings import Component, Config, GoldConfig, OracleConfig
from oat.errors import ConfigError
from oat.explore.base import Explorer, NoExploration
from oat.models.adapter_files import described_adapter
from oat.models.beside import is_adapter_directory
from oat.oracles.builtin import BUILTIN
from oat.oracles.make import oracle_options
from oat.plugins.calls import bare, guarded
from oat.plugins.registry import EXPLORERS, ORACLES
from oat.resolve.cross_checks.all_sections import check_settings
from oat.resolve.environment import with_environment
from oat.resolve.explorers import GuardedExplorer
from oat.resolve.oracles import evaluation_oracles_of
from oat.resolve.parts import part_defaults
from oat.resolve.resolved import Resolved, engine_traits
from oat.tracking.sinks import with_sinks
from oat.types import Requires


def resolve(config: Config, origins: Origins) -> Resolved:
    """Fill in every default of a configuration's parts, make its objective and its explorer, and refuse
    settings that contradict each other.

    Raises:
        ConfigError: a setting is refused. The message names its place and its field, and says what to do.
    """
    for field in ("path", "reference", "adapter", "critic"):
        with blaming(config, origins, f"model.{field}"):
            refuse_misplaced(getattr(config.model, field), origins)
    config = _with_adapter(config, origins)
    config = with_environment(with_settings(config, origins), origins)
    config = _with_evaluation_oracles(replace(config, tracking=with_sinks(config.tracking, origins)))
    named: dict[str, OracleConfig | Component] = {"oracle": config.oracle}
    named |= {
        f"evaluation.{'gold' if purpose == 'gold' else 'oracle'}": judge
        for purpose, judge in evaluation_oracles_of(config).items()
    }
    for section, judge in named.items():
        with blaming(config, origins, f"{section}.name"):
            _check_oracle(tuple(section.split(".")), judge, origins)
    derived = {"model.lora": "as model.adapter says"} if config.model.adapter is not None else {}
    for section in REGISTRIES:
        own = part_defaults(config, section, origins)
        config = _with_options(config, section, {name: default.value for name, default in own.items()})
        derived |= {f"{section}.{name}": default.source for name, default in own.items()}
    objective = make_objective(config)
    with blaming(config, origins, "explorer.name"):
        built = make_explorer(config, objective.requires)
    resolved = _filled_in(Resolved(config, origins, objective, built, derived), "first")
    check_settings(resolved)
    return _filled_in(_with_samples(resolved), "last")


def openings(resolved: Resolved) -> Callable[[], Resolved]:
    """Return a function that returns the configuration for each opening of a run: at first `resolved`, then
    one of the same settings with an objective of its own, since objectives have a state."""
    left = [resolved]
    return lambda: left.pop() if left else resolve(resolved.config, resolved.origins)


def make_objective(config: Config) -> Objective:
    """Make the objective of a configuration in which all settings of the parts are filled in."""
    objective: Objective = find_part(config, "algorithm", {})(own_settings(config, "algorithm"))
    is_engines_old = engine_traits(config).capabilities.recorded_is_old
    objective.recorded_is_old = config.learner.autocast is None and is_engines_old
    return objective


def make_explorer(config: Config, requires: Requires) -> Explorer:
    """Make the explorer of a configuration. Its class is called with the kind of feedback. If it has a
    dataclass `Config`, it is also called with its settings. A user's explorer is put into a
    `GuardedExplorer`.

    Raises:
        ConfigError: the constructor of the user's class fails.
        ContractError: see `GuardedExplorer`.
    """
    if config.explorer.name == "none":
        return NoExploration(requires.feedback, reads_text=config.oracle.name not in BUILTIN)
    cls: Callable[..., Explorer] = find_part(config, "explorer", {})
    name = config.explorer.name
    given = [own_settings(config, "explorer")] if hasattr(cls, "Config") else []
    with guarded(
        name,
        lambda what: ConfigError(
            f"the explorer cannot be made: {bare(what)}; repair its constructor (oat/explore/base.py)"
        ),
    ):
        explorer = cls(requires.feedback, *given)
    return explorer if name in EXPLORERS else GuardedExplorer(explorer, requires.feedback, name)


def _with_adapter(config: Config, origins: Origins) -> Config:
    """Return the configuration. If the policy starts with an adapter, `model.lora` gets the values in the
    adapter's files.

    Raises:
        ConfigError: `model.path` or `model.critic` is an adapter, or `model.lora` contradicts the adapter.
        ModelError: the adapter cannot be read.
    """
    model = config.model
    if is_adapter_directory(model.path):
        base = described_adapter(model.path)[1]
        place = where(("model", "path"), origins)
        raise ConfigError(
            f"{place}: {model.path} is an adapter; set model.adapter to it, and model.path to the model "
            f"beside it ({base or 'its files do not name it'})"
        )
    if model.critic is not None and is_adapter_directory(model.critic):
        place = where(("model", "critic"), origins)
        raise ConfigError(
            f"{place}: model.critic is {model.critic!r}, an adapter, and a critic starts from a whole model; "
            "merge it with PEFT, and give the merged model"
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


def _with_evaluation_oracles(config: Config) -> Config:
    """Return the configuration. In it, a name in `evaluation.oracle` or `evaluation.gold` has become a
    section. If training's oracle has the same name, the section gets the options of training's oracle."""
    e = config.evaluation
    if e is None:
        return config
    options = {config.oracle.name: config.oracle.options}
    own = Component(e.oracle, options.get(e.oracle, {})) if isinstance(e.oracle, str) else e.oracle
    gold = GoldConfig(e.gold, options.get(e.gold, {})) if isinstance(e.gold, str) else e.gold
    return replace(config, evaluation=replace(e, oracle=own, gold=gold))


def _check_oracle(path: tuple[str, ...], oracle: OracleConfig | Component, origins: Origins) -> None:
    """Refuse a name that no oracle has, and an option that is neither a field of the section nor an option of
    its oracle."""
    if oracle.name not in BUILTIN:
        ORACLES.refuse_unknown(oracle.name)
    if not oracle.options:
        return
    takes = set() if oracle.name in BUILTIN else oracle_options(oracle.name)
    for option in oracle.options:
        if takes is not None and option not in takes:
            valid = {f.name for f in dataclasses.fields(oracle)} | takes
            raise unknown_field(
                (*path, option),
                valid,
                origins,
                f" of {oracle.name}",
                unknown={option: oracle.options[option]},
            )


def _filled_in(resolved: Resolved, when: str) -> Resolved:
    """Return the configuration. Settings that are left open have the values that follow from others
    (`Follows`).

    Raises:
        ConfigError: a value follows only if another setting is given, and it is not.
    """
    config = resolved.config
    for path, value, default, said in settings_below(resolved.config):
        is_open = value in (None, ()) or (value == default and path not in resolved.origins)
        if said.follows is not UNSAID and said.follows.fills == when and is_open:
            found = said.follows.value(resolved)
            if found is not None:
                section, name = path
                fields: dict[str, Any] = {name: found}
                sections: dict[str, Any] = {section: replace(getattr(config, section), **fields)}
                config = replace(config, **sections)
    return replace(resolved, config=config)


def _with_samples(resolved: Resolved) -> Resolved:
    """If responses are recorded, set `algorithm.samples` to their number per prompt, and make the objective
    again.

    Raises:
        ConfigError: the user set `algorithm.samples`, but not to this number.
    """
    config, samples = resolved.config, resolved.config.algorithm.options.get("samples")
    recorded = len(config.prompts.responses)
    if not recorded or samples is None:
        return resolved
    derived = {**resolved.derived, "algorithm.samples": "as many as prompts.responses has"}
    resolved = replace(resolved, derived=derived)
    if samples == recorded:
        return resolved
    if ("algorithm", "samples") in resolved.origins:
        place = where(("algorithm", "samples"), resolved.origins)
        raise ConfigError(
            f"{place}: algorithm.samples is {samples}: prompts.responses names {recorded}, and nothing else "
            "is learned from; remove it"
        )
    config = _with_options(config, "algorithm", {"samples": recorded})
    return replace(resolved, config=config, objective=make_objective(config))


def _with_options(config: Config, section: str, options: Mapping[str, object]) -> Config:
    parts: dict[str, Any] = {section: filled(getattr(config, section), options, section)}
    return replace(config, **parts)
