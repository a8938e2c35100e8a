"""Records of evaluations: one file for each evaluation, with one line for each response."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oat.errors import DirectoryError, RecordError, printable
from oat.files import DirectoryGuard, write_atomically
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
"""The fields of a record, without two fields for the prompt. If the data's prompt column is `prompt`, these
two are `prompt` and `format_prompt`."""

TURNS = "turns"
"""The field that a record of an episode of several turns has besides those of `RECORD`."""


class RecordFiles:
    """Writes the files `directory/step_XXXXXXXX.jsonl`, one for each evaluation. Other programs see a file
    only when it is complete.

    Args:
        prompt_key: name of the prompt's column in the data.
        generator: name of the run.
        decode: function that returns the text of a prompt's ids.
        turns: function that returns the turns of an episode; None for an episode of one turn.
    """

    def __init__(
        self,
        directory: Path,
        *,
        prompt_key: str,
        generator: str,
        decode: Callable[[np.ndarray], str],
        turns: Callable[[Trajectory], list[dict[str, Any]] | None],
    ):
        self.directory = directory
        self.prompt_key = prompt_key
        self.generator = generator
        self.decode = decode
        self.turns = turns
        self._standing = DirectoryGuard(directory)

    def record(self, prompt: Prompt, response: Trajectory, fields: Mapping[str, object]) -> dict[str, object]:
        """Return the record of one response.

        It has the prompt as the data have it, the prompt as the model read it, the response, the reference,
        the name of the run, and `fields`. That of an episode of several turns also has the turns; its
        response is the last one.
        """
        turns = self.turns(response)
        return {
            self.prompt_key: raw_prompt(prompt),
            f"format_{self.prompt_key}": self.decode(response.segments[0].ids),
            "output": response.text,
            "reference": prompt.reference,
            "generator": self.generator,
            **fields,
            **({TURNS: turns} if turns else {}),
        }

    def write(self, step: int, records: Sequence[Mapping[str, object]]) -> None:
        """Write the file of an evaluation.

        Args:
            step: number of updates before the evaluation.

        Raises:
            DirectoryError: the folder existed earlier, and was removed or replaced while this process ran.
            RecordError: the file cannot be written.
        """
        self._standing.refuse_lost(DirectoryError)
        lines = [printable(json.dumps(record, ensure_ascii=False)) for record in records]
        try:
            self.directory.mkdir(exist_ok=True)
            self._standing = DirectoryGuard(self.directory)
            write_atomically(self.directory / f"step_{step:08d}.jsonl", "\n".join(lines) + "\n")
        except OSError as error:
            raise RecordError(
                f"{error.filename}: the records cannot be written ({error.strerror}); make room, or mend "
                "what is wrong there"
            ) from error


def raw_prompt(prompt: Prompt) -> str | list[dict[str, Any]]:
    """Return a prompt as text if it is a single user message without further fields; else as messages."""
    if len(prompt.messages) == 1 and prompt.messages[0].role == "user" and not prompt.messages[0].fields:
        return prompt.messages[0].content
    return [message.plain for message in prompt.messages]
