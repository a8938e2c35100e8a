"""`credit`: rewards of steps and of turns arrive at their tokens, and estimators compare them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scored_groups import feedback
from shaped import CUT, changed, made, prepared, with_rows

from oat.types import Answer, Feedback, Item, Segment

STEPS = (((1, 1.0),), ((2, 1.0), (4, 3.0)), ((1, -1.0),))
"""Rewards of steps: of the first response at its only token; of the second at its tokens 2 and 4; of the
third at its first token, with the rest of its score, 2, at its last."""


def test_rewards_of_steps_arrive_at_their_tokens() -> None:
    given = changed(feedback((1.0, 4.0, 1.0)), steps=STEPS, step_unit="tokens")
    found = prepared(made("rloo", credit="steps"), given).columns["advantages_K"].tolist()
    assert found == [1, 4, 4, 3, 3, 1, 2]
    as_one = prepared(made("rloo", credit="response"), given).columns["advantages_N"].tolist()
    assert as_one == [1, 4, 1]
    halved = prepared(made("rloo", credit="steps", gamma=0.5), given).columns["advantages_K"].tolist()
    assert halved == [1, 0.5 + 3 / 8, 1 + 3 / 4, 1.5, 3, -1 + 1, 2]


def test_steps_are_compared_with_the_steps_of_their_group() -> None:
    """DeepSeekMath, Section 4.1.3: rewards 1; 1, 3; -1, 2 have the mean 1.2; a token's advantage is the sum
    of those of its own step and the later ones."""
    given = changed(feedback((1.0, 4.0, 1.0)), steps=STEPS, step_unit="tokens")
    found = prepared(made("rloo", advantage="group_mean", credit="steps"), given).columns["advantages_K"]
    assert found.tolist() == pytest.approx([-0.2, 1.6, 1.6, 1.8, 1.8, -1.4, 0.8], abs=1e-6)


def test_leave_one_out_leaves_the_steps_of_the_response_out() -> None:
    """Rewards 1; 1, 3; -1, 2: the first response is compared with the mean 1.25 of the others' four, the
    second with 2/3, the third with 5/3; by `leave_one_out_max` with 3, 2 and 3."""
    given = changed(feedback((1.0, 4.0, 1.0)), steps=STEPS, step_unit="tokens")
    for name, base in (("leave_one_out", (1.25, 2 / 3, 5 / 3)), ("leave_one_out_max", (3.0, 2.0, 3.0))):
        own = [(1 - base[0],), (1 - base[1], 3 - base[1]), (-1 - base[2], 2 - base[2])]
        expected = [own[0][0], *[sum(own[1])] * 2, *[own[1][1]] * 2, sum(own[2]), own[2][1]]
        objective = made("rloo", advantage=name, credit="steps")
        found = prepared(objective, given).columns["advantages_K"].tolist()
        assert found == pytest.approx(expected, abs=1e-6), name


@pytest.mark.parametrize(
    "name",
    ["group_mean", "group_norm", "batch_norm", "leave_one_out", "leave_one_out_max", "length_weighted"],
)
def test_a_response_alone_in_its_group_is_not_compared_with_its_own_steps(name: str) -> None:
    steps = (STEPS[1], (), ())
    given = changed(
        feedback((4.0, 0.0, 0.0)), steps=steps, step_unit="tokens", marks=("ok", "failed", "failed")
    )
    long = with_rows(given, *[{"segments": CUT.items[0].group.trajectories[1].segments}] * 3)
    batch = prepared(made("rloo", advantage=name, credit="steps"), long)
    assert batch.columns["advantages_K"].tolist() == [0, 0, 0, 0]


def test_an_estimator_of_a_user_may_compare_the_steps_of_one_response(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def doubled(given):\n    return 2 * given.rewards_N\n")
    given = changed(feedback((4.0,)), steps=(((1, 1.0), (2, 3.0)),), step_unit="tokens")
    long = with_rows(given, {"segments": CUT.items[0].group.trajectories[1].segments})
    config = {"advantage": f"{file}:doubled", "credit": "steps", "samples": 1}
    assert prepared(made("rloo", **config), long).columns["advantages_K"].tolist() == [8, 6, 0, 0]


def test_a_response_that_goes_on_after_its_last_step_earns_nothing_there() -> None:
    """The steps add up to the scores. So the tokens after the last steps, such as an end token, have no
    reward, and estimators do not compare a 0 with the rewards of steps: the mean of 1, 1, 3 and -1 is 1."""
    steps = (((1, 1.0),), ((2, 1.0), (3, 3.0)), ((1, -1.0),))
    given = changed(feedback((1.0, 4.0, -1.0)), steps=steps, step_unit="tokens")
    found = prepared(made("rloo", advantage="group_mean", credit="steps"), given).columns["advantages_K"]
    assert found.tolist() == pytest.approx([0, 2, 2, 2, 0, -2, 0], abs=1e-6)
    running = made("rloo", credit="steps", rewards={"normalise": "running"})
    prepared(running, given)
    assert running.state["moments"]["total"][:2] == [4, 1]
    cut = with_rows(given, {}, {"finish_reason": "length"}, {})
    section = {"credit": "steps", "rewards": {"missing_end_penalty": 0.5}}
    assert prepared(made("rloo", **section), cut).columns["advantages_K"].tolist() == [
        1,
        3.5,
        3.5,
        2.5,
        -0.5,
        -1,
        0,
    ]


def two_turns() -> Feedback:
    """Return feedback about one episode: a turn of 2 tokens with the reward 1, a context of 3, a turn of 2
    tokens with the reward 3, of which the first is not trained; the score is 5."""
    (item,) = feedback((5.0,)).items
    (row,) = item.group.trajectories

    def turn(mask: list[bool], reward: float) -> Segment:
        zeros = np.zeros(len(mask), np.float32)
        ids, versions = np.arange(len(mask), dtype=np.int32), np.zeros(len(mask), np.int32)
        arrays = {"mask": np.array(mask), "versions": versions, "raw_logps": zeros, "sampled_logps": zeros}
        return Segment("model", ids, **arrays, reward=reward)

    said = Segment("context", np.arange(3, dtype=np.int32))
    segments = (row.segments[0], turn([True, True], 1.0), said, turn([False, True], 3.0))
    episode = replace(item.group, trajectories=(replace(row, segments=segments, reward=4.0),))
    return Feedback(0, (Item(episode, item.question, item.answer, None),), queries=1)


def test_rewards_of_turns_and_a_discount_over_turns() -> None:
    """The score exceeds the turns' rewards by 1, which is earned at the end: 1 at token 1, 4 at token 2."""
    given = two_turns()
    assert prepared(made("rloo", credit="turns"), given).columns["advantages_K"].tolist() == [5, 5, 4]
    found = prepared(made("rloo", credit="turns", turn_gamma=0.5), given).columns["advantages_K"].tolist()
    assert found == [3, 3, 4]
    both = made("rloo", credit="turns", turn_gamma=0.5, gamma=0.5)
    assert prepared(both, given).columns["advantages_K"].tolist() == [0.5 * 2, 1 + 0.25 * 4, 4]


def test_an_answer_without_steps_is_one_number() -> None:
    assert Answer.__dataclass_fields__["steps"].default == ()
    found = prepared(made("rloo", credit="steps")).columns["advantages_K"].tolist()
    assert found == [1, 4, 4, 4, 4, 1, 1]
