"""Which oracle answers which question."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from oat.types import Question


class Router(Protocol):
    def route(self, questions: Sequence[Question]) -> list[Question]:
        """The questions in their order, each with an address."""


class OneOracle:
    """Sends every question that has no address yet to one oracle."""

    def __init__(self, name: str):
        self.name = name

    def route(self, questions: Sequence[Question]) -> list[Question]:
        """The questions in their order, each with an address."""
        return [
            question if question.oracle else replace(question, oracle=self.name) for question in questions
        ]
