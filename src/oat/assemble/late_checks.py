"""Checks of settings that need the prompts, the oracle's prices, the files of a backbone, or the chat
template together with the environment. They are made before anything is sampled or paid for.

They refuse new runs only. A run that has begun is never refused: it may have begun before oat made these
checks, and it gets a warning.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from oat.assemble.run_inputs import RunInputs
from oat.config.load import dump, where
from oat.data.prompts import Prompts
from oat.errors import ConfigError, TemplateError, shown, warn
from oat.explore.settings import FeaturesConfig
from oat.resolve.cross_checks import plausible
from oat.resolve.cross_checks.all_sections import message_of
from oat.resolve.parts import part_checks, run_facts
from oat.resolve.resolved import Resolved
from oat.rollout.features import positions_of, reads_conversations
from oat.text.call_forms import ToolCall
from oat.text.calls import template_calls
from oat.text.openings import without_opening
from oat.text.recorded_calls import is_probe, probe_message
from oat.text.renderer import Renderer
from oat.types import Message, Price
from oat.types.part import RunFacts


def check_with_inputs(
    resolved: Resolved, run_inputs: RunInputs, dearest: Price | None, *, is_begun: bool
) -> None:
    """Make the checks of parts once more, with all facts of the run. These are also the checks that
    `check_settings` left out. Warn of values that are hardly meant.

    Args:
        dearest: the highest price of a question, as `dearest_question` returns it; None: it is not known,
            since no budget limits the run.
        is_begun: True if the run has begun, or is a fork of one. Then nothing is refused.

    Raises:
        ConfigError: a setting is refused. The message names its place and its field, and says what to do.
    """
    of_parts = part_checks(resolved.config, _all_facts(resolved, run_inputs, dearest))
    for check in (*of_parts, *plausible.values(resolved)):
        if not check.is_wrong or (is_begun and check.refuses == "never"):
            continue
        if not is_begun and check.refuses != "never":
            raise ConfigError(message_of(resolved, check))
        warn(message_of(resolved, check))
    check_backbone(resolved, run_inputs.prompts, is_begun=is_begun)
    check_calls(resolved, run_inputs, is_begun=is_begun)
    check_stops(resolved, run_inputs)


def check_stops(resolved: Resolved, run_inputs: RunInputs) -> None:
    """Warn if no response has the form that a rule of shape wants, because each ends before a stop string, or
    behind one in the middle of the form. Of a pattern, only its plain characters are read."""
    renderer, first = run_inputs.renderer, next(iter(run_inputs.prompts.all()), None)
    if not renderer.stop or first is None:
        return
    opening = renderer.opening(first.messages)
    for name, form, is_pattern in _forms(dump(resolved.config)):
        example = re.sub(r"\\(\W)", r"\1", form) if is_pattern else form.replace("...", "oattext")
        example = without_opening(example, opening).strip()
        left = renderer.cut(example)
        at = next((stop for stop in renderer.stop if example[len(left) :].startswith(stop)), None)
        is_lost = any(map(str.isalnum, at or "")) if is_pattern else left.strip() != example
        if is_lost:
            warn(
                f"sampling.stop ends each response at {shown(at or left[-40:])}, and the oracle {name} wants "
                f"the form {shown(form)}; so no response has it: remove that string from sampling.stop, or "
                "take it out of the form"
            )


def _forms(section: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield the rules of shape that a section of the configuration names: the name, the template or pattern,
    and True if it is a pattern."""
    if isinstance(section, Mapping):
        for field in ("template", "pattern"):
            if section.get("name") in ("format", "regex") and isinstance(section.get(field), str):
                yield section["name"], section[field], field == "pattern"
    if isinstance(section, Mapping | list | tuple):
        for each in section.values() if isinstance(section, Mapping) else section:
            yield from _forms(each)


def check_calls(resolved: Resolved, run_inputs: RunInputs, *, is_begun: bool) -> None:
    """Check that the tools of the environment read a call as the chat template writes it, and that the
    template writes their results. Warn if it does not, since the environment may say them in messages of its
    own; and if a parser does not that the environment chose, since the model may learn another form.

    Args:
        is_begun: as in `check_with_inputs`.

    Raises:
        ConfigError: the default parser reads no such call, and the run has not begun.
    """
    environment, renderer = run_inputs.environment, run_inputs.renderer
    if environment is None or not environment.tools:
        return
    answered = Message("user", "oatuser"), Message("assistant", "oatassistant")
    for role in sorted({tools.role for tools in environment.tools}):
        try:
            renderer.written([], [*answered, Message(role, "oatresult")])
        except TemplateError as fault:
            _refuse(
                resolved,
                f"{environment.name} has tools whose results are messages of the role {role}, and {fault} "
                "(`role` of Tools)",
                is_begun=is_begun,
            )
    text, by_id = written_call(renderer), False
    with suppress(TemplateError):
        result = Message("tool", "oatresult", {"tool_call_id": "oatid"})
        by_id = "oatid" in renderer.written([], [*answered, result])
    for tools in environment.tools if text else ():
        if _reads(tools.parse, text):
            if tools.role == "tool" and by_id and not all(call.id for call in tools.parse(text)):
                _refuse(
                    resolved,
                    f"{environment.name} has tools, the chat template writes the id of a call beside its "
                    "result (`tool_call_id`), and oat reads no id in its calls; choose another template, or "
                    "give Tools a `role` that needs none",
                    is_begun=is_begun,
                )
            continue
        writes = f"the chat template writes a call of a tool as {shown(text, 300)}"
        if tools.parse is not template_calls:
            other = "; template_calls reads it" if _reads(template_calls, text) else ""
            name = getattr(tools.parse, "__name__", type(tools.parse).__name__)
            warn(
                f"{environment.name} reads calls by {name}, and {writes}, which it does not read{other}. "
                "So a response in the template's form calls nothing, and the model must learn another form"
            )
            continue
        _refuse(
            resolved,
            f"{writes}, and oat.environments.tools reads no such form; give Tools a `parse` that reads "
            "it, or choose another template",
            is_begun=is_begun,
        )


def _refuse(resolved: Resolved, fault: str, *, is_begun: bool) -> None:
    """Refuse the environment; only warn if the run has begun."""
    with resolved.error_context("sampling.environment"):
        if not is_begun:
            raise ConfigError(fault)
        warn(fault)


def written_call(renderer: Renderer) -> str:
    """Return the text that an environment gets of a response with a call, as the chat template writes it; ""
    if the template writes none."""
    asked, called = Message("user", "oatuser"), Message.of(probe_message())
    if not renderer.reads("tool_calls"):
        return ""
    with suppress(TemplateError):
        return renderer.text(renderer.response(called))
    with suppress(TemplateError):  # some templates end a turn with a call in another way
        before, whole = renderer.prompt([asked]), renderer.prompt([asked, called])
        size = min(len(before), len(whole))
        same = int(np.cumprod(before[:size] == whole[:size]).sum())
        return renderer.text(whole[same:])
    return ""


def _reads(parse: Callable[[str], Sequence[ToolCall]], text: str) -> bool:
    try:
        return [*map(is_probe, parse(text))] == [True]
    except Exception:  # a user's parser may raise any
        return False


def check_backbone(resolved: Resolved, prompts: Prompts, *, is_begun: bool) -> None:
    """Check that a backbone of its own can read the run's prompts, and has `explorer.features.max_tokens`
    positions.

    Args:
        is_begun: as in `check_with_inputs`.

    Raises:
        ConfigError: it cannot or has not, and the run has not begun.
        ModelError: there is no such backbone.
    """
    features = resolved.features
    if features is None or not features.is_own:
        return
    with resolved.error_context("explorer.name"):
        faults = [*_position_faults(features), *_message_faults(features, prompts)]
    for field, fault in faults:
        place = where(("explorer", "features", field), resolved.origins)
        said = f"{place}: explorer.features.{field} is {getattr(features, field)}, {fault}"
        if not is_begun:
            raise ConfigError(said)
        warn(said)


def _position_faults(features: FeaturesConfig) -> Iterator[tuple[str, str]]:
    """Yield the field `max_tokens` if it is above the backbone's positions. Its default is no mistake: a
    backbone with fewer positions reads as many as it has."""
    if features.max_tokens == FeaturesConfig.max_tokens:
        return
    positions = positions_of(features.backbone)
    if positions is not None and features.max_tokens > positions:
        yield (
            "max_tokens",
            f"and the backbone {features.backbone} has {positions} positions; set as much or less, or leave "
            "it out",
        )


def _message_faults(features: FeaturesConfig, prompts: Prompts) -> Iterator[tuple[str, str]]:
    """Yield the field `backbone` if it reads one message as the prompt, and a prompt has several."""
    most = max((len(prompt.messages) for prompt in prompts.all()), default=1)
    if most > 1 and not reads_conversations(features.backbone):
        yield (
            "backbone",
            f"which reads a prompt of one message, and a prompt has {most}; take an encoder, a causal model "
            "with a chat template, or reference",
        )


def _all_facts(resolved: Resolved, run_inputs: RunInputs, dearest: Price | None) -> RunFacts:
    config, questions = resolved.config, resolved.widened.questions
    return replace(
        run_facts(config),
        slots=resolved.slots,
        steps=resolved.last_step(run_inputs.prompts.size),
        questions=questions,
        most_questions=None if config.oracle.max_outstanding else questions * resolved.most_rounds,
        question_price=dearest.queries if dearest is not None else None,
    )
