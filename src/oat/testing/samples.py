"""Made-up prompts, responses and questions; the random ones are functions of a generator."""

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
    """A question as an oracle gets it.

    Args:
        prompt: a user's text, or a conversation, which functions get as a list of messages.
        candidates: the responses that the question is about; two if `kind` is "compare".
        occurrence: tells the questions of one submission apart.
        columns: of the prompt's record.
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
    """Random responses of one to six letters to a random prompt, one token a letter; one in four is cut at
    its length.

    Args:
        samples: responses by slot.
        version: of the weights that sampled them.
        text: of all of them; None: random ones.
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
