"""The names of all metrics, with their meanings.

A user's own objective may add names under `user/`. In the list, `@k` stands for `@` and any number, and
`label` for the label of one source in a mixture of sources.

The units of metrics.
"""

import fnmatch
import re

_OF_RESPONSES = {
    "high": "upper end of the mean's 95 % interval over prompts",
    "length": "mean number of tokens",
    "low": "lower end of the mean's 95 % interval over prompts",
    "win_rate": "share of responses that win against the reference response; a tie counts one half",
    "win_rate_high": "upper end of the win rate's 95 % interval over prompts",
    "win_rate_lc": "the win rate at equal lengths (docs/evaluation.md)",
    "win_rate_low": "lower end of the win rate's 95 % interval over prompts",
}

_OF_MODEL_PAIRS = ("pair_variance", "prompt_variance")

NAMES = {
    "alarms/raised": "alarms raised so far, whatever their action (docs/alarms.md)",
    "alarms/rolled_back": "1 if an alarm restored the learned parts from a checkpoint in this step, else 0",
    "answers/abstained_frac": "share of the step's questions that have at least one abstention",
    "answers/expired": "answers that came too late for this step to learn from (oracle.max_answer_age)",
    "answers/failed_frac": "share of the step's questions that failed in part, or passed their deadline",
    "answers/missing_frac": (
        "share of the values asked for in the step that are missing: abstained, failed or unpaid"
    ),
    "answers/tied_frac": "share of the step's questions without a winner (equal responses, equal rewards)",
    "answers/unpaid_frac": "share of the step's questions that the budget did not allow",
    "answers/wasted_frac": (
        "among the step's questions that took tokens or money, the share that brought no value at all; "
        "reported only if there are such questions"
    ),
    "buffer/age": "mean age of the questions that the step learns from, in steps since they were asked",
    "buffer/questions": "questions that the step learns from, including its own (learner.buffer)",
    "correction/bounded_frac": "share of trained tokens whose correction a bound changed, or left out",
    "correction/weight": "mean over trained tokens of the weight that corrects for the sampler",
    "ensemble/accuracy": (
        "share of the ensemble's training pairs in which the mean reward over members prefers the chosen "
        "response"
    ),
    "ensemble/feature_age": (
        "of features of the policy: mean number of the policy's updates since the features of the buffer's "
        "pairs were computed (explorer.features.refresh_every)"
    ),
    "ensemble/pairs": "pairs in the ensemble's buffer",
    "ensemble/prior_coef": (
        "coefficient of loss/prior in this step, which falls with the number of labelled pairs "
        "(explorer.ensemble.prior, prior_form and prior_fades)"
    ),
    "ensemble/reward_chosen": (
        "mean over the ensemble's training pairs of the mean reward over members of the chosen response"
    ),
    "ensemble/reward_rejected": "as ensemble/reward_chosen, but of the rejected response",
    "episode/broken_calls": (
        "number of the model's calls of tools in which the tool raised an exception that does not blame the "
        "arguments (oat.environments.tools)"
    ),
    "episode/turns": "mean number of the model's turns in an episode (sampling.environment)",
    "eval/best": (
        "mean score (or probability of winning) of the response that the ensemble finds best among several "
        "to a held-out prompt (evaluation.best_of)"
    ),
    **{
        f"eval/best_{name}": f"the best response of several: {meaning}"
        for name, meaning in _OF_RESPONSES.items()
    },
    "eval/failed": "1 if an evaluation was due and failed; training goes on",
    "eval/gold_agreement": (
        "share of pairs of responses that both oracles of an evaluation put in the same order; a pair is two "
        "responses to the same prompt, and counts only if neither oracle gives both the same score"
    ),
    "eval/gold_best": "as eval/best, but measured by the second oracle",
    "eval/gold_failed": "1 if the second oracle of an evaluation failed",
    "eval/gold_greedy": "as eval/greedy, but measured by the second oracle (evaluation.gold)",
    "eval/gold_sampled": "as eval/sampled, but measured by the second oracle",
    "eval/gold_skipped": "1 if the second oracle's budget did not suffice",
    "eval/greedy": "mean score (or probability of winning) of greedy responses to held-out prompts",
    **{f"eval/greedy_{name}": f"greedy responses: {meaning}" for name, meaning in _OF_RESPONSES.items()},
    "eval/kl": (
        "k1 estimate of KL(policy || reference): log-ratio summed over the tokens of a response, mean over "
        "sampled responses, nats per response (evaluation.kl)"
    ),
    "eval/online": (
        "mean score (or probability of winning) of the responses in the questions that the step took "
        "(evaluation.online)"
    ),
    **{
        f"eval/online_{name}": f"responses that the step learned from: {meaning}"
        for name, meaning in _OF_RESPONSES.items()
    },
    "eval/gold_online": "as eval/online, but measured by the second oracle",
    "eval/majority@k": "mean over held-out prompts of the score of the most frequent answer among k samples",
    "eval/pairs/accuracy": (
        "share of the held-out pairs in which the chosen response has the higher reward, implicit or of a "
        "reward model (evaluation.pairs)"
    ),
    "eval/pairs/brier": "as pairs/brier, but over the held-out pairs",
    "eval/pairs/confidence": "as pairs/confidence, but over the held-out pairs",
    "eval/pairs/count": (
        "number of held-out pairs that are measured; a pair is left out if neither response is the better "
        "one, if both are equal, or if no token of one is learned"
    ),
    "eval/pairs/loss": "the algorithm's loss over the held-out pairs, the sum of all of its parts",
    "eval/pairs/margin": (
        "mean over the held-out pairs of the reward of the chosen minus that of the rejected response"
    ),
    "eval/pairs/reference_gap": (
        "as logps/reference_gap, but over the held-out pairs: how far the policy has moved on pairs that it "
        "never learned"
    ),
    "eval/pairs/reward_chosen": "mean over the held-out pairs of the reward of the chosen response",
    "eval/pairs/reward_rejected": "mean over the held-out pairs of the reward of the rejected response",
    "eval/pass@k": (
        "unbiased estimate of the share of held-out prompts that at least one of k samples solves"
    ),
    "eval/sampled": (
        "mean score (or probability of winning) of responses to held-out prompts, sampled as in training"
    ),
    **{f"eval/sampled_{name}": f"sampled responses: {meaning}" for name, meaning in _OF_RESPONSES.items()},
    "eval/skipped": "1 if an evaluation was due and its budget did not suffice",
    "explorer/agreement": (
        "share of the pairs that the oracle labelled in which the ensemble, before it learned from them, "
        "gave the winner the higher mean reward"
    ),
    "explorer/audit_accuracy": (
        "share of audited pairs in which the oracle confirms the ensemble's label "
        "(explorer.model_labels.audit)"
    ),
    "explorer/audit_win_prob": (
        "mean over audited pairs of the oracle's probability that the response wins that the ensemble prefers"
    ),
    "explorer/clash_frac": "share of the prompts for which the rule chose one response twice",
    "explorer/clash_second_std": "as explorer/second_std, but over the prompts of explorer/clash_frac",
    "explorer/entropy": (
        "mean over the prompts that were kept of their predictive entropy, nats (explorer apl)"
    ),
    "explorer/gap": (
        "posterior gap: mean over prompts and members of the reward of a member's best response, minus its "
        "reward of the response that is best by the mean"
    ),
    "explorer/margin": "mean over pairs of the difference of their implicit rewards, nats (explorer apl)",
    "explorer/mean_margin": "as explorer/margin, but over all pairs of the prompts that were kept",
    "explorer/model_belief": (
        "mean over the pairs chosen for the ensemble's label of the probability that its preferred response "
        "wins, itself a mean over members"
    ),
    "explorer/model_belief_max": "as explorer/model_belief, but the largest one",
    "explorer/model_belief_min": "as explorer/model_belief, but the smallest one",
    "explorer/model_frac": (
        "share of the step's pairs that were chosen for the ensemble's label, audited ones included "
        "(explorer.model_labels)"
    ),
    **{f"explorer/model_{name}": f"as explorer/{name}, but over these pairs" for name in _OF_MODEL_PAIRS},
    **{f"explorer/model_{name}_std": "standard deviation over these pairs" for name in _OF_MODEL_PAIRS},
    "explorer/model_reward_chosen": (
        "mean over the pairs of explorer/model_frac of the mean reward over members of the preferred response"
    ),
    "explorer/model_reward_rejected": "as explorer/model_reward_chosen, but of the other response",
    "explorer/pair_variance": (
        "mean over pairs of the variance over the ensemble's members of the difference of their two rewards"
    ),
    "explorer/prompt_variance": (
        "mean over prompts of that variance, averaged over all pairs of different responses"
    ),
    "explorer/second_std": (
        "mean over pairs of the standard deviation over members of the second response's reward"
    ),
    "kl/coef": "coefficient of the KL to the reference in this step (algorithm.kl_target)",
    "kl/old": (
        "mean over trained tokens of the k3 estimate of KL(old policy || policy), nats, before each "
        "optimiser step, the one included before which the update ended (algorithm.target_kl)"
    ),
    "kl/old_k2": "mean over trained tokens of the k2 estimate of KL(old policy || policy), nats",
    "kl/response": (
        "mean over responses of the KL to the reference, summed over their tokens, nats, before the update "
        "(algorithm.kl_reward_estimator)"
    ),
    "kl/reference": "mean over sampled tokens of the k3 estimate of KL(policy || reference), nats",
    "kto/baseline": (
        "KTO's z: mean log-ratio of responses, each after the prompt of another response, nats; 0 if this "
        "mean is negative"
    ),
    "kto/baseline_rows": "number of sequences from which the baseline was estimated",
    "kto/desirable_frac": "share of desirable responses among the scored ones that the step learns from",
    "kto/reward_desirable": "mean over desirable responses of the implicit reward, beta times the log-ratio",
    "kto/reward_undesirable": "mean over undesirable responses of the implicit reward",
    "lag/versions": (
        "mean over the sampler's tokens of the policy's version minus the version that sampled the token"
    ),
    "logps/chosen": "mean over pairs of the summed log-probability of the chosen response, nats",
    "logps/recorded_gap": (
        "mean over trained tokens of the absolute difference between the recorded log-probabilities and the "
        "policy's before the update, nats; measured over the first mini-batch if the recorded ones serve as "
        "old ones"
    ),
    "logps/recorded_gap_max": "as logps/recorded_gap, but the largest difference",
    "logps/recomputed": (
        "1 if recorded log-probabilities could not serve as old ones (other weights, another precision), so "
        "that one more pass was needed; else 0"
    ),
    "logps/reference_gap": (
        "mean over trained tokens, sampled or recorded, of |log policy - log reference|, nats. It is 0 "
        "while the two models are equal. It is not an estimate of a KL"
    ),
    "logps/rejected": "mean over pairs of the summed log-probability of the rejected response, nats",
    "loss/centring": "squared sum of a pair's two scores, averaged, before its coefficient",
    "loss/covariance_kl": (
        "KL(old policy || policy) of the tokens with the largest covariance of log-probability and "
        "advantage, averaged over all tokens, before its coefficient (algorithm.tokens.covariance_kl)"
    ),
    "loss/drift": "KL(old policy || policy), averaged, before its coefficient (algorithm.drift_coef)",
    "loss/ensemble": "pairwise loss of the ensemble, averaged over pairs and members",
    "loss/ensemble_total": "total loss of the ensemble, which is differentiated",
    "loss/entropy": "the policy's entropy, averaged, before its coefficient (algorithm.entropy)",
    "loss/kl": "KL term, averaged, before its coefficient",
    "loss/optimism": (
        "log-probability of the reference's responses under the policy, averaged over pairs, nats, before "
        "its coefficient"
    ),
    "loss/policy": "policy-gradient term, averaged",
    "loss/preference": "preference term, averaged",
    "loss/prior": (
        "distance of the ensemble's parameters to their initial values, before its coefficient, "
        "ensemble/prior_coef (explorer.ensemble.prior_form)"
    ),
    "loss/reward": "loss of the reward model, averaged",
    "loss/sft": (
        "negative log-likelihood of the responses that the policy imitates (demonstrations, accepted or "
        "chosen responses), averaged, nats per token, before its coefficient"
    ),
    "loss/value": "loss of the critic, averaged, before its coefficient",
    "loss/total": "total loss, which is differentiated",
    "optim/critic_grad_norm": "norm of the critic's gradient before clipping",
    "optim/critic_learning_rate": "learning rate of the critic's last optimiser step",
    "optim/ensemble_grad_norm": "norm of the ensemble's gradient before clipping",
    "optim/ensemble_learning_rate": "learning rate of the ensemble's last optimiser step",
    "optim/grad_norm": "norm of the gradient of the policy, or of the reward model, before clipping",
    "optim/learning_rate": "learning rate of the last optimiser step",
    "optim/left_out": (
        "optimiser steps so far that the algorithm has left out by ending an update (algorithm.target_kl); "
        "schedules count them"
    ),
    "optim/skipped": (
        "optimiser steps left out so far because a number was not finite (learner.on_nonfinite: skip)"
    ),
    "optim/steps": "optimiser steps of the policy, or of the reward model, so far",
    "oracle/changes": (
        "number of times that an oracle had changed before the answers of this row were taken; a curve "
        "across a change joins answers of different versions (docs/ledger.md)"
    ),
    "oracle/cost": (
        "money spent so far on the answers that steps of training have taken; reported only if it is above 0 "
        "(the oracle's price_in and price_out)"
    ),
    "oracle/invalid_frac": (
        "share of a judge's replies without a verdict, so far in this process (docs/oracles/judge.md)"
    ),
    "oracle/latency_s": (
        "mean seconds between the first try of a question and its answer, for oracles over HTTP, so far in "
        "this process"
    ),
    "oracle/outages": (
        "how often a URL of an oracle over HTTP has failed so many times in a row that it was left to rest, "
        "so far in this process"
    ),
    "oracle/position_bias": (
        "probability that the response shown first wins, minus one half: a judge's mean so far in this "
        "process, over pairs shown in both orders"
    ),
    "oracle/pairs": (
        "compared pairs for which steps of training took paid answers so far; a pair counts once, whatever "
        "the oracle charges for it"
    ),
    "oracle/queries": "priced items in the answers that steps of training have taken so far",
    "oracle/reasked": (
        "questions submitted once more (after a restart, a broken answer or a failed submission), so far in "
        "the run"
    ),
    "oracle/retries": "tries of an oracle over HTTP that were repeated, so far in this process",
    "oracle/source/label": (
        "mean of the scores that the mixture's source with this label gave to the step's questions, before "
        "any weight and normalisation"
    ),
    "pairs/accuracy": (
        "share of pairs in which the chosen response has the higher reward, implicit or of a reward model"
    ),
    "pairs/brier": (
        "mean over pairs of the squared error of the reward model's probability that the chosen response wins"
    ),
    "pairs/confidence": (
        "mean over pairs of the reward model's probability that the response which it scores higher wins; "
        "equal to the accuracy if the model is calibrated"
    ),
    "pairs/empty_frac": (
        "share of the step's pairs that have no winner because a response has no trained token"
    ),
    "pairs/halved_frac": (
        "share of the step's pairs that have no winner and count one half in each order (algorithm.ties, "
        "algorithm.abstentions)"
    ),
    "pairs/held_out": "number of the step's held-out pairs, which are only measured (algorithm.held_out)",
    "pairs/held_out_accuracy": (
        "share of the step's held-out pairs whose chosen response scores higher, before the update"
    ),
    "pairs/held_out_brier": "as pairs/brier, but over the step's held-out pairs, before the update",
    "pairs/held_out_ece": (
        "expected calibration error of pairs/confidence on the step's held-out pairs, in ten bins; with few "
        "pairs this estimate is too high"
    ),
    "pairs/margin": "mean over pairs of the reward of the chosen minus that of the rejected response",
    "pairs/reward_chosen": (
        "mean over pairs of the reward of the chosen response (the algorithm's page says what it is)"
    ),
    "pairs/reward_rejected": "mean over pairs of the reward of the rejected response",
    "policy/clipped_frac": "share of trained tokens whose loss is clipped, so that they have no gradient",
    "policy/entropy": "mean over trained tokens of the policy's entropy at temperature 1, nats",
    "policy/entropy_coef": "coefficient of the entropy in this step (algorithm.entropy.target)",
    "policy/gradient_frac": "share of trained tokens that give a gradient (algorithm.tokens)",
    "policy/ratio_mean": "mean importance ratio (new to old probability) of the trained tokens",
    "policy/ratio_var": (
        "mean over trained tokens of the squared distance of the importance ratio from 1, its expectation"
    ),
    "policy/response_entropy": (
        "mean over responses of minus their log-probability under the old policy, nats: an estimate of the "
        "entropy of complete responses"
    ),
    "policy/ratio_max": "largest importance ratio (new to old probability) of a trained token",
    "policy/ratio_min": "smallest importance ratio (new to old probability) of a trained token",
    "prompts/cut": (
        "in row 0, the number of records whose prompt or responses were cut because they were too long "
        "(prompts.too_long), of training and evaluation together"
    ),
    "prompts/dropped": (
        "in row 0, the number of prompts left out because they are longer than prompts.max_tokens, or too "
        "long even when cut, of training and evaluation together"
    ),
    "prompts/skipped": (
        "in row 0, the number of malformed records left out (prompts.on_bad_record: skip), of training and "
        "evaluation together"
    ),
    "reference/updates": "updates of the reference so far (model.reference_update)",
    "response/ended": "number of trained responses that the model ended itself",
    "response/length": "mean number of trained tokens in a response",
    "response/tokens": "number of trained tokens in all responses of the step",
    "response/truncated_frac": "share of responses cut by the length limit",
    "refill/rounds": "rounds of questions that the step asked, the first included (sampling.refill_rounds)",
    "refill/thrown_away": "questions that the step asked and does not learn from",
    "refill/unusable_frac": "share of the step's questions that teach the algorithm nothing",
    "reward/clipped_frac": "share of the step's rewards that a bound changed (algorithm.rewards.clip)",
    "reward/kl": (
        "mean over responses of what the KL to the reference adds to their rewards, mostly a negative number "
        "(algorithm.kl_reward_coef); 0 without it"
    ),
    "reward/total": "mean over the trained responses of the sum of their tokens' rewards, before whitening",
    "reward/mean": (
        "mean over the candidates that have a score; in a comparison made from scores, a score counts even "
        "if the other response has none"
    ),
    "reward/penalty": "mean over responses of what penalties subtract from their scores (algorithm.rewards)",
    "reward/shaped_mean": "mean over responses of the reward that is learned from (algorithm.rewards)",
    "reward/std_within": "mean over groups of the standard deviation of their scores",
    "reward/zero_spread_frac": "share of groups with equal scores, or with fewer than two scores",
    "roofline/decode": (
        "share of this machine's limit that generation reached: the least time that its work needs, divided "
        "by the time that it took (docs/performance.md)"
    ),
    "roofline/padded_keys": ("share of empty places among all places for cached keys that generation reads"),
    "roofline/update": (
        "share of this machine's rate of matrix products that the update, and the passes of `prepare` before "
        "it, reached (docs/performance.md)"
    ),
    "rows/trained": "number of rows in the batch that the step learns from",
    "sft/accepted_frac": "share of the step's responses whose score reaches the threshold",
    "sft/duplicates": (
        "accepted responses left out because the step, or the run, has learned the same prompt and response "
        "already"
    ),
    "sft/solved_frac": "share of the step's prompts with an accepted response",
    "time/evaluate_s": "seconds of the evaluation",
    "time/explore_s": "seconds in which the explorer scored samples and chose questions",
    "time/learn_s": "seconds of prepare and update",
    "time/sample_s": "seconds of generation and asking, with those of time/explore_s",
    "time/save_s": (
        "seconds that the run stood still to save the checkpoint after the previous row: it waits until an "
        "older one is written, and copies the state; with checkpoint.background false it waits until the new "
        "one is written"
    ),
    "time/step_s": "seconds of the whole step",
    "value/clipped_frac": "share of the critic's values whose loss is clipped, so that they have no gradient",
    "value/explained_var": (
        "share of the variance of the critic's targets that its values explain, before the update; 0 if a "
        "constant would be as good"
    ),
    "value/mean": "mean value of the critic before the update",
    "vine/branches": "number of branches with a score that the step has (algorithm.advantage vine)",
    "vine/steps": "mean number of steps of a response, of which each begins with a state that has a value",
    "vine/unvalued_frac": (
        "share of the steps of responses that teach nothing, because no other response of the group has a "
        "score"
    ),
    "weights/version": "version of the sampler's weights",
}


_UNITS = {
    "s": ("time/*", "oracle/latency_s"),
    "tokens": ("response/length", "response/tokens", "eval/*_length"),
    "queries": ("oracle/queries",),
    "money": ("oracle/cost",),
    "0 or 1": ("alarms/rolled_back", "eval/*failed", "eval/*skipped", "logps/recomputed"),
    "probability": ("oracle/position_bias", "explorer/audit_win_prob", "explorer/model_belief*"),
    "share": (
        "*_frac",
        "*/accuracy",
        "*/held_out_accuracy",
        "explorer/agreement",
        "explorer/audit_accuracy",
        "*pairs/confidence",
        "*win_rate*",
        "eval/pass@k",
        "eval/gold_agreement",
        "roofline/*",
    ),
    "nats a token": ("kl/reference", "kl/old", "kl/old_k2", "loss/sft", "policy/entropy", "*/reference_gap"),
    "nats": (
        "explorer/entropy",
        "explorer/*margin",
        "kl/response",
        "policy/response_entropy",
        "logps/*",
        "kto/baseline",
        "eval/kl",
    ),
    "ratio": ("policy/ratio_*",),
    "steps": ("buffer/age", "ensemble/feature_age"),
    "turns": ("episode/turns",),
    "version": ("weights/version", "lag/versions"),
    "count": (
        "alarms/raised",
        "answers/expired",
        "episode/broken_calls",
        "ensemble/pairs",
        "oracle/pairs",
        "optim/left_out",
        "optim/skipped",
        "optim/steps",
        "oracle/reasked",
        "pairs/held_out",
        "prompts/*",
        "oracle/changes",
        "oracle/outages",
        "oracle/retries",
        "reference/updates",
        "refill/rounds",
        "refill/thrown_away",
        "rows/trained",
        "response/ended",
        "sft/duplicates",
        "kto/baseline_rows",
        "buffer/questions",
        "eval/pairs/count",
        "vine/branches",
        "vine/steps",
    ),
    "": (
        "ensemble/reward_*",
        "ensemble/prior_coef",
        "explorer/*reward_*",
        "explorer/gap",
        "explorer/*std",
        "explorer/*variance",
        "kl/coef",
        "policy/entropy_coef",
        "correction/weight",
        "value/explained_var",
        "kto/*",
        "loss/*",
        "optim/*",
        "pairs/*",
        "eval/pairs/*",
    ),
    "score": ("eval/*", "reward/*", "value/mean", "oracle/source/*"),
}
"""Patterns of metric names, by unit. A name has the first unit with a matching pattern; "" is for numbers
without a unit."""


def listed(name: str) -> str:
    """Return a metric's name in the form of `NAMES`: `eval/pass@k` for `eval/pass@8`, `oracle/source/label`
    for `oracle/source/gsm8k`."""
    return re.sub(r"@[0-9]+$", "@k", "oracle/source/label" if name.startswith("oracle/source/") else name)


def unit(name: str) -> str:
    """Return the unit of a metric; "" for a metric without a unit, and for every metric under `user/`."""
    return next(
        (
            unit
            for unit, patterns in _UNITS.items()
            if any(fnmatch.fnmatchcase(listed(name), pattern) for pattern in patterns)
        ),
        "",
    )
