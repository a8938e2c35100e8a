"""The oracles of a run in a client: a process that asks them (`runtime/clients.py`). They are made there from
the configuration, as the run's own process makes them."""

import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from warnings import catch_warnings

import torch

from oat import wire
from oat.assemble.oracles import Addressed, by_field, evaluation_oracles, training_oracle
from oat.assemble.run_inputs import RunInputs
from oat.config.load import config_of, dump
from oat.config.settings import Config
from oat.data.prompts import Prompts
from oat.errors import ConfigError, OracleError, WireError
from oat.hardware.memory import keep_few_kernels
from oat.models.loading import load_tokenizer
from oat.oracles.base import Oracle
from oat.oracles.builtin import KnownOracle
from oat.oracles.contract import calling, checked, pairs_of, tickets_of
from oat.plugins import loading as plugins
from oat.resolve.resolve import resolve
from oat.resolve.resolved import Resolved
from oat.runtime.clients import ClientOracle, Clients, Sums, sums_of
from oat.text.renderer import Renderer
from oat.types import Answer, Message, Opening, Question
from oat.types.questions import Budget

BOX = f"{__name__}:OracleBox"
"""The name of the box that a client makes."""

_Columns = tuple[list[str], bool]
"""The columns of prompts; and True if they have references."""


@dataclass(frozen=True)
class OraclePlan:
    """All that a client needs to make the oracles of a run.

    Attributes:
        config: every setting of the run, as plain data (`dump`).
        given: what objects that were given from Python are called in their modules, by `Name` of
            `python:Name`.
        versions: the versions that the asked oracles have in the run's own process, by role. A role is the
            setting that names an oracle.
        training: of the prompts of training.
        held_out: of the prompts of evaluations; None: there are none.
        rendering: the definition of the run's renderer, of which a client needs only how prompts begin their
            responses (`Oracle.tell_opening`).
        parts: the names of the user's code that a client needs. They are not sent with the plan.
    """

    config: dict[str, Any]
    given: dict[str, str]
    versions: dict[str, str | None]
    training: _Columns
    held_out: _Columns | None
    rendering: dict[str, Any]
    parts: tuple[str, ...] = ()

    @property
    def encoded(self) -> bytes:
        """The plan as bytes; see `OracleBox`."""
        held_out, rendering = self.held_out, self.rendering
        return wire.encode((self.config, self.given, self.versions, self.training, held_out, rendering))


def plan_of(resolved: Resolved, config: Config, run_inputs: RunInputs) -> OraclePlan:
    """Return the plan of a run's clients.

    Args:
        config: the configuration, whose parts other processes find, except for the oracles.

    Raises:
        ConfigError: an oracle was given from Python, and other processes cannot import it.
    """
    given, named = dict[str, str](), list[str]()
    tree, evaluation = dump(config), dump(config)["evaluation"] or {}
    sections = {"oracle.name": tree["oracle"], "evaluation.oracle": evaluation.get("oracle")}
    for place, section in {**sections, "evaluation.gold": evaluation.get("gold")}.items():
        with resolved.error_context(place):
            given |= {name: plugins.travelling(f"python:{name}") for name in _given_in(section)}
        if section and ":" in section["name"] and not section["name"].startswith("python:"):
            named.append(section["name"])
    held_out = run_inputs.held_out
    return OraclePlan(
        dump(config),
        given,
        {role: oracle.version for role, (_, oracle) in _asked(run_inputs.roles).items()},
        _columns(run_inputs.prompts),
        None if held_out is None else _columns(held_out),
        run_inputs.renderer.definition,
        parts=(*given.values(), *named),
    )


def client_oracles(clients: Clients, run_inputs: RunInputs) -> dict[str, Oracle]:
    """Return the oracles that clients ask, by address."""
    asked = _asked(run_inputs.roles)
    roles = {address: role for role, (address, _) in reversed(asked.items())}
    return {address: ClientOracle(clients, role, asked[role][1]) for address, role in roles.items()}


class OracleBox:
    """The oracles of a run in a process of its own (`worker.Box`).

    Args:
        plan: the fields of the `OraclePlan`, encoded.

    Raises:
        ConfigError: an oracle has another version than in the run's own process.
        OatError: an oracle cannot be made as configured.
    """

    def __init__(self, plan: bytes):
        made = OraclePlan(*wire.decode(plan))
        plugins.given.update({name: plugins.load_symbol(spec) for name, spec in made.given.items()})
        resolved = resolve(*config_of(made.config))
        keep_few_kernels()
        if resolved.config.compute.threads:
            torch.set_num_threads(resolved.config.compute.threads)
        training, named = training_oracle(resolved)
        evaluating = evaluation_oracles(resolved, named)
        opening = _opening_by(resolved.config.model.path, made.rendering)
        named.check_columns(*made.training)
        named.tell_opening(opening)
        for _, oracle in evaluating.values():
            if made.held_out is not None:
                oracle.check_columns(*made.held_out)
            oracle.tell_opening(opening)
        roles = by_field(training, evaluating)
        self._oracles = {role: roles[role] for role in made.versions}
        for role, (address, oracle) in self._oracles.items():
            _refuse_other_version(address, oracle, made.versions[role])
        self._open: dict[str, dict[str, Question]] = {role: {} for role in self._oracles}
        self._broken: dict[tuple[str, str], OracleError] = {}

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call `submit`, `collect`, `drop` or `close`; see `runtime.clients.Clients`."""
        return getattr(self, name)(*arguments)

    def submit(self, role: str, encoded: Sequence[bytes]) -> list[str]:
        """Ask an oracle, and return its tickets.

        Raises:
            OracleError: the oracle raises, or returns tickets that break the contract.
        """
        address, oracle = self._oracles[role]
        questions = [wire.decode(each) for each in encoded]
        new = {question.key for question in questions}
        # a question that is asked again may get its old ticket
        known = [ticket for ticket, question in self._open[role].items() if question.key not in new]
        tickets = tickets_of(calling(address, oracle.submit, questions), len(questions), address, known)
        self._open[role].update(zip(tickets, questions, strict=True))
        return tickets

    def collect(
        self, role: str, purpose: str, tickets: Sequence[str], seconds: float
    ) -> tuple[list[tuple[str, Answer]], Sums]:
        """Return answers, and the oracle's metrics. If some answers break the contract, return the sound ones
        now, and raise the error at the next call for the purpose. As the ledger does, ignore the second
        answer to a ticket, and that to a ticket that nobody waits for.

        Raises:
            OracleError: the oracle raises, or gives an answer that breaks the contract.
        """
        (address, oracle), place = self._oracles[role], (role, purpose)
        answers, asked = [], {*tickets}
        if place not in self._broken:
            first: dict[str, Any] = {}
            for ticket, answer in pairs_of(calling(address, oracle.collect, tickets, seconds), address):
                if ticket in self._open[role] or ticket in asked:
                    first.setdefault(ticket, answer)
            for ticket, answer in first.items():
                question = self._open[role].pop(ticket, None)
                try:
                    answers.append((ticket, _sound(answer, question, ticket, address, oracle)))
                except OracleError as error:
                    self._broken.setdefault(place, error)
        if place in self._broken and not answers:
            raise self._broken.pop(place)
        return answers, self._sums(role, purpose)

    def _sums(self, role: str, purpose: str) -> Sums:
        try:
            return sums_of(self._oracles[role][1].metrics)
        except OracleError as error:
            self._broken.setdefault((role, purpose), error)
            return {}

    def drop(self, role: str, tickets: Sequence[str]) -> None:
        """Tell an oracle that nobody waits for the answers to these tickets."""
        for ticket in tickets:
            self._open[role].pop(ticket, None)
        address, oracle = self._oracles[role]
        calling(address, oracle.drop, tickets)

    def close(self) -> None:
        """Close the oracles."""
        for oracle in {id(oracle): oracle for _, oracle in self._oracles.values()}.values():
            oracle.close()


def _asked(roles: Mapping[str, Addressed]) -> dict[str, Addressed]:
    """Return those oracles that have to be asked: they do not know the answers from the question itself."""
    return {role: each for role, each in roles.items() if not isinstance(each[1], KnownOracle)}


def _sound(answer: Any, question: Question | None, ticket: str, address: str, oracle: Oracle) -> Answer:
    """Return an answer with plain numbers. That of a question from before a restart, which only the ledger
    knows, is checked by the ledger, as is every price."""
    if question is None:
        try:
            wire.encode(answer)
        except WireError as error:
            raise OracleError(f"oracle {address}: the answer under the ticket {ticket}: {error}") from None
        sound: Answer = answer
        return sound
    return checked(answer, question, address, Budget(), oracle.gives_steps)


def _refuse_other_version(address: str, oracle: Oracle, version: str | None) -> None:
    if oracle.version != version:
        raise ConfigError(
            f"on the machine {socket.gethostname()} the oracle {address} has the version {oracle.version}, "
            f"and {version} in the run's own process; put the same files of it on every machine"
        )


def _opening_by(model: str, rendering: Mapping[str, Any]) -> Callable[[Sequence[Message]], Opening]:
    """Return the run's `Renderer.opening`. The tokenizer is loaded when the function is first called."""

    @cache
    def renderer() -> Renderer:
        with catch_warnings(action="ignore"):  # the run's own process has said them
            return Renderer.of(load_tokenizer(model), rendering)

    return lambda messages: renderer().opening(messages)


def _columns(prompts: Prompts) -> _Columns:
    return sorted(prompts.columns), prompts.has_references


def _given_in(section: Any) -> set[str]:
    """Return the names of the objects given from Python that a section names."""
    names = {text.removeprefix("python:") for text in _texts(section) if text.startswith("python:")}
    return names & plugins.given.keys()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Collection):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
