"""Checks of the section `render`."""

from collections.abc import Iterator

from oat.resolve.resolved import Resolved
from oat.text.question_forms import FORMS
from oat.types.part import Check


def examples(resolved: Resolved) -> Iterator[Check]:
    form, few_shot = resolved.config.render.question, resolved.config.render.few_shot
    most = len(FORMS[form].examples) if form else 0
    yield Check(
        "render.few_shot",
        few_shot > most,
        f"the form {form} has {most} examples; lower it"
        if form
        else "set render.question, whose examples they are",
    )


def system(resolved: Resolved) -> Iterator[Check]:
    """Check that `render.system` is not set for a reward model. Later users of the model would not add this
    system message to the texts."""
    yield Check(
        "render.system",
        "reward" in resolved.objective.wants and resolved.config.render.system is not None,
        f"{resolved.config.algorithm.name} learns scores of texts as they stand, and nobody would put it "
        "before them later; put it into the data",
    )
