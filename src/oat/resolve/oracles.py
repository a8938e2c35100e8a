"""The oracles that a configuration names."""

from collections.abc import Mapping
from typing import Any

from oat.config.settings import Component, Config, OracleConfig
from oat.errors import OatError
from oat.oracles.make import is_shown_groups


def evaluation_oracles_of(config: Config) -> dict[str, OracleConfig | Component]:
    """Return the sections of the oracles that evaluations ask, by the purpose of the questions. The purposes
    are "eval" and, if there is a second oracle, "gold"."""
    if config.answering is None:
        return {}
    own, gold = config.answering.oracle, config.answering.gold
    assert not isinstance(own, str), "resolve makes sections of names"
    assert not isinstance(gold, str), "resolve makes sections of names"
    return {"eval": own or config.oracle, **({"gold": gold} if gold else {})}


def shows_groups(config: Config) -> bool:
    """Return True if an oracle of training or of evaluations is a reward function that does not declare
    `reads_group = False`, or has one as a source. If the code cannot be loaded, return True."""
    sections = [(config.oracle.name, config.oracle.options)]
    sections += [(each.name, each.options) for each in evaluation_oracles_of(config).values()]
    return any(_shows_groups(*section) for section in sections)


def _shows_groups(name: Any, options: Mapping[str, Any]) -> bool:
    if name == "mixture":
        sources = options.get("sources")
        named = [each for each in sources if isinstance(each, Mapping)] if isinstance(sources, list) else []
        return any(_shows_groups(each.get("name"), each) for each in named)
    try:
        return isinstance(name, str) and ":" in name and is_shown_groups(name)
    except OatError:
        return True
