"""The lines that a run prints last. If the run learned nothing, they say so and name the likely cause;
otherwise they say that it finished. After its first step, a run warns if most responses were cut, or if the
answers of this step have nothing to learn from. If it has learned nothing after its first two steps
(`FIRST_STEPS`) and goes on, a warning says so, unless the warnings after the first step named the cause.

The outcome is read from the rows of metrics, so it does not depend on kills. If rows are damaged or missing,
the outcome is unknown. Then the lines say that the run finished.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from oat.algorithms.base import Objective
from oat.control.silence import CAUSES, MISSING, why
from oat.errors import warn
from oat.files import absolute
from oat.loop import Run
from oat.reports.progress import way_on
from oat.resolve.about import RunSummary
from oat.rundir.provenance import begins_after
from oat.rundir.rows import sound_rows

FIRST_STEPS = 2
"""The number of steps after which a run warns if it has learned nothing."""
SPREAD = "reward/zero_spread_frac"
TIED = "answers/tied_frac"
MARKED_BIAS = 0.25
"""The smallest position bias with which a judge is said to choose by the position of a response instead of
its text. The largest possible bias is 0.5."""

MOSTLY_CUT = 0.5
"""The share of cut responses from which the first step warns."""
CUT = "response/truncated_frac"

Rows = Sequence[Mapping[str, float]]
Words = Callable[[Rows, RunSummary], str]
"""A function that returns a cause in words, as the lines of this module have it."""


class Outcome:
    """The outcome of a run. An instance watches the steps of one process.

    Args:
        about: settings of the run.

    Attributes:
        begins: the step at which the run began: 0, or for a fork the step of its first checkpoint.
        is_idle: True as long as this process has reported no step.
    """

    def __init__(self, run: Run, about: RunSummary):
        self.run = run
        self.about = about
        self.directory = absolute(about.run_dir)
        self.begins = begins_after(self.directory)
        self.is_idle = True
        self._told: list[Words] | None = None

    def note_step(self, step: int, values: Mapping[str, float]) -> None:
        """Note that a step was reported. Warn after the first step, and after the first `FIRST_STEPS` steps,
        as the head of this module says.

        Args:
            values: the step's row of metrics.
        """
        self.is_idle = False
        if step == self.begins + 1:
            self._note_first_step(step, values)
        if (
            step == self.begins + FIRST_STEPS
            and step != self.run.stop.last
            and (cause := self.nothing_learned()) is not None
            and not self._is_told(cause)
        ):
            warn(f"after {step} steps: the run has learned nothing yet: {cause}")

    def _note_first_step(self, step: int, values: Mapping[str, float]) -> None:
        if self._told is not None:  # a roll back led to this step again
            return
        self._told = []
        ending = self.nothing_learned() if step == self.run.stop.last else None
        for words, line in faults_of_first_step(step, values, self._objective, self.about):
            if ending is None or words([values], self.about) not in ending:
                warn(f"step {step}: {line}")
                self._told.append(words)
        unusual = [name for name in self.about.shown if name not in self.about.usually_shown]
        lacking = [name for name in unusual if name not in values and not name.startswith("eval/")]
        if lacking:
            warn(
                f"step {step}: its row of metrics lacks {', '.join(lacking)} (tracking.shown); the line of a "
                "step shows a metric only if the step reports it (docs/metrics.md)"
            )

    def _is_told(self, cause: str) -> bool:
        """Return True if a warning after the first step gave this cause."""
        rows, _ = self._rows()
        return any(words(rows, self.about) in cause for words in self._told or ())

    @property
    def _objective(self) -> Objective:
        first, last = self.run.objectives[0], self.run.objectives[-1]
        return first if first.learns else last

    def _rows(self) -> tuple[Rows, str]:
        """Return the rows of the run's own steps, and a sentence about damaged rows, "" if there are none."""
        file = self.directory / "metrics.jsonl"
        rows, damage = sound_rows(file.read_bytes() if file.exists() else b"")
        return [row for _, row in rows if row["step"] > self.begins], damage

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
        own, damage = self._rows()
        last = own[-1]["step"] if own else self.begins
        is_none_due = not own and (self.is_idle or self.run.stop.steps_done(self.begins) is not None)
        if is_none_due or damage or any(step > last for step in self.run.checkpoints.steps):
            return None
        return likely_cause(own, self._objective, self.about)


def faults_of_first_step(
    step: int, row: Mapping[str, float], objective: Objective, about: RunSummary
) -> Iterator[tuple[Words, str]]:
    """Yield the faults that the first step of a run shows: most responses were cut; the rewards of every
    group were equal; all pairs were ties.

    Args:
        step: the number of the step.
        row: its row of metrics.

    Returns:
        For each fault, the words with which `likely_cause` names it, and a line for people.
    """
    rows = [row]
    if _are_mostly_cut(rows, about):
        yield _cuts, f"{_cuts(rows, about)}; {_way_to_ends(rows, about)}"
    if not about.is_ours or row.get(MISSING, 0.0) >= 0.5:
        return
    is_tied = TIED in objective.watched and row.get(TIED) == 1.0 and not row.get("rows/trained")
    look = f"oat samples {about.run_dir} --step {step}"
    if _is_flat(rows) and (is_tied or (SPREAD in objective.watched and not _parts_equals(about))):
        yield _equal_rewards, _line_of_equals(row["reward/mean"], is_cut=_mean(rows, CUT) == 1.0, look=look)
    elif is_tied and row.get("oracle/queries"):  # of pairs that nobody is asked about, the step itself warns
        yield _cause_of_ties, f"all {_cause_of_ties(rows, about)}"


def _way_to_ends(rows: Rows, about: RunSummary) -> str:
    """Return what to do if most responses were cut."""
    way = "raise sampling.max_new_tokens"
    if _mean(rows, CUT) < 1.0:
        return way
    ends = (
        "see with oat check --show-tokens whether its template opens the assistant's turn, and which tokens "
        "end a response"
        if about.tree["render"]["template"] is not None
        else "give a chat model its chat template (render.template: tokenizer)"
    )
    return f"{way}; if longer responses do not end either, {ends} (docs/first_run.md)"


def _line_of_equals(mean: float, *, is_cut: bool, look: str) -> str:
    """Return a line about a step whose groups had equal rewards.

    Args:
        mean: the mean reward.
        is_cut: True if every response was cut.
        look: a command that shows the responses.
    """
    hopeless = "no response does the task (take easier prompts, or give partial credit)"
    solved = "every response does the task (take harder prompts)"
    constant = "the reward is a constant (correct it)"
    likely = {0.0: hopeless, 1.0: solved}.get(mean, f"{hopeless}, {solved}")
    likely = f"{'no response was finished' if is_cut else likely}, or {constant}"
    return (
        f"the rewards of every group were equal (their mean is {mean:.4g}), and nothing is learned from such "
        f"groups; probably {likely}: see `{look}`"
    )


def likely_cause(rows: Rows, objective: Objective, about: RunSummary) -> str | None:
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
            else _cause_of_no_gradient(rows, objective, about)
        )
    if not _any(rows, rates):
        return f"the learning rate was 0 in every step ({about.why_no_rate})"
    is_of_groups = about.is_ours and SPREAD in objective.watched and not _parts_equals(about)
    return _equal_rewards(rows, about) if is_of_groups and _is_flat(rows) else None


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


def _equal_rewards(rows: Rows, about: RunSummary) -> str:
    means = [row["reward/mean"] for row in rows if "reward/mean" in row]
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    value = f"their mean from {low:.4g} to {high:.4g}"
    if low == high:  # groups of one step may differ from each other
        value = f"all of them {low:g}" if len(means) > 1 else f"their mean {low:.4g}"
    equal = f"the rewards of every group were equal in every step ({value})"
    look = "see in samples.jsonl whether every prompt is solved, or hopeless, or the reward is a constant"
    if not _are_mostly_cut(rows, about):
        return f"{equal}; {look}"
    cuts = f"{_cuts(rows, about)}; raise sampling.max_new_tokens"
    # responses without an end rarely have a reward, so they explain no other value
    return f"{equal}; {cuts}, or {look}" if high <= 0.0 else f"{equal}; {look}; besides, {cuts}"


def _are_mostly_cut(rows: Rows, about: RunSummary) -> bool:
    """Return True if most responses that the model sampled were cut."""
    is_sampled = about.oracle != "recorded" and not about.tree["prompts"]["responses"]
    return is_sampled and _mean(rows, CUT) >= MOSTLY_CUT


def _cuts(rows: Rows, about: RunSummary) -> str:
    """Return the share of the responses that were cut, and the settings that decide about them."""
    share = _mean(rows, CUT)
    who = "every response was" if share == 1.0 else f"{share:.0%} of the responses were"
    limit = about.tree["sampling"]["max_new_tokens"]
    left_out = _left_out(about)
    lost = f", and nothing is learned from such responses ({left_out})" if left_out else ""
    return f"{who} cut at the length limit (sampling.max_new_tokens is {limit}){lost}"


def _parts_equals(about: RunSummary) -> bool:
    """Return True if responses of a group that have equal scores may get different rewards: by penalties, or
    as sources of a mixture that are normalised each by itself."""
    rewards = about.tree["algorithm"].get("rewards")
    if not isinstance(rewards, Mapping):
        return False
    penalties = (rewards.get(name) for name in ("missing_end_penalty", "overlong_penalty"))
    return any(penalties) or rewards.get("sources", "sum") != "sum"


def _left_out(about: RunSummary) -> str:
    """Return the setting by which nothing is learned from cut responses, with its value; "" if cut responses
    are learned from."""
    rewards = about.tree["algorithm"].get("rewards")
    truncated = rewards.get("truncated") if isinstance(rewards, Mapping) else None
    return f"algorithm.rewards.truncated is {truncated}" if truncated in ("mask", "drop") else ""


def _cause_of_no_gradient(rows: Rows, objective: Objective, about: RunSummary) -> str:
    if _is_flat(rows) and SPREAD in objective.watched:
        return _equal_rewards(rows, about)
    if _has_only_empty(rows):
        return "the gradient was 0 in every step, since every response was empty; look at samples.jsonl"
    return (
        "the gradient was 0 in every step; look at loss/total and rows/trained in metrics.jsonl, and at "
        "what the loss leaves out"
    )


def _cause_of_no_step(rows: Rows, objective: Objective, about: RunSummary) -> str:
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
    if (own := _cause_of_cuts(rows, about) or objective.why_no_rows(rows)) is not None:
        return f"{none}: {own}"
    if _any(rows, ["pairs/empty_frac"]) and _mean(rows, "pairs/empty_frac") >= _mean(rows, TIED):
        return f"{none}: in every pair a response was empty; look at samples.jsonl"
    if _mean(rows, TIED) >= 0.5:
        return f"{none}: {(_equal_rewards if _is_flat(rows) else _cause_of_ties)(rows, about)}"
    if _is_flat(rows) and SPREAD in objective.watched:
        return f"{none}: {_equal_rewards(rows, about)}"
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


def _cause_of_cuts(rows: Rows, about: RunSummary) -> str | None:
    """Return the reason if all responses were cut, and nothing is learned from cut ones."""
    is_cause = bool(_left_out(about)) and _mean(rows, CUT) == 1.0
    return f"{_cuts(rows, about)}; {_way_to_ends(rows, about)}" if is_cause else None


def _cause_of_ties(rows: Rows, about: RunSummary) -> str:
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
