"""Texts that users' code makes from sets are the same in two runs."""

import os
import subprocess
import sys

SCRIPT = """
import sys
from oat.cli import main

print(hash("a"), flush=True)
sys.exit(main())
"""


def hashes(*words: str, flags: tuple[str, ...] = (), **settings: str) -> list[int]:
    """Return the hash of a text in each process in which a command is begun."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, *flags, "-c", SCRIPT, *words],
        env={**plain, **settings},
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines() if line.lstrip(b"-").isdigit()]


def test_commands_that_call_users_code_have_fixed_hashes() -> None:
    begun = [hashes("train", "--help"), hashes("eval", "--help")]
    assert [len(each) for each in begun] == [2, 2]
    assert begun[0][-1] == begun[1][-1]


def test_a_choice_of_hashes_is_kept() -> None:
    """Other commands begin once. If Python is told to heed no variable, nothing begins for ever."""
    assert len(hashes("train", "--help", PYTHONHASHSEED="random")) == 1
    assert len(hashes("check", "--help")) == 1
    assert len(hashes("train", "--help", flags=("-E",))) == 2
