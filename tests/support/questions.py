"""Helpers that make questions and ask them of an oracle."""

from oat.types import Key, Message, Question

PLAIN = (Message("user", "2+2="),)


def question(occurrence, candidates, *, kind="score", messages=PLAIN, reference=None, oracle="", **columns):
    key = Key("train", 0, 0, occurrence)
    return Question(
        key, kind, messages, tuple(candidates), tuple(range(len(candidates))), reference, columns, oracle
    )


def ask(oracle, *questions):
    tickets = oracle.submit(questions)
    assert len(tickets) == len(questions)
    answers = dict(oracle.collect(tickets, 1.0))
    assert oracle.collect(tickets, 0.0) == []
    return [answers[ticket] for ticket in tickets]


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]
