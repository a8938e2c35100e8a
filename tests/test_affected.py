"""`make affected` chooses the test files that a change can touch."""

import affected
import pytest
from affected import SOURCE, TESTS


def names(*changed: str) -> set[str]:
    return {test.relative_to(TESTS).as_posix() for test in affected.affected(changed)}


@pytest.mark.parametrize(
    ("changed", "touched", "untouched"),
    [
        ("src/oat/reports/plot.py", "reports/test_plot.py", "functional/test_sampling.py"),
        ("src/oat/loop.py", "golden/test_golden.py", "functional/test_sampling.py"),
        ("src/oat/algorithms/kto.py", "algorithms/test_kto.py", "golden/test_golden.py"),
        ("src/oat/oracles/judge.py", "oracles/test_judge_runs.py", "oracles/test_rules_math.py"),
        ("src/oat/quickstart/__init__.py", "quickstart/test_quickstart.py", "learner/test_critic.py"),
        ("tests/support/kills.py", "faults/test_inner_kills.py", "golden/test_golden.py"),
        ("tests/golden/golden.json", "golden/test_golden.py", "reports/test_plot.py"),
        ("tests/data/conftest.py", "data/test_prompts.py", "reports/test_plot.py"),
        ("docs/rules.md", "pages/test_docs.py", "golden/test_golden.py"),
    ],
)
def test_a_change_touches_the_tests_that_reach_it(changed: str, touched: str, untouched: str) -> None:
    assert touched in names(changed)
    assert untouched not in names(changed)


def test_a_test_touches_itself() -> None:
    assert names("tests/reports/test_plot.py") == {"reports/test_plot.py", *affected.ALWAYS}


def test_no_change_touches_nothing_and_a_change_of_the_tools_everything() -> None:
    assert names() == set()
    assert len(names("pyproject.toml")) == len(affected.tests())


def test_every_file_of_the_package_is_reached() -> None:
    found = set().union(*map(affected.reached, affected.tests()))
    lost = {f"src/{file.relative_to(SOURCE)}" for file in SOURCE.rglob("*.py") if file not in found}
    assert lost <= set(affected.EVERYTHING)


def test_what_git_says_has_changed() -> None:
    assert "tests/no_such_file.py" not in affected.changed_since("HEAD")
