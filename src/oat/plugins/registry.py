"""The package's parts by name, in one table per kind. Reading a part from its table imports its module.

A new part is one file, and one line here. `Registry.load` also loads a user's own part, which is named as
`path/to/file.py:Name` or `package.module:Name`.
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from oat.errors import ConfigError, did_you_mean
from oat.plugins.loading import load_symbol


class Registry(Mapping[str, Any]):
    """The parts of one kind. Iteration and `in` use only the names; reading an item imports its module.

    Args:
        unknown: message about an unknown name. It has the fields `{name}` and `{nearest}`; the second is a
            hint with similar names.
        symbols: place of each part by name, as `package.module:Name`.
        users: regular expression for the names of users' own parts; None: users cannot add parts of this
            kind.
    """

    def __init__(self, unknown: str, symbols: Mapping[str, str], *, users: str | None = ".*:.*"):
        self._unknown = unknown
        self._symbols = symbols
        self._users = users

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self._symbols[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return name in self._symbols

    def __iter__(self) -> Iterator[str]:
        return iter(self._symbols)

    def __len__(self) -> int:
        return len(self._symbols)

    def symbol(self, name: str) -> str:
        """Return the place from which another process can load a part: `package.module:Name` for one of the
        package's parts, or the name itself for a user's part."""
        return self._symbols.get(name, name)

    def refuse_unknown(self, name: str) -> None:
        """Refuse a name that cannot name a part.

        Raises:
            ConfigError: the name is not in the table and does not have the form of a user's part.
        """
        is_users = self._users is not None and re.fullmatch(self._users, name, re.DOTALL)
        if name not in self._symbols and not is_users:
            raise ConfigError(self._unknown.format(name=name, nearest=did_you_mean(name, self._symbols)))

    def load(self, name: str) -> Any:
        """Return the part with a name, either one of the package's parts or a user's part.

        Raises:
            ConfigError: the name is unknown (`refuse_unknown`), or a user's part cannot be loaded
                (`load_symbol`).
        """
        self.refuse_unknown(name)
        return self[name] if name in self else load_symbol(name)


_DIRECT = "oat.algorithms.direct"
_CONTRAST = "oat.algorithms.contrast"
ALGORITHMS = Registry(
    "there is no algorithm {name!r}; {nearest}, or path/to/file.py:Name",
    {
        "dpo": f"{_DIRECT}:DPO",
        "robust_dpo": f"{_DIRECT}:RobustDPO",
        "ipo": f"{_DIRECT}:IPO",
        "slic": f"{_DIRECT}:SLiC",
        "simpo": f"{_DIRECT}:SimPO",
        "bnf": f"{_DIRECT}:BNF",
        "exo": f"{_CONTRAST}:EXO",
        "nca": f"{_CONTRAST}:NCA",
        "apo_zero": f"{_CONTRAST}:APOZero",
        "apo_down": f"{_CONTRAST}:APODown",
        "sppo_hard": f"{_CONTRAST}:SPPOHard",
        "discopop": f"{_CONTRAST}:DiscoPOP",
        "aot": f"{_CONTRAST}:AOT",
        "orpo": f"{_CONTRAST}:ORPO",
        "cpo": f"{_CONTRAST}:CPO",
        "xpo": "oat.algorithms.xpo:XPO",
        "kto": "oat.algorithms.kto:KTO",
        "sft": "oat.algorithms.supervised:SFT",
        "grpo": "oat.algorithms.group:GRPO",
        "dr_grpo": "oat.algorithms.group:DrGRPO",
        "rloo": "oat.algorithms.group:RLOO",
        "reinforce_pp": "oat.algorithms.group:ReinforcePP",
        "gspo": "oat.algorithms.group:GSPO",
        "cispo": "oat.algorithms.group:CISPO",
        "cpgd": "oat.algorithms.group:CPGD",
        "sapo": "oat.algorithms.group:SAPO",
        "luspo": "oat.algorithms.group:LUSPO",
        "vespo": "oat.algorithms.group:VESPO",
        "ppo": "oat.algorithms.ppo:PPO",
        "frozen": "oat.algorithms.frozen:Frozen",
        "reward_model": "oat.algorithms.reward_model:RewardModelling",
    },
)
EXPLORERS = Registry(
    "there is no explorer {name!r}; {nearest}",
    {
        "none": "oat.explore.base:NoExploration",
        "ensemble": "oat.explore.ensemble:EnsembleExplorer",
        "apl": "oat.explore.apl:APL",
    },
)
ENGINES = Registry(
    "there is no engine {name!r}; {nearest}", {"torch": "oat.engines.embedded:Embedded"}, users=None
)
ORACLES = Registry(
    "no oracle is called {name!r}; {nearest}, or your own as path/to/file.py:Name",
    {
        "exact_match": "oat.oracles.rules.exact:exact_match",
        "gsm8k": "oat.oracles.rules.gsm8k:gsm8k",
        "gsm8k_marked": "oat.oracles.rules.gsm8k:gsm8k_marked",
        "countdown": "oat.oracles.rules.countdown:CountdownRule",
        "cheerful": "oat.oracles.rules.sentiment:cheerful",
        "isolated": "oat.oracles.isolated:Isolated",
        "mixture": "oat.oracles.mixture:Mixture",
        "math": "oat.oracles.rules.math:MathRule",
        "format": "oat.oracles.rules.shape:FormatRule",
        "length": "oat.oracles.rules.shape:LengthRule",
        "regex": "oat.oracles.rules.shape:RegexRule",
        "judge": "oat.oracles.judge:Judge",
        "remote": "oat.oracles.remote.client:RemoteOracle",
        "reward_model": "oat.oracles.reward_model:RewardModelOracle",
        "pairrm": "oat.oracles.pairrm:PairRM",
    },
)
ANSWERS = Registry(
    "no answers are called {name!r}; {nearest}, or your own as path/to/file.py:function",
    {
        "last_number": "oat.oracles.rules.gsm8k:last_number",
        "marked_number": "oat.oracles.rules.gsm8k:marked_number",
        "tagged_answer": "oat.oracles.rules.countdown:tagged_answer",
    },
)
SINKS = Registry(
    "there is no sink {name!r}; {nearest}, or your own as path/to/file.py:Class or package.module:Class",
    {
        "files": "oat.tracking.files:Tracking",
        "tensorboard": "oat.tracking.tensorboard:TensorBoard",
        "wandb": "oat.tracking.wandb:Wandb",
        "mlflow": "oat.tracking.mlflow:Mlflow",
    },
    users=r".+:\w+",
)
