"""The rules of alarms, computed by hand: bounds, patience, the target of a roll back, gold oracle, and
state."""

import json
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from oat.config.alarm_settings import AlarmsConfig
from oat.control.alarms import LENGTH, METRICS, Alarm, Alarms, alarms_of


def fed(alarms: Alarms, metric: str, values: Sequence[float | None], begin: int = 0) -> list[int]:
    """Return the steps after which a rule was raised. None stands for a step without the metric."""
    raised = []
    for step, value in enumerate(values, begin + 1):
        before = alarms.raised
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alarms.check(step, {} if value is None else {metric: value}, is_saved=False)
        raised += [step] * (alarms.raised - before)
    return raised


def alone(
    below: float = -math.inf,
    above: float = math.inf,
    *,
    metric: str = "m",
    patience: int = 1,
    action: str = "warn",
    most: int = 3,
) -> Alarms:
    return Alarms({"kl": Alarm(metric, patience, action, below, above)}, most)


class TestBounds:
    def test_the_bounds_themselves_are_within(self) -> None:
        assert fed(alone(0.5, 2.0), "m", [0.5, 2.0, 1.0]) == []
        assert fed(alone(0.5, 2.0), "m", [math.nextafter(0.5, 0)]) == [1]
        assert fed(alone(0.5, 2.0), "m", [math.nextafter(2.0, 3)]) == [1]

    def test_patience_counts_steps_on_end(self) -> None:
        assert fed(alone(above=1.0, patience=3), "m", [2, 2, 1, 2, 2, 2, 2, 2]) == [6]

    def test_an_alarm_is_raised_once_until_it_ceases(self) -> None:
        assert fed(alone(above=1.0, patience=2), "m", [2, 2, 2, 2, 0, 2, 2, 2]) == [2, 7]

    def test_a_step_without_the_metric_is_passed_over(self) -> None:
        assert fed(alone(above=1.0, patience=2), "m", [2, None, None, 2, 1, None, 2]) == [4]

    def test_what_is_not_a_number_is_the_guard_s_matter(self) -> None:
        assert fed(alone(0.0, 1.0), "m", [math.nan, math.nan]) == []
        assert fed(alone(0.0, 1.0), "m", [math.inf]) == [1]

    def test_a_length_is_held_against_its_first_three_steps(self) -> None:
        rule: dict[str, Any] = {"below": 0.5, "above": 2.0, "metric": LENGTH}
        assert fed(alone(**rule), LENGTH, [1, 1000, 999]) == []
        assert fed(alone(**rule), LENGTH, [5, 10, 15, 20, 5, 10, 20.1]) == [7]
        assert fed(alone(**rule), LENGTH, [5, 10, 15, 4.9]) == [4]
        assert fed(alone(**rule), LENGTH, [5, None, 10, None, 15, 21]) == [6]

    def test_two_rules_are_two_alarms(self) -> None:
        alarms = Alarms(
            {"kl": Alarm("m", 1, "warn", -math.inf, 1.0), "entropy": Alarm("m", 2, "warn", -math.inf, 1.0)}, 3
        )
        assert fed(alarms, "m", [2, 2, 2]) == [1, 2]

    def test_rules_that_are_off_or_have_no_metric_are_not_watched(self) -> None:
        every = {metric for metrics in METRICS.values() for metric in metrics}
        assert (
            alarms_of(AlarmsConfig(), every).keys() | {"gold"}
            == METRICS.keys()
            == vars(AlarmsConfig()).keys() - {"max_roll_backs"}
        )
        assert alarms_of(AlarmsConfig(), {"policy/entropy", "answers/tied_frac"}).keys() == {
            "entropy",
            "spread",
        }
        assert alarms_of(AlarmsConfig(), {"answers/tied_frac"})["spread"] == Alarm(
            "answers/tied_frac", 5, "warn", -math.inf, 0.99
        )
        assert (
            alarms_of(AlarmsConfig(spread=type(AlarmsConfig().spread)(action="off")), {"answers/tied_frac"})
            == {}
        )


class TestRollingBack:
    def test_a_checkpoint_is_good_once_the_step_after_it_was(self) -> None:
        """A checkpoint becomes the target of a roll back when the step after it is within the alarm's bound.
        Checkpoints are saved after 0, 2, 4, ... steps, and step n reports on the state after n - 1 steps."""
        alarms = alone(above=1.0, patience=2, action="roll_back")
        assert alarms.begin(0)
        assert not alarms.begin(0)
        found = []
        for step, value in enumerate([0, 0, 0, 0, 2, 0, 0, 2], 1):
            assert alarms.check(step, {"m": value}, is_saved=(step - 1) % 2 == 0) is None
            found.append(alarms.back)
        assert found == [0, 0, 2, 2, 2, 2, 6, 6]
        with pytest.warns(UserWarning, match="back to the state after 6"):
            assert alarms.check(9, {"m": 2}, is_saved=True) == 6
        assert alarms.counts == {"kl": 0}

    def test_the_last_one_ends_the_run(self) -> None:
        alarms = alone(above=1.0, action="roll_back", most=2)
        alarms.begin(0)
        with pytest.warns(UserWarning, match="roll back 2 of 2"):
            assert [alarms.check(step, {"m": 2}, is_saved=False) for step in (1, 2)] == [0, 0]
        assert alarms.ended is None
        assert alarms.check(3, {"m": 2}, is_saved=False) is None
        assert alarms.ended is not None
        assert "after 3 steps, and the run was rolled back 2 times" in alarms.ended

    def test_who_ends_the_run_does_not_roll_it_back(self) -> None:
        rules = {
            "kl": Alarm("m", 1, "roll_back", -math.inf, 1.0),
            "ratio": Alarm("m", 1, "stop", -math.inf, 1.0),
        }
        alarms = Alarms(rules, 3)
        alarms.begin(0)
        with pytest.warns(UserWarning, match="alarm kl"):
            assert alarms.check(1, {"m": 2}, is_saved=True) is None
        assert alarms.ended is not None
        assert alarms.roll_backs == 0

    def test_without_such_a_rule_nothing_has_to_be_kept(self) -> None:
        alarms = alone(above=1.0, action="stop")
        assert not alarms.begin(0)
        alarms.check(1, {"m": 0}, is_saved=True)
        assert alarms.back is None


class TestGold:
    """An evaluation of the state after a step is read together with the next step, and compared with the best
    evaluation so far."""

    RULE = "eval/gold_sampled", 2, "warn", -0.5, math.inf

    def heard(self, alarms: Alarms, values: Sequence[float | None], saved: Sequence[bool] = ()) -> list[int]:
        """Feed the evaluations after 0, 1, 2, ... steps; None stands for no evaluation. Return the target of
        a roll back after each step."""
        found = []
        for step, value in enumerate(values):
            if value is not None:
                alarms.note_evaluation({"eval/gold_sampled": value, "eval/sampled": 9.0})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                alarms.check(step + 1, {}, is_saved=bool(saved) and saved[step])
            found.append(alarms.back if alarms.back is not None else -1)
        return found

    def test_it_is_held_against_its_best(self) -> None:
        for values, raised in [
            ([0, 1, 0.6, 0.5], 0),
            ([0, 1, 0.4, 0.6, 0.4], 0),
            ([0, 1, 0.4, None, None, 0.4], 1),
            ([0, 1, 0.4, 3, 2.4, 2.4], 1),
        ]:
            alarms = Alarms({"gold": Alarm(*self.RULE)}, 3)
            self.heard(alarms, values)
            assert alarms.raised == raised, values

    def test_only_what_it_has_seen_is_proven(self) -> None:
        """A run rolls back only to a checkpoint that an evaluation has found good. Every step has a
        checkpoint, and every second one is evaluated."""
        alarms = Alarms({"gold": Alarm("eval/gold_sampled", 2, "roll_back", -0.5, math.inf)}, 3)
        alarms.begin(0)
        assert self.heard(alarms, [0, None, 1, None, 0.4], [True] * 5) == [0, 0, 2, 2, 2]
        alarms.note_evaluation({"eval/gold_sampled": 0.3})
        with pytest.warns(
            UserWarning, match=r"is 0.3, below 0.5 \(0.5 under its best, 1\), for 2 evaluations on end"
        ):
            assert alarms.check(6, {}, is_saved=True) == 2

    def test_a_run_that_goes_on_has_heard_it(self) -> None:
        values = [0.0, 1.0, 0.4, 0.3]
        for cut in range(1, len(values) + 1):
            first, second = Alarms({"gold": Alarm(*self.RULE)}, 3), Alarms({"gold": Alarm(*self.RULE)}, 3)
            self.heard(first, values[: cut - 1])
            first.note_evaluation({"eval/gold_sampled": values[cut - 1]})
            second.load_state(json.loads(json.dumps(first.state)))
            self.heard(second, [None, *values[cut:]])
            assert (second.raised, second.best) == (1, 1.0)

    def test_a_state_of_an_earlier_version_lacks_it(self) -> None:
        alarms = Alarms({"gold": Alarm(*self.RULE)}, 3)
        alarms.load_state(
            {name: value for name, value in alarms.state.items() if name not in ("best", "heard")}
        )
        assert (alarms.best, alarms.heard) == (None, {})


class TestState:
    def test_a_run_that_goes_on_counts_on(self) -> None:
        values = [5, 10, 15, 21, 21, 5, 21, 21, 21]
        settings: dict[str, Any] = {"above": 2.0, "metric": LENGTH, "patience": 2}
        for cut in range(len(values)):
            first, second = alone(**settings), alone(**settings)
            raised = fed(first, LENGTH, values[:cut])
            second.load_state(json.loads(json.dumps(first.state)))
            assert raised + fed(second, LENGTH, values[cut:], begin=cut) == [5, 8]
            assert second.raised == 2

    def test_a_changed_rule_starts_anew_and_others_do_not(self) -> None:
        same = Alarm("m", 3, "warn", 0.0, 1.0)
        old = Alarm("n", 3, "stop", 0.0, 1.0)
        new = Alarm("n", 3, "stop", 0.0, 1.5)
        before, after = Alarms({"kl": same, "ratio": old}, 3), Alarms({"kl": same, "ratio": new}, 3)
        for step in (1, 2):
            before.check(step, {"m": 2, "n": 2}, is_saved=False)
        after.load_state(before.state)
        assert after.counts == {"kl": 2, "ratio": 0}

    @pytest.mark.parametrize(
        ("now", "is_over"),
        [
            ({}, True),
            ({"above": 1.5}, False),
            ({"patience": 2}, False),
            ({"action": "warn"}, False),
            ({"most": 4}, False),
        ],
        ids=str,
    )
    def test_an_end_stays_until_its_rule_is_changed(self, now: dict[str, Any], is_over: bool) -> None:
        settings: dict[str, Any] = {"above": 1.0, "action": "roll_back", "most": 1}
        alarms = alone(**settings)
        alarms.begin(0)
        with pytest.warns(UserWarning, match="roll back 1 of 1"):
            alarms.check(1, {"m": 2}, is_saved=False)
        alarms.check(2, {"m": 2}, is_saved=False)
        again = alone(**{**settings, **now})
        again.load_state(alarms.state)
        assert (again.ended == alarms.ended is not None) == is_over
        assert (again.ended is not None) == is_over
        assert again.counts == {"kl": 1 if is_over else 0}
