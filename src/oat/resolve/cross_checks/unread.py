"""Refusal of settings that nothing reads in the configured combination of parts."""

import dataclasses
from collections.abc import Mapping

from oat.config.settings import EvaluationConfig
from oat.control.alarms import METRICS
from oat.errors import ConfigError
from oat.oracles.builtin import BUILTIN
from oat.resolve.environment import ignores_deadline
from oat.resolve.resolved import Resolved
from oat.resolve.whole_groups import shows_groups

_OF_PAIRS = ("path", "pairs", "split", "max_prompts", "every", "every_queries", "every_hours")
"""Fields of the section `evaluation` that are read even if it has pairs and no prompts."""
_OF_CLUSTER = (
    "actors",
    "actor_cpus",
    "gpus",
    "collocate",
    "address",
    "learner",
    "learner_cpus",
    "standby",
    "max_restarts",
    "deadline_s",
)
"""Fields of the section `compute` that every run on a cluster reads, and no other."""
_OF_CRITIC = ("learning_rate", "weight_decay", "max_grad_norm", "schedule", "warmup_steps", "only_steps")
"""Fields of the section `learner` with the prefix `critic_` that every run with a critic reads."""


def refuse_unread(resolved: Resolved) -> None:
    """Refuse settings that nothing reads.

    Raises:
        ConfigError: a setting was given another value than its default, and nothing reads it.
    """
    config, origins = resolved.config, resolved.origins
    for (section, key), is_unread in _unread(resolved).items():
        part = getattr(config, section)
        default = next(f.default for f in dataclasses.fields(part) if f.name == key)
        if is_unread and (section, key) in origins and getattr(part, key) != default:
            place = origins[section, key]
            raise ConfigError(
                f"{place}: nothing reads {section}.{key} with algorithm {config.algorithm.name} and these "
                "settings; remove it"
            )


def _unread(resolved: Resolved) -> Mapping[tuple[str, str], bool]:
    """Return, for each setting that some runs do not read, True if this run does not read it."""
    return {
        **_of_oracle(resolved),
        **_of_model(resolved),
        **_of_evaluation(resolved),
        **_of_prompts_and_sampling(resolved),
        **_of_learner(resolved),
        **_of_others(resolved),
    }


def _of_oracle(resolved: Resolved) -> dict[tuple[str, str], bool]:
    oracle, is_compared = resolved.config.oracle, resolved.requires.feedback == "compare"
    is_never_late = oracle.max_wait_s is None and oracle.max_outstanding == 0
    return {
        ("oracle", "labels"): not is_compared,
        ("oracle", "scale"): not is_compared,
        ("oracle", "repeats"): oracle.name in BUILTIN,
        ("oracle", "whole_groups"): oracle.whole_groups is not None and not shows_groups(resolved.config),
        ("oracle", "max_wait_s"): oracle.name in BUILTIN,
        ("oracle", "max_outstanding"): oracle.name == "recorded",
        ("oracle", "max_answer_age"): oracle.name == "recorded" or is_never_late,
        ("oracle", "deadline_s"): _asked(resolved) <= {*BUILTIN},
    }


def _asked(resolved: Resolved) -> set[str]:
    """Return the names of the oracles of training and of evaluations."""
    return {resolved.config.oracle.name, *(each.name for each in resolved.evaluation_oracles.values())}


def _of_model(resolved: Resolved) -> dict[tuple[str, str], bool]:
    e, requires = resolved.config.answering, resolved.requires
    evaluated = {e.slot, *(["reference"] if e.kl else [])} if e else set()
    named = requires.models | requires.slots | resolved.explorer.needs | evaluated
    features = resolved.features
    has_reference = "reference" in named or (features is not None and features.backbone == "reference")
    return {
        ("model", "critic"): "critic" not in requires.models,
        ("model", "reference_update"): "reference" not in requires.models,
        ("model", "reference"): not has_reference,
        ("model", "reference_device"): not has_reference,
        ("model", "reference_dtype"): not has_reference,
    }


def _of_evaluation(resolved: Resolved) -> dict[tuple[str, str], bool]:
    e = resolved.config.answering
    if e is not None:
        return {
            ("evaluation", "success"): not e.pass_at,
            ("evaluation", "answers"): not e.majority_at,
            ("evaluation", "best_of_temperature"): not e.best_of,
        }
    if resolved.config.evaluation is None:
        return {}
    names = [field.name for field in dataclasses.fields(EvaluationConfig) if field.name not in _OF_PAIRS]
    return {("evaluation", name): True for name in names}


def _of_prompts_and_sampling(resolved: Resolved) -> dict[tuple[str, str], bool]:
    config, e = resolved.config, resolved.config.answering
    is_recorded = bool(config.prompts.responses)
    has_pairs = config.evaluation is not None and config.evaluation.pairs is not None
    is_sampled = not is_recorded or e is not None
    is_drawn = not is_recorded or (e is not None and e.samples > 0)
    return {
        ("prompts", "score_key"): not is_recorded,
        ("prompts", "too_long"): not is_recorded and not has_pairs,
        ("prompts", "split"): not isinstance(config.prompts.path, str),
        **{("sampling", name): not is_drawn for name in ("temperature", "top_k", "top_p", "min_p")},
        **{("sampling", name): not is_sampled for name in ("stop", "overflow", "environment")},
        ("sampling", "environment_deadline_s"): ignores_deadline(config),
    }


def _of_learner(resolved: Resolved) -> dict[tuple[str, str], bool]:
    learner, models = resolved.config.learner, resolved.requires.models
    has_critic, constant = "critic" in models, "constant"
    critic_schedule = (learner.critic_schedule or learner.schedule) if has_critic else constant
    is_sampled = not resolved.config.prompts.responses or resolved.config.answering is not None
    return {
        **{("learner", f"critic_{name}"): not has_critic for name in _OF_CRITIC},
        ("learner", "critic_schedule_steps"): critic_schedule == constant,
        ("learner", "sync_every"): "reward" in models or not is_sampled,
        ("learner", "schedule_steps"): {learner.schedule, critic_schedule} == {constant},
        ("learner", "max_skips"): learner.on_nonfinite == "stop",
    }


def _of_others(resolved: Resolved) -> dict[tuple[str, str], bool]:
    config = resolved.config
    is_local = config.compute.runtime == "local"
    rolls_back = any(getattr(config.alarms, name).action == "roll_back" for name in METRICS)
    return {
        ("render", "date"): config.render.template in (None, "chatml"),
        ("checkpoint", "best_metric"): not config.checkpoint.keep_best,
        ("alarms", "max_roll_backs"): not rolls_back,
        **{("compute", name): is_local for name in _OF_CLUSTER},
        ("compute", "oracle_clients"): is_local or _asked(resolved) <= {*BUILTIN},
        ("compute", "oracle_cpus"): is_local or not config.compute.oracle_clients,
    }
