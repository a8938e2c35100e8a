"""Ways in which a judge may write a verdict or a score, each with what has to be read in it."""

import math
from typing import Any

from judge_shapes import NONE, ONE, ZERO, reply, spelt, thought, token

LIST = [token(piece) for piece in ("1", ".", " The", " first")]
MEAN = (7 * 0.6 + 8 * 0.3) / 0.9
"""The mean of 7 and 8, with the probabilities 0.6 and 0.3."""

SPELLINGS: dict[str, tuple[dict[str, Any], float | None]] = {
    "bold": (reply("**0**", [token("**", ("1", 0.05), ("0", 0.05), p=0.8), ZERO, token("**")]), 0.8),
    "quoted": (reply('"0"', [token('"0', ('"1', 0.2), p=0.8), token('"')]), 0.8),
    "code": (reply("`1`", [token("`"), ONE, token("`")]), 0.2),
    "brackets": (reply("[[1]]", [token("[["), ONE, token("]]")]), 0.2),
    "parentheses": (reply("(1)", [token("(1", ("(0", 0.2), p=0.8), token(")")]), 0.2),
    "a point in the token": (reply("0.", [token("0.", ("1.", 0.2), p=0.8)]), 0.8),
    "labelled": (
        reply("Answer: 1", [token("Answer", ("0", 0.2), p=0.8), token(":"), token(" 1", (" 0", 0.2), p=0.8)]),
        0.2,
    ),
    "a bold label": (reply("**Answer:** 0"), 1.0),
    "json": (reply('```json\n{"answer": "0"}\n```'), 1.0),
    "element": (reply("<answer>1</answer>"), 0.0),
    "boxed": (reply(r"$\boxed{0}$"), 1.0),
    "fullwidth": (reply("０", [token("０", ("１", 0.2), p=0.8)]), 0.8),
    "arabic": (reply("١"), 0.0),
    "invisible": (
        reply("\u200b\ufeff1\u2060", [token("\u200b"), token("\ufeff"), ONE, token("\u2060")]),
        0.2,
    ),
    "blanks": (
        reply("\n\n 0 \n", [token("\n\n"), token(" 0", (" 1", 0.1), ("1", 0.1), p=0.8), token(" \n")]),
        0.8,
    ),
    "a reason below": (
        reply("1\n\nThe second", [ONE, token("\n\n"), token("The"), token(" second")], finish="length"),
        0.2,
    ),
    "a label at the end of prose": (
        reply(
            "I look.\n\nVerdict: 1",
            [
                token("I", ("0", 0.2), p=0.8),
                token(" look."),
                token("\n\nVerdict:"),
                token(" 1", (" 0", 0.2), p=0.8),
            ],
        ),
        0.2,
    ),
    "an object": (
        reply(
            '{"verdict": 1}',
            [token('{"'), token("verdict", ("0", 0.2), p=0.8), token('": '), ONE, token("}")],
        ),
        0.2,
    ),
    "a verdict and line feeds in a token": (
        reply("0\n\n", [token("0\n\n", ("1\n\n", 0.2), ("0", 0.1), ("1", 0.1), p=0.6)]),
        0.7,
    ),
    "a reason behind": (reply("1 is better", [ONE, token(" is"), token(" better")]), 0.2),
    "a cut character behind": (
        reply(
            "0\n\n…",
            [
                ZERO,
                token("\n\n"),
                {"token": "\\xe2\\x80", "bytes": [226, 128], "logprob": 0.0},
                {"token": "\\xa6", "bytes": [166], "logprob": 0.0},
            ],
        ),
        0.8,
    ),
    "a cut character before": (
        reply(
            "「0」",
            [
                {"token": "\ufffd", "bytes": [227, 128], "logprob": 0.0},
                {
                    "token": "\ufffd0",
                    "bytes": [140, 48],
                    "logprob": math.log(0.8),
                    "top_logprobs": [{"token": "\ufffd1", "bytes": [140, 49], "logprob": math.log(0.2)}],
                },
                spelt("」"),
            ],
        ),
        0.8,
    ),
    "a cut verdict": (reply("0", [ZERO], finish="length"), 0.8),
    "no alternatives": (reply("1", [{**ONE, "top_logprobs": []}]), 0.0),
    "null alternatives": (reply("1", [{**ONE, "top_logprobs": None}]), 0.0),
    "no log-probability": (reply("1", [{"token": "1"}]), 0.0),
    "a null log-probability": (reply("1", [{**ONE, "logprob": None}]), 0.2),
    "a null log-probability of an alternative": (
        reply("1", [{**ONE, "top_logprobs": [{"token": "0", "logprob": None}]}]),
        0.0,
    ),
    "-inf": (
        reply("1", [{"token": "1", "logprob": 0.0, "top_logprobs": [{"token": "0", "logprob": -math.inf}]}]),
        0.0,
    ),
    "nan": (
        reply(
            "1", [{"token": "1", "logprob": math.nan, "top_logprobs": [{"token": "0", "logprob": math.nan}]}]
        ),
        0.0,
    ),
    "probabilities instead": (
        reply("1", [{"token": "1", "logprob": 0.8, "top_logprobs": [{"token": "0", "logprob": 0.2}]}]),
        0.0,
    ),
    "all are certain": (
        reply("1", [{"token": "1", "logprob": 0.0, "top_logprobs": [{"token": "0", "logprob": 0.0}]}]),
        0.0,
    ),
    "no tokens": (reply("1", []), 0.0),
    "tokens of another text": (reply("1", [ZERO]), NONE),
    "tokens of no text": (reply("1", [token("x")]), 0.0),
    "another verdict is more probable": (reply("1", [token("1", ("0", 0.6), p=0.3)]), NONE),
    "another verdict, in two spellings": (reply("1", [token("1", ("0", 0.3), (" 0", 0.25), p=0.4)]), NONE),
    "hardly a verdict": (reply("0", [token("0", ("The", 0.3), ("1", 0.1), ("I", 0.25), p=0.35)]), NONE),
    "an empty text": (reply("", [token("")]), NONE),
    "a list": (reply("1. The first", LIST), NONE),
    "a list that was cut": (reply("1. The first", LIST, finish="length"), NONE),
    "a list, cut at once": (reply("1.", LIST[:2], finish="length"), NONE),
    "a list with brackets": (reply("1) The first response"), NONE),
    "a bold list": (reply("**1.** The first response"), NONE),
    "a list with colons": (reply("0: good\n1: bad"), NONE),
    "a list with dashes": (reply("0 - good\n1 - bad"), NONE),
    "an item of a bullet list": (reply("- 1"), NONE),
    "probabilities as json": (reply('{"0": 0.3, "1": 0.7}'), NONE),
    "both": (reply("0 and 1 are equally good"), NONE),
    "both, as a list": (reply("[0, 1]"), NONE),
    "one or the other": (reply("1 or 0", [ONE, token(" or"), token(" 0")]), NONE),
    "both in lines": (reply("0 is short\n1 is long"), NONE),
    "worse": (reply("1 is worse"), NONE),
    "worse, cut": (reply("1 is", [ONE, token(" is")], finish="length"), NONE),
    "a question": (reply("1?"), NONE),
    "an amount": (reply("1 of 2"), NONE),
    "items in lines": (reply("1.\n2."), NONE),
    "negative": (reply("-1", [token("-"), ONE]), NONE),
    "a decimal": (reply("0.5", [ZERO, token("."), token("5")]), NONE),
    "a decimal comma": (reply("0,5"), NONE),
    "another number": (reply("10", [ONE, token("0")]), NONE),
    "a fraction": (reply("1/2"), NONE),
    "an ordinal": (reply("1st"), NONE),
    "a place": (reply("#1"), NONE),
    "a response": (reply("Response 1"), NONE),
    "a power": (reply("1²"), NONE),
}
"""Ways to write a verdict, each with the probability that "0" wins."""


def digits(text: str, *others: tuple[str, float], p: float = 0.6) -> list[dict[str, Any]]:
    return [token(text, *others, p=p)]


SCORES: dict[str, tuple[dict[str, Any], float | None, tuple[int, int]]] = {
    "a digit": (reply("7", digits("7", ("8", 0.3), ("The", 0.1))), MEAN, (0, 9)),
    "a digit beyond the range": (reply("7", digits("7", ("8", 0.3))), NONE, (1, 5)),
    "alternatives beyond the range": (
        reply("4", digits("4", ("8", 0.3), ("3", 0.1))),
        (4 * 0.6 + 3 * 0.1) / 0.7,
        (1, 5),
    ),
    "ten in two tokens": (reply("10", [*digits("1", ("9", 0.3)), token("0")]), NONE, (0, 9)),
    "ten in a wider range": (reply("10", [*digits("1", ("9", 0.3)), token("0")]), 10.0, (1, 10)),
    "ten in a wider range, cut": (reply("1", digits("1", ("9", 0.3)), finish="length"), NONE, (1, 10)),
    "seven in a wider range, cut": (reply("7", digits("7"), finish="length"), NONE, (1, 10)),
    "the highest, cut": (reply("**9**", finish="length"), 9.0, (0, 9)),
    "the beginning of 0.9": (reply("Score: 0", digits("Score: 0"), finish="length"), NONE, (0, 1)),
    "the beginning of -0.9": (reply("Score: -0", finish="length"), NONE, (-1, 1)),
    "the beginning of 85.5": (reply("**85**", finish="length"), NONE, (0, 100)),
    "the beginning of 0.05": (reply("0.0", finish="length"), NONE, (0, 1)),
    "one with a decimal": (reply("1.0", [*digits("1", ("0", 0.4)), token("."), token("0")]), 1.0, (0, 1)),
    "one with a decimal, in two tokens": (
        reply("1.0", [*digits("1.", ("0.", 0.4)), token("0")]),
        1.0,
        (0, 1),
    ),
    "one with a decimal, in one token": (reply("1.0", digits("1.0", ("0.5", 0.4))), 0.8, (0, 1)),
    "a fullwidth decimal": (reply("５．０", [*digits("５", ("４", 0.4)), token("．０")]), 5.0, (1, 5)),
    "an alternative that goes on": (
        reply("7", digits("7", ("8", 0.1), ("8.", 0.2))),
        (7 * 0.6 + 8 * 0.1) / 0.7,
        (0, 9),
    ),
    "alternatives with full stops": (reply("7.", digits("7.", ("8.", 0.3))), MEAN, (0, 9)),
    "one with a full stop": (reply("1.", digits("1.", ("0", 0.4))), 0.6, (0, 1)),
    "a decimal": (reply("7.5", [*digits("7", ("8", 0.3)), token("."), token("5")]), 7.5, (0, 9)),
    "of ten": (
        reply("8/10", [*digits("8", ("7", 0.3)), token("/"), token("10")]),
        8 * 0.6 / 0.9 + 7 * 0.3 / 0.9,
        (0, 9),
    ),
    "of ten, in words": (reply("8 out of 10"), 8.0, (1, 10)),
    "of another range": (reply("4/5"), NONE, (0, 9)),
    "of ten, in brackets": (reply("7 (out of 10)"), NONE, (0, 100)),
    "of a hundred": (reply("8/100"), NONE, (0, 10)),
    "per cent": (reply("70%"), 70.0, (0, 100)),
    "per cent of another range": (reply("7%"), NONE, (0, 9)),
    "negative": (reply("-1", [token("-"), *digits("1")]), -1.0, (-1, 1)),
    "a typographic minus": (reply("\u22121"), -1.0, (-1, 1)),
    "positive": (reply("+1"), 1.0, (-1, 1)),
    "negative beyond the range": (reply("-1", [token("-"), *digits("1")]), NONE, (0, 9)),
    "bold": (
        reply("**7**", [token("**", ("7", 0.1), p=0.8), *digits("7", ("8", 0.3)), token("**")]),
        MEAN,
        (0, 9),
    ),
    "labelled": (reply("Score: 7", [token("Score"), token(":"), *digits(" 7", (" 8", 0.3))]), MEAN, (0, 9)),
    "labelled in bold": (reply("**Score:** 7/9"), 7.0, (0, 9)),
    "json": (reply('{"score": 7}'), 7.0, (0, 9)),
    "with its name": (reply("7分"), 7.0, (0, 9)),
    "fullwidth": (reply("７", digits("７", ("８", 0.3))), MEAN, (0, 9)),
    "a reason": (reply("7 - well written"), 7.0, (0, 9)),
    "a range": (reply("7-8"), NONE, (0, 9)),
    "a range in words": (reply("7 to 8"), NONE, (0, 9)),
    "two numbers": (reply("7 8"), NONE, (0, 9)),
    "a list": (
        reply("1. Clarity: good\n2. Style: bad", [*digits("1"), token("."), token(" Clarity")]),
        NONE,
        (0, 9),
    ),
    "a list that was cut": (
        reply("1. Clarity", [*digits("1"), token("."), token(" Clarity")], finish="length"),
        NONE,
        (0, 9),
    ),
    "thousands": (reply("1,000"), NONE, (0, 1000)),
    "an exponent": (reply("7e1"), NONE, (0, 9)),
    "a word": (reply("seven"), NONE, (0, 9)),
    "thoughts": (
        reply("<think>3</think>7", [*thought("<think>", "3", "</think>"), *digits("7", ("8", 0.3))]),
        MEAN,
        (0, 9),
    ),
    "hardly a score": (reply("7", digits("7", ("The", 0.5), p=0.4)), NONE, (0, 9)),
}
"""Replies to `mode: score`, each with the score and the range."""
