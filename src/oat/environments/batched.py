"""The episodes of a batch in a user's environment: one call for all of them, with deadlines and checks."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from oat.environments.base import Environment, Turn
from oat.environments.contract import plain_turn, state_fault, turn_fault, turns_fault
from oat.environments.event_loop import LATE, EventLoop, Outcome
from oat.environments.tools import Tools, tools_of
from oat.errors import EpisodeError, shortened, warn
from oat.plugins.calls import guarded
from oat.types import Prompt, Work

State = Mapping[str, Any]

_METHODS = ("reset", "step", "step_all")


def is_async(environment: Any) -> bool:
    """Return True if a method of an environment, or of its class, is `async`."""
    return any(inspect.iscoroutinefunction(getattr(environment, method, None)) for method in _METHODS)


class BatchedEnvironment:
    """A user's environment, which answers the episodes of a batch together.

    * Plain methods run in this thread, without a limit of time: `step_all` once for the batch, or else `step`
      for one episode after another.
    * If a method is `async`, all methods run in an event loop in a thread of its own, and the episodes of a
      batch at the same time. An episode that is not answered within `deadline_s` seconds is *late*: its call
      is cancelled, and a warning counts the late episodes. A late `step_all` makes all episodes of its batch
      late.

    Attributes:
        name: what messages call the environment.

    Raises (each method):
        EpisodeError: the environment raised an exception, returned something else than its protocol says, or
            blocked its event loop. The message names the record of the episode.
    """

    def __init__(self, environment: Environment, deadline_s: float):
        self._environment = environment
        self._deadline_s = deadline_s
        self.name = f"the environment {type(environment).__name__}"
        self._loop = EventLoop() if is_async(environment) else None

    @property
    def tools(self) -> list[Tools]:
        """The tools of the environment (`tools_of`)."""
        return tools_of(self._environment)

    def reset(
        self, prompts: Sequence[Prompt], generators: Iterable[np.random.Generator]
    ) -> list[State | None]:
        """Return the state of each episode before its first response; None for a late one.

        Args:
            prompts: the prompt of each episode.
            generators: the generator of each episode.
        """
        calls = [partial(self._environment.reset, *each) for each in zip(prompts, generators, strict=True)]
        found = self._results("reset", calls, [[prompt.row] for prompt in prompts], state_fault)
        return self._without_late(found)

    def step(
        self, states: Sequence[State], responses: Sequence[str], rows: Sequence[int]
    ) -> list[Turn | None]:
        """Return the answer to the response of each episode; None for a late one.

        Args:
            states, responses: state and response of each episode.
            rows: the number of its prompt's record.
        """
        if not callable(getattr(self._environment, "step_all", None)):
            calls = [partial(self._environment.step, *each) for each in zip(states, responses, strict=True)]
            found = self._results("step", calls, [[row] for row in rows], turn_fault)
            turns = [plain_turn(turn) if turn is not LATE else turn for turn in found]
            return self._without_late(turns)
        call = partial(self._environment.step_all, list(states), list(responses))
        fault = partial(turns_fault, count=len(rows))
        (turns,) = self._results("step_all", [call], [rows], fault) if len(rows) else [[]]
        if turns is LATE:
            return self._without_late([LATE] * len(rows))
        for row, turn in zip(rows, turns, strict=True):
            self._check("step_all", turn_fault(turn), [row])
        return [plain_turn(turn) for turn in turns]

    def work(self) -> Work:
        """Return the number of calls of tools that failed by a fault of the tool."""
        return Work(broken_calls=sum(tools.broken for tools in self.tools))

    def failed(self, what: str, rows: Sequence[int]) -> EpisodeError:
        """Return an error that says what is wrong with the environment in episodes from records."""
        unique = list(dict.fromkeys(rows))
        where = f"record {unique[0]}" if len(unique) == 1 else "one of the records "
        where += "" if len(unique) == 1 else shortened(", ".join(map(str, unique)))
        return EpisodeError(
            f"{self.name} {what}, in an episode from {where}; repair it, and run the same command again"
        )

    def close(self) -> None:
        """End the thread of the event loop."""
        if self._loop is not None:
            self._loop.close()

    def _results(
        self,
        method: str,
        calls: Sequence[Callable[[], Any]],
        rows: Sequence[Sequence[int]],
        fault: Callable[[Any], str | None],
    ) -> list[Any]:
        """Make calls of a method, check their results, and return them, in order. A late call has the result
        `LATE`.

        Args:
            rows: for each call, the records of its episodes.
            fault: returns what is wrong with a result, or None.
        """
        at: Sequence[int] = ()
        found = []
        with guarded(self.name, lambda what: self.failed(what, at)):
            outcomes = self._ended(calls, rows) if self._loop is not None else [None] * len(calls)
            for mine, call, outcome in zip(rows, calls, outcomes, strict=True):
                at = mine
                found.append(call() if outcome is None else outcome.result())
        for mine, result in zip(rows, found, strict=True):
            self._check(method, fault(result) if result is not LATE else None, mine)
        return found

    def _ended(
        self, calls: Sequence[Callable[[], Any]], rows: Sequence[Sequence[int]]
    ) -> Sequence[Outcome | None]:
        assert self._loop is not None
        outcomes = self._loop.outcomes(calls, self._deadline_s)
        if outcomes is None:
            raise self.failed(
                f"blocks its event loop: {self._deadline_s:g} s (sampling.environment_deadline_s) were over, "
                "and it let nothing else run; await what takes time, or call it by asyncio.to_thread",
                [row for mine in rows for row in mine],
            )
        return outcomes

    def _without_late(self, results: Sequence[Any]) -> list[Any]:
        """Return the results, with None in place of `LATE`, and warn of these."""
        late = sum(result is LATE for result in results)
        if late:
            warn(
                f"{self.name} did not answer {late} of {len(results)} episodes within "
                f"{self._deadline_s:g} s (sampling.environment_deadline_s); they end here and have no reward"
            )
        return [None if result is LATE else result for result in results]

    def _check(self, method: str, fault: str | None, rows: Sequence[int]) -> None:
        if fault is not None:
            raise self.failed(f"is wrong: {method} {fault}", rows)
