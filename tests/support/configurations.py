"""Configurations that tests change."""

from pathlib import Path
from typing import Any

from oat.config.load import load_config
from oat.resolve.resolve import resolve

MINIMAL = """\
model:
  path: models/tiny
prompts:
  path: train.jsonl
sampling:
  max_new_tokens: 8
oracle:
  name: exact_match
algorithm:
  name: grpo
  prompts: 4
  samples: 2
learner:
  learning_rate: 5e-4
stop:
  max_steps: 3
"""


ALGORITHM = '''
from __future__ import annotations

from dataclasses import dataclass, replace

from oat.algorithms.direct import DPO, DPOConfig
from oat.explore.base import NoExploration


@dataclass(frozen=True)
class MyConfig(DPOConfig):
    strength: float = 2.0
    """Of the new term."""
    names: tuple[str, ...] = ("a", "b")


class Mine(DPO):
    name = "mine"
    Config = MyConfig


def function(config):
    return None


class Curious(NoExploration):
    needs = frozenset({"policy"})


class Wide(NoExploration):
    def widen(self, plan):
        return replace(plan, samples={"sampler": 6})


class Asked:
    def __init__(self, **options):
        self.options = options
'''


def resolved(path: str | Path, *flags: str) -> Any:
    config, origins = load_config(path, flags)
    return resolve(config, origins).config


OFFLINE = [
    "--algorithm",
    "{name: dpo, prompts: 2}",
    "--prompts.responses",
    "[good, bad]",
    "--oracle.name",
    "recorded",
]


PLAYED = ["--oracle.name", "environment", "--sampling.environment", "game.py:Game"]
