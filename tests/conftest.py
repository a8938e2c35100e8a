"""Every test checks the jaxtyping signatures of `oat.functional` at run time. The hook must be installed
before the package is imported."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator

import jaxtyping

jaxtyping.install_import_hook("oat.functional", "beartype.beartype")
# bitsandbytes would compile its functions, with the machine's compiler; test_quantize.py has a test of that
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# ruff: noqa: E402, F401 (the helpers import the package; they are fixtures for every test)

import pytest
import torch
from brief_writes import brief_writes
from evaluations import judges
from faulty_server import brief_waits
from fixtures import (
    NO_BITSANDBYTES,
    NO_MLFLOW,
    NO_TRL,
    NO_WANDB,
    finished,
    over_the_wire,
    serialise_by_default,
    several_cpus,
    world,
)
from hypothesis import settings
from ray_nodes import nodes
from ray_runs import strikes
from suites import mark_slow

gc.disable()  # no garbage collection finds anything before `pytest_collection_finish`
torch.set_num_threads(1)
# a shell makes what it starts in the background deaf to it
signal.signal(signal.SIGINT, signal.default_int_handler)

NO_DEVICE = "no CUDA device here"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--serialise",
        action="store_true",
        help="every run sends its values through the wire encoding (compute.serialise: true)",
    )
    parser.addoption("--fault", metavar="ROW", help="only tests that prove this row of the fault table")


settings.register_profile("usual", max_examples=100)
settings.register_profile("fault table", max_examples=300)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("fault table" if config.getoption("--fault") else "usual")
    if config.getoption("--serialise"):
        serialise_by_default(True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow(items, are_whole=not any("[" in argument for argument in config.args))
    row = config.getoption("--fault")
    if row is not None:
        proves = [any(row in mark.args for mark in item.iter_markers("fault")) for item in items]
        config.hook.pytest_deselected(
            items=[item for item, does in zip(items, proves, strict=True) if not does]
        )
        items[:] = [item for item, does in zip(items, proves, strict=True) if does]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_DEVICE))


def pytest_collection_finish() -> None:
    """Freeze all objects that were imported and collected. Later garbage collections are few, and skip them.

    Bytecode is turned off. Python tells by the second whether bytecode is up to date, and tests change user
    code within a second.
    """
    freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
    sys.dont_write_bytecode = True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze after each file what its tests have imported."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        freeze()


def freeze() -> None:
    """Let garbage collections skip all objects that there are. Else each full collection would walk through
    everything that was imported, and in a forked child copy its memory too: 8 % of the CPU time of a part of
    the suite."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if count := sum(NO_DEVICE in reason for reason in skipped):
        terminalreporter.write_line(
            f"{count} GPU tests skipped: {NO_DEVICE} (docs/gpu.md says how to run them)"
        )
    if count := sum(NO_TRL in reason for reason in skipped):
        terminalreporter.write_line(
            f"{count} tests of TRL's own functions skipped: {NO_TRL} (`make bench` brings it)"
        )
    if count := sum(NO_WANDB in reason or NO_MLFLOW in reason for reason in skipped):
        terminalreporter.write_line(
            f"{count} tests of wandb and mlflow skipped: they are not here (`make test-slow` runs them in "
            ".venv-trackers)"
        )
    if count := sum(NO_BITSANDBYTES in reason for reason in skipped):
        terminalreporter.write_line(
            f"{count} tests of weights in four bits skipped: {NO_BITSANDBYTES} (pip install "
            "'oat-align[quantize]')"
        )


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Store a result of a fault test in its report, for the table of `make faults`: `figure("100 of
    100")`."""
    return lambda text: record_property("figure", text)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Turn the run-time signatures off, as for users. Only the package's own shape checks remain."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
