"""Defaults that follow from other settings, for people: what each came to, and from which.

Sampling, learner and the sizes of a step have defaults; how a run ends (`stop`) has none in a file. From
Python, a run without an end is one pass over its prompts.
"""

from collections.abc import Iterator
from dataclasses import replace

from oat.build.models import has_own_reference
from oat.build.parts import part_defaults, settings_of
from oat.build.resolved import Resolved
from oat.config.settings import Component, Config


def derived(resolved: Resolved) -> Iterator[str]:
    """A sentence for each setting that was left open and that another one has decided."""
    config, origins = resolved.config, resolved.origins
    model = config.model
    learner = config.learner
    e = config.evaluation
    has_reference = "reference" in resolved.models
    question = config.render.question
    threads = resolved.engine.threads
    is_followed = (
        config.compute.profile == "cpu"
        and ("compute", "threads") in origins
        and threads in (None, config.compute.threads)
    )
    found: dict[str, tuple[bool, object, str]] = {
        "model.lora": (
            model.adapter is not None,
            f"of rank {model.lora.rank}" if model.lora else None,
            "as model.adapter says",
        ),
        "model.reference": (model.reference is None and has_reference, "the policy's start", "as model.path"),
        "model.reference_dtype": (
            model.reference_dtype is None and has_reference and has_own_reference(model),
            model.dtype,
            "as model.dtype",
        ),
        "prompts.responses": (
            config.oracle.name == "recorded",
            ", ".join(config.prompts.responses),
            "what oracle.name recorded reads",
        ),
        "sampling.stop": (
            question is not None,
            ", ".join(map(repr, config.sampling.stop)),
            f"where a question of render.question {question} begins",
        ),
        "algorithm.samples": (
            bool(config.prompts.responses),
            resolved.step.samples,
            "as many as prompts.responses has",
        ),
        **_of_the_algorithm(resolved),
        "learner.critic_learning_rate": (
            "critic" in resolved.requires.models,
            learner.learning_rate,
            "as learner.learning_rate",
        ),
        "learner.schedule_steps": (
            True,
            learner.schedule_steps,
            f"the optimiser steps of stop.max_steps {config.stop.max_steps}",
        ),
        "learner.micro_batch_size": (True, *_micro_batch(config)),
        "evaluation.oracle": (
            e is not None and e.oracle is None,
            config.oracle.name,
            "as oracle.name, with its options",
        ),
        "engine.threads": (is_followed, config.compute.threads, "as compute.threads"),
    }
    for name, (follows, value, source) in found.items():
        if follows and value is not None and tuple(name.split(".")) not in origins:
            yield f"{name}: {value}, {source}"


def _of_the_algorithm(resolved: Resolved) -> dict[str, tuple[bool, object, str]]:
    """Settings of the algorithm that follow from the run: those that it fills in where they are left open."""
    config, origins = resolved.config, resolved.origins
    options = config.algorithm.options
    given = {name: value for name, value in options.items() if ("algorithm", name) in origins}
    as_given = replace(config, algorithm=Component(config.algorithm.name, given))
    found = part_defaults(as_given, "algorithm", settings_of(as_given, "algorithm"), origins)
    return {f"algorithm.{name}": (True, options[name], default.source) for name, default in found.items()}


def _micro_batch(config: Config) -> tuple[object, str]:
    if config.learner.micro_batch_size is None:
        return "no limit", "since learner.micro_batch_tokens is one"
    return config.learner.micro_batch_size, "since learner.micro_batch_tokens is not set"
