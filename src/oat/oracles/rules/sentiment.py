"""The rule `cheerful`, a reward for cheerful stories. It uses VADER, a published lexicon of sentiment (C.J.
Hutto and E. Gilbert, ICWSM 2014; the package vaderSentiment).

VADER's `compound` of a sentence is the normalised sum of the words' valences, in [-1, 1], with rules for
negation, degree and capitals. For a complete story it would be close to -1 or 1. So the reward of a story is
the mean over its sentences.

Not handled: languages other than English; the meaning of a sentence beyond its words.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from oat.errors import OracleError
from oat.oracles.rules.texts import completion_texts

_SENTENCE = re.compile(r"(?<=[.!?])[\"'”’)]*\s+|\n+")
_LETTER = re.compile(r"[^\W\d_]")


def cheerful(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return, for each completion, the mean of VADER's compound over its sentences, from -1 (gloomy) to 1
    (cheerful). The score is 0 for a completion without a sentence.

    Args:
        completions: texts; for conversations, lists that hold one assistant message. Only the completion is
            scored, even if it ends a sentence that the prompt began.

    Raises:
        OracleError: the package vaderSentiment is not installed.
    """
    texts = completion_texts(completions)
    return [_mean([_compound(sentence) for sentence in sentences(text)]) for text in texts]


def sentences(text: str) -> list[str]:
    """Return the sentences of a text. A sentence ends at the end of a line, or at . ! or ? and a blank.
    Closing quotes and brackets between these two are removed. The text after the last end is a
    sentence too. Pieces without a letter are dropped."""
    return [piece.strip() for piece in _SENTENCE.split(text) if _LETTER.search(piece)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _compound(sentence: str) -> float:
    return float(_analyser().polarity_scores(sentence)["compound"])


@cache
def _analyser() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise OracleError(
            "cheerful needs the package vaderSentiment, which is not installed; pip install "
            "'oat-align[sentiment]'"
        ) from error
    return SentimentIntensityAnalyzer()
