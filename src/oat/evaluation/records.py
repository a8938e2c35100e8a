"""The records of evaluations: one line a response, in a file a step."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oat.errors import DirectoryError, RecordError, printable
from oat.files import Standing, write_atomically
from oat.types import Prompt, Trajectory

RECORD = (
    "mode",
    "sample",
    "output",
    "reference",
    "generator",
    "value",
    "mark",
    "gold",
    "gold_mark",
    "answer",
)
"""Fields of a record, beside the prompt under the name that it has in the data, and `format_` with that
name."""


class Records:
    """The files of an evaluation, `directory/step_XXXXXXXX.jsonl`, each written whole or not at all; one line
    a response.

    Args:
        prompt_key: the name that the prompt has in the data.
        generator: the name of the run.
        decode: from the ids that the model continued to their text.
    """

    def __init__(
        self, directory: Path, *, prompt_key: str, generator: str, decode: Callable[[np.ndarray], str]
    ):
        self.directory = directory
        self.prompt_key = prompt_key
        self.generator = generator
        self.decode = decode
        self._standing = Standing(directory)

    def record(self, prompt: Prompt, response: Trajectory, fields: Mapping[str, object]) -> dict[str, object]:
        """A line: the prompt as it stands in the data and as the model saw it, its response and reference,
        and further fields."""
        return {
            self.prompt_key: raw_prompt(prompt),
            f"format_{self.prompt_key}": self.decode(response.segments[0].ids),
            "output": response.text,
            "reference": prompt.reference,
            "generator": self.generator,
            **fields,
        }

    def write(self, step: int, records: Sequence[Mapping[str, object]]) -> None:
        """The file of an evaluation.

        Raises:
            DirectoryError: the folder, which was there, is gone.
            RecordError: it cannot be written.
        """
        self._standing.refuse_lost(DirectoryError)
        lines = [printable(json.dumps(record, ensure_ascii=False)) for record in records]
        try:
            self.directory.mkdir(exist_ok=True)
            self._standing = Standing(self.directory)
            write_atomically(self.directory / f"step_{step:08d}.jsonl", "\n".join(lines) + "\n")
        except OSError as error:
            raise RecordError(
                f"{error.filename}: the records cannot be written ({error.strerror}); make room, or mend "
                "what is wrong there"
            ) from error


def raw_prompt(prompt: Prompt) -> str | list[dict[str, Any]]:
    """A prompt that is one user's message as its text, every other as messages."""
    if len(prompt.messages) == 1 and prompt.messages[0].role == "user" and not prompt.messages[0].fields:
        return prompt.messages[0].content
    return [message.plain for message in prompt.messages]
