"""Tools that close the standard streams, or leave the process."""

import asyncio
import os
import sys
from typing import Any

from oat.environments.tools import Tools, bracket_calls
from oat.errors import EpisodeError
from oat.plugins.calls import restoring

STREAMS = ("stdin", "stdout", "stderr")


def closes(name: str) -> str:
    getattr(sys, name).close()
    return "ok"


async def closes_async(name: str) -> str:
    await asyncio.sleep(0)
    return closes(name)


def forks() -> str:
    if not (child := os.fork()):
        os._exit(7)
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


DO: dict[str, Any] = {
    "detach": lambda: (sys.stdout.detach(), sys.stderr.buffer.close()),
    "replace": lambda: vars(sys).update(dict.fromkeys(STREAMS)),
    "descriptors": lambda: os.closerange(0, 3),
    "another file": lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1),
    "exit": lambda: os._exit(0),
    "exit 3": lambda: os._exit(status=3),
    "exit 256": lambda: exec("import os; os._exit(256)"),
    "another program": lambda: os.execvp("true", ["true"]),
    "fork": forks,
}
"""What leaves the process without a standard stream, or ends it."""


def damages(what: str) -> str:
    found = DO[what]()
    return found if isinstance(found, str) else "ok"


DAMAGES = {
    **dict.fromkeys(["detach", "replace", "descriptors", "another file"], "ok 0 0"),
    **{
        name: f"error: the tool failed (SystemExit: os.{call} would end the process of the run) 1 1"
        for call, names in {"_exit": ("exit", "exit 3", "exit 256"), "execv": ("another program",)}.items()
        for name in names
    },
    "fork": "7 0 0",
}
"""What is told of a call of `damages`."""


def damaged() -> dict[str, str]:
    """Return what is told of tools that close streams or leave the process. The streams must write then."""
    tools, found = Tools([damages, closes, closes_async], parse=bracket_calls), {}
    calls = [*DAMAGES, *(f"{call}({name})" for call in ("closes", "closes_async") for name in STREAMS)]
    for call in calls:
        with restoring("the environment", EpisodeError):
            response = f"[{call}]" if call.startswith("closes") else f"[damages({call})]"
            is_async = call.startswith("closes_async")
            answered = asyncio.run(tools.answer_async(response)) if is_async else tools.answer(response)
        assert answered is not None
        found[call] = f"{answered.message.content} {answered.failed} {answered.broken}"
        print(call, file=sys.stderr, flush=True)
        os.write(1, b"\n")
        assert sys.stdin.read() == ""
    return found
