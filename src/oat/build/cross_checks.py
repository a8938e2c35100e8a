"""The rules between settings: what contradicts what, and what nothing reads."""

import dataclasses
import math
from collections.abc import Collection

from oat.algorithms.base import Objective
from oat.build.models import has_own_reference
from oat.build.resolved import Resolved, evaluation_budgets, judges_of
from oat.config.alarm_settings import AlarmsConfig
from oat.config.load import Origins, where
from oat.config.settings import (
    Component,
    Config,
    EvaluationConfig,
    SamplingConfig,
    TorchEngineConfig,
)
from oat.control.alarms import METRICS
from oat.errors import ConfigError, did_you_mean
from oat.evaluation.records import RECORD
from oat.explore.base import Explorer
from oat.metrics import NAMES
from oat.oracles.answers import load_answers
from oat.text.question_forms import FORMS
from oat.types import ENSEMBLE, Plan, Requires

BUILTIN = ("environment", "recorded")
"""Oracles that ask nobody; the data or the environment know the value."""
_OF_PAIRS = ("path", "pairs", "split", "max_prompts", "every", "every_queries", "every_hours")
"""Fields of an evaluation that are read where nobody answers prompts."""
Rule = tuple[str, object, str]
"""A field to change, whether it is wrong, and why, with what to do."""


def check_rules(resolved: Resolved) -> None:
    """Refuse settings that contradict each other, or that nothing reads in this combination.

    Raises:
        ConfigError: names the place, the field, and what to do.
    """
    config, origins = resolved.config, resolved.origins
    objective, explorer = resolved.objective, resolved.explorer
    plan = resolved.widened
    rules = [
        *_sizes(config, objective, plan),
        *_ends(config),
        *_answers(config, objective),
        *_sampled(resolved),
    ]
    rules += [
        *_models(config, explorer),
        *_engine(config),
        *_ranking(config),
        *_evaluation(config),
        *_reward_model(config, objective),
    ]
    rules += [*_held_out_pairs(config, objective), *_buffer(config, objective, plan)]
    for field, is_wrong, why in rules:
        if is_wrong:
            section, key = field.split(".")
            part = getattr(config, section)
            value = part.options[key] if isinstance(part, Component) and key != "name" else getattr(part, key)
            value = value.name if isinstance(value, Component) else value
            raise ConfigError(
                f"{where((section, key), origins)}: {field} is "
                f"{'not set' if value is None else repr(value)}: {why}"
            )
    for (section, key), is_unread in _unread(config, objective.requires, explorer.needs).items():
        part = getattr(config, section)
        default = next(f.default for f in dataclasses.fields(part) if f.name == key)
        if is_unread and (section, key) in origins and getattr(part, key) != default:
            place = origins[section, key]
            raise ConfigError(
                f"{place}: nothing reads {section}.{key} with algorithm {config.algorithm.name} and these "
                "settings; remove it"
            )
    _check_alarms(config, resolved.watched, origins)


def _check_alarms(config: Config, watched: Collection[str], origins: Origins) -> None:
    """Alarms that were set, and would never be raised since nobody reports what they watch."""
    for name, metrics in METRICS.items():
        rule, default = getattr(config.alarms, name), getattr(AlarmsConfig(), name)
        if (
            ("alarms", name) in origins
            and rule != default
            and rule.action != "off"
            and not {*metrics} & {*watched}
        ):
            why = (
                f"algorithm {config.algorithm.name} with these settings does not report "
                f"{' or '.join(metrics)}, which it watches"
            )
            hint = (
                "set algorithm.kl_coef above 0, or remove it"
                if name == "kl" and "kl_coef" in config.algorithm.options
                else "remove it"
            )
            hint = "name evaluation.gold, or remove it" if name == "gold" else hint
            raise ConfigError(
                f"{where(('alarms', name), origins)}: nothing would ever raise alarms.{name}: {why}; {hint}"
            )
    gold = config.alarms.gold
    if gold.drop is None and gold != AlarmsConfig().gold and gold.action != "off":
        place = where(("alarms", "gold"), origins)
        raise ConfigError(
            f"{place}: nothing would ever raise alarms.gold without a bound; set alarms.gold.drop, in the "
            "units of evaluation.gold"
        )


def _sizes(config: Config, objective: Objective, plan: Plan) -> list[Rule]:
    """How much a step has, and what fits. Of the units that a user's algorithm makes of its rows nothing is
    known."""
    options = config.algorithm.options
    recorded = len(config.prompts.responses)
    is_compared = objective.requires.feedback == "compare"
    rows = recorded or sum(plan.samples.values())
    units = plan.questions * (1 if is_compared else rows) if ":" not in config.algorithm.name else math.inf
    samples = (
        "prompts.responses" if recorded else "algorithm.samples" if "samples" in options else "algorithm.name"
    )
    return [
        *(
            (f"algorithm.{name}", options.get(name, 1) < 1, "it must be at least 1")
            for name in ("prompts", "epochs", "minibatches")
        ),
        (
            "algorithm.minibatches",
            options.get("minibatches", 1) > units,
            (
                f"a step has at most {units} {'pairs' if is_compared else 'rows'}; lower it, or raise "
                "algorithm.prompts"
            ),
        ),
        (
            samples,
            is_compared and config.explorer.name == "none" and rows != 2,
            (
                f"a comparison without an explorer is of 2 responses a prompt, not {rows}; give 2, or choose "
                "an explorer"
            ),
        ),
        (
            "model.dtype",
            config.model.dtype == "bfloat16",
            "AdamW loses most of its steps on such weights; keep float32, set learner.autocast",
        ),
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
                (
                    f"the oracle {config.oracle.name} costs nothing, so it is never spent; set "
                    "stop.max_steps, stop.max_hours or prompts.epochs instead"
                ),
            )
            for name, limit in budget.items()
        ),
        (
            "stop.max_steps",
            (stop.max_steps, stop.max_hours, config.prompts.epochs, *budget.values()) == (None,) * 6,
            (
                "the run would never end; set it, "
                f"{'' if is_free else 'stop.max_queries, '}stop.max_hours or "
                "prompts.epochs"
            ),
        ),
    ]


def _answers(config: Config, objective: Objective) -> list[Rule]:
    """Whom to ask, and who reads the answers."""
    evaluation, oracle = config.answering, config.oracle.name
    form, few_shot = config.render.question, config.render.few_shot
    most = len(FORMS[form].examples) if form else 0
    return [
        (
            "oracle.name",
            oracle == "environment" and not config.sampling.environment,
            "name the environment in sampling.environment",
        ),
        (
            "render.few_shot",
            few_shot > most,
            f"the form {form} has {most} examples; lower it"
            if form
            else "set render.question, whose examples they are",
        ),
        (
            "algorithm.threshold" if "threshold" in config.algorithm.options else "algorithm.name",
            not objective.reads_answers and oracle not in BUILTIN,
            f"nothing would read the answers of {oracle}; set algorithm.threshold, or learn from "
            "prompts.responses with oracle.name recorded, "
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
    e = config.answering
    if e is None:
        return []
    names = {
        "evaluation.gold" if purpose == "gold" else "evaluation.oracle": judge.name
        for purpose, judge in judges_of(config).items()
    }
    limited = {
        "evaluation.gold" if purpose == "gold" else "evaluation.oracle": budget.is_limited
        for purpose, budget in evaluation_budgets(config).items()
    }
    if e.answers is not None:
        load_answers(e.answers)
    new = (
        "evaluation samples new responses, and the oracle recorded knows only recorded ones; name an "
        "oracle that can score them"
    )
    few = f"evaluation.samples is {e.samples}, and no k may be more; lower it, or raise evaluation.samples"
    return [
        *((field, name == "recorded", new) for field, name in names.items()),
        *(
            (
                field,
                name == "environment" and not config.sampling.environment,
                "name it in sampling.environment",
            )
            for field, name in names.items()
        ),
        *(
            (
                field,
                name in BUILTIN and limited[field],
                f"{name} costs nothing; remove max_queries and the like",
            )
            for field, name in names.items()
        ),
        (
            "evaluation.online",
            e.online and bool(config.prompts.responses),
            "training draws no responses where they are recorded; remove it",
        ),
        (
            "evaluation.kl",
            e.kl and not e.samples,
            "it is estimated from sampled responses; set evaluation.samples",
        ),
        (
            "evaluation.kl",
            e.kl and e.slot == "reference",
            "the slot is the reference itself, so it would be 0; remove it",
        ),
        ("evaluation.pass_at", any(k > e.samples for k in e.pass_at), few),
        ("evaluation.majority_at", any(k > e.samples for k in e.majority_at), few),
        (
            "evaluation.majority_at",
            e.majority_at and e.answers is None,
            "say what the answer in a response is; set evaluation.answers",
        ),
        (
            "prompts.prompt_key",
            config.prompts.prompt_key in RECORD,
            "records of an evaluation have a field of that name; rename the column",
        ),
    ]


def _held_out_pairs(config: Config, objective: Objective) -> list[Rule]:
    """Whether an evaluation has anything to measure, and whose loss it would be."""
    e = config.evaluation
    name = config.algorithm.name
    others = sorted(objective.requires.slots - {"sampler"})
    if e is None:
        return []
    is_free = config.oracle.name in BUILTIN
    slots = f"{name} learns from responses of {', '.join(others)}, which recorded ones are not; remove it"
    return [
        (
            "evaluation.path",
            e.path is None and e.pairs is None,
            "name prompts that the model answers, or recorded pairs in evaluation.pairs",
        ),
        (
            "evaluation.pairs",
            e.pairs and objective.requires.feedback != "compare",
            f"{name} learns from scores and not from pairs; remove it",
        ),
        (
            "evaluation.pairs",
            e.pairs and objective.requires.ratio_based,
            f"{name} divides by the probability of sampling; remove it",
        ),
        ("evaluation.pairs", e.pairs and others, slots),
        (
            "evaluation.every_queries",
            e.every_queries is not None and is_free,
            f"{config.oracle.name} costs no queries; set every, or every_hours",
        ),
        (
            "evaluation.pairs",
            e.pairs and config.algorithm.options.get("held_out"),
            "algorithm.held_out would leave a share of them out; remove one",
        ),
    ]


def _sampled(resolved: Resolved) -> list[Rule]:
    """What an algorithm or an explorer needs of the samples."""
    config, explorer = resolved.config, resolved.explorer
    requires, plan = resolved.requires, resolved.plan
    widened = resolved.widened.samples
    name, recorded = config.algorithm.name, bool(config.prompts.responses)
    ratio = f"{name} divides by the probability of sampling"
    return [
        (
            "sampling.temperature",
            requires.ratio_based and config.sampling.temperature == 0,
            f"{ratio}; set it above 0",
        ),
        (
            "oracle.max_outstanding",
            requires.ratio_based and config.oracle.max_outstanding,
            f"{name} needs answers about its newest samples; set it to 0",
        ),
        (
            "oracle.max_wait_s",
            requires.ratio_based
            and config.oracle.max_wait_s is not None
            and config.oracle.max_answer_age != 0,
            (
                f"{name} needs answers about its newest samples, and late ones would be learned from at a "
                "later step; set oracle.max_answer_age to 0"
            ),
        ),
        (
            "prompts.responses",
            requires.ratio_based and recorded,
            f"{ratio}, which recorded responses lack; choose another algorithm",
        ),
        (
            "explorer.name",
            recorded and explorer.needs,
            (
                f"it needs {', '.join(sorted(explorer.needs))}, without which recorded responses come; "
                "remove "
                "the explorer, or prompts.responses"
            ),
        ),
        (
            "explorer.name",
            recorded and widened != plan.samples,
            f"it wants {dict(widened)} responses a prompt instead of {dict(plan.samples)}, and there are "
            "those of prompts.responses alone; let "
            "its widen leave samples as they are, or remove one of the two",
        ),
        (
            "sampling.temperature",
            requires.feedback == "compare"
            and not recorded
            and config.explorer.name == "none"
            and _repeats(config.sampling, requires),
            (
                "both samples of a pair would be the same, and nothing could be learned; set a temperature "
                "above 0 and top_k other than 1"
            ),
        ),
    ]


def _models(config: Config, explorer: Explorer) -> list[Rule]:
    """Which weights there are, and who keeps them where."""
    model, is_own = config.model, has_own_reference(config.model)
    beside = "the reference stands beside the policy's frozen weights and has none of its own; remove it"
    return [
        (
            "model.quantize",
            model.quantize is not None and model.lora is None,
            "weights in four bits cannot be trained; set model.lora, whose adapter is",
        ),
        (
            "model.quantize",
            model.quantize is not None and config.engine.options["dtype"] != "float32",
            "the engine would have to pack other weights than the learner's; leave engine.dtype at float32",
        ),
        (
            "model.reference_update",
            model.reference_update is not None and ENSEMBLE in explorer.needs,
            (
                "an ensemble's features are the reference's, and those that it has learned from would be of "
                "another reference; leave it frozen"
            ),
        ),
        (
            "model.reference_dtype",
            model.reference_dtype == "bfloat16" and model.reference_update is not None,
            "most shares of an update are less than the gap between two such numbers; leave it at float32",
        ),
        ("model.reference_device", model.reference_device is not None and not is_own, beside),
        ("model.reference_dtype", model.reference_dtype is not None and not is_own, beside),
        (
            "model.reference_device",
            model.reference_device is not None and config.compute.profile == "cpu",
            "everything is there with compute.profile: cpu; remove it",
        ),
    ]


def _engine(config: Config) -> list[Rule]:
    """What the engine can promise, and whether anything reads its settings."""
    options = TorchEngineConfig(**config.engine.options)
    return [
        (
            "engine.deterministic",
            options.deterministic and config.compute.profile == "gpu",
            (
                "on a GPU the same tokens under any batching are not promised; leave it out, or set "
                "compute.profile: cpu"
            ),
        ),
        (
            "engine.dtype",
            options.dtype != "float32" and bool(config.prompts.responses) and config.answering is None,
            (
                "nothing is sampled from recorded responses without an evaluation, so nothing reads it; "
                "remove it"
            ),
        ),
    ]


def _ranking(config: Config) -> list[Rule]:
    """Whether any row has what the best checkpoints are ranked by."""
    metric = config.checkpoint.best_metric
    evaluation = config.answering
    is_read = config.checkpoint.keep_best > 0
    names = ("eval/sampled", "eval/greedy", "eval/online")
    given = (
        dict(zip(names, (evaluation.samples > 0, evaluation.greedy, evaluation.online), strict=True))
        if evaluation
        else {}
    )
    has_pairs = config.evaluation is not None and config.evaluation.pairs is not None
    return [
        (
            "checkpoint.best_metric",
            is_read and metric not in NAMES and not metric.startswith("user/"),
            f"there is no such metric; {did_you_mean(metric, NAMES)[:80]}",
        ),
        (
            "checkpoint.best_metric",
            is_read
            and (
                (metric in names and not given.get(metric))
                or (metric.startswith("eval/pairs/") and not has_pairs)
            ),
            "no evaluation of this run gives it; see the section evaluation, or name another metric",
        ),
    ]


def _reward_model(config: Config, objective: Objective) -> list[Rule]:
    """Whoever trains a reward model has a policy that stays as it is, and texts as the reward model will be
    given them."""
    is_frozen = "policy" not in objective.wants
    name = config.algorithm.name
    return [
        (
            "algorithm.name",
            is_frozen and config.answering is not None,
            "its policy does not learn, so an evaluation of what it samples says nothing; remove "
            "evaluation.path, and name held-out pairs in "
            "evaluation.pairs, or set algorithm.held_out",
        ),
        (
            "render.system",
            "reward" in objective.wants and config.render.system is not None,
            (
                f"{name} learns scores of texts as they stand, and nobody would put it before them later; "
                "put "
                "it into the data"
            ),
        ),
    ]


def _buffer(config: Config, objective: Objective, plan: Plan) -> list[Rule]:
    """Who may learn again from older samples, and of how many a step has room."""
    buffer = config.learner.buffer
    name = config.algorithm.name
    requires = objective.requires
    others = sorted(requires.slots - {"sampler"})
    reason = (
        f"{name} divides by the probability of sampling, and would learn from what older weights sampled"
        if requires.ratio_based
        else f"{name} sets samples of {', '.join(others)} against those of the policy as it is"
        if others
        else (
            f"{name} does not say that it is sound on what older weights sampled (`reuses` of "
            "oat/algorithms/base.py)"
        )
    )
    least = (
        f"a step takes {plan.questions} questions, of which some would never be learned; raise it to as "
        "many or more"
    )
    return [
        (
            "learner.buffer",
            buffer and (requires.ratio_based or others or not objective.reuses),
            f"{reason}; remove it, algorithm.epochs is there",
        ),
        ("learner.buffer", buffer and buffer.questions < plan.questions, least),
        (
            "learner.buffer",
            buffer and config.algorithm.options.get("duplicates") == "run",
            (
                "algorithm.duplicates is run, so nothing is learned twice, and a buffer would bring nothing; "
                "remove one of them"
            ),
        ),
    ]


def _unread(config: Config, requires: Requires, needs: Collection[str]) -> dict[tuple[str, str], bool]:
    """Fields that nothing reads in this combination. With recorded responses only the evaluation samples."""
    recorded, evaluation = bool(config.prompts.responses), config.answering
    judged = {evaluation.slot, *(["reference"] if evaluation.kl else [])} if evaluation else set()
    has_reference = bool({"reference", ENSEMBLE} & (requires.models | requires.slots | set(needs) | judged))
    is_silent = config.evaluation is not None and evaluation is None
    is_sampled, is_drawn = (
        not recorded or evaluation is not None,
        not recorded or (evaluation is not None and evaluation.samples > 0),
    )
    return {
        ("oracle", "labels"): requires.feedback != "compare",
        ("oracle", "scale"): requires.feedback != "compare",
        **{("oracle", name): config.oracle.name in BUILTIN for name in ("repeats", "max_wait_s")},
        ("oracle", "max_outstanding"): config.oracle.name == "recorded",
        ("oracle", "max_answer_age"): config.oracle.name == "recorded"
        or (config.oracle.max_wait_s is None and config.oracle.max_outstanding == 0),
        ("oracle", "deadline_s"): {config.oracle.name, *(judge.name for judge in judges_of(config).values())}
        <= {*BUILTIN},
        ("model", "reference_update"): "reference" not in requires.models,
        **{("model", f"reference{end}"): not has_reference for end in ("", "_device", "_dtype")},
        **{
            ("evaluation", f.name): True
            for f in dataclasses.fields(EvaluationConfig)
            if is_silent and f.name not in _OF_PAIRS
        },
        **(
            {
                ("evaluation", "success"): not evaluation.pass_at,
                ("evaluation", "answers"): not evaluation.majority_at,
            }
            if evaluation
            else {}
        ),
        ("prompts", "score_key"): not recorded,
        ("prompts", "too_long"): not recorded
        and (config.evaluation is None or config.evaluation.pairs is None),
        ("prompts", "split"): not isinstance(config.prompts.path, str),
        **{("sampling", name): not is_drawn for name in ("temperature", "top_k", "top_p", "min_p")},
        **{("sampling", name): not is_sampled for name in ("stop", "overflow", "environment")},
        ("learner", "critic_learning_rate"): "critic" not in requires.models,
        ("learner", "sync_every"): "reward" in requires.models or not is_sampled,
        ("learner", "schedule_steps"): config.learner.schedule == "constant",
        ("learner", "max_skips"): config.learner.on_nonfinite == "stop",
        ("render", "date"): config.render.template in (None, "chatml"),
        ("checkpoint", "best_metric"): not config.checkpoint.keep_best,
        ("alarms", "max_roll_backs"): not any(
            getattr(config.alarms, name).action == "roll_back" for name in METRICS
        ),
    }


def _repeats(sampling: SamplingConfig, requires: Requires) -> bool:
    """Whether every response of a prompt is the same."""
    return len(requires.slots) == 1 and (sampling.temperature == 0 or sampling.top_k == 1)
