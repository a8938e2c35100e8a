"""`oat generate`: write responses to the prompts of a file. Each prompt gives one line of JSON with its
responses and the columns of its record."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oat.commands.generation_options import add_generation_options, add_model, generation_options
from oat.commands.interruptible import hearing_signals
from oat.data.fit import Fit
from oat.data.formats import Layout
from oat.data.index import cache_folders
from oat.data.prompts import PromptSet, Source
from oat.errors import ConfigError, DataError, printable
from oat.evaluation.records import raw_prompt
from oat.files import absolute, appearing, refuse_known, saying_what_is_free
from oat.types import Group

if TYPE_CHECKING:
    from oat.answering.speaker import ResponseGenerator

_PROMPTS = 512
"""Largest number of prompts whose responses are sampled in one call, and with `best_of` a fraction of it.
Their lines are yielded after the call."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add(
        "--prompts",
        required=True,
        metavar="FILE",
        help="the prompts, as prompts.path: a file, a saved dataset or a dataset of the hub",
    )
    add("--prompt-key", metavar="NAME", help="column of the prompt; by default the run's, or prompt")
    add(
        "--out",
        metavar="FILE",
        help="a new file, which appears once it is complete; by default the standard output",
    )
    add("--n", type=int, default=1, metavar="N", help="number of responses to each prompt; by default 1")
    add_generation_options(parser)


def call(arguments: argparse.Namespace, _: list[str]) -> int:
    if arguments.n < 1:
        raise ConfigError(f"--n is {arguments.n}; give at least 1 response a prompt")
    with hearing_signals(lambda: str(arguments.model), str) as (told, _name), told.at_once():
        from oat.answering.speaker import load_speaker

        out = None if arguments.out is None else absolute(arguments.out)
        if out is not None:
            refuse_known(out, "--out")
        lines = generate(
            load_speaker(arguments.model, generation_options(arguments)),
            arguments.prompts,
            arguments.n,
            prompt_key=arguments.prompt_key,
        )
        if out is None:
            for line in lines:
                print(line, flush=True)
            return 0
        count = write_lines(lines, out)
        print(printable(f"oat generate: {arguments.n} responses to each of {count:,} prompts are in {out}"))
    return 0


def generate(
    speaker: "ResponseGenerator", prompts: str, samples: int, *, prompt_key: str | None = None
) -> Iterator[str]:
    """Yield a line of JSON for each prompt, in the order of the data. On one machine, equal arguments give
    equal lines.

    Args:
        prompts: a file, a saved dataset or a dataset of the hub, as `data/sources.py` reads them.
        samples: number of responses to each prompt. If an ensemble chooses them, each is the best one of
            several that were sampled for it alone.
        prompt_key: column of the prompt. If it is given, no reference is read. None: the run's columns of
            prompt and reference; for a model without a run, the column `prompt` and no reference.

    Yields:
        An object with `prompt`, a text or a list of messages; `responses`, a list of texts; `finish`, the end
        of each response ("stop", or "length" if the response was cut off); `reference`, the record's
        reference or null; `columns`, the other columns of the record.

    Raises:
        DataError: the prompts cannot be read; the records have texts without prompts; or a prompt leaves no
            room for a response of one token.
    """
    layout = Layout(prompt_key or speaker.prompt_key, speaker.reference_key if prompt_key is None else None)
    room = None if speaker.context is None else speaker.context - 1
    found = PromptSet(Source(prompts), layout, Fit(speaker.renderer, None, room), caches=cache_folders())
    if found.index.over:
        row, tokens = found.index.first_over
        raise DataError(
            f"{prompts}: record {row}: the prompt has {tokens} tokens, and the model's context holds "
            f"{speaker.context}; shorten it, or leave it out (this long: {found.index.over} of {len(found)})"
        )
    most = max(1, _PROMPTS // (speaker.best_of or 1))
    for start in range(0, len(found), most):
        end = min(start + most, len(found))
        some = [replace(found[number], occurrence=number) for number in range(start, end)]
        if not all(prompt.messages for prompt in some):
            raise DataError(
                f"{prompts}: its records have texts and no prompts; --prompt-key text continues them"
            )
        for group in speaker.respond(some, samples, ("generate",)):
            yield printable(json.dumps(_record(group), ensure_ascii=False))


def write_lines(lines: Iterable[str], out: Path) -> int:
    """Write lines to a new file, and return their number. The file appears only after all lines are written.
    Missing folders are made. If the standard error is a terminal, it shows the number of lines so far.

    Raises:
        ConfigError: `out` is there already.
        OSError: the file cannot be written.
    """
    count = 0
    try:
        with appearing(out, "--out") as new, new.open("x", encoding="utf-8") as file:
            for line in lines:
                with saying_what_is_free(out):
                    count += file.write(f"{line}\n") > 0
                    file.flush()
                if sys.stderr.isatty():
                    print(f"\r{count:,} prompts", end="", file=sys.stderr, flush=True)
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
    return count


def _record(group: Group) -> dict[str, Any]:
    prompt, responses = group.prompt, group.trajectories
    return {
        "prompt": raw_prompt(prompt),
        "responses": [response.text for response in responses],
        "finish": [response.finish_reason for response in responses],
        "reference": prompt.reference,
        "columns": prompt.columns,
    }
