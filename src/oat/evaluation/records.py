"""The files of evaluations: one file an evaluation, one line a response."""

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
"""Fields of a record, beside two for the prompt: the data's name for it, and that name behind `format_`."""


class RecordFiles:
    """The files `directory/step_XXXXXXXX.jsonl`, one an evaluation, each written whole or not at all.

    Args:
        prompt_key: name of the prompt's column in the data.
        generator: name of the run.
        decode: returns the text of the ids that the model continued.
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
        """Return a line: the prompt as it stands in the data and as the model saw it, the response, the
        reference, and further fields."""
        return {
            self.prompt_key: raw_prompt(prompt),
            f"format_{self.prompt_key}": self.decode(response.segments[0].ids),
            "output": response.text,
            "reference": prompt.reference,
            "generator": self.generator,
            **fields,
        }

    def write(self, step: int, records: Sequence[Mapping[str, object]]) -> None:
        """Write the file of an evaluation.

        Raises:
            DirectoryError: the folder existed and is gone.
            RecordError: the file cannot be written.
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
    """Return a prompt as text if it is one user message, else as messages."""
    if len(prompt.messages) == 1 and prompt.messages[0].role == "user" and not prompt.messages[0].fields:
        return prompt.messages[0].content
    return [message.plain for message in prompt.messages]
