"""The one list of metric names, and the collection of a step's numbers.

A user's own objective may add names under `user/`. In the list `@k` stands for `@` and any number, `label`
for the label of a source of a mixture.
"""

import fnmatch
import re
from collections.abc import Mapping

from oat.errors import ConfigError, did_you_mean

_OF_RESPONSES = {
    "high": "upper end of the mean's 95 % interval over prompts",
    "length": "mean tokens",
    "low": "lower end of the mean's 95 % interval over prompts",
    "win_rate": "share that wins against the reference, a tie being one half",
    "win_rate_high": "upper end of the win rate's 95 % interval over prompts",
    "win_rate_lc": "the win rate at equal lengths (docs/evaluation.md)",
    "win_rate_low": "lower end of the win rate's 95 % interval over prompts",
}

NAMES = {
    "alarms/raised": "alarms so far, of every action (docs/alarms.md)",
    "alarms/rolled_back": "1 where an alarm took what was learned back to a checkpoint, 0 elsewhere",
    "answers/abstained_frac": "share of the step's questions whose oracle abstained",
    "answers/expired": "answers that came too late for this step to learn from (oracle.max_answer_age)",
    "answers/failed_frac": "share of the step's questions that failed or passed their deadline",
    "answers/missing_frac": (
        "share of the values that the step asked for and that have none: abstained, failed or unpaid"
    ),
    "answers/tied_frac": "share of the step's questions without a winner (equal responses, equal rewards)",
    "answers/unpaid_frac": "share of the step's questions that the budget did not allow",
    "answers/wasted_frac": (
        "of the step's questions that took tokens or money, the share that brought no value at all; where "
        "there are such"
    ),
    "buffer/age": "mean over the questions that the step learns from of the steps since they were asked",
    "buffer/questions": "questions that the step learns from, its own among them (learner.buffer)",
    "ensemble/accuracy": "share of training pairs whose mean reward over members prefers the chosen response",
    "ensemble/pairs": "pairs in the ensemble's buffer",
    "eval/failed": "1 where an evaluation was due and failed; training went on",
    "eval/gold_agreement": (
        "of the pairs of responses to a prompt that both oracles tell apart, the share that they order alike"
    ),
    "eval/gold_failed": "1 where the second oracle of an evaluation failed",
    "eval/gold_greedy": "as eval/greedy, by the second oracle",
    "eval/gold_sampled": "as eval/sampled, by the second oracle",
    "eval/gold_skipped": "1 where the second oracle's budget did not suffice",
    "eval/greedy": "held-out mean score (or probability of winning) of greedy responses",
    **{f"eval/greedy_{name}": f"of greedy responses: {meaning}" for name, meaning in _OF_RESPONSES.items()},
    "eval/kl": (
        "mean over sampled responses of the summed k1 estimate of KL(policy || reference), nats a response "
        "(evaluation.kl)"
    ),
    "eval/online": (
        "mean score (or probability of winning) of the responses that the step learned from "
        "(evaluation.online)"
    ),
    **{
        f"eval/online_{name}": f"of the responses that the step learned from: {meaning}"
        for name, meaning in _OF_RESPONSES.items()
    },
    "eval/gold_online": "as eval/online, by the second oracle",
    "eval/majority@k": "held-out mean score of the answer that most of k samples give",
    "eval/pairs/accuracy": (
        "share of the held-out pairs whose reward, implicit or of a reward model, prefers the chosen "
        "response (evaluation.pairs)"
    ),
    "eval/pairs/brier": "as pairs/brier, of the held-out pairs",
    "eval/pairs/confidence": "as pairs/confidence, of the held-out pairs",
    "eval/pairs/count": "held-out pairs that count: their responses differ, and neither is empty",
    "eval/pairs/loss": "what the algorithm's loss, all of its parts together, is over the held-out pairs",
    "eval/pairs/margin": (
        "mean over the held-out pairs of the reward of the chosen minus that of the rejected response"
    ),
    "eval/pairs/reference_gap": (
        "as logps/reference_gap, of the held-out pairs: how far the policy has moved on what it never learned"
    ),
    "eval/pairs/reward_chosen": "mean over the held-out pairs of the reward of the chosen response",
    "eval/pairs/reward_rejected": "mean over the held-out pairs of the reward of the rejected response",
    "eval/pass@k": "share of held-out prompts that one of k samples solves, without bias",
    "eval/sampled": "held-out mean score (or probability of winning) of responses sampled as in training",
    **{f"eval/sampled_{name}": f"of sampled responses: {meaning}" for name, meaning in _OF_RESPONSES.items()},
    "eval/skipped": "1 where an evaluation was due and its budget did not suffice",
    "kl/coef": "coefficient of the KL to the reference in this step (algorithm.kl_target)",
    "kl/reference": "mean over sampled tokens of the k3 estimate of KL(policy || reference), nats",
    "kto/baseline": "KTO's z: mean log-ratio of responses to prompts that are not theirs, at least 0, nats",
    "kto/baseline_rows": "responses that the baseline was estimated from",
    "kto/desirable_frac": "share of the step's judged responses that are desirable",
    "kto/reward_desirable": "mean over desirable responses of the implicit reward, beta times the log-ratio",
    "kto/reward_undesirable": "mean over the other judged responses of the implicit reward",
    "lag/versions": (
        "mean over the sampler's tokens of the policy's version minus the version that sampled the token"
    ),
    "logps/chosen": "mean over pairs of the summed log-probability of the chosen response, nats",
    "logps/recorded_gap": "mean absolute difference between old and recorded log-probabilities, nats",
    "logps/recomputed": (
        "1 where recorded log-probabilities could not serve as old ones (other weights, another precision): "
        "one more pass"
    ),
    "logps/reference_gap": (
        "mean over trained tokens, recorded ones too, of |log policy - log reference|, nats: 0 at the start, "
        "and no KL"
    ),
    "logps/rejected": "mean over pairs of the summed log-probability of the rejected response, nats",
    "loss/centring": "reduced squared sum of a pair's scores, before its coefficient",
    "loss/ensemble": "reduced pairwise loss of the ensemble, mean over members",
    "loss/ensemble_total": "the scalar of the ensemble that was differentiated",
    "loss/kl": "reduced KL term before its coefficient",
    "loss/policy": "reduced policy-gradient term",
    "loss/preference": "reduced preference term",
    "loss/prior": "mean squared distance of the ensemble to its start, before its coefficient",
    "loss/reward": "reduced loss of the reward model",
    "loss/sft": (
        "reduced negative log-likelihood of the responses that are learned by heart, nats a token, before "
        "its coefficient"
    ),
    "loss/total": "the scalar that was differentiated",
    "optim/critic_grad_norm": "norm of the critic's gradient before clipping",
    "optim/critic_learning_rate": "critic's learning rate of the last optimiser step",
    "optim/ensemble_grad_norm": "norm of the ensemble's gradient before clipping",
    "optim/ensemble_learning_rate": "learning rate of the ensemble's last optimiser step",
    "optim/grad_norm": "norm of the gradient of the policy, or of the reward model, before clipping",
    "optim/learning_rate": "learning rate of the last optimiser step",
    "optim/skipped": (
        "optimiser steps left out so far because a number was not finite (learner.on_nonfinite: skip)"
    ),
    "optim/steps": "optimiser steps of the policy, or of the reward model, so far",
    "oracle/changes": (
        "times that an oracle changed before this row: what it says stands in one curve with what it said "
        "before (docs/ledger.md)"
    ),
    "oracle/cost": (
        "money that the answers cost that steps have taken so far in training; once any did (the oracle's "
        "price_in and price_out)"
    ),
    "oracle/invalid_frac": (
        "share of a judge's replies without a verdict, so far in this process (docs/oracles/judge.md)"
    ),
    "oracle/latency_s": (
        "mean seconds of a question to an oracle over HTTP, from its first try to its answer, so far in this "
        "process"
    ),
    "oracle/outages": (
        "times that an address of an oracle over HTTP failed so often in a row that it was left alone, so "
        "far in this process"
    ),
    "oracle/position_bias": (
        "how much more probable than one half a judge finds it that the response shown first wins, a mean so "
        "far in this process"
    ),
    "oracle/queries": "priced items of the answers that steps have taken so far in training",
    "oracle/reasked": "questions asked again after a restart, so far in this process",
    "oracle/retries": "tries of an oracle over HTTP that were repeated, so far in this process",
    "oracle/source/label": (
        "mean plain score of the source of that label in a mixture, over the newest round of training that "
        "asked it"
    ),
    "pairs/accuracy": (
        "share of pairs whose reward, implicit or of a reward model, prefers the chosen response"
    ),
    "pairs/brier": (
        "mean over pairs of the squared error of the reward model's probability that the chosen response wins"
    ),
    "pairs/confidence": (
        "mean over pairs of the reward model's probability of the response that it scores higher; "
        "calibrated, it is the accuracy"
    ),
    "pairs/empty_frac": (
        "share of the step's pairs of which a response has no trained token, so that there is no winner"
    ),
    "pairs/halved_frac": (
        "share of the step's pairs without a winner that count one half in each order (algorithm.ties, "
        "algorithm.abstentions)"
    ),
    "pairs/held_out": "pairs of the step that are only measured (algorithm.held_out)",
    "pairs/held_out_accuracy": (
        "share of the step's held-out pairs whose chosen response scores higher, before the update"
    ),
    "pairs/held_out_brier": "as pairs/brier, of the step's held-out pairs, before the update",
    "pairs/held_out_ece": (
        "expected calibration error of pairs/confidence on the step's held-out pairs, in ten bins; of few "
        "pairs it is too high"
    ),
    "pairs/margin": "mean over pairs of the reward of the chosen minus that of the rejected response",
    "pairs/reward_chosen": (
        "mean over pairs of the reward of the chosen response (the algorithm's page says what it is)"
    ),
    "pairs/reward_rejected": "mean over pairs of the reward of the rejected response",
    "policy/clipped_frac": "share of trained tokens where the clip decides",
    "policy/entropy": "mean over trained tokens of the policy's entropy at temperature 1, nats",
    "policy/ratio_max": "largest probability ratio of a trained token",
    "policy/ratio_min": "smallest probability ratio of a trained token",
    "prompts/cut": (
        "row 0: recorded data cut so that they have room (prompts.too_long), of training and evaluation "
        "together"
    ),
    "prompts/dropped": (
        "row 0: prompts left out as longer than prompts.max_tokens, or too long for the cut, of training and "
        "evaluation together"
    ),
    "prompts/skipped": (
        "row 0: malformed records left out (prompts.on_bad_record: skip), of training and evaluation together"
    ),
    "reference/updates": "updates of the reference so far (model.reference_update)",
    "response/length": "mean tokens of a response",
    "response/tokens": "tokens of the step's responses together",
    "response/truncated_frac": "share of responses cut by the length limit",
    "reward/mean": (
        "mean score of the candidates that were asked about and have one; of pairs made of scores also where "
        "the other response has none"
    ),
    "reward/std_within": "mean over groups of the standard deviation of their scores",
    "reward/zero_spread_frac": "share of groups whose scores are all equal",
    "roofline/decode": (
        "share of this machine's limit that generation reached: least time of the work over its time "
        "(docs/performance.md)"
    ),
    "roofline/padded_keys": (
        "share of the cached keys that generation computed with and that belong to no token"
    ),
    "roofline/update": (
        "share of this machine's rate of matrix products that prepare's passes and the update reached "
        "(docs/performance.md)"
    ),
    "rows/trained": "rows that carry gradient",
    "sft/accepted_frac": "share of the step's responses whose score reaches the threshold",
    "sft/duplicates": (
        "accepted responses left out because the step, or the run, has learned the same prompt and response "
        "already"
    ),
    "sft/solved_frac": "share of the step's prompts with an accepted response",
    "time/evaluate_s": "seconds of the evaluation",
    "time/learn_s": "seconds of prepare and update",
    "time/sample_s": "seconds of generation and asking",
    "time/save_s": (
        "seconds that the checkpoint behind the row before held the run: copying, and waiting for an older "
        "one to be written"
    ),
    "time/step_s": "seconds of the whole step",
    "weights/version": "version of the sampler's weights",
}

_UNITS = {
    "s": ("time/*", "oracle/latency_s"),
    "tokens": ("response/length", "response/tokens", "eval/*_length"),
    "queries": ("oracle/queries",),
    "money": ("oracle/cost",),
    "0 or 1": ("alarms/rolled_back", "eval/*failed", "eval/*skipped", "logps/recomputed"),
    "probability": ("oracle/position_bias",),
    "share": (
        "*_frac",
        "*/accuracy",
        "*/held_out_accuracy",
        "*pairs/confidence",
        "*win_rate*",
        "eval/pass@k",
        "eval/gold_agreement",
        "roofline/*",
    ),
    "nats a token": ("kl/reference", "loss/sft", "policy/entropy", "*/reference_gap"),
    "nats": ("logps/*", "kto/baseline", "eval/kl"),
    "ratio": ("policy/ratio_*",),
    "steps": ("buffer/age",),
    "version": ("weights/version", "lag/versions"),
    "count": (
        "alarms/raised",
        "answers/expired",
        "ensemble/pairs",
        "optim/skipped",
        "optim/steps",
        "oracle/reasked",
        "pairs/held_out",
        "prompts/*",
        "oracle/changes",
        "oracle/outages",
        "oracle/retries",
        "reference/updates",
        "rows/trained",
        "sft/duplicates",
        "kto/baseline_rows",
        "buffer/questions",
        "eval/pairs/count",
    ),
    "": ("kl/coef", "kto/*", "loss/*", "optim/*", "pairs/*", "eval/pairs/*"),
    "score": ("eval/*", "reward/*", "oracle/source/*"),
}
"""Patterns of names by unit, of which the first that matches counts; "" for numbers without a unit."""

UNREPEATABLE = (
    "time/",
    "roofline/",
    "oracle/reasked",
    "oracle/invalid_frac",
    "oracle/latency_s",
    "oracle/outages",
    "oracle/position_bias",
    "oracle/retries",
    "oracle/source/",
)
"""Names, or beginnings of names, whose numbers depend on clocks, machines or restarts; digests leave them
out."""


def listed(name: str) -> str:
    """A metric's name as `NAMES` has it: `eval/pass@k` for `eval/pass@8`, `oracle/source/label` for
    `oracle/source/gsm8k`."""
    return re.sub(r"@[0-9]+$", "@k", "oracle/source/label" if name.startswith("oracle/source/") else name)


def unit(name: str) -> str:
    """The unit of a metric; "" for one without a unit, or a user's."""
    return next(
        (
            unit
            for unit, patterns in _UNITS.items()
            if any(fnmatch.fnmatchcase(listed(name), pattern) for pattern in patterns)
        ),
        "",
    )


class Metrics:
    """The numbers of one row, by name."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Add numbers; one of a name that is there already replaces it.

        Raises:
            ConfigError: a name is neither in `NAMES` nor under `user/`.
        """
        for name, value in values.items():
            if listed(name) not in NAMES and not name.startswith("user/"):
                raise ConfigError(
                    f"an objective reports {name!r}, which no list knows; {did_you_mean(name, NAMES)[:80]}; "
                    f"or name your own user/{name}"
                )
            self.values[name] = float(value)


def repeatable(values: Mapping[str, float]) -> dict[str, float]:
    """The numbers that are the same in two equal runs."""
    return {name: value for name, value in values.items() if not name.startswith(UNREPEATABLE)}
