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


def short_bounds(tree: ast.Module) -> Iterator[int]:
    """Yield the lines that assert that something took less than `SHORTEST_S` seconds of a clock, or ended
    before a time that is so near."""
    numbers = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def number(node: ast.expr) -> float | None:
        """Return a number that is written down, also behind a `+`, as in `begin + 2`."""
        node = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else node
        value = node.value if isinstance(node, ast.Constant) else None
        value = numbers.get(node.id) if isinstance(node, ast.Name) else value
        return float(value) if isinstance(value, int | float) else None

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
        asserted = (node.test for node in ast.walk(function) if isinstance(node, ast.Assert))
        for node in (each for test in asserted for each in ast.walk(test) if isinstance(each, ast.Compare)):
            compared = [node.left, *node.comparators]
            for first, sign, second in zip(compared, node.ops, compared[1:], strict=False):
                is_less = isinstance(sign, ast.Lt | ast.LtE)
                low, high = (first, second) if is_less else (second, first)
                is_time = any(calls(low, CLOCKS)) or (isinstance(low, ast.Name) and low.id in taken)
                bound = number(high) if isinstance(sign, ast.Lt | ast.LtE | ast.Gt | ast.GtE) else None
                if is_time and bound is not None and bound < SHORTEST_S:
                    yield node.lineno


@pytest.mark.parametrize(
    ("line", "is_short"),
    [
        ("assert time.monotonic() - begin < 2", True),
        ("took = time.time() - begin\n    assert took <= 0.5", True),
        ("took = time.time() - begin\n    assert 0 < took < 0.5", True),
        ("assert 2 > time.monotonic() - begin", True),
        ("assert begin and time.monotonic() - begin < 2", True),
        ("assert time.monotonic() < begin + 2", True),
        ("assert time.monotonic() - begin < SHORT", True),
        ("assert time.monotonic() - begin < 60", False),
        ("assert time.monotonic() < begin + 60", False),
        ("assert time.monotonic() - begin > 2", False),
        ("while time.monotonic() - begin < 2:\n        pass", False),
    ],
)
def test_a_short_bound_is_seen(line: str, is_short: bool) -> None:
    assert bool([*short_bounds(ast.parse(f"SHORT = 2\ndef test(begin):\n    {line}\n"))]) == is_short


def test_no_bound_of_time_is_that_of_an_idle_machine() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(TESTS.rglob("*.py"))}
    trees = {file: ast.parse(text) for file, text in texts.items() if re.search(READS, text)}
    places = [f"{file.relative_to(TESTS)}:{line}" for file in trees for line in short_bounds(trees[file])]
    assert places == [], f"allow {SHORTEST_S:g} s or more, or look at what is open, loaded or called"
    found = {str(file.relative_to(TESTS)) for file in trees if any(calls(trees[file], CPU_CLOCKS))}
    assert found == READERS.keys(), "support/cpu_time.py compares the CPU time of machines"
