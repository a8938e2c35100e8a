"""Tests know no machine. What a test needs of one (pages, bytes, digits) it measures, and what takes time is
bounded so that a slow or busy machine passes too. These tests read the sources of the others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SHORTEST_S = 10.0
"""A busy machine may not run a process for seconds. What hangs, hangs for minutes."""
CPU_CLOCKS = {"process_time", "process_time_ns", "thread_time", "thread_time_ns", "getrusage"}
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
READS = rf"\b(time|resource)\.({'|'.join(CPU_CLOCKS | CLOCKS)})\b"
READERS = {
    "support/cpu_time.py": "measures beside it how slow the machine is",
    "faults/test_hostile_text.py": "finds the slowest of many, which cpu_time then measures",
    "data/test_large_data.py": "reads the memory of a process, and no time",
}
"""Files that read CPU time or the use of resources, and why they may."""


def calls(tree: ast.AST, names: set[str]) -> Iterator[ast.Attribute]:
    """Yield the attributes with one of these names of the modules `time` and `resource`."""
    for node in ast.walk(tree):
        is_attribute = isinstance(node, ast.Attribute) and node.attr in names
        if is_attribute and isinstance(node.value, ast.Name) and node.value.id in ("time", "resource"):
            yield node


def short_bounds(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that assert that something took less than `SHORTEST_S` seconds of a clock."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        taken = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
            for target in node.targets
            if isinstance(target, ast.Name) and any(calls(node.value, CLOCKS))
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
                compared = [node.test.left, *node.test.comparators]
                for low, sign, high in zip(compared, node.test.ops, compared[1:], strict=False):
                    is_time = any(calls(low, CLOCKS)) or (isinstance(low, ast.Name) and low.id in taken)
                    if is_time and isinstance(sign, ast.Lt | ast.LtE) and isinstance(high, ast.Constant):
                        yield from [node.lineno] * (high.value < SHORTEST_S)


@pytest.mark.parametrize(
    ("line", "is_short"),
    [
        ("assert time.monotonic() - begin < 2", True),
        ("took = time.time() - begin\n    assert took <= 0.5", True),
        ("took = time.time() - begin\n    assert 0 < took < 0.5", True),
        ("assert time.monotonic() - begin < 60", False),
        ("assert time.monotonic() - begin > 2", False),
        ("while time.monotonic() - begin < 2:\n        pass", False),
    ],
)
def test_a_short_bound_is_seen(line: str, is_short: bool) -> None:
    assert bool([*short_bounds(ast.parse(f"def test(begin):\n    {line}\n"))]) == is_short


def test_no_bound_of_time_is_that_of_an_idle_machine() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(TESTS.rglob("*.py"))}
    trees = {file: ast.parse(text) for file, text in texts.items() if re.search(READS, text)}
    places = [f"{file.relative_to(TESTS)}:{line}" for file in trees for line in short_bounds(trees[file])]
    assert places == [], f"allow {SHORTEST_S:g} s or more, or look at what is open, loaded or called"
    found = {str(file.relative_to(TESTS)) for file in trees if any(calls(trees[file], CPU_CLOCKS))}
    assert found == READERS.keys(), "support/cpu_time.py compares the CPU time of machines"
