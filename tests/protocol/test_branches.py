"""Runs with branches (`algorithm.advantage: vine`): what is sampled, asked and paid, kills, and refusals."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench import HERE, Bench, assert_a_kill_changes_nothing
from fixtures import checked, kill_at, make_model, oat
from transformers import AutoTokenizer

from oat.algorithms.rows import scored_rows
from oat.algorithms.vine import earned_by_steps
from oat.commands.digest import digest_run
from oat.engines.torch import TorchEngine
from oat.functional.values import step_advantages
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.models.loading import load_lm
from oat.rollout.actor import Actor, delimiter_ends, step_sizes
from oat.text.renderer import Renderer
from oat.types import Branching, Feedback, Item, Request, Sampling, Segment, Trajectory

STEPS, PROMPTS, SAMPLES, BRANCHES, MOST_STEPS, TOKENS = 3, 6, 4, 2, 3, 12
VINE = {"branches": BRANCHES, "delimiter": "3", "most_steps": MOST_STEPS}
MOST = SAMPLES * (1 + BRANCHES * (MOST_STEPS - 1))


def config_of(bench: Bench, file: Path, **sections: Any) -> Path:
    algorithm = {
        "name": "grpo",
        "advantage": "vine",
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "vine": VINE,
        **sections.pop("algorithm", {}),
    }
    return bench.config(
        file,
        **{
            "model": {"path": str(bench.folder / "model")},
            "algorithm": algorithm,
            "oracle": {"name": f"{HERE}/rewards.py:graded"},
            "sampling": {"max_new_tokens": TOKENS},
            "learner": {"learning_rate": 3e-3, "micro_batch_size": 4},
            "checkpoint": {"every": 2},
            "stop": {"max_steps": STEPS},
            **sections,
        },
    )


@pytest.fixture(scope="module")
def config(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_of(bench, tmp_path_factory.mktemp("branches") / "vine.yaml")


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    assert oat("train", config) == 0
    return config.with_suffix("")


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def groups_of(run: Path, step: int) -> list[list[Trajectory]]:
    store = Store(run / "ledger.sqlite")
    found = [list(group.trajectories) for group in store.groups("train", step, 0)]
    store.close()
    return found


def size_of(row: Trajectory, end: int) -> int:
    """Return the number of tokens with which the first `end` characters of a text are complete. A token has
    one character; padding and the two ids that end a response have none."""
    return int(np.flatnonzero(row.completion > 2)[end - 1]) + 1


def test_each_state_of_a_group_has_its_branches_once(run: Path) -> None:
    """States are where the delimiter, one token here, is followed by more text. A branch begins with the
    tokens of a response, of which none is trained, and is as short as any response."""
    num_states = 0
    for step in range(STEPS):
        for rows in groups_of(run, step):
            responses, branches = rows[:SAMPLES], rows[SAMPLES:]
            wanted = {
                row.completion[: size_of(row, end)].tobytes()
                for row in responses
                for end in delimiter_ends(row.text, "3")[: MOST_STEPS - 1]
            }
            found = Counter(row.completion[: row.branched_at].tobytes() for row in branches)
            assert found == dict.fromkeys(wanted, BRANCHES)
            assert not any(row.branched_at for row in responses)
            for row in branches:
                begun = len(row.segments[0].ids) + row.branched_at
                assert np.flatnonzero(row.trained).tolist() == [*range(begun, len(row.ids))]
                assert (row.recorded("versions") == step).all()
                assert row.branched_at < len(row.completion) <= TOKENS
                assert len(row.text) == (row.completion > 2).sum()
                assert row.finish_reason == ("stop" if row.completion[-1] in (1, 2) else "length")
            num_states += len(wanted)
    assert num_states > 10


def test_branches_differ_from_each_other_and_from_their_response(run: Path) -> None:
    same = [
        np.array_equal(one.completion, two.completion)
        for step in range(STEPS)
        for rows in groups_of(run, step)
        for one, two in zip(rows[SAMPLES::2], rows[SAMPLES + 1 :: 2], strict=True)
    ]
    assert np.mean(same) < 0.2


def test_branches_are_drawn_with_the_recorded_probabilities(run: Path, bench: Bench) -> None:
    """Before the first update, the weights are those of the model's folder."""
    lm = load_lm(str(bench.folder / "model"))
    branches = [row for rows in groups_of(run, 0) for row in rows if row.branched_at]
    engine = TorchEngine({"sampler": lm}, num_tokens=16, stop_ids=[1], decode=str)
    for row, logps in zip(branches, engine.logps([row.ids for row in branches], "sampler"), strict=True):
        of_response = logps[len(row.segments[0].ids) - 1 :]
        assert row.segments[1].raw_logps == pytest.approx(of_response, abs=1e-4)


def test_every_branch_is_scored_and_paid_and_none_is_trained(run: Path) -> None:
    queries, store = 0, Store(run / "ledger.sqlite")
    for step, row in enumerate(rows_of(run)[1:]):
        groups = groups_of(run, step)
        answers = [
            (intent.question, answer) for intent, answer, _ in store.answers(store.taken("train", step))
        ]
        assert [len(question.candidates) for question, _ in answers] == [len(rows) for rows in groups]
        queries += sum(answer.queries for _, answer in answers)
        scored = [[mark == "ok" for mark in answer.marks] for _, answer in answers]
        assert row["oracle/queries"] == queries
        assert row["rows/trained"] == sum(sum(each[:SAMPLES]) for each in scored)
        assert row["vine/branches"] == sum(sum(each[SAMPLES:]) for each in scored)
        assert 1 < row["vine/steps"] <= MOST_STEPS
        lengths = [len(each.completion) for rows in groups for each in rows[:SAMPLES]]
        assert row["response/tokens"] == sum(lengths)
        assert row["optim/grad_norm"] > 0
    store.close()


def test_only_the_step_that_earns_the_reward_gets_credit(bench: Bench, tmp_path: Path) -> None:
    """The score is that of the text before the first delimiter. So the value of a state after it is the score
    itself, and later steps have no advantage. With one number for each response they would."""
    config = config_of(
        bench, tmp_path / "first.yaml", oracle={"name": f"{HERE}/rewards.py:of_first"}, stop={"max_steps": 2}
    )
    assert oat("train", config) == 0
    store = Store(config.with_suffix("") / "ledger.sqlite")
    items = [
        Item(store.groups("train", step, 0)[intent.member], intent.question, answer, label)
        for step in range(2)
        for intent, answer, label in store.answers(store.taken("train", step))
    ]
    store.close()
    _, found, _ = earned_by_steps(scored_rows(Feedback(0, tuple(items), 0)))
    assert found.values_E is not None
    advantages_E = step_advantages(found.rewards_E, found.values_E, found.row_of_E)
    is_later_E = torch.cat([torch.tensor([False]), found.row_of_E[1:] == found.row_of_E[:-1]])
    assert is_later_E.sum() > 5
    assert advantages_E[is_later_E].abs().max() < 1e-6
    assert advantages_E[~is_later_E].abs().mean() > 0.1


@pytest.mark.slow(
    instead="tests/faults/test_kill.py; tests/faults/test_state.py walks over episodes of several turns",
    seconds=7.1,
)
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(lambda: kill_at(Actor, "branch", 2), id="before the branches"),
        pytest.param(lambda: kill_at(TorchEngine, "generate", 4, after=True), id="while they are sampled"),
        pytest.param(lambda: kill_at(Actor, "branch", 2, after=True), id="branches sampled, not on disk"),
        pytest.param(lambda: kill_at(Store, "add_round", 2, after=True), id="inside their transaction"),
        pytest.param(lambda: kill_at(Store, "add_take", 2), id="before a take"),
    ],
)
def test_a_kill_changes_nothing(config: Path, run: Path, tmp_path: Path, arm: Callable[[], None]) -> None:
    assert_a_kill_changes_nothing(config, run, tmp_path, arm)


@pytest.mark.slow(
    instead="tests/golden and tests/faults/test_state.py send runs through the wire encoding", seconds=1.1
)
def test_over_the_wire(config: Path, run: Path, tmp_path: Path) -> None:
    wire = ("--compute.serialise", "true")
    assert_a_kill_changes_nothing(config, run, tmp_path, lambda: kill_at(Actor, "branch", 2), *wire)


def test_a_replay_asks_nobody(
    config: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has the branches, so a replay samples none."""
    (other := tmp_path / "vine").mkdir()
    for name in ("config.yaml", "ledger.sqlite"):
        shutil.copy(run / name, other)
    shutil.copytree(run / "ledger.trajectories", other / "ledger.trajectories")
    for owner, name in ((Ledger, "ask"), (Actor, "branch")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("a replay asks nobody"))
    assert oat("train", config, "--run_dir", other) == 0
    assert digest_run(other) == digest_run(run)


def test_kept_sets_and_a_correction_of_truncated_sampling(bench: Bench, tmp_path: Path) -> None:
    sampling = {"max_new_tokens": TOKENS, "top_k": 5, "temperature": 0.9}
    config = config_of(
        bench,
        tmp_path / "kept.yaml",
        sampling=sampling,
        algorithm={"vine": {**VINE, "delimiter": "b"}},
        stop={"max_steps": 1},
    )
    assert oat("train", config) == 0
    branches = [row for rows in groups_of(config.with_suffix(""), 0) for row in rows if row.branched_at]
    for row in branches:
        response = row.segments[1]
        assert response.kept is not None
        assert len(response.kept.offsets) == len(response.ids) + 1
        for place, id in enumerate(response.ids):
            kept = response.kept.ids[response.kept.offsets[place] : response.kept.offsets[place + 1]]
            assert id in kept
            assert len(kept) == 5
    assert len(branches) > 3


def test_groups_whose_steps_teach_nothing_are_replaced(bench: Bench, tmp_path: Path) -> None:
    config = config_of(
        bench,
        tmp_path / "refilled.yaml",
        oracle={"name": f"{HERE}/rewards.py:coarse"},
        algorithm={"samples": 2},
        sampling={"max_new_tokens": 4, "refill_rounds": 9},
        stop={"max_steps": 2},
    )
    assert oat("train", config) == 0
    rows = rows_of(config.with_suffix(""))[1:]
    assert [row["rows/trained"] for row in rows] == [2 * PROMPTS] * 2
    assert max(row["refill/thrown_away"] for row in rows) > 0


def test_online_evaluation_leaves_branches_out(bench: Bench, tmp_path: Path) -> None:
    evaluation = {"path": str(bench.folder / "train.jsonl"), "every": 1, "max_prompts": 2, "online": True}
    config = config_of(bench, tmp_path / "online.yaml", evaluation=evaluation, stop={"max_steps": 1})
    assert oat("train", config) == 0
    store = Store(config.with_suffix("") / "ledger.sqlite")
    sizes = store.db.execute("SELECT count(*) FROM questions WHERE purpose = 'eval'").fetchall()
    store.close()
    assert sizes
    row = rows_of(config.with_suffix(""))[1]
    assert "eval/online" in row


def test_check_states_the_most_queries(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(bench, tmp_path / "check.yaml")
    said, _ = checked(capsys, config)
    assert (said["prompts a step"], said["responses a step"], said["longest response"]) == (6, 24, 12)
    assert (said["questions a step"], said["queries a step, most"]) == (6, 6 * MOST)
    assert (said["branches a step of a response"], said["steps of a response, most"]) == (2, 3)
    assert said["branches a step, most"] == 6 * MOST - 24
    assert (said["responses left"], said["queries left, most"]) == (72, 18 * MOST)


REFUSED = {
    "an environment": (
        {"sampling": {"max_new_tokens": 8, "environment": f"{HERE}/guessing.py:Guessing"}},
        "algorithm.advantage is 'vine': vine samples again from within responses, which episodes with an",
    ),
    "a budget below a question": (
        {"stop": {"max_queries": MOST - 1}},
        f"stop.max_queries is {MOST - 1}, and one question can cost {MOST}",
    ),
    "a budget below a step": (
        {"stop": {"max_queries": PROMPTS * MOST - 1}},
        f"and one step can cost {PROMPTS * MOST}, with 6 questions in 1 round; raise it, or lower "
        "algorithm.samples or algorithm.vine.branches or algorithm.vine.most_steps",
    ),
    "an explorer": (
        {"explorer": {"name": "oat.explore.base:NoExploration"}},
        "algorithm.advantage vine needs the scores of all responses",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_runs_where_it_makes_no_sense_are_refused(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    sections, message = REFUSED[name]
    assert oat("check", config_of(bench, tmp_path / "wrong.yaml", **sections)) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_recorded_responses_are_refused(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "a": "2", "b": "3", "s": [1, 0]}\n')
    prompts = {"path": str(data), "responses": ["a", "b"], "score_key": "s"}
    config = config_of(bench, tmp_path / "offline.yaml", prompts=prompts, oracle={"name": "recorded"})
    assert oat("check", config, "--algorithm.samples", "2") != 0
    assert "which recorded responses do not allow" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("a;b;c", [2, 4]),
        ("a;b;", [2]),
        (";a;b", [3]),
        ("a; ;b", [4]),
        (";;a", []),
        ("a", []),
        ("", []),
        ("a; ", []),
    ],
)
def test_no_step_is_blank(text: str, ends: list[int]) -> None:
    assert delimiter_ends(text, ";") == ends


def test_a_stop_string_may_begin_before_the_branch(bench: Bench) -> None:
    lm = load_lm(str(bench.folder / "model"))
    engine = TorchEngine(
        {"sampler": lm},
        num_tokens=16,
        stop_ids=[1],
        decode=lambda ids, after: "".join(chr(97 + id) for id in ids),
    )
    prompt = np.array([2, 3, 4], dtype=np.int32)
    (whole,) = engine.generate([Request(prompt, Sampling(4, 0.0), key=0)], "sampler")
    first, second = whole.ids[:2]
    stop = chr(97 + first) + chr(97 + second)
    start = np.append(prompt, first).astype(np.int32)
    sampling = Sampling(3, 0.0, stop=(stop,))
    for begun, reason in ((0, "length"), (1, "stop"), (2, "stop")):
        (found,) = engine.generate([Request(start, sampling, key=0, begun=begun)], "sampler")
        assert (found.finish_reason, len(found.ids)) == (reason, 1 if reason == "stop" else 3)


def test_a_token_with_more_than_a_delimiter_belongs_to_the_step_before(tmp_path: Path) -> None:
    make_model(tmp_path, tokens=[*"ab1", "1a", "b1b1"])
    renderer = Renderer(AutoTokenizer.from_pretrained(tmp_path), template=None)
    ids = np.array([2, 5, 3, 6, 4, 2, 1], dtype=np.int32)
    row = Trajectory(
        "sampler", (Segment("context", ids[:1]), Segment("model", ids)), "stop", renderer.text(ids)
    )
    assert row.text == "a1abb1b11a"
    for most, sizes in ((8, [2, 4, 5]), (3, [2, 4]), (2, [2])):
        assert step_sizes(row, Branching(1, "1", most), renderer) == sizes
