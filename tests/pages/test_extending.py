"""The code of docs/extending.md works unchanged."""

import inspect
import re
import sys
from pathlib import Path

import pytest

from oat.errors import ContractError
from oat.plugins.loading import load_symbol
from oat.testing import check_oracle, tiny_run

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL))
CONFIGS = re.findall(r"<!-- config -->\n```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
OTHERS = {"sampling": "{max_new_tokens: 4}", "learner": "{learning_rate: 5e-3}", "stop": "{max_steps: 2}"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_every_block_is_run() -> None:
    assert PAGE.count("```") == 2 * (len(FILES) + len(CONFIGS))
    assert {
        name
        for text in (*CONFIGS, FILES["test_mine.py"])
        for name in FILES
        if name.removesuffix(".py") in text
    } >= {*FILES} - {"test_mine.py"}


@pytest.mark.parametrize("config", CONFIGS, ids=[re.findall(r"\w+\.py", config)[-1] for config in CONFIGS])
def test_every_configuration_runs(folder: Path, config: str) -> None:
    whole = config + "".join(
        f"{section}: {fields}\n" for section, fields in OTHERS.items() if f"{section}:" not in config
    )
    rows = tiny_run(whole, ["a=", "b=", "aa=", "bb="], folder=folder)
    assert len(rows) == 3
    assert "loss/total" in rows[-1]
    for row in rows[1:]:  # whatever the algorithm is, and though it calls nothing of ours
        assert {"response/length", "response/tokens", "answers/failed_frac", "oracle/queries"} <= row.keys()
        assert "shorter.py" in config or {"reward/mean", "reward/zero_spread_frac"} <= row.keys()


def test_a_batch_that_does_not_keep_to_the_page_ends_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch that breaks the page's rules ends the run. The error is that of `check_algorithm`, although
    nobody called it."""
    source = FILES["algorithm.py"]
    for good, bad, words in (
        (
            "numbers = np.arange(len(rows))",
            "numbers = 2 * np.arange(len(rows))",
            r"unit_of_N is \[0 2 4 6\]; give one whole number a row",
        ),
        ("Batch(rows, numbers", "Batch(rows[1:], numbers", r"there are 3 rows, and unit_of_N has 4 numbers"),
        (
            "Batch(rows, numbers, numbers",
            "Batch(rows, numbers[1:], numbers[1:]",
            r"there are 4 rows, and unit_of_N has 3 numbers",
        ),
        (
            "Batch(rows, numbers, numbers",
            "Batch(rows, numbers[:-1], numbers",
            r"unit_of_N is \[0 1 2\]; give one whole number a row, .*\(N is 4\)",
        ),
        (
            "Batch(rows, numbers, numbers",
            "Batch(rows, numbers, numbers[:-1]",
            r"group_of_N is \[0 1 2\]; give one whole number a row, .*\(N is 4\)",
        ),
        (
            '{"rewards_N": rewards_N}',
            '{"rewards_N": rewards_N[1:]}',
            r"the column rewards_N has shape \(3,\); its axis N has 4 places",
        ),
    ):
        assert good in source
        (folder / "algorithm.py").write_text(source.replace(good, bad))
        whole = next(config for config in CONFIGS if "algorithm.py" in config) + "".join(
            f"{name}: {text}\n" for name, text in OTHERS.items()
        )
        with pytest.raises(ContractError, match="ended with exit code 1"):
            tiny_run(whole, ["a=", "b="], folder=folder)
        assert re.search(f"the batch of best: {words}", capsys.readouterr().err)


@pytest.mark.slow(
    instead="test_every_configuration_runs, and tests/testing/test_testing_algorithms.py", seconds=1.6
)
def test_the_tests_pass(folder: Path) -> None:
    names = re.findall(r"^def (test_\w+)", FILES["test_mine.py"], flags=re.MULTILINE)
    assert len(names) == 3
    for name in names:
        function = load_symbol(f"test_mine.py:{name}")
        function(*([folder] if inspect.signature(function).parameters else []))
    for module in ("algorithm", "environment", "explorer", "oracle", "reward"):
        del sys.modules[module]  # which other tests have under the same names


def test_the_checks_are_not_content_with_everything(folder: Path) -> None:
    (folder / "reward.py").write_text(
        "seen = []\n\ndef reward(prompts, completions, **columns):\n    seen.extend(completions)\n    "
        "return [float(len(seen))] * len(completions)\n"
    )
    with pytest.raises(
        ContractError,
        match=r"reward: question .*: answered \(\S+, 'ok'\), and \(\S+, 'ok'\) when asked again",
    ):
        check_oracle(load_symbol("reward.py:reward"))
    with pytest.raises(ContractError, match=r"the run in \S+ ended with exit code 2"):
        tiny_run("oracle: {name: nobody}\n", ["a="], folder=folder)


@pytest.mark.parametrize("name", re.findall(r"`((?:src|examples)/[\w/]+\.py)`", PAGE))
def test_every_file_that_is_named_is_there(name: str) -> None:
    assert (Path(__file__).parents[2] / name).exists()
