"""Settings whose defaults follow from other settings. `oat check` shows each with its value and with the
setting from which it follows.

The end of a run has no default in a file: the file must set `stop` or `prompts.epochs`. If a run from Python
sets neither, it makes one pass over its prompts.
"""

from collections.abc import Iterator
from typing import NamedTuple

from oat.config.part_names import REGISTRIES
from oat.resolve.model_starts import has_own_reference
from oat.resolve.resolved import Resolved


class _Default(NamedTuple):
    """A setting that may follow from another setting.

    Attributes:
        field: the setting, as "section.field".
        applies: True if the setting, when left open, follows from `source` in this run.
        value: the value that the setting has in this run, or None.
        source: the setting from which the value follows, in words.
    """

    field: str
    applies: bool
    value: object
    source: str


def derived(resolved: Resolved) -> Iterator[str]:
    """Yield a sentence for each setting that is left open and follows from another setting."""
    for default in (*_of_model(resolved), *_of_samples(resolved), *_of_the_others(resolved)):
        is_open = tuple(default.field.split(".")) not in resolved.origins
        if default.applies and default.value is not None and is_open:
            yield f"{default.field}: {default.value}, {default.source}"


def _of_model(resolved: Resolved) -> Iterator[_Default]:
    model, has_reference = resolved.config.model, "reference" in resolved.models
    rank = f"of rank {model.lora.rank}" if model.lora else None
    yield _Default("model.lora", model.adapter is not None, rank, "as model.adapter says")
    is_start = model.reference is None and has_reference
    yield _Default("model.reference", is_start, "the policy's start", "as model.path")
    has_critic = model.critic is None and "critic" in resolved.models
    yield _Default("model.critic", has_critic, "the policy's start", "as model.path")
    is_own = model.reference_dtype is None and has_reference and has_own_reference(model)
    yield _Default("model.reference_dtype", is_own, model.dtype, "as model.dtype")


def _of_samples(resolved: Resolved) -> Iterator[_Default]:
    config, question = resolved.config, resolved.config.render.question
    responses, stop = config.prompts.responses, ", ".join(map(repr, config.sampling.stop))
    is_recorded = config.oracle.name == "recorded"
    yield _Default("prompts.responses", is_recorded, ", ".join(responses), "what oracle.name recorded reads")
    begins = f"where a question of render.question {question} begins"
    yield _Default("sampling.stop", question is not None, stop, begins)
    samples = resolved.step.samples
    yield _Default("algorithm.samples", bool(responses), samples, "as many as prompts.responses has")
    for section in REGISTRIES:
        yield from _of_part(resolved, section)


def _of_part(resolved: Resolved, section: str) -> Iterator[_Default]:
    """Yield the defaults that the part of a section, such as the algorithm, gives to settings left open."""
    part = getattr(resolved.config, section)
    for field, source in resolved.derived.items():
        if field.startswith(f"{section}."):
            yield _Default(field, True, part.options[field.partition(".")[2]], source)


def _of_the_others(resolved: Resolved) -> Iterator[_Default]:
    config, origins = resolved.config, resolved.origins
    learner = config.learner
    has_critic = "critic" in resolved.requires.models
    for name in ("learning_rate", "weight_decay", "max_grad_norm", "schedule", "warmup_steps"):
        is_open = has_critic and getattr(learner, f"critic_{name}") is None
        yield _Default(f"learner.critic_{name}", is_open, getattr(learner, name), f"as learner.{name}")
    end = f"the optimiser steps of stop.max_steps {config.stop.max_steps}"
    alone = learner.critic_only_steps
    left = f"{end}, without {alone} of learner.critic_only_steps" if alone else end
    yield _Default("learner.schedule_steps", True, learner.schedule_steps, left)
    is_given = ("learner", "schedule_steps") in origins
    of_critic = "as learner.schedule_steps" if is_given else end
    yield _Default("learner.critic_schedule_steps", has_critic, learner.critic_schedule_steps, of_critic)
    rows = learner.micro_batch_size or "no limit"
    why = "is not set" if learner.micro_batch_size else "is one"
    yield _Default("learner.micro_batch_size", True, rows, f"since learner.micro_batch_tokens {why}")
    e = config.evaluation
    asks_the_same = e is not None and e.oracle is None
    yield _Default("evaluation.oracle", asks_the_same, config.oracle.name, "as oracle.name, with its options")
    has_gpus = config.compute.gpus is not None
    yield _Default("compute.actors", has_gpus, config.compute.actors, "one for each GPU of the actors")
    is_given = config.compute.profile == "cpu" and ("compute", "threads") in origins
    is_same = resolved.engine.threads in (None, config.compute.threads)
    yield _Default("engine.threads", is_given and is_same, config.compute.threads, "as compute.threads")
