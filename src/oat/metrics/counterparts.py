"""The names of metrics in TRL and in the predecessor (the dormant package `oat-llm`), each with the metric's
name in `oat`. Two tables in docs/metrics.md are made from them. `oat plot`, and the settings that name
metrics, look up unknown names here.

TRL's names are those of its trainers for DPO, GRPO, RLOO, SFT, online DPO and PPO. The predecessor's names
are those of its groups misc, train, actor and eval.
"""

from dataclasses import dataclass

from oat.errors import did_you_mean
from oat.metrics.names import NAMES, listed


@dataclass(frozen=True)
class Name:
    """The metric of `oat` that corresponds to a metric of TRL or of `oat-llm`, the predecessor of `oat`.

    Attributes:
        ours: the nearest metric of `oat`, or "step" for the number of the row; "" if there is none.
        note: how the two metrics differ, or another place to find the number.
    """

    ours: str
    note: str = ""


_EXACT = "`samples.jsonl` and the ledger have every response"
_NOT_HERE = "no such term here"
_SETTING = "a setting, in `config.yaml`"

TRL = {
    "global_step": Name("optim/steps"),
    "epoch": Name("", "`prompts.epochs` bounds it"),
    "num_tokens": Name(
        "response/tokens",
        "counts the tokens of the step's responses; `oat plot --against tokens` sums them up",
    ),
    "step_time": Name("time/step_s"),
    "loss": Name("loss/total"),
    "learning_rate": Name("optim/learning_rate"),
    "grad_norm": Name("optim/grad_norm"),
    "entropy": Name("policy/entropy", "mean over trained tokens; reported by all policy gradients"),
    "mean_token_accuracy": Name("", "`loss/sft` is the nearest measure"),
    "aux_loss": Name("", _NOT_HERE),
    "logits/chosen": Name(
        "logps/chosen", "logits are defined only up to a constant, so they are not reported"
    ),
    "logits/rejected": Name(
        "logps/rejected", "logits are defined only up to a constant, so they are not reported"
    ),
    "logps/chosen": Name("logps/chosen"),
    "logps/rejected": Name("logps/rejected"),
    "rewards/chosen": Name("pairs/reward_chosen"),
    "rewards/rejected": Name("pairs/reward_rejected"),
    "rewards/margins": Name("pairs/margin"),
    "rewards/accuracies": Name("pairs/accuracy"),
    "reward": Name("reward/mean"),
    "reward_std": Name("reward/std_within", "within groups; TRL's is over the batch"),
    "rewards/{function}/mean": Name(
        "reward/mean", "of the run's one oracle; a mixture also reports `oracle/source/LABEL` for each source"
    ),
    "rewards/{function}/std": Name("reward/std_within", "within groups; TRL's is over the batch"),
    "frac_reward_zero_std": Name("reward/zero_spread_frac", "share of groups; TRL's is the share of samples"),
    "completions/mean_length": Name("response/length"),
    "completions/min_length": Name("", _EXACT),
    "completions/max_length": Name("", _EXACT),
    "completions/mean_terminated_length": Name("", _EXACT),
    "completions/min_terminated_length": Name("", _EXACT),
    "completions/max_terminated_length": Name("", _EXACT),
    "completions/clipped_ratio": Name("response/truncated_frac"),
    "policy_loss": Name("loss/policy"),
    "entropy_coef": Name("policy/entropy_coef", "with `algorithm.entropy.target`"),
    "kl": Name("kl/reference"),
    "clip_ratio": Name("policy/clipped_frac"),
    "clip_ratio/region_mean": Name("policy/clipped_frac"),
    "clip_ratio/low_mean": Name(
        "policy/clipped_frac", "both sides together; `policy/ratio_min` is the smallest ratio"
    ),
    "clip_ratio/low_min": Name("policy/ratio_min", "the ratio itself"),
    "clip_ratio/high_mean": Name(
        "policy/clipped_frac", "both sides together; `policy/ratio_max` is the largest ratio"
    ),
    "clip_ratio/high_max": Name("policy/ratio_max", "the ratio itself"),
    "sampling/sampling_logp_difference/mean": Name("logps/recorded_gap"),
    "sampling/sampling_logp_difference/max": Name("logps/recorded_gap_max"),
    "sampling/importance_sampling_ratio/min": Name(
        "correction/bounded_frac", "share of tokens whose weight a bound changed, or left out"
    ),
    "sampling/importance_sampling_ratio/mean": Name(
        "correction/weight",
        "with `algorithm.correction`; without it nothing is reweighted: if engine and learner differ in "
        "precision, old log-probabilities are computed again (`logps/recomputed`)",
    ),
    "sampling/importance_sampling_ratio/max": Name(
        "correction/bounded_frac", "see `sampling/importance_sampling_ratio/min`"
    ),
    "tools/call_frequency": Name("", "an environment keeps its own counts"),
    "tools/failure_frequency": Name("", "an environment keeps its own counts"),
    "objective/kl": Name(
        "kl/response",
        "of `ppo`, if a coefficient of the KL is above 0, since otherwise no reference is needed; elsewhere "
        "`kl/reference`, which is per token",
    ),
    "objective/entropy": Name("policy/response_entropy", "of `ppo`; elsewhere `policy/entropy`, per token"),
    "objective/scores": Name(
        "reward/shaped_mean",
        "of `ppo`, after all of `algorithm.rewards`, as TRL's is after its penalty; elsewhere `reward/mean`",
    ),
    "objective/scores_margin": Name(
        "reward/std_within", "for groups of two responses, the margin divided by √2"
    ),
    "objective/non_score_reward": Name(
        "reward/kl", "of `ppo`, 0 without `algorithm.kl_reward_coef`; elsewhere the KL term is in the loss"
    ),
    "objective/rlhf_reward": Name(
        "reward/total", "of `ppo`: `reward/shaped_mean` and `reward/kl` together; elsewhere `reward/mean`"
    ),
    "policy/approxkl_avg": Name("kl/old_k2"),
    "policy/clipfrac_avg": Name("policy/clipped_frac"),
    "policy/entropy_avg": Name("policy/entropy", "at temperature 1"),
    "loss/policy_avg": Name("loss/policy"),
    "loss/value_avg": Name("loss/value"),
    "val/clipfrac_avg": Name("value/clipped_frac"),
    "val/ratio": Name("policy/ratio_mean"),
    "val/ratio_var": Name(
        "policy/ratio_var", "over tokens; TRL's is the variance of the means of forward passes"
    ),
    "val/num_eos_tokens": Name("response/ended", "responses that ended, not tokens"),
    "lr": Name("optim/learning_rate", "of the last optimiser step; TRL's schedule moves once an update"),
    "episode": Name("step", "times `algorithm.prompts` times `algorithm.samples`"),
    "eps": Name("time/step_s", "the responses of a step divided by it are TRL's episodes per second"),
    "val/contain_eos_token": Name("response/truncated_frac", "one minus TRL's number"),
    "beta": Name("", _SETTING),
}
"""The metrics of TRL, each with its counterpart in `oat`."""

PREDECESSOR = {
    "misc/pi_beta_version": Name("weights/version"),
    "misc/global_step": Name("step", "counts steps; the predecessor counts micro-batches"),
    "misc/policy_sgd_step": Name("optim/steps"),
    "misc/pi_buffer_len": Name(
        "buffer/questions", "reported with `learner.buffer`; includes ties and abstentions"
    ),
    "misc/elapse": Name("time/step_s", "seconds of one step; `oat plot --against time` sums them up"),
    "misc/update_interval": Name("", "one update per step"),
    "misc/prompt_epoch": Name("", "`prompts.epochs` bounds it"),
    "misc/gradient_update_elapse": Name("time/learn_s", "seconds of one step"),
    "misc/lr": Name("optim/learning_rate"),
    "misc/query_step": Name("oracle/queries"),
    "misc/prompt_consumed": Name("step", "times `algorithm.prompts`"),
    "misc/r_buffer_len": Name("ensemble/pairs"),
    "train/epoch": Name("", "`prompts.epochs` bounds it"),
    "train/loss_mean": Name("loss/total"),
    "train/chosen_reward": Name("pairs/reward_chosen"),
    "train/rejected_reward": Name("pairs/reward_rejected"),
    "train/acc_mean": Name("pairs/accuracy"),
    "train/reward_margin": Name("pairs/margin"),
    "train/learning_round": Name("step"),
    "train/learn_batch_time": Name("time/learn_s", "seconds of one step"),
    "train/pg_loss": Name("loss/policy"),
    "train/reg_loss": Name("loss/kl"),
    "train/critic_loss": Name("loss/value"),
    "train/vf_clipfrac": Name("value/clipped_frac"),
    "train/ratio_max_nan": Name("optim/skipped", "any number that is not finite (`learner.on_nonfinite`)"),
    "train/ratio_min_nan": Name("optim/skipped", "any number that is not finite (`learner.on_nonfinite`)"),
    "train/ratio_max_inf": Name("optim/skipped", "any number that is not finite (`learner.on_nonfinite`)"),
    "train/ratio_min_inf": Name("optim/skipped", "any number that is not finite (`learner.on_nonfinite`)"),
    "train/ratio_max": Name("policy/ratio_max"),
    "train/ratio_min": Name("policy/ratio_min"),
    "train/rm/loss_rew": Name("loss/ensemble"),
    "train/rm/loss_reg": Name(
        "loss/prior", "before its coefficient, `ensemble/prior_coef`; the predecessor's is after it"
    ),
    "train/rm/lambda": Name(
        "ensemble/prior_coef", "falls with labelled pairs; the predecessor's falls with queries"
    ),
    "actor/total_time": Name("time/sample_s"),
    "actor/generate_time": Name("time/sample_s", "includes the time of asking"),
    "actor/oracle_time": Name(
        "time/sample_s", "includes the time of generation; `oat ledger` has the oracle's seconds"
    ),
    "actor/chosen_avg_str_len": Name("response/length", "in tokens, over all responses"),
    "actor/rejected_avg_str_len": Name("response/length", "in tokens, over all responses"),
    "actor/generate_avg_str_len": Name("response/length", "in tokens"),
    "actor/init_clash_ratio": Name("explorer/clash_frac"),
    "actor/same_response_ratio": Name(
        "answers/tied_frac",
        "also counts pairs with equal rewards, and prompts for which no pair was asked",
    ),
    "actor/avg_margins": Name("explorer/mean_margin"),
    "actor/selected_margins": Name("explorer/margin"),
    "actor/avg_scores": Name("explorer/mean_margin", "over the kept prompts"),
    "actor/selected_scores": Name("explorer/margin"),
    "train/optimism_loss": Name("loss/optimism"),
    "actor/model_data_ratio": Name("explorer/model_frac"),
    "explorer/model_data_ratio": Name("explorer/model_frac"),
    "explorer/model_chosen_rewards": Name("explorer/model_reward_chosen"),
    "explorer/model_rejected_rewards": Name("explorer/model_reward_rejected"),
    "explorer/model_pred_prob_min": Name("explorer/model_belief_min", "a mean over members"),
    "explorer/model_pred_prob_max": Name("explorer/model_belief_max", "a mean over members"),
    "explorer/model_pred_prob_mean": Name("explorer/model_belief", "a mean over members"),
    "explorer/sel_pair_ep_uct_mean": Name("explorer/model_pair_variance"),
    "explorer/sel_pair_ep_uct_std": Name("explorer/model_pair_variance_std"),
    "explorer/sel_prompt_ep_uct_mean": Name("explorer/model_prompt_variance"),
    "explorer/sel_prompt_ep_uct_std": Name("explorer/model_prompt_variance_std"),
    "explorer/all_ep_uct_mean": Name("explorer/prompt_variance"),
    "explorer/agreed_best_resp_std": Name("explorer/clash_second_std"),
    "explorer/not_agreed_best_resp_std": Name("explorer/second_std"),
    "train/rm/chosen_rewards": Name("ensemble/reward_chosen"),
    "train/rm/rejected_rewards": Name("ensemble/reward_rejected"),
    "actor/loss_mask": Name("answers/tied_frac", "the share of questions that are masked"),
    "actor/pair_edit_dist": Name("", _EXACT),
    "actor/chosen_id": Name("", "`label` in `samples.jsonl`"),
    "actor/first_action_win_prob": Name("", "`values` in `samples.jsonl`"),
    "actor/rewards_mean": Name("reward/mean"),
    "actor/rewards_std": Name("reward/std_within", "within groups"),
    "actor/rewards_std_per_prompt": Name("reward/std_within"),
    "actor/minibatch_accuracy": Name("reward/mean", "equals it if the oracle's scores are 0 or 1"),
    "actor/no_eos_count": Name("response/truncated_frac", "a share, not a count"),
    "actor/num_data": Name("rows/trained"),
    "eval/rm_win_rate": Name("eval/sampled_win_rate"),
    "eval/rm_win_rate_prob": Name("eval/sampled", "if the oracle compares"),
    "eval/elapse": Name("time/evaluate_s"),
    "eval/response_str_len": Name("eval/sampled_length", "in tokens"),
    "eval/online_win_probs": Name(
        "eval/online",
        "if the oracle compares, with `evaluation.online`; at every step with `evaluation.every: 1`",
    ),
    "eval/rm_acc": Name("explorer/agreement"),
    "eval/model_rollout_acc": Name("explorer/audit_accuracy", "with `explorer.model_labels.audit`"),
    "eval/model_rollout_win_prob": Name("explorer/audit_win_prob", "with `explorer.model_labels.audit`"),
}
"""The metrics of the predecessor, each with its counterpart in `oat`."""


def ours(name: str) -> str:
    """Return the name in `oat` of a metric of TRL or of the predecessor. Return "" if `name` is unknown, or
    if the metric has no counterpart."""
    found = TRL.get(name) or PREDECESSOR.get(name)
    return found.ours if found else ""


def why_unknown(name: str) -> str:
    """Return why a run reports no metric of this name, and what to name instead. Return "" for a metric of
    `NAMES`, and for every name under `user/`, which a user's own parts may report."""
    if listed(name) in NAMES or name.startswith("user/"):
        return ""
    other = TRL.get(name) or PREDECESSOR.get(name)
    if other is not None:
        here = f"the metric is called {other.ours} here" if other.ours else "oat does not report this metric"
        return f"{here} ({other.note})" if other.note else here
    near = did_you_mean(name, NAMES).partition("valid: ")[0]  # the list of all names would be a page
    return f"there is no metric {name!r}; {near}docs/metrics.md has all names"
