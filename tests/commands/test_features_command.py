"""`oat features`: how much features tell about an oracle, compared with a slow regression."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures import Finished, World, oat, write_jsonl

from oat.commands.features import Judged, judge_features, table
from oat.errors import ConfigError, OatWarning, OracleError
from oat.resolve.targets import resolve_file
from oat.rollout.features import Features
from oat.types import Group

STRENGTHS = [0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5]
PROMPTS, SAMPLES, SHARE = 24, 6, 0.75
EXPLORER: dict[str, Any] = {
    "name": "ensemble",
    "samples": SAMPLES,
    "ensemble": {"members": 3, "hidden": 8, "batch": 6, "steps": 2},
}
ORACLES = '''
def some(prompts, completions, **columns):
    """No score for texts that begin with a digit below 5."""
    return [None if text[:1] in set("01234") else float(text.count("a")) for text in completions]


def none(prompts, completions, **columns):
    return [None] * len(completions)


def longer(prompts, first, second, **columns):
    return [0.9 if len(a) > len(b) else 0.5 if len(a) == len(b) else 0.2 for a, b in zip(first, second)]


def broken(prompts, completions, **columns):
    raise ValueError("closed today")
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with more prompts than any test asks about, and with oracles."""
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "train.jsonl", [{"prompt": f"{a}+{b}="} for a in range(9) for b in range(9)])
    (folder / "oracles.py").write_text(ORACLES, encoding="utf-8")
    return folder


def config_of(world: World, data: Path, folder: Path, oracle: str | None = None, **features: Any) -> Path:
    changes: dict[str, Any] = {
        "prompts": {"path": str(data / "train.jsonl")},
        "explorer": {**EXPLORER, "features": features},
        "evaluation": None,
        "sampling.temperature": 1.5,
    }
    if oracle is not None:
        changes["oracle.name"] = f"{data / 'oracles.py'}:{oracle}"
    return world.config("dpo", folder, changes)


def score(text: str) -> float:
    """Return the score of the oracle of `World`."""
    return text.count("a") + 0.1 * text.count("b")


def letters(text: str) -> list[float]:
    return [float(text.count("a")), float(text.count("b")), float(len(text))]


class Told:
    """Features that a function of the text gives.

    Attributes:
        groups: the groups whose features were last asked for.
    """

    def __init__(self, function: Callable[[str], Sequence[float]], width: int):
        self.function, self.width = function, width
        self.identity: dict[str, Any] = {}
        self.groups: Sequence[Group] = ()

    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        self.groups = groups
        return [
            np.array([self.function(row.text) for row in group.trajectories], dtype=np.float32)
            for group in groups
        ]


def noise(text: str) -> list[float]:
    """Return five numbers that tell nothing about the text."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).normal(size=5).tolist()


def judged(
    monkeypatch: pytest.MonkeyPatch,
    config: Path,
    features: Features,
    *,
    prompts: int = PROMPTS,
    samples: int | None = None,
    share: float = SHARE,
) -> tuple[Judged, str]:
    """Return what `oat features` says about these features, and what it asked. Policy, oracle and regression
    are the real ones."""
    monkeypatch.setattr("oat.assemble.ensemble.features_with", lambda lms, *others: features)
    (first, *others), asked = judge_features(resolve_file(config), prompts, samples, share)
    for other in others:
        np.testing.assert_equal(vars(other) | {"name": first.name}, vars(first))
    return first, asked


# a slow version


def slow_weights(x_ND: np.ndarray, y_N: np.ndarray, place_N: np.ndarray) -> np.ndarray:
    """Return the weights of a ridge regression of scaled features, by numpy's least squares on rows for the
    penalty. The strength is that with the smallest error in five folds of prompts."""
    scale_D = np.maximum(x_ND.std(axis=0), 1e-12)
    x_ND = x_ND / scale_D

    def fit(x_ND: np.ndarray, y_N: np.ndarray, strength: float) -> np.ndarray:
        width = x_ND.shape[1]
        rows = np.concatenate([x_ND, np.sqrt(strength) * np.eye(width)])
        return np.linalg.lstsq(rows, np.concatenate([y_N, np.zeros(width)]), rcond=None)[0]

    errors = []
    for strength in STRENGTHS:
        total = 0.0
        for fold in range(5):
            out = place_N % 5 == fold
            if out.any():
                total += ((x_ND[out] @ fit(x_ND[~out], y_N[~out], strength) - y_N[out]) ** 2).sum()
        errors.append(total)
    return fit(x_ND, y_N, STRENGTHS[int(np.argmin(errors))]) / scale_D


def slow_judged(
    groups: Sequence[Group],
    features: Features,
    scores: Mapping[int, Sequence[float]],
    num_learned: int,
) -> dict[str, float]:
    """Return what `Judged` says, for an oracle of scores.

    Args:
        scores: for each group, the scores of its responses.
    """
    xs, ys, places = [], [], []
    for place, features_GD in enumerate(features.of(groups)):
        x_GD, y_G = features_GD.astype(float), np.array(scores[place])
        xs.append(x_GD - x_GD.mean(axis=0))
        ys.append(y_G - y_G.mean())
        places.append(np.full(len(y_G), place))
    x_ND, y_N, place_N = np.concatenate(xs), np.concatenate(ys), np.concatenate(places)
    is_learned_N = place_N < num_learned
    predicted_N = x_ND @ slow_weights(x_ND[is_learned_N], y_N[is_learned_N], place_N[is_learned_N])
    held_out = range(num_learned, len(groups))
    picked = [scores[each][int(np.argmax(predicted_N[place_N == each]))] for each in held_out]
    return {
        "correlation": float(np.corrcoef(predicted_N[~is_learned_N], y_N[~is_learned_N])[0, 1]),
        "pick": float(np.mean(picked)),
        "random": float(np.mean([np.mean(scores[each]) for each in held_out])),
        "best": float(np.mean([np.max(scores[each]) for each in held_out])),
    }


# what features tell


@pytest.mark.parametrize(
    ("function", "width"),
    [
        (letters, 3),
        (lambda text: [*letters(text), *noise(text)], 8),
        (lambda text: [float(len(text)), float(text.count("1"))], 2),
        (lambda text: [noise(text + str(copy))[0] + letters(text)[0] for copy in range(90)], 90),
    ],
    ids=["exact", "exact, with noise", "a little", "more than responses"],
)
def test_it_says_what_a_slow_version_says(
    world: World,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[[str], Sequence[float]],
    width: int,
) -> None:
    features = Told(function, width)
    prompts = PROMPTS if width < 90 else 12
    found, asked = judged(monkeypatch, config_of(world, data, tmp_path), features, prompts=prompts)
    groups = features.groups
    assert [len(group.trajectories) for group in groups] == [SAMPLES] * prompts
    scores = {place: [score(row.text) for row in group.trajectories] for place, group in enumerate(groups)}
    expected = slow_judged(groups, features, scores, round(SHARE * prompts))
    assert found.width == width
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-5)
    pairs = prompts * SAMPLES // 2
    assert asked.endswith(f" about {pairs} pairs: {2 * pairs} queries")


def test_features_that_contain_the_score_tell_it(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predicted best response is the best one. A constant beside the score changes nothing."""
    features = Told(lambda text: [3.0 * score(text), 1.0], 2)
    found, _ = judged(monkeypatch, config_of(world, data, tmp_path), features)
    assert found.correlation > 0.999
    assert found.pick == found.best
    assert found.random is not None
    assert found.best is not None
    assert found.best > found.random + 0.3


class Noise(Told):
    """Features that are drawn for each response, whatever its text."""

    def __init__(self) -> None:
        super().__init__(noise, 5)

    def of(self, groups: Sequence[Group]) -> list[np.ndarray]:
        return [
            np.random.default_rng(group.prompt.occurrence).normal(size=(len(group.trajectories), 5))
            for group in groups
        ]


def test_features_that_tell_nothing_are_a_guess(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picked response is as good as a random one."""
    found, _ = judged(
        monkeypatch, config_of(world, data, tmp_path), Noise(), prompts=72, samples=12, share=0.5
    )
    assert abs(found.correlation) < 0.15
    assert found.pick is not None
    assert found.random is not None
    assert found.best is not None
    assert abs(found.pick - found.random) < 0.3
    assert found.best > found.random + 0.6


def test_features_that_do_not_differ_have_no_correlation(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = judged(monkeypatch, config_of(world, data, tmp_path), Told(lambda text: [1.0], 1))
    assert np.isnan(found.correlation)
    assert found.best is not None


def test_an_oracle_that_only_compares(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The regression learns the oracle's probability from differences of features. There is no pick."""
    features = Told(lambda text: [float(len(text)), float(text.count("a"))], 2)
    found, asked = judged(monkeypatch, config_of(world, data, tmp_path, "longer"), features)
    assert (found.pick, found.random, found.best) == (None, None, None)
    xs, ys, places = [], [], []
    for place, (group, x_GD) in enumerate(zip(features.groups, features.of(features.groups), strict=True)):
        for first in range(0, SAMPLES, 2):
            sizes = [len(group.trajectories[first + other].text) for other in (0, 1)]
            p = 0.5 if sizes[0] == sizes[1] else 0.9 if sizes[0] > sizes[1] else 0.2
            xs.append(x_GD[first].astype(float) - x_GD[first + 1].astype(float))
            ys.append(p - 0.5)
            places.append(place)
    x_ND, y_N, place_N = np.array(xs), np.array(ys), np.array(places)
    is_learned_N = place_N < round(SHARE * PROMPTS)
    predicted_N = x_ND @ slow_weights(x_ND[is_learned_N], y_N[is_learned_N], place_N[is_learned_N])
    expected = np.corrcoef(predicted_N[~is_learned_N], y_N[~is_learned_N])[0, 1]
    assert found.correlation == pytest.approx(expected, rel=1e-5)
    assert found.correlation > 0.7
    pairs = PROMPTS * SAMPLES // 2
    assert asked.endswith(f" about {pairs} pairs: {pairs} queries")


def test_pairs_without_an_answer_are_left_out(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response counts if the oracle scored both responses of its pair."""
    features = Told(letters, 3)
    config = config_of(world, data, tmp_path, "some")
    found, _ = judged(monkeypatch, config, features)
    held_out = []
    for group in features.groups[round(SHARE * PROMPTS) :]:
        texts = [row.text for row in group.trajectories]
        pairs = [texts[first : first + 2] for first in range(0, SAMPLES, 2)]
        kept = [text for pair in pairs for text in pair if not any(t[:1] in set("01234") for t in pair)]
        if kept:
            held_out.append([float(text.count("a")) for text in kept])
    assert sum(map(len, held_out)) < SAMPLES * (PROMPTS - round(SHARE * PROMPTS))
    assert found.best == pytest.approx(np.mean([max(scores) for scores in held_out]))
    assert found.random == pytest.approx(np.mean([np.mean(scores) for scores in held_out]))
    assert found.pick == found.best


@pytest.mark.parametrize(("share", "learned"), [(0.5, 4), (0.01, 2), (0.99, 6)])
def test_at_least_two_prompts_are_learned_and_two_judged(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, learned: int
) -> None:
    features = Told(lambda text: [score(text)], 1)
    found, _ = judged(monkeypatch, config_of(world, data, tmp_path), features, prompts=8, share=share)
    held_out = [[score(row.text) for row in group.trajectories] for group in features.groups[learned:]]
    assert found.best == pytest.approx(np.mean([max(scores) for scores in held_out]))


@pytest.mark.parametrize(("samples", "pairs"), [(2, 1), (5, 2), (None, 3)])
def test_responses_are_compared_in_pairs(
    world: World,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    samples: int | None,
    pairs: int,
) -> None:
    """By default there are as many responses as the explorer chooses from. An odd one is in no pair."""
    features = Told(letters, 3)
    _, asked = judged(monkeypatch, config_of(world, data, tmp_path), features, prompts=8, samples=samples)
    assert {len(group.trajectories) for group in features.groups} == {samples or SAMPLES}
    assert asked.endswith(f"about {8 * pairs} pairs: {16 * pairs} queries")


# the command


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ({}, ["layer -1, mean", "layer -1, last", "all layers, last", "all layers, mean"]),
        (
            {"layer": 1, "pooling": "last"},
            ["layer 1, last", "layer -1, last", "layer -1, mean", "all layers, last", "all layers, mean"],
        ),
        (
            {"backbone": "policy"},
            ["layer -1, mean", "layer -1, last", "all layers, last", "all layers, mean"],
        ),
    ],
    ids=["reference", "another layer", "policy"],
)
def test_the_table_begins_with_the_features_of_the_configuration(
    world: World,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    features: dict[str, Any],
    names: list[str],
) -> None:
    """No run directory is made."""
    config = config_of(world, data, tmp_path, **features)
    before = content(tmp_path)
    assert oat("features", config, "--prompts", "8", "--samples", "4") == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["features", "numbers", "correlation", "pick", "random", "best"]
    assert [line[:20].rstrip() for line in lines] == names
    for line in lines:
        width, correlation, pick, random, best = line[20:].split()
        assert (int(width), -1 <= float(correlation) <= 1) == (16, True)
        assert float(random) <= float(best)
        assert float(pick) <= float(best)
    assert len({tuple(line[20:].split()[-2:]) for line in lines}) == 1, "all are judged by the same responses"
    assert last == f"oat features: asked {world.oracle}/preferences about 16 pairs: 32 queries"
    assert content(tmp_path) == before


def test_a_run_that_is_there_is_not_touched(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And it says the same as before the run began: it is about the policy's start."""
    changes = {"explorer": EXPLORER, "evaluation": None, "stop.max_steps": 2}
    run_dir = finished.copy("dpo", tmp_path, changes)
    before = content(tmp_path)
    command_line = ("features", tmp_path / "dpo.yaml", "--prompts", "8")
    assert oat(*command_line) == 0
    first = capsys.readouterr().out
    assert content(tmp_path) == before
    run_dir.rename(tmp_path / "elsewhere")
    assert oat(*command_line) == 0
    assert capsys.readouterr().out == first


def test_numbers_that_are_missing_are_dashes() -> None:
    shown = table([Judged("layer -1, mean", 16, 0.5), Judged("x", 7, float("nan"), 1.0, 0.25, 2.0)])
    _, first, second = shown.splitlines()
    assert first.split() == ["layer", "-1,", "mean", "16", "0.50", "-", "-", "-"]
    assert second.split() == ["x", "7", "nan", "1.000", "0.250", "2.000"]


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        ({"explorer": None}, (), "this configuration's explorer reads no features; set explorer"),
        ({"explorer": {"name": "apl"}}, (), "this configuration's explorer reads no features"),
        ({}, ("--prompts", "3"), "give at least 4 prompts and 2 samples"),
        ({}, ("--samples", "1"), "give at least 4 prompts and 2 samples"),
        ({}, ("--share", "0"), "a share between 0 and 1"),
        ({}, ("--share", "1"), "a share between 0 and 1"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_is_asked(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    flags: tuple[str, ...],
    said: str,
) -> None:
    forbidden = {"oracle.name": f"{world.folder / 'reward.py'}:forbidden"}
    config = world.config("dpo", tmp_path, {"explorer": EXPLORER, "evaluation": None, **forbidden, **changes})
    assert oat("features", config, *flags) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "dpo").exists()


def test_an_oracle_without_answers_is_named_as_the_reason(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(world, data, tmp_path, "none")
    said = r"a value for 0 of 24 pairs \(it abstained on 24\)"
    with pytest.raises(ConfigError, match=said), pytest.warns(OatWarning, match="^features: oracle .*none"):
        judged(monkeypatch, config, Told(letters, 3), prompts=8)


@pytest.mark.parametrize("texts", [["1+1=", "2+2="], ["1+1=", "2+2=", "1+1=", "1+1=", "2+2="]])
def test_too_few_different_prompts_are_refused_before_anything_is_asked(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: list[str]
) -> None:
    write_jsonl(tmp_path / "few.jsonl", [{"prompt": text} for text in texts])
    config = config_of(world, tmp_path, tmp_path)
    flags = (
        "--prompts.path",
        tmp_path / "few.jsonl",
        "--oracle.name",
        f"{world.folder / 'reward.py'}:forbidden",
    )
    assert oat("features", config, "--prompts", "8", *flags) == 2
    error = capsys.readouterr().err
    assert f"gives 8 prompts with {len(set(texts))} different texts; two are to learn from" in error
    assert "prompts.path" in error
    assert "--prompts" not in error.replace("--prompts.path", "")


def test_prompts_with_equal_texts_are_learned_together_or_not(
    world: World, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records may differ in other columns."""
    texts = [f"{number % 6}+1=" for number in range(24)]
    records = [{"prompt": text, "number": number} for number, text in enumerate(texts)]
    write_jsonl(tmp_path / "equal.jsonl", records)
    features = Told(letters, 3)
    config = config_of(world, data, tmp_path)
    tree = {"prompts.path": str(tmp_path / "equal.jsonl"), "prompts.shuffle": False}
    flags = [word for name, value in tree.items() for word in (f"--{name}", json.dumps(value))]
    monkeypatch.setattr("oat.assemble.ensemble.features_with", lambda lms, *others: features)
    (found, *_), _ = judge_features(resolve_file(config, flags), 24, None, 0.5)
    held_out = [group for group in features.groups if group.prompt.messages[0].content in texts[3:6]]
    assert len(held_out) == 12
    scores = [[score(row.text) for row in group.trajectories] for group in held_out]
    assert found.best == pytest.approx(np.mean([max(each) for each in scores]))
    assert found.random == pytest.approx(np.mean([np.mean(each) for each in scores]))


def test_an_oracle_that_fails_ends_it(world: World, data: Path, tmp_path: Path) -> None:
    config = config_of(world, data, tmp_path, "broken")
    with pytest.raises(OracleError, match="closed today"):
        judge_features(resolve_file(config), 8, None, SHARE)
