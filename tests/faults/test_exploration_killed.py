"""R35: runs of the recipes of exploration are killed with SIGKILL where an explorer scores, chooses and asks,
and where its ensemble stores, learns and is sent. Continued, they are the unbroken run.

`refreshed` is SEA whose features are computed again every two steps. Each series has KILLS runs. Every third
kill is at a random time of the run. The number of a kill decides where and when it happens.
"""

import importlib
import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures import counting, forked, kill_at, logged, named, oat
from kills import killed_in_time
from tiny_models import build_config, save_model

from oat.commands.digest import digest_run
from oat.ledger.audit import contradictions
from oat.ledger.store import Store

pytestmark = [pytest.mark.fault("R35"), pytest.mark.filterwarnings("ignore::oat.errors.OatWarning")]

ROOT = Path(__file__).parents[2]
STEPS = 7
KILLS = 9
SAMPLES = {"xpo": 0}
"""The kills that `make test` makes, by series."""
_LABELS = {"explorer.model_labels.burn_in": 2, "explorer.model_labels.share": 0.5}
SERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "sea_dpo": ("sea_dpo", {**_LABELS, "explorer.model_labels.audit": 0.3}),
    "sea_simpo": ("sea_simpo", {}),
    "refreshed": ("sea_dpo", {**_LABELS, "explorer.features.refresh_every": 2}),
    "ee4llm": ("ee4llm", {"evaluation.best_of": 3}),
    "apl": ("apl", {}),
    "xpo": ("xpo", {}),
}
_ASKING = {
    "before a round is recorded": ("oat.ledger.store:Store.add_round", False),
    "inside the transaction of a round": ("oat.ledger.store:Store.add_round", True),
    "a round on disk, nothing sent": ("oat.ledger.outstanding:Outstanding.submit", False),
    "answers taken, nothing learned": ("oat.ledger.store:Store.add_take", True),
    "between two objectives, or after both": ("oat.learner.learner:Learner.update", True),
}
_ENSEMBLE = {
    "candidates scored, nothing chosen": ("oat.rollout.ensemble_scorer:EnsembleScorer.score", True),
    "pairs chosen, nothing recorded": ("oat.explore.ensemble:EnsembleExplorer.choose", True),
    "pairs stored, not learned": ("oat.explore.pair_buffer:PairBuffer.add", True),
    "the ensemble sent to the explorer": ("oat.rollout.ensemble_scorer:EnsembleScorer.load", True),
}


def points_of(series: str) -> dict[str, tuple[str, bool]]:
    if series == "xpo":
        return _ASKING
    if series == "apl":
        return {"pairs chosen, nothing recorded": ("oat.explore.apl:APL.choose", True), **_ASKING}
    if series == "refreshed":
        again = ("oat.explore.pair_buffer:PairBuffer.refresh", True)
        return {"some features computed again": again, **_ENSEMBLE}
    return {**_ENSEMBLE, **_ASKING}


@dataclass(frozen=True)
class Whole:
    """The unbroken run.

    Attributes:
        calls: calls of each point.
        seconds: duration of the run.
    """

    digest: dict[str, str]
    calls: dict[str, int]
    seconds: float


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recipes")
    return save_model(folder / "model", build_config("llama", layers=1, context=256))


def words(series: str, model: str, run_dir: Path) -> list[str]:
    """Return the arguments of a small run of a recipe."""
    recipe, changes = SERIES[series]
    flags = {
        "model": model,
        "run_dir": run_dir,
        "stop.max_steps": STEPS,
        "sampling.max_new_tokens": 6,
        "algorithm.prompts": 6,
        "evaluation.max_prompts": 4,
        "evaluation.every": 3,
        "checkpoint.every": 2,
        "tracking.keep_trajectories": "true",
        "engine.threads": 1,
        # the recipes' own finds all texts of a model with random weights equal, but for a chance
        "oracle": '{name: regex, pattern: "(?s)^[ a-m]", labels: bernoulli}',
        **({} if series == "xpo" else {"explorer.samples": 4}),
        **changes,
    }
    given = [str(word) for flag, value in flags.items() for word in (f"--{flag}", value)]
    return ["train", str(ROOT / "configs" / f"{recipe}.yaml"), *given]


@pytest.fixture(scope="module")
def wholes(model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """Return a function that gives the unbroken run of a series. Each run is made once."""
    importlib.import_module("oat.assemble.run")  # so that children start warm
    found: dict[str, Whole] = {}

    def make(series: str) -> Whole:
        if series not in found:
            folder = tmp_path_factory.mktemp("whole")

            def counted() -> int:
                counts = {name: counting(*named(place)) for name, (place, _) in points_of(series).items()}
                code = oat(*words(series, model, folder / "run"))
                (folder / "calls").write_text(json.dumps({name: count() for name, count in counts.items()}))
                return code

            began = time.monotonic()
            assert forked(counted, folder / "log") == 0, (folder / "log").read_text()
            seconds, calls = time.monotonic() - began, json.loads((folder / "calls").read_text())
            found[series] = Whole(digest_run(folder / "run"), calls, seconds)
        return found[series]

    return make


@pytest.mark.parametrize(
    ("series", "number"),
    [
        pytest.param(series, number, marks=[] if SAMPLES.get(series) == number else pytest.mark.large)
        for series in SERIES
        for number in range(KILLS)
    ],
)
def test_killed_once(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wholes: Callable[[str], Whole],
    figure: Callable[[str], None],
    series: str,
    number: int,
) -> None:
    monkeypatch.chdir(ROOT)
    whole, log, run_dir = wholes(series), tmp_path / "log", tmp_path / "run"
    drawn = random.Random(f"{series} {number}").random()
    given = words(series, model, run_dir)
    if number % 3 == 2:
        killed_in_time(
            lambda seconds: forked(lambda: oat(*given), log, kill_after_s=seconds),
            run_dir,
            drawn * whole.seconds,
        )
    else:
        points = points_of(series)
        name = [*points][(number - number // 3 + 4 * [*SERIES].index(series)) % len(points)]
        place, is_after = points[name]

        def armed() -> int:
            kill_at(*named(place), 1 + int(drawn * whole.calls[name]), after=is_after)
            return oat(*given)

        assert forked(armed, log) == -signal.SIGKILL, log.read_text()
    assert logged(log, *given) == 0, log.read_text()
    with closing(Store(run_dir / "ledger.sqlite")) as store:
        assert contradictions(store) == []
    is_equal = digest_run(run_dir) == whole.digest
    figure(f"{int(is_equal)} of 1 killed runs equal the unbroken one bitwise ({series})")
    assert is_equal
    shutil.rmtree(run_dir)


@pytest.mark.sample("refreshed", seconds=1.5)
@pytest.mark.parametrize("series", SERIES)
def test_every_point_is_reached(
    wholes: Callable[[str], Whole], monkeypatch: pytest.MonkeyPatch, series: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert all(wholes(series).calls.values())
