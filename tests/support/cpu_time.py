"""CPU time that can be compared between machines."""

import gc
import json
import re
import time
from collections.abc import Callable
from typing import Any

_USUAL_S = 0.0012
"""CPU seconds of the fixed work on the machine for which the tests' bounds were chosen."""


def seconds(action: Callable[[], Any]) -> float:
    """Return the CPU seconds of the thread for an action, divided by how many times slower than usual a
    fixed piece of work is on this machine just before and after it. A faster machine counts as usual."""
    gc.disable()  # a collection would count the memory of the whole test process
    try:
        before = _of(_work)
        taken = _of(action)
        return taken / max(1.0, before / _USUAL_S, _of(_work) / _USUAL_S)
    finally:
        gc.enable()


def _of(action: Callable[[], Any]) -> float:
    begin = time.thread_time()
    action()
    return time.thread_time() - begin


def _work() -> int:
    """Work of the kinds that the tests measure: loops, patterns and parsing."""
    text = json.dumps([{"number": number, "text": f"<{number}>"} for number in range(600)])
    count = len(json.loads(text)) + len(re.findall(r"<(\d+)>", text))
    for character in text:
        count += character == "<"
    return count
