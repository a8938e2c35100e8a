"""Settings that two names of TRL decide together: the source of prompts, the end of a schedule, and sinks."""

from collections.abc import Mapping
from typing import Any

from oat.config.secrets import looks_secret

DATA = ("dataset_name", "dataset_config")
SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs")
SINKS = ("report_to", "project", "wandb_project", "wandb_entity", "run_name")
_OPTIONS = {
    "wandb_project": "project",
    "project": "project",
    "wandb_entity": "entity",
    "run_name": "run_name",
}
"""TRL's names for options of the sink `wandb`; the first of two for one option decides."""
_LEAST = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
"""TRL's schedules that fall to a rate of the user's."""
_SHARE = 0.1
"""The share of the rate to which our schedules fall."""
Decided = tuple[dict[str, Any], str] | None
"""Settings and a remark; None: the names do not decide together."""


def configured(given: Mapping[str, Any]) -> Decided:
    """Return our setting for a dataset of the hub and its configuration.

    Args:
        given: the names of TRL that are set, with their values.
    """
    name, part = (given.get(each) for each in DATA)
    is_given = isinstance(name, str) and isinstance(part, str) and part and "@" not in name
    return ({"prompts.path": f"{name}@{part}"}, "") if is_given else None


def schedule_of(given: Mapping[str, Any]) -> Decided:
    """Return our setting for a schedule that falls to a least rate.

    Args:
        given: as for `configured`; `learning_rate` is read too.
    """
    kind, options = (given.get(each) for each in SCHEDULE)
    if kind not in _LEAST:
        return None
    ours = {"learner.schedule": "cosine"}
    if not isinstance(options, Mapping):
        return None if options else (ours, "it falls to a tenth of the rate here")
    share, least, rate = options.get("min_lr_rate"), options.get("min_lr"), given.get("learning_rate")
    if share is None and isinstance(least, int | float) and isinstance(rate, float) and rate:
        share = least / rate
    if options.keys() - {"min_lr_rate", "min_lr"} or not isinstance(share, int | float):
        return None
    is_ours = abs(share - _SHARE) < 1e-6
    return ours, "" if is_ours else f"it falls to {share:g} of the rate there, and to {_SHARE:g} of it here"


def sinks_of(given: Mapping[str, Any]) -> Decided:
    """Return our setting for the sinks of metrics if one of them, `wandb`, has options; None also if one may
    be a secret.

    Args:
        given: as for `configured`.
    """
    names = given.get("report_to")
    names = names if isinstance(names, list) else [names]
    options = {ours: given[name] for name, ours in reversed(_OPTIONS.items()) if given.get(name) is not None}
    options = {name: options[name] for name in _OPTIONS.values() if name in options}
    are_texts = all(isinstance(value, str) and not looks_secret(value) for value in options.values())
    if (
        "wandb" not in names
        or not options
        or not are_texts
        or not {*names} <= {"wandb", "tensorboard", "mlflow"}
    ):
        return None
    return {
        "tracking.sinks": [{"name": "wandb", **options} if name == "wandb" else name for name in names]
    }, ""
