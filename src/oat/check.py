"""The rules between settings: what each part reads, what contradicts what, and the defaults that follow from other settings.

Whatever the configuration alone decides is decided here, before anything is loaded, sampled or paid for. `config.py` checks each field by itself,
`build.py` what only the model and the data can tell.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from oat.alarms import METRICS, AlarmsConfig
from oat.algorithms.base import OF_RESPONSES, Objective
from oat.algorithms.direct import BNF, DPO, IPO, RobustDPO, SimPO, SLiC
from oat.algorithms.group import GRPO, DrGRPO, DrGRPOConfig
from oat.algorithms.supervised import SFT
from oat.config import Origins, blaming, convert, unknown_field, where
from oat.errors import ConfigError, OatError, did_you_mean
from oat.evaluate import RECORD
from oat.explore.base import Explorer
from oat.explore.rules import NoExploration
from oat.fields import Count, Positive
from oat.metrics import NAMES
from oat.oracles.answers import load_answers
from oat.oracles.registry import oracle_options
from oat.plugins import load_symbol
from oat.settings import Component, Config, GoldConfig, OracleConfig, SamplingConfig
from oat.types import ENSEMBLE, Requires

ALGORITHMS: dict[str, Any] = {cls.name: cls for cls in (DPO, RobustDPO, IPO, SLiC, SimPO, BNF, SFT, GRPO, DrGRPO)}
BUILTIN = ("environment", "recorded")
"""Oracles that ask nobody; the data or the environment know the value."""
Rule = tuple[str, object, str]
"""A field to change, whether it is wrong, and why, with what to do."""


@dataclass(frozen=True)
class TorchEngineConfig:
    max_rows: Count = 256
    """Most rows decoded together."""
    cache_gb: Positive = 4.0
    """Most memory for keys and values, 10^9 bytes; when it is full, rows wait."""
    deterministic: bool = False
    """The same tokens under any batching, for some speed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which it computes. In bfloat16 its slots have weights of their own, cast from the learner's at every sync."""
    threads: Count | None = None
    """Threads of the engine; None: the number that is fastest in a short measurement when the run is created, kept from then on."""


@dataclass(frozen=True)
class NoOptions:
    pass


def resolve(config: Config, origins: Origins) -> Config:
    """The configuration with every default of its parts filled in, and every rule between settings checked.

    Raises:
        ConfigError: names the place, the field, and what to do.
    """
    algorithm = algorithm_class(config.algorithm.name, origins)
    with blaming(config, origins, "explorer.name"):
        explorer = load_symbol(config.explorer.name) if ":" in config.explorer.name else NoExploration
    choices = getattr(explorer, "Config", NoOptions)
    known: dict[str, type] = {"engine": TorchEngineConfig, "explorer": choices, "router": NoOptions, "algorithm": algorithm.Config}
    names = {"engine": ["torch"], "explorer": ["none"], "router": ["one"]}
    parts: dict[str, Any] = {}
    for section, cls in known.items():
        component: Component = getattr(config, section)
        if section in names and component.name not in names[section] and not (section == "explorer" and ":" in component.name):
            place = where((section, "name"), origins)
            raise ConfigError(f"{place}: there is no {section} {component.name!r}; {did_you_mean(component.name, names[section])}")
        with blaming(config, origins, section):
            parts[section] = Component(component.name, _options(section, component, cls, origins))
    given = set(config.algorithm.options)
    config = _with_judges(replace(config, **parts))
    named: dict[str, OracleConfig | Component] = {"oracle": config.oracle}
    named |= {f"evaluation.{'gold' if purpose == 'gold' else 'oracle'}": judge for purpose, judge in judges_of(config).items()}
    for section, judge in named.items():
        with blaming(config, origins, f"{section}.name"):
            _check_oracle(tuple(section.split(".")), judge, origins)
    if issubclass(algorithm.Config, DrGRPOConfig):
        config = _with_max_length(config, origins)
    objective = make_objective(config)
    config = _with_responses(config, objective)
    with blaming(config, origins, "explorer.name"):
        built = make_explorer(config, objective.requires)
    _check(config, objective, built, origins)
    config = _with_schedule(_with_samples(config, given, origins), origins)
    if config.learner.micro_batch_size is None and config.learner.micro_batch_tokens is None:
        config = replace(config, learner=replace(config.learner, micro_batch_size=8))
    return config


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
        if Objective not in getattr(found, "__mro__", ()) or not dataclasses.is_dataclass(getattr(found, "Config", None)):
            raise ConfigError(f"{place}: {name} is no algorithm; subclass Objective of oat/algorithms/base.py, with a dataclass `Config` in it")
        return found
    raise ConfigError(f"{place}: there is no algorithm {name!r}; {did_you_mean(name, ALGORITHMS)}, or path/to/file.py:Name")


def make_objective(config: Config) -> Objective:
    cls = algorithm_class(config.algorithm.name, {})
    objective: Objective = cls(convert(cls.Config, config.algorithm.options, ("algorithm",), {}))
    objective.recorded_is_old = config.learner.autocast is None and TorchEngineConfig(**config.engine.options).dtype == "float32"
    return objective


def make_explorer(config: Config, requires: Requires) -> Explorer:
    """NoExploration, or a user's class: constructed with (kind), or (kind, config) where it has a dataclass `Config`."""
    assert requires.feedback != "none", "an objective without feedback needs no explorer"
    if config.explorer.name == "none":
        return NoExploration(requires.feedback)
    cls: Callable[..., Explorer] = load_symbol(config.explorer.name)
    settings = getattr(cls, "Config", None)
    given = [convert(settings, config.explorer.options, ("explorer",), {})] if settings else []
    try:
        return cls(requires.feedback, *given)
    except OatError:
        raise
    except Exception as error:  # it raises what it likes
        raise ConfigError(f"the explorer cannot be made: {type(error).__name__}: {error}; repair its constructor (oat/explore/base.py)") from error


def _options(section: str, component: Component, cls: type, origins: Origins) -> dict[str, Any]:
    fields = {f.name for f in dataclasses.fields(cls)}
    for option in component.options:
        if option not in fields:
            readers = [name for name, other in ALGORITHMS.items() if section == "algorithm" and option in other.Config.__dataclass_fields__]
            hint = f" of {component.name}" + (f" (it is read by {', '.join(readers)})" if readers else "")
            raise unknown_field((section, option), fields, origins, hint)
    return dataclasses.asdict(convert(cls, component.options, (section,), origins))


def judges_of(config: Config) -> dict[str, OracleConfig | Component]:
    """Whom the evaluations of a resolved configuration ask, by the purpose of the questions: "eval", and "gold" where a second oracle is named."""
    if config.evaluation is None:
        return {}
    own, gold = config.evaluation.oracle, config.evaluation.gold
    assert not isinstance(own, str), "resolve makes sections of names"
    assert not isinstance(gold, str), "resolve makes sections of names"
    return {"eval": own or config.oracle, **({"gold": gold} if gold else {})}


def _with_judges(config: Config) -> Config:
    """The oracles of evaluations as sections; the name alone of the one that training asks is that one, with its options."""
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
    """Dr. GRPO's constant: by default the most tokens of a response. Nothing bounds those of an episode of several turns, so there it must be set."""
    most, found = config.sampling.max_new_tokens, config.algorithm.options["max_length"]
    place = where(("algorithm", "max_length"), origins)
    if config.sampling.environment is not None:
        if found is None:
            raise ConfigError(f"{place}: set algorithm.max_length, the most tokens that the responses of an episode may have together")
        return config
    if found is not None and found < most:
        raise ConfigError(
            f"{place}: algorithm.max_length is {found}: a response may have sampling.max_new_tokens {most}; set as much or more, or leave it out"
        )
    return _with_option(config, "max_length", most if found is None else found)


def _with_responses(config: Config, objective: Objective) -> Config:
    """The oracle `recorded` answers about recorded responses: by default those that have TRL's names."""
    if config.oracle.name != "recorded" or config.prompts.responses:
        return config
    names = ("chosen", "rejected") if objective.requires.feedback == "compare" else ("completion",)
    return replace(config, prompts=replace(config.prompts, responses=names))


def _with_samples(config: Config, given: Collection[str], origins: Origins) -> Config:
    """Recorded responses are as many as they are; whoever states another number of samples is mistaken."""
    recorded, found = len(config.prompts.responses), config.algorithm.options.get("samples")
    if not recorded or found is None or found == recorded:
        return config
    if "samples" in given:
        place = where(("algorithm", "samples"), origins)
        raise ConfigError(f"{place}: algorithm.samples is {found}: prompts.responses names {recorded}, and nothing else is learned from; remove it")
    return _with_option(config, "samples", recorded)


def _with_schedule(config: Config, origins: Origins) -> Config:
    """A falling schedule ends, by default, with the run."""
    if config.learner.schedule == "constant" or config.learner.schedule_steps is not None:
        return config
    if config.stop.max_steps is None:
        place = where(("learner", "schedule"), origins)
        raise ConfigError(f"{place}: a {config.learner.schedule} schedule ends at a step; set learner.schedule_steps, or stop.max_steps")
    updates = config.algorithm.options.get("epochs", 1) * config.algorithm.options.get("minibatches", 1)
    return replace(config, learner=replace(config.learner, schedule_steps=config.stop.max_steps * updates))


def _with_option(config: Config, name: str, value: object) -> Config:
    return replace(config, algorithm=replace(config.algorithm, options={**config.algorithm.options, name: value}))


def _check(config: Config, objective: Objective, explorer: Explorer, origins: Origins) -> None:
    """Settings that contradict each other, or that nothing reads in this combination."""
    rules = [*_sizes(config, objective, explorer), *_ends(config), *_answers(config, objective), *_sampled(config, objective.requires, explorer)]
    rules += [*_engine(config), *_ranking(config), *_evaluation(config)]
    for field, is_wrong, why in rules:
        if is_wrong:
            section, key = field.split(".")
            part = getattr(config, section)
            value = part.options[key] if isinstance(part, Component) and key != "name" else getattr(part, key)
            value = value.name if isinstance(value, Component) else value
            raise ConfigError(f"{where((section, key), origins)}: {field} is {value!r}: {why}")
    for (section, key), is_unread in _unread(config, objective.requires, explorer.needs).items():
        part = getattr(config, section)
        default = next(f.default for f in dataclasses.fields(part) if f.name == key)
        if is_unread and (section, key) in origins and getattr(part, key) != default:
            place = origins[section, key]
            raise ConfigError(f"{place}: nothing reads {section}.{key} with algorithm {config.algorithm.name} and these settings; remove it")
    _check_alarms(config, watched_metrics(config, objective), origins)


def watched_metrics(config: Config, objective: Objective) -> frozenset[str]:
    """The metrics that alarms may watch; recorded responses say nothing about the policy."""
    return objective.watched - OF_RESPONSES if config.prompts.responses else objective.watched


def _check_alarms(config: Config, watched: Collection[str], origins: Origins) -> None:
    """Alarms that were set, and would never be raised since nobody reports what they watch."""
    for name, metrics in METRICS.items():
        rule, default = getattr(config.alarms, name), getattr(AlarmsConfig(), name)
        if ("alarms", name) in origins and rule != default and rule.action != "off" and not {*metrics} & {*watched}:
            why = f"algorithm {config.algorithm.name} with these settings does not report {' or '.join(metrics)}, which it watches"
            hint = "set algorithm.kl_coef above 0, or remove it" if name == "kl" and "kl_coef" in config.algorithm.options else "remove it"
            raise ConfigError(f"{where(('alarms', name), origins)}: nothing would ever raise alarms.{name}: {why}; {hint}")


def _sizes(config: Config, objective: Objective, explorer: Explorer) -> list[Rule]:
    """How much a step has, and what fits. Of the units that a user's algorithm makes of its rows nothing is known."""
    options, recorded, is_compared = config.algorithm.options, len(config.prompts.responses), objective.requires.feedback == "compare"
    plan = explorer.widen(objective.plan(0))
    rows = recorded or sum(plan.samples.values())
    units = plan.questions * (1 if is_compared else rows) if config.algorithm.name in ALGORITHMS else math.inf
    samples = "prompts.responses" if recorded else "algorithm.samples" if "samples" in options else "algorithm.name"
    return [
        *((f"algorithm.{name}", options.get(name, 1) < 1, "it must be at least 1") for name in ("prompts", "epochs", "minibatches")),
        (
            "algorithm.minibatches",
            options.get("minibatches", 1) > units,
            f"a step has at most {units} {'pairs' if is_compared else 'rows'}; lower it, or raise algorithm.prompts",
        ),
        (
            samples,
            is_compared and config.explorer.name == "none" and rows != 2,
            f"a comparison without an explorer is of 2 responses a prompt, not {rows}; give 2, or choose an explorer",
        ),
        ("model.dtype", config.model.dtype == "bfloat16", "AdamW loses most of its steps on such weights; keep float32, set learner.autocast"),
        (
            "learner.micro_batch_tokens",
            config.learner.micro_batch_tokens == "auto" and config.compute.memory_gb is None,
            "set compute.memory_gb, what the learner may take",
        ),
    ]


def _ends(config: Config) -> list[Rule]:
    """A run has a stop rule that can be met."""
    stop, is_free = config.stop, config.oracle.name in BUILTIN
    budget = {"max_queries": stop.max_queries, "max_tokens": stop.max_tokens, "max_cost": stop.max_cost}
    return [
        *(
            (
                f"stop.{name}",
                limit is not None and is_free,
                f"the oracle {config.oracle.name} costs nothing, so it is never spent; set stop.max_steps, stop.max_hours or prompts.epochs instead",
            )
            for name, limit in budget.items()
        ),
        (
            "stop.max_steps",
            (stop.max_steps, stop.max_hours, config.prompts.epochs, *budget.values()) == (None,) * 6,
            f"the run would never end; set it, {'' if is_free else 'stop.max_queries, '}stop.max_hours or prompts.epochs",
        ),
    ]


def _answers(config: Config, objective: Objective) -> list[Rule]:
    """Whom to ask, and who reads the answers."""
    evaluation, oracle = config.evaluation, config.oracle.name
    return [
        ("oracle.name", oracle == "environment" and not config.sampling.environment, "name the environment in sampling.environment"),
        (
            "algorithm.threshold" if "threshold" in config.algorithm.options else "algorithm.name",
            not objective.reads_answers and oracle not in BUILTIN,
            f"nothing would read the answers of {oracle}; set algorithm.threshold, or learn from prompts.responses with oracle.name recorded, "
            "which costs nothing (evaluation.oracle may still name another)",
        ),
        (
            "evaluation.samples",
            evaluation and not evaluation.samples and not evaluation.greedy,
            "no responses to evaluate; set it, or evaluation.greedy",
        ),
    ]


def _evaluation(config: Config) -> list[Rule]:
    """Whom evaluations ask, and what their samples and records can say."""
    e, is_free = config.evaluation, config.oracle.name in BUILTIN
    if e is None:
        return []
    names = {"evaluation.gold" if purpose == "gold" else "evaluation.oracle": judge.name for purpose, judge in judges_of(config).items()}
    purses = {"evaluation.oracle": e.max_queries, "evaluation.gold": e.gold.max_queries if isinstance(e.gold, GoldConfig) else None}
    if e.answers is not None:
        load_answers(e.answers)
    new = "evaluation samples new responses, and the oracle recorded knows only recorded ones; name an oracle that can score them"
    few = f"evaluation.samples is {e.samples}, and no k may be more; lower it, or raise evaluation.samples"
    return [
        *((field, name == "recorded", new) for field, name in names.items()),
        *((field, name == "environment" and not config.sampling.environment, "name it in sampling.environment") for field, name in names.items()),
        *((field, name in BUILTIN and purses[field] is not None, f"{name} costs no queries; remove max_queries") for field, name in names.items()),
        ("evaluation.every_queries", e.every_queries is not None and is_free, f"{config.oracle.name} costs no queries; set every, or every_hours"),
        ("evaluation.pass_at", any(k > e.samples for k in e.pass_at), few),
        ("evaluation.majority_at", any(k > e.samples for k in e.majority_at), few),
        ("evaluation.majority_at", e.majority_at and e.answers is None, "say what the answer in a response is; set evaluation.answers"),
        ("prompts.prompt_key", config.prompts.prompt_key in RECORD, "records of an evaluation have a field of that name; rename the column"),
    ]


def _sampled(config: Config, requires: Requires, explorer: Explorer) -> list[Rule]:
    """What an algorithm or an explorer needs of the samples."""
    name, recorded = config.algorithm.name, bool(config.prompts.responses)
    ratio = f"{name} divides by the probability of sampling"
    return [
        ("sampling.temperature", requires.ratio_based and config.sampling.temperature == 0, f"{ratio}; set it above 0"),
        (
            "oracle.max_outstanding",
            requires.ratio_based and config.oracle.max_outstanding,
            f"{name} needs answers about its newest samples; set it to 0",
        ),
        (
            "oracle.max_wait_s",
            requires.ratio_based and config.oracle.max_wait_s is not None and config.oracle.max_answer_age != 0,
            f"{name} needs answers about its newest samples, and late ones would be learned from at a later step; set oracle.max_answer_age to 0",
        ),
        ("prompts.responses", requires.ratio_based and recorded, f"{ratio}, which recorded responses lack; choose another algorithm"),
        (
            "explorer.name",
            recorded and explorer.needs,
            f"it needs {', '.join(sorted(explorer.needs))}, without which recorded responses come; remove the explorer, or prompts.responses",
        ),
        (
            "sampling.temperature",
            requires.feedback == "compare" and not recorded and config.explorer.name == "none" and _repeats(config.sampling, requires),
            "both samples of a pair would be the same, and nothing could be learned; set a temperature above 0 and top_k other than 1",
        ),
    ]


def _engine(config: Config) -> list[Rule]:
    """What the engine can promise, and whether anything reads its settings."""
    options = TorchEngineConfig(**config.engine.options)
    return [
        (
            "engine.deterministic",
            options.deterministic and config.compute.profile == "gpu",
            "on a GPU the same tokens under any batching are not promised; leave it out, or set compute.profile: cpu",
        ),
        (
            "engine.dtype",
            options.dtype != "float32" and bool(config.prompts.responses) and config.evaluation is None,
            "nothing is sampled from recorded responses without an evaluation, so nothing reads it; remove it",
        ),
    ]


def _ranking(config: Config) -> list[Rule]:
    """Whether any row has what the best checkpoints are ranked by."""
    metric, evaluation, is_read = config.checkpoint.best_metric, config.evaluation, config.checkpoint.keep_best > 0
    modes = {} if evaluation is None else {"eval/sampled": evaluation.samples > 0, "eval/greedy": evaluation.greedy}
    return [
        (
            "checkpoint.best_metric",
            is_read and metric not in NAMES and not metric.startswith("user/"),
            f"there is no such metric; {did_you_mean(metric, NAMES)[:80]}",
        ),
        (
            "checkpoint.best_metric",
            is_read and metric in ("eval/sampled", "eval/greedy") and not modes.get(metric),
            "no evaluation of this run gives it; see the section evaluation, or name another metric",
        ),
    ]


def _unread(config: Config, requires: Requires, needs: Collection[str]) -> dict[tuple[str, str], bool]:
    """Fields that nothing reads in this combination. With recorded responses only the evaluation samples."""
    recorded, evaluation = bool(config.prompts.responses), config.evaluation
    judged = {evaluation.slot} if evaluation else set()
    is_sampled, is_drawn = not recorded or evaluation is not None, not recorded or (evaluation is not None and evaluation.samples > 0)
    return {
        ("oracle", "labels"): requires.feedback != "compare",
        ("oracle", "scale"): requires.feedback != "compare",
        ("oracle", "repeats"): config.oracle.name in BUILTIN,
        ("oracle", "max_answer_age"): config.oracle.max_wait_s is None and config.oracle.max_outstanding == 0,
        ("model", "reference"): not {"reference", ENSEMBLE} & (requires.models | requires.slots | set(needs) | judged),
        **({("evaluation", "success"): not evaluation.pass_at, ("evaluation", "answers"): not evaluation.majority_at} if evaluation else {}),
        ("prompts", "score_key"): not recorded,
        ("prompts", "split"): not isinstance(config.prompts.path, str),
        **{("sampling", name): not is_drawn for name in ("temperature", "top_k", "top_p", "min_p")},
        **{("sampling", name): not is_sampled for name in ("stop", "overflow", "environment")},
        ("learner", "critic_learning_rate"): "critic" not in requires.models,
        ("learner", "schedule_steps"): config.learner.schedule == "constant",
        ("learner", "max_skips"): config.learner.on_nonfinite == "stop",
        ("render", "date"): config.render.template in (None, "chatml"),
        ("checkpoint", "best_metric"): not config.checkpoint.keep_best,
        ("alarms", "max_roll_backs"): not any(getattr(config.alarms, name).action == "roll_back" for name in METRICS),
    }


def _repeats(sampling: SamplingConfig, requires: Requires) -> bool:
    """Whether every response of a prompt is the same."""
    return len(requires.slots) == 1 and (sampling.temperature == 0 or sampling.top_k == 1)
