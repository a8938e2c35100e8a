"""The lines that a run prints last. If the run learned nothing, they say so and name the likely cause;
otherwise they say that it finished. If a run has learned nothing after its first two steps (`FIRST_STEPS`)
and goes on, a warning says so.

The outcome is read from the rows of metrics, so it does not depend on kills. If rows are damaged or missing,
the outcome is unknown. Then the lines say that the run finished.
"""

from collections.abc import Collection, Mapping, Sequence

from oat.algorithms.base import Objective
from oat.build.about import About
from oat.build.fork import begins_after
from oat.control.silence import CAUSES, MISSING, why
from oat.errors import warn
from oat.files import seen
from oat.loop import Run
from oat.reports.progress import way_on
from oat.rundir.rows import sound_rows

FIRST_STEPS = 2
"""The number of steps after which a run warns if it has learned nothing."""
SPREAD = "reward/zero_spread_frac"
TIED = "answers/tied_frac"
MARKED_BIAS = 0.25
"""The smallest position bias with which a judge is said to choose by the position of a response instead of
its text. The largest possible bias is 0.5."""

Rows = Sequence[Mapping[str, float]]


class Outcome:
    """The outcome of a run. An instance watches the steps of one process.

    Args:
        about: settings of the run.

    Attributes:
        begins: the step at which the run began: 0, or for a fork the step of its first checkpoint.
        is_idle: True as long as this process has reported no step.
    """

    def __init__(self, run: Run, about: About):
        self.run = run
        self.about = about
        self.directory = seen(about.run_dir)
        self.begins = begins_after(self.directory)
        self.is_idle = True

    def note_step(self, step: int) -> None:
        """Note that a step was reported. After the first `FIRST_STEPS` steps of the run, warn if the run goes
        on and has learned nothing."""
        self.is_idle = False
        if (
            step == self.begins + FIRST_STEPS
            and step != self.run.stop.last
            and (cause := self.nothing_learned()) is not None
        ):
            warn(f"after {step} steps: the run has learned nothing yet: {cause}")

    def lines(self, reason: str, cause: str | None, way_to_export: str = "") -> list[str]:
        """Return the last lines of a run.

        Args:
            reason: the reason why the run ended.
            cause: the likely cause if the run learned nothing (`nothing_learned`); otherwise None.
            way_to_export: text that is added to the first line if `cause` is None.
        """
        place = f"the run lies in {self.about.run_dir}"
        idle = [way_on(self.run, self.about, reason)] if self.is_idle else []
        if cause is None:
            return [f"finished, {reason}; {place}{way_to_export}", *idle]
        return [*idle, f"the run learned nothing: {cause}. It ended, since {reason}; {place}"]

    def nothing_learned(self) -> str | None:
        """Return the likely cause if the run has learned nothing so far. Return None in these cases:

        * The run learned something.
        * The run made no step, because none was left to make.
        * The run made no step, and this process reported no row, not even row 0.
        * Rows are damaged or missing.
        """
        file = self.directory / "metrics.jsonl"
        rows, damage = sound_rows(file.read_bytes() if file.exists() else b"")
        own = [row for _, row in rows if row["step"] > self.begins]
        last = own[-1]["step"] if own else self.begins
        is_none_due = not own and (self.is_idle or self.run.stop.steps_done(self.begins) is not None)
        if is_none_due or damage or any(step > last for step in self.run.checkpoints.steps):
            return None
        first, last = self.run.objectives[0], self.run.objectives[-1]
        return likely_cause(own, first if first.learns else last, self.about)


def likely_cause(rows: Rows, objective: Objective, about: About) -> str | None:
    """Return the reason why nothing was learned in the steps of these rows; None if something was learned.

    A run learns nothing in each of these cases:

    * It made no optimiser step.
    * The gradient or the learning rate was 0 in all optimiser steps.
    * The rewards were equal within every group, and the algorithm is one of this package that compares the
      rewards of a group. Because of the KL term, the gradient may then differ from 0.
    """
    if not rows:
        return "it made no step"
    norms, rates = (_names(objective.wants, end, rows) for end in ("grad_norm", "learning_rate"))
    if not _any(rows, norms):
        return (
            _cause_of_no_step(rows, objective, about)
            if not any(name in row for name in norms for row in rows)
            else _cause_of_no_gradient(rows, objective)
        )
    if not _any(rows, rates):
        return f"the learning rate was 0 in every step ({about.why_no_rate})"
    is_of_groups = about.is_ours and SPREAD in objective.watched
    return _equal_rewards(rows) if is_of_groups and _is_flat(rows) else None


def _names(trained: Collection[str], end: str, rows: Rows) -> list[str]:
    """Return the names of a metric of the learner in `metrics.jsonl`. If a policy or a reward model is
    trained, this is one name, such as `optim/grad_norm`. Otherwise it is one name for each trained model. In
    a run that ended while only its critic learned, it is the critic's name.

    Args:
        end: the end of the names, such as `grad_norm`.
    """
    main, of_critic = f"optim/{end}", f"optim/critic_{end}"
    if {"policy", "reward"} & {*trained}:
        has_critic_only = any(of_critic in row for row in rows) and not any(main in row for row in rows)
        return [of_critic if has_critic_only else main]
    return [f"optim/{name}_{end}" for name in trained]


def _any(rows: Rows, names: Collection[str]) -> bool:
    """Return True if one of these metrics differs from 0 in at least one row."""
    return any(row.get(name, 0.0) != 0.0 for name in names for row in rows)


def _is_flat(rows: Rows) -> bool:
    """Return True if the rewards were equal within every group, in every step that had rewards. Return False
    if no step had rewards."""
    known = [row[SPREAD] for row in rows if SPREAD in row]
    return bool(known) and min(known) == 1.0


def _equal_rewards(rows: Rows) -> str:
    means = [row["reward/mean"] for row in rows if "reward/mean" in row]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    value = f"all of them {low:g}" if low == high else f"their mean from {low:.4g} to {high:.4g}"
    look = "see in samples.jsonl whether every prompt is solved, or hopeless, or the reward is a constant"
    return f"the rewards of every group were equal in every step ({value}); {look}"


def _cause_of_no_gradient(rows: Rows, objective: Objective) -> str:
    if _is_flat(rows) and SPREAD in objective.watched:
        return _equal_rewards(rows)
    if _has_only_empty(rows):
        return "the gradient was 0 in every step, since every response was empty; look at samples.jsonl"
    return (
        "the gradient was 0 in every step; look at loss/total and rows/trained in metrics.jsonl, and at "
        "what the loss leaves out"
    )


def _cause_of_no_step(rows: Rows, objective: Objective, about: About) -> str:
    """Return the likely reason why no optimiser step was made. Causes are tested in a fixed order, and the
    first that applies is returned."""
    none = "no optimiser step was made"
    if (left_out := _cause_of_steps_left_out(rows, objective)) is not None:
        return f"{left_out}; {none}"
    if not any(name in row for name in (MISSING, TIED) for row in rows) or _mean(rows, MISSING) >= 0.5:
        shares = {mark: _mean(rows, metric) for mark, metric in CAUSES.items()}
        most = max(shares, key=shares.__getitem__)
        is_mute = most == "unpaid" and not _any(rows, ["oracle/queries"])
        found = (
            "nobody was asked"
            if is_mute
            else f"of the questions, {about.oracle} left {shares[most]:.0%} without a value"
        )
        if shares[most]:
            return f"{none}; {found}: {why(most, about.oracle)}"
    if (own := objective.why_no_rows(rows)) is not None:
        return f"{none}: {own}"
    if _any(rows, ["pairs/empty_frac"]) and _mean(rows, "pairs/empty_frac") >= _mean(rows, TIED):
        return f"{none}: in every pair a response was empty; look at samples.jsonl"
    if _mean(rows, TIED) >= 0.5:
        return f"{none}: {_equal_rewards(rows) if _is_flat(rows) else _cause_of_ties(rows)}"
    if _is_flat(rows) and SPREAD in objective.watched:
        return f"{none}: {_equal_rewards(rows)}"
    if _any(rows, ["answers/expired"]):
        return f"{none}: answers came too late to learn from (oracle.max_answer_age)"
    if _has_only_empty(rows):
        return f"{none}: every response was empty; look at samples.jsonl"
    return (
        f"{none}: no step had a row to learn from; look at samples.jsonl, and at what the algorithm "
        "leaves out"
    )


def _cause_of_steps_left_out(rows: Rows, objective: Objective) -> str | None:
    if _any(rows[-1:], ["optim/skipped"]):
        return "every optimiser step was left out, since a number was not finite (learner.on_nonfinite: skip)"
    if _any(rows[-1:], ["optim/left_out"]):
        return f"every update ended before its first optimiser step (ends_passes of {objective.name})"
    return None


def _cause_of_ties(rows: Rows) -> str:
    bias = rows[-1].get("oracle/position_bias", 0.0)
    if abs(bias) >= MARKED_BIAS:
        place = "first" if bias > 0 else "last"
        return (
            f"pairs were ties: the judge finds the response that it is shown {place} better, whichever that "
            f"is (oracle/position_bias is {bias:.2f}), so its two orders contradict each other; ask another "
            "model, or with another rubric (docs/oracles/judge.md)"
        )
    return (
        "pairs were ties: their responses were equal, or the oracle found neither better; look at "
        "samples.jsonl and sampling.temperature"
    )


def _has_only_empty(rows: Rows) -> bool:
    return any("response/length" in row for row in rows) and not _any(rows, ["response/length"])


def _mean(rows: Rows, name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return sum(values) / max(1, len(values))
