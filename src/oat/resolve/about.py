"""The settings of a run, as plain values for reports and commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oat.config.load import dump
from oat.config.settings import Config, TrackingConfig
from oat.plugins.registry import ALGORITHMS


@dataclass(frozen=True)
class RunSummary:
    """The settings of one run that reports and commands use.

    Attributes:
        run_dir: the run directory, as the configuration names it.
        model: the model that the policy starts from, a directory or a hub id.
        critic: the model that the critic starts from; None: the policy's.
        has_adapter: True if an adapter is trained beside the frozen weights.
        algorithm: name of the algorithm.
        is_ours: True if the algorithm is one of oat's own.
        oracle: name of the oracle that training asks.
        prompts: the sources of the prompts.
        max_steps: `stop.max_steps`.
        stops_at_bad_records: True if a malformed record ends the run before its first step.
        evaluated: the source of the held-out prompts or, without prompts, of the held-out pairs. None: there
            is no evaluation.
        why_no_rate: the reason why the learning rate can be 0 in the first steps, as a part of a sentence.
        shown: the metrics that the line of a step shows.
        usually_shown: the metrics that it shows unless the user says otherwise.
        tree: every setting, as `config.yaml` has it.
    """

    run_dir: str
    model: str
    critic: str | None
    has_adapter: bool
    algorithm: str
    is_ours: bool
    oracle: str
    prompts: tuple[str, ...]
    max_steps: int | None
    stops_at_bad_records: bool
    evaluated: str | None
    why_no_rate: str
    shown: tuple[str, ...]
    usually_shown: tuple[str, ...]
    tree: Mapping[str, Any]


def about(config: Config) -> RunSummary:
    learner, path = config.learner, config.prompts.path
    e = config.evaluation
    sources = (path,) if isinstance(path, str) else path
    rises = f"learner.warmup_steps is {learner.warmup_steps}, and it rises from 0"
    return RunSummary(
        run_dir=config.run_dir,
        model=config.model.path,
        critic=config.model.critic,
        has_adapter=config.model.lora is not None,
        algorithm=config.algorithm.name,
        is_ours=config.algorithm.name in ALGORITHMS,
        oracle=config.oracle.name,
        prompts=tuple(source if isinstance(source, str) else source.path for source in sources),
        max_steps=config.stop.max_steps,
        stops_at_bad_records=config.prompts.on_bad_record == "stop",
        evaluated=None if e is None else e.path or e.pairs,
        why_no_rate="learner.learning_rate is 0" if learner.learning_rate == 0 else rises,
        shown=config.tracking.shown,
        usually_shown=TrackingConfig.shown,
        tree=dump(config),
    )
