"""Help for the tests of people who extend `oat`: fakes of an engine and an oracle, checks that a part keeps
its protocol, and a real run of a few seconds.

    from oat.testing import check_oracle
    from reward import reward

    def test_reward():
        check_oracle(reward, columns={"answer": "42"})

If a check finds no fault, it returns None. Otherwise it raises an error, usually a `ContractError`. The
message says what was found, where, and what to do.
"""

from oat.testing.algorithms import check_algorithm
from oat.testing.environments import check_environment
from oat.testing.explorers import check_explorer
from oat.testing.fakes import FakeEngine, FakeOracle
from oat.testing.oracles import check_oracle
from oat.testing.samples import make_question
from oat.testing.tiny import tiny_run, write_tiny_model

__all__ = [
    "FakeEngine",
    "FakeOracle",
    "check_algorithm",
    "check_environment",
    "check_explorer",
    "check_oracle",
    "make_question",
    "tiny_run",
    "write_tiny_model",
]
