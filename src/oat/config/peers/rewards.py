"""The oracle that TRL's reward functions and their weights become."""

from collections.abc import Mapping
from typing import Any

from oat.config.peers.objects import Named
from oat.files import absolute

REWARDS = ("reward_funcs", "reward_weights")
"""TRL's names for reward functions and their weights, which decide the oracle together."""


def oracle_of(given: Mapping[str, Any], *, is_python: bool) -> tuple[dict[str, Any], str] | None:
    """Return our setting for reward functions, and what is wrong with them; None: a function has no name that
    is known, or there is no function.

    Args:
        given: the names of TRL that are set, with their values.
        is_python: True: functions stand in an argument of `oat.Trainer`; False: in a file or in flags.
    """
    functions = given.get("reward_funcs")
    functions = functions if isinstance(functions, list) else [functions]
    sources = [source for each in functions if (source := _source(each, is_python=is_python))]
    if not sources or len(sources) < len(functions):
        return None
    weights = given.get("reward_weights")
    if isinstance(weights, list) and len(weights) != len(sources):
        of = f"{len(sources)} functions and {len(weights)} weights, which TRL refuses"
        return {"oracle" if is_python else "oracle.name": ...}, of
    if isinstance(weights, list):
        sources = [{**source, "weight": weight} for source, weight in zip(sources, weights, strict=True)]
    if is_python:
        shown = [source["name"] if source.keys() == {"name"} else source for source in sources]
        return {"oracle": shown if len(shown) > 1 or "weight" in sources[0] else shown[0]}, ""
    if len(sources) == 1 and "weight" not in sources[0]:
        return {f"oracle.{field}": value for field, value in sources[0].items()}, ""
    return {"oracle.name": "mixture", "oracle.sources": sources}, ""


def _source(function: Any, *, is_python: bool) -> dict[str, Any] | None:
    """Return the section of an oracle for one of TRL's reward functions; None: it has no name that is known.

    A text is `file.py:name` as here, `package.module.name`, or the hub id of a reward model. A module that
    lies in the working directory, where TRL's command finds it, is named by its file.
    """
    if isinstance(function, Named):
        return {"name": function} if is_python else None
    if not isinstance(function, str) or not function:
        return None
    if ":" in function:
        return {"name": function}
    if "/" in function:
        return {"name": "reward_model", "path": function}
    module, _, name = function.rpartition(".")
    if not module or not function.replace(".", "").isidentifier():
        return None
    file = f"{module.replace('.', '/')}.py"
    return {"name": f"{file if absolute(file).is_file() else module}:{name}"}
