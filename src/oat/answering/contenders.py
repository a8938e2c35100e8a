"""The two models that `oat eval A --against B` compares, each with a configuration of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oat.answering.evaluated import without_explorer
from oat.config.settings import ModelConfig
from oat.config.stored import stored_config
from oat.errors import ConfigError
from oat.files import absolute
from oat.resolve.resolve import resolve
from oat.resolve.resolved import Resolved
from oat.resolve.targets import load_file


@dataclass(frozen=True)
class ComparedModel:
    """One of the two models that are compared.

    Attributes:
        name: the name that the user gave.
        resolved: the configuration of the comparison. Its sections `model` and `render` are this model's own.
        run_dir: the run whose newest checkpoint is compared; None: the model is used as it is.
    """

    name: str
    resolved: Resolved
    run_dir: Path | None


def contenders_of(first: str, second: str, flags: Sequence[str]) -> tuple[ComparedModel, ComparedModel]:
    """Return the two contenders. Their configurations differ only in the sections `model` and `render`.

    Args:
        first, second: a run directory, a configuration file, or a model. The settings outside these two
            sections are those of `first`; if `first` is a model, those of `second`. But `oracle.repeats` is
            0, and `evaluation.kl`, `.pairs` and `.best_of` are off, and so is the explorer.
        flags: settings from the command line. They override the settings of `first`; if `first` is a model,
            those of `second`.

    Raises:
        ConfigError: neither `first` nor `second` is a run or a configuration, or the configuration has no
            held-out prompts, or neither sampled nor greedy responses.
    """
    loaded = [_load(name, flags if place == 0 else ()) for place, name in enumerate((first, second))]
    if loaded[0] is None and loaded[1] is not None:
        loaded[1] = _load(second, flags)
    base = loaded[0] or loaded[1]
    if base is None:
        raise ConfigError(
            f"neither {first} nor {second} is a run or a configuration, so nothing says which prompts and "
            "which oracle; give a configuration and the first model by a flag: oat eval CONFIG --model.path "
            f"{first} --against {second}"
        )
    evaluation = base.config.answering
    if evaluation is None:
        raise ConfigError(
            f"{first if loaded[0] else second}: has no held-out prompts; add --evaluation.path PROMPTS.jsonl"
        )
    if not evaluation.samples and not evaluation.greedy:
        raise ConfigError(
            "evaluation.best_of takes no part in a comparison, which is of sampled or greedy responses; set "
            "evaluation.samples, or evaluation.greedy"
        )

    def contender(name: str, own: Resolved | None) -> ComparedModel:
        model, render = ModelConfig(name), base.config.render
        if own is not None:
            model = replace(own.config.model, reference=None, reference_update=None)
            render = own.config.render
        # repeats=0: the oracle is asked about both orders; otherwise the cache would derive the second one
        oracle = replace(base.config.oracle, repeats=0)
        config = replace(base.config, model=model, oracle=oracle, render=render)
        # a comparison needs neither a reference nor an ensemble
        config = replace(config, evaluation=replace(evaluation, kl=False, pairs=None, best_of=None))
        # nothing is learned, so both contenders may share the objective of `base`
        resolved = replace(without_explorer(base), config=config, origins={(): name})
        return ComparedModel(name, resolved, absolute(name) if _is_run(name) else None)

    return contender(first, loaded[0]), contender(second, loaded[1])


def _load(name: str, flags: Sequence[str]) -> Resolved | None:
    """Read the configuration of a run or of a file; return None if the name is a model's."""
    if _is_run(name):
        return resolve(stored_config(absolute(name), flags)[0], {})
    return resolve(*load_file(name, flags)) if absolute(name).is_file() else None


def _is_run(name: str) -> bool:
    return (absolute(name) / "config.yaml").exists()
