"""`oat check`: make a run without weights, and say what it would do.

Every part of the run is made as `oat train` makes it, but with tensors that have a shape and no memory. So
most mistakes are refused with the same messages. If these tensors do not tell whether a model will be refused
(`forecast/trial.py`), its weights are loaded for a moment. Otherwise these mistakes are found only by `oat
train`:
* weights that are not finite;
* a model that gives other logits with the engine's KV cache than without it, although all of its attention
  can be replaced;
* if the model is on the hub or Accelerate is not installed: tensors that the model's files lack or have in
  another shape.
"""

from collections import Counter
from collections.abc import Collection
from contextlib import suppress

from oat.assemble.apart import refuse_without_cluster
from oat.assemble.fingerprints import OwnFiles, recorded
from oat.assemble.late_checks import check_with_inputs
from oat.assemble.run_inputs import RunInputs, gather_inputs, refuse_weights
from oat.commands.show_tokens import token_lines
from oat.errors import TemplateError
from oat.files import seen
from oat.forecast.arithmetic import Begun, Lines, evaluation_lines, run_lines, step_lines
from oat.forecast.estimate import lengths_of
from oat.forecast.highest_cost import dearest_question, refuse_small_budget
from oat.forecast.memory import memory_lines, refuse_short_cache, refuse_too_large
from oat.forecast.memory_apart import process_lines
from oat.forecast.places import checkpoint_lines, default_lines, place_lines, sink_lines, stored_step
from oat.forecast.trial import load_unknown
from oat.learner.learner import Learner
from oat.learner.models import LanguageModel
from oat.loop import Run
from oat.models.beside import other_ids
from oat.models.nf4 import count
from oat.opening.open_run import outlined, refuse_changes, settled
from oat.resolve.resolved import Resolved
from oat.rundir.checkpoint_files import newest_state
from oat.rundir.checkpoints import Checkpoints
from oat.rundir.provenance import Origin
from oat.rundir.rows import read_metrics
from oat.text.changed_texts import changed_part, changed_texts, made_ordinary, unread_calls
from oat.types import Price

_MOST_CHANGED = 3
"""Largest number of texts that the tokenizer changes, or of special tokens, that a line shows."""
_LOOKED_AT = 256
"""Largest number of records whose texts are compared with those that are learned or read."""


def check_run(
    resolved: Resolved,
    source: str | None = None,
    *,
    accept_changed: Collection[str] = (),
    with_tokens: bool = False,
    with_memory: bool = False,
) -> list[str]:
    """Refuse a configuration that `oat train` would refuse, and return lines that describe the run.

    Args:
        source: "RUN@STEP" or "RUN": check a fork of this run; None: no fork.
        accept_changed: names of the inputs that may have changed, as for `open_run`.
        with_tokens: True: also show the responses to the first prompt, token by token (`token_lines`).
        with_memory: True: also estimate the memory that the run needs, which takes seconds.

    Raises:
        OatError: `oat train` would refuse the run before its first step.
    """
    resolved.refuse_missing_sinks()
    refuse_without_cluster(resolved)
    resolved, origin = settled(resolved, source)
    own = seen(resolved.about.run_dir)
    directory, step = (own, None) if origin is None else (origin.run, origin.step)
    run_inputs = gather_inputs(resolved, known=recorded(directory, step))
    lengths = lengths_of(run_inputs)
    is_begun = origin is None and (directory / "config.yaml").exists()
    refuse_short_cache(resolved, lengths, run_inputs.outline, is_begun=is_begun)
    memory = refuse_too_large(resolved, lengths, run_inputs.outline)
    refuse_changes(resolved, run_inputs, directory / "ledger.sqlite", accept_changed, step)
    most = dearest_question(resolved, run_inputs)
    refuse_small_budget(resolved, most, is_begun=is_begun)
    check_with_inputs(resolved, run_inputs, most, is_begun=is_begun or origin is not None)
    refuse_weights(
        resolved,
        run_inputs,
        is_begun=bool(Checkpoints(directory / "checkpoints", every=1, keep_last=1).steps),
    )
    trial = load_unknown(resolved, run_inputs.outline)
    processes = [*process_lines(resolved, lengths)]
    with outlined(resolved, run_inputs) as run:
        lines = [*_lines(resolved, run, run_inputs, origin, most), *processes, ("memory", memory)]
        lines += [("note", note) for note in (*run.notes, *trial.untried)]
        OwnFiles(run_inputs.known, run_inputs.roles)()
    trial.decode()
    return [
        *(f"  {name:<13}{text}" for name, text in lines),
        *(token_lines(resolved, run_inputs) if with_tokens else []),
        *(memory_lines(resolved, lengths, run_inputs.outline) if with_memory else []),
    ]


def _lines(
    resolved: Resolved, run: Run, run_inputs: RunInputs, origin: Origin | None, dearest: Price
) -> Lines:
    learner, begun = run.learner, _begun(resolved, origin)
    assert isinstance(learner, Learner), "nothing goes through the wire here"
    yield from _model(learner, learns=resolved.objective.learns)
    yield from _tokenizer(run_inputs)
    yield from _data(run_inputs)
    yield from step_lines(resolved, run, dearest)
    yield from run_lines(resolved, run, run_inputs, dearest, begun)
    yield from evaluation_lines(resolved, run, run_inputs, begun)
    yield from checkpoint_lines(resolved, learner, origin, run.stop.last)
    yield from place_lines(resolved, learner, run_inputs)
    yield from default_lines(resolved)
    yield from sink_lines(resolved)


def _model(learner: Learner, *, learns: bool) -> Lines:
    policy = learner.models["policy"]
    assert isinstance(policy, LanguageModel)
    lm = policy.lm
    parameters = sum(count(lm).values())
    learning = sum(parameter.numel() for parameter in lm.trainable().values())
    which = f"of which {learning / 1e6:.3g} million learn" if learns else "which stay as they are"
    yield "model", f"a {lm.model_type} of {parameters / 1e6:.3g} million parameters, {which}"


def _tokenizer(run_inputs: RunInputs) -> Lines:
    """Yield a line if the tokenizer changes texts, and how many records it changes; and a line if special
    tokens in the texts become ordinary text. Then records are learned and read otherwise than the data have
    them. Yield a line also if responses have calls of tools that our parsers do not read."""
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
            "tokenizer",
            f"changes texts (docs/data.md#tokenizers){': ' if shown else ''}{shown}{more}; of "
            f"{len(looked_at)} records that were compared, it changes {len(rows)}{some}",
        )
    if others := other_ids(run_inputs.renderer.tokenizer):
        text, ids, theirs = others[-1]
        yield (
            "tokenizer",
            f"{type(run_inputs.renderer.tokenizer).__name__} of transformers encodes {len(others)} sample "
            f"texts to other ids than the tokenizer.json of the model, such as {text!r}: {len(ids)} tokens "
            f"for {len(theirs)}; if the model was trained with that file, set tokenizer_class in "
            "tokenizer_config.json to PreTrainedTokenizerFast",
        )
    if tokens:
        names = ", ".join(f"{token!r} in {count}" for token, count in tokens.most_common(_MOST_CHANGED))
        more = ", and others" if len(tokens) > _MOST_CHANGED else ""
        yield (
            "tokenizer",
            "special tokens in the texts of messages are read and learned as ordinary text "
            f"(docs/data.md#text-to-tokens): {names} of {len(looked_at)} records{more}; if the prompts are "
            "already rendered by a chat template, set `template: null` under `render`",
        )

    if unread:
        row, fault = unread[0]
        yield (
            "tools",
            f"{len(unread)} of {len(looked_at)} responses have a call in their text that cannot be read, as "
            f"in row {row}: {fault}",
        )


def _data(run_inputs: RunInputs) -> Lines:
    held_out = f"; {run_inputs.held_out.size} held out" if run_inputs.held_out else ""
    what = " with the longest response" if run_inputs.prompts.responses else ""
    yield (
        "prompts",
        f"{run_inputs.prompts.size}, at most {run_inputs.prompts.longest} tokens long{what}{held_out}",
    )


def _begun(resolved: Resolved, origin: Origin | None) -> Begun:
    """Return the numbers of steps and queries that the run in the directory has made. If a fork is still to
    be made, return those that the original run had made at the checkpoint from which the fork begins."""
    step, directory = stored_step(resolved), seen(resolved.about.run_dir)
    if step is None and origin is not None:
        step, directory = origin.step, origin.run
    if not step:
        return Begun(0, 0)
    spent = [
        row["oracle/queries"]
        for row in read_metrics(directory / "metrics.jsonl")
        if row["step"] <= step and "oracle/queries" in row
    ]
    _, state = newest_state(directory / "checkpoints", step) or ("", {})
    return Begun(step, int(spent[-1]) if spent else 0, state.get("prompts", {}).get("taken"))
