"""An event loop in a thread of its own, for the `async` methods of environments."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import Any

_GRACE_S = 5.0
"""Seconds after a deadline in which the loop must say what it has. A loop that does not is blocked."""


LATE = object()
"""The result of a call that had not ended at its deadline. The call was cancelled then."""


@dataclass(frozen=True)
class Outcome:
    """The end of a call: its result, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """Return the result, or raise the exception."""
        if self.error is not None:
            raise self.error
        return self.value


class _DaemonThreads(ThreadPoolExecutor):
    """Makes each call in a thread of its own, which does not keep the process alive.

    The executor that asyncio would make has few threads, which calls that never return would occupy, and
    Python waits for these threads before the process ends. asyncio accepts no executor of another base class.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        call = partial(fn, *args, **kwargs)
        Thread(target=_make, args=(call, future), name="oat-environment-call", daemon=True).start()
        return future


class EventLoop:
    """An event loop, which begins with the first call and runs until `close`. Clients that belong to a loop,
    such as those of HTTP libraries, can be used in all calls. Calls that the loop makes in threads
    (`asyncio.to_thread`) do not wait for one another."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def outcomes(self, calls: Sequence[Callable[[], Any]], seconds: float) -> list[Outcome] | None:
        """Make calls at the same time, and return how each ended, in order. A call may return an awaitable,
        which is awaited.

        Args:
            calls: functions without arguments.
            seconds: the time within which each call must end.

        Returns:
            The outcomes; None if a call blocks the loop, so that not even deadlines are noticed. The next
            call then begins another loop.
        """
        future = asyncio.run_coroutine_threadsafe(_all(calls, seconds), self._running())
        try:
            return future.result(seconds + _GRACE_S)
        except TimeoutError:
            self._loop = None
            return None

    def close(self) -> None:
        """End the loop and its thread, and cancel what still runs in it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(_DaemonThreads())
            Thread(target=_run, args=(self._loop,), name="oat-environment", daemon=True).start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        loop.close()


def _make(call: Callable[[], Any], future: Future[Any]) -> None:
    """Make a call, unless its future was cancelled before, and pass on its result or exception."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


async def _all(calls: Sequence[Callable[[], Any]], seconds: float) -> list[Outcome]:
    tasks = [asyncio.ensure_future(_one(call)) for call in calls]
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
    found = []
    for task in tasks:
        if task.done():
            found.append(task.result())
        else:
            task.cancel()
            found.append(Outcome(LATE))
    return found


async def _one(call: Callable[[], Any]) -> Outcome:
    """Make a call. Every exception becomes a part of the outcome, also those that would end the loop."""
    try:
        value = call()
        return Outcome(await value if inspect.isawaitable(value) else value)
    except BaseException as error:
        return Outcome(error=error)
