"""Rows and notes of `oat check` about what a run begins with: its model, its prompts, and their texts."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from oat.assemble.run_inputs import RunInputs
from oat.errors import TemplateError
from oat.forecast.arithmetic import Rows
from oat.forecast.rows import Row
from oat.learner.learner import Learner
from oat.learner.models import LanguageModel
from oat.models.beside import other_ids
from oat.models.nf4 import count
from oat.text.changed_texts import changed_part, changed_texts, made_ordinary, unread_calls

_MOST_CHANGED = 3
"""Largest number of texts that the tokenizer changes, or of special tokens, that a note shows."""
_LOOKED_AT = 256
"""Largest number of records whose texts are compared with those that are learned or read."""


def input_rows(learner: Learner, run_inputs: RunInputs, *, learns: bool) -> Rows:
    """Yield rows about the model and the data.

    Args:
        learns: True if the policy learns.
    """
    policy = learner.models["policy"]
    assert isinstance(policy, LanguageModel)
    lm, prompts = policy.lm, run_inputs.prompts
    learning = sum(parameter.numel() for parameter in lm.trainable().values()) if learns else 0
    yield Row("model", lm.model_type, "", "model.path")
    yield Row("parameters", sum(count(lm).values()), "parameters", "model.path")
    yield Row("parameters that learn", learning, "parameters", "model.lora")
    yield Row("prompts", prompts.size, "prompts", "prompts.path")
    what = "longest prompt with its response" if prompts.responses else "longest prompt"
    yield Row(what, prompts.longest, "tokens", "prompts.path")
    if run_inputs.held_out:
        yield Row("held-out prompts", run_inputs.held_out.size, "prompts", "evaluation.path")


def text_notes(run_inputs: RunInputs) -> Iterator[str]:
    """Yield a sentence if the tokenizer changes texts, and how many records it changes; and one if special
    tokens in the texts become ordinary text. Then records are learned and read otherwise than the data have
    them. Yield one also if responses have calls of tools that our parsers do not read."""
    changed = list(changed_texts(run_inputs.renderer.tokenizer))
    looked_at = run_inputs.prompts.spread(_LOOKED_AT)
    rows, tokens, unread = dict[int, str](), Counter[str](), list[tuple[int, str]]()
    for prompt in looked_at:
        values = [prompt.columns[name] for name in run_inputs.prompts.responses] or [None]
        with suppress(TemplateError):  # this record is refused elsewhere, or left out
            parts = [changed_part(run_inputs.renderer, prompt.messages, value) for value in values]
            if found := [part for part in parts if part is not None]:
                rows[prompt.row] = found[0]
        for value in values:
            tokens.update({*made_ordinary(run_inputs.renderer, prompt.messages, value)})
            unread += [(prompt.row, fault) for fault in unread_calls(value)[:1]]
    if changed or rows:
        shown = ", ".join(f"{text!r} becomes {now!r}" for text, now in changed[:_MOST_CHANGED])
        more = f", and {len(changed) - _MOST_CHANGED} more" if len(changed) > _MOST_CHANGED else ""
        some = "".join(f", such as {part[:80]!r} in row {row}" for row, part in [*rows.items()][:1])
        yield (
            f"the tokenizer changes texts (docs/data.md#tokenizers){': ' if shown else ''}{shown}{more}; of "
            f"{len(looked_at)} records that were compared, it changes {len(rows)}{some}"
        )
    if others := other_ids(run_inputs.renderer.tokenizer):
        text, ids, theirs = others[-1]
        yield (
            f"{type(run_inputs.renderer.tokenizer).__name__} of transformers encodes {len(others)} sample "
            f"texts to other ids than the tokenizer.json of the model, such as {text!r}: {len(ids)} tokens "
            f"for {len(theirs)}; if the model was trained with that file, set tokenizer_class in "
            "tokenizer_config.json to PreTrainedTokenizerFast"
        )
    if tokens:
        names = ", ".join(f"{token!r} in {count}" for token, count in tokens.most_common(_MOST_CHANGED))
        more = ", and others" if len(tokens) > _MOST_CHANGED else ""
        yield (
            "special tokens in the texts of messages are read and learned as ordinary text "
            f"(docs/data.md#text-to-tokens): {names} of {len(looked_at)} records{more}; if the prompts are "
            "already rendered by a chat template, set `template: null` under `render`"
        )

    if unread:
        row, fault = unread[0]
        yield (
            f"{len(unread)} of {len(looked_at)} responses have a call in their text that cannot be read, as "
            f"in row {row}: {fault}"
        )
