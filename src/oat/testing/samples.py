"""Made-up prompts, responses and questions."""

import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oat.types import Group, Key, Kind, Message, Prompt, Question, Segment, Trajectory

VOCABULARY = 32
END_ID = 0


def make_question(
    prompt: str | Sequence[Message],
    *candidates: str,
    kind: Kind = "score",
    occurrence: int = 0,
    reference: str | None = None,
    **columns: Any,
) -> Question:
    """Return a question to give to an oracle.

    Args:
        prompt: a user's text, or a conversation. A reward function gets a conversation as a list of messages.
        candidates: the responses that the question is about; two if `kind` is "compare".
        occurrence: a number that distinguishes the question from other questions of the same submission.
        reference: the reference answer of the prompt.
        columns: further columns of the prompt's record.
    """
    messages = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
    known = tuple(float(len(text)) for text in candidates)
    ids = tuple(np.array([*text.encode(), END_ID], dtype=np.int32) for text in candidates)
    content = (messages, candidates, tuple(range(len(candidates))), reference, columns)
    return Question(
        Key("train", 0, 0, occurrence),
        kind,
        *content,
        known=known,
        is_chat=not isinstance(prompt, str),
        ids=ids,
    )


def make_group(
    occurrence: int,
    samples: Mapping[str, int],
    generator: np.random.Generator,
    *,
    version: int = 0,
    text: str | None = None,
) -> Group:
    """Return a random prompt with a group of random responses of one to six letters. Each letter is one
    token. With probability 1/4, a response has no end token, and its finish reason is "length".

    Args:
        occurrence: occurrence of the prompt.
        samples: number of responses from each slot.
        version: version of the weights that sampled the responses.
        text: the text of every response; None: random texts.
    """
    question = _letters(generator, 3)
    context = Segment("context", _ids(question))
    trajectories = []
    for slot, count in samples.items():
        for _ in range(count):
            said = _letters(generator, int(generator.integers(1, 7))) if text is None else text
            is_cut = bool(generator.random() < 0.25)
            ids = _ids(said) if is_cut else np.append(_ids(said), np.int32(END_ID))
            logps = -generator.exponential(2.0, size=len(ids)).astype(np.float32)
            mask, versions = np.ones(len(ids), dtype=bool), np.full(len(ids), version, dtype=np.int32)
            response = Segment(
                "model", ids, mask=mask, versions=versions, raw_logps=logps, sampled_logps=logps
            )
            trajectories.append(
                Trajectory(
                    slot, (context, response), "length" if is_cut else "stop", said, reward=float(len(said))
                )
            )
    prompt = Prompt(occurrence + 1, occurrence, (Message("user", question),), "a", {"level": occurrence})
    return Group(prompt, tuple(trajectories))


def _letters(generator: np.random.Generator, count: int) -> str:
    return "".join(string.ascii_lowercase[place] for place in generator.integers(26, size=count))


def _ids(text: str) -> np.ndarray:
    return np.array([1 + string.ascii_lowercase.index(letter) for letter in text], dtype=np.int32)
