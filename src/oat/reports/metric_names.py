"""The names that TRL and the predecessor give to metrics, each with ours. A table in docs/metrics.md is made
from them, and `oat plot` looks up unknown names here.

TRL's names are those of its trainers for DPO, GRPO, RLOO, SFT and online DPO. The predecessor's are those of
its groups misc, train, actor and eval.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """The counterpart of a metric of TRL or of the predecessor.

    Attributes:
        ours: our nearest metric, or "step" for the column of that name; "" if there is none.
        note: how the two metrics differ, or where to look instead.
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
        "response/tokens", "of the step, and of responses only; `oat plot --against tokens` sums them up"
    ),
    "step_time": Name("time/step_s"),
    "loss": Name("loss/total"),
    "learning_rate": Name("optim/learning_rate"),
    "grad_norm": Name("optim/grad_norm"),
    "entropy": Name("policy/entropy", "of trained tokens; reported by `grpo` and `dr_grpo`"),
    "mean_token_accuracy": Name("", "`loss/sft` says how well the tokens are known"),
    "aux_loss": Name("", _NOT_HERE),
    "logits/chosen": Name("logps/chosen", "raw logits have no zero, so they are not reported"),
    "logits/rejected": Name("logps/rejected", "as above"),
    "logps/chosen": Name("logps/chosen"),
    "logps/rejected": Name("logps/rejected"),
    "rewards/chosen": Name("pairs/reward_chosen"),
    "rewards/rejected": Name("pairs/reward_rejected"),
    "rewards/margins": Name("pairs/margin"),
    "rewards/accuracies": Name("pairs/accuracy"),
    "reward": Name("reward/mean"),
    "reward_std": Name("reward/std_within", "within groups; theirs is over the batch"),
    "rewards/{function}/mean": Name("reward/mean", "one oracle a run"),
    "rewards/{function}/std": Name("reward/std_within", "within groups; theirs is over the batch"),
    "frac_reward_zero_std": Name("reward/zero_spread_frac", "of groups; theirs is of samples"),
    "completions/mean_length": Name("response/length"),
    "completions/min_length": Name("", _EXACT),
    "completions/max_length": Name("", _EXACT),
    "completions/mean_terminated_length": Name("", _EXACT),
    "completions/min_terminated_length": Name("", _EXACT),
    "completions/max_terminated_length": Name("", _EXACT),
    "completions/clipped_ratio": Name("response/truncated_frac"),
    "policy_loss": Name("loss/policy"),
    "entropy_coef": Name("", _NOT_HERE),
    "kl": Name("kl/reference"),
    "clip_ratio": Name("policy/clipped_frac"),
    "clip_ratio/region_mean": Name("policy/clipped_frac"),
    "clip_ratio/low_mean": Name("policy/clipped_frac", "both sides together; `policy/ratio_min` is the end"),
    "clip_ratio/low_min": Name("policy/ratio_min", "the ratio itself"),
    "clip_ratio/high_mean": Name("policy/clipped_frac", "both sides together; `policy/ratio_max` is the end"),
    "clip_ratio/high_max": Name("policy/ratio_max", "the ratio itself"),
    "sampling/sampling_logp_difference/mean": Name("logps/recorded_gap"),
    "sampling/sampling_logp_difference/max": Name("logps/recorded_gap", "the mean"),
    "sampling/importance_sampling_ratio/min": Name(
        "logps/recorded_gap", "engine and learner compute in one precision, so nothing is reweighted"
    ),
    "sampling/importance_sampling_ratio/mean": Name("logps/recorded_gap", "as above"),
    "sampling/importance_sampling_ratio/max": Name("logps/recorded_gap", "as above"),
    "tools/call_frequency": Name("", "an environment keeps its own counts"),
    "tools/failure_frequency": Name("", "as above"),
    "objective/kl": Name("kl/reference", "a token; theirs is a response"),
    "objective/entropy": Name("policy/entropy", "a token; theirs is a response"),
    "objective/scores": Name("reward/mean"),
    "objective/scores_margin": Name("reward/std_within", "of a pair the margin over √2"),
    "objective/non_score_reward": Name("", "the KL term is in the loss, not in the reward"),
    "objective/rlhf_reward": Name("reward/mean", "without the KL term"),
    "val/contain_eos_token": Name("response/truncated_frac", "one minus it"),
    "beta": Name("", _SETTING),
}
"""Metrics of TRL, each with ours."""

PREDECESSOR = {
    "misc/pi_beta_version": Name("weights/version"),
    "misc/global_step": Name("step", "steps; theirs are micro-batches"),
    "misc/policy_sgd_step": Name("optim/steps"),
    "misc/pi_buffer_len": Name("buffer/questions", "with `learner.buffer`; ties and abstentions among them"),
    "misc/elapse": Name("time/step_s", "of the step; `oat plot --against time` sums them up"),
    "misc/update_interval": Name("", "one update a step"),
    "misc/prompt_epoch": Name("", "`prompts.epochs` bounds it"),
    "misc/gradient_update_elapse": Name("time/learn_s", "of the step"),
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
    "train/learn_batch_time": Name("time/learn_s", "of the step"),
    "train/pg_loss": Name("loss/policy"),
    "train/reg_loss": Name("loss/kl"),
    "train/ratio_max": Name("policy/ratio_max"),
    "train/ratio_min": Name("policy/ratio_min"),
    "train/rm/loss_rew": Name("loss/ensemble"),
    "train/rm/loss_reg": Name("loss/prior"),
    "actor/total_time": Name("time/sample_s"),
    "actor/generate_time": Name("time/sample_s", "with the asking"),
    "actor/oracle_time": Name("time/sample_s", "with the generation; `oat ledger` has the oracle's seconds"),
    "actor/chosen_avg_str_len": Name("response/length", "in tokens, of all responses"),
    "actor/rejected_avg_str_len": Name("response/length", "in tokens, of all responses"),
    "actor/generate_avg_str_len": Name("response/length", "in tokens"),
    "actor/init_clash_ratio": Name("answers/tied_frac"),
    "actor/loss_mask": Name("answers/tied_frac", "the share that is masked"),
    "actor/pair_edit_dist": Name("", _EXACT),
    "actor/chosen_id": Name("", "`label` in `samples.jsonl`"),
    "actor/first_action_win_prob": Name("", "`values` in `samples.jsonl`"),
    "actor/rewards_mean": Name("reward/mean"),
    "actor/rewards_std": Name("reward/std_within", "within groups"),
    "actor/rewards_std_per_prompt": Name("reward/std_within"),
    "actor/minibatch_accuracy": Name("reward/mean", "with an oracle that says 0 or 1"),
    "actor/no_eos_count": Name("response/truncated_frac", "a share"),
    "actor/num_data": Name("rows/trained"),
    "eval/rm_win_rate": Name("eval/sampled_win_rate"),
    "eval/rm_win_rate_prob": Name("eval/sampled", "of a comparing oracle"),
    "eval/elapse": Name("time/evaluate_s"),
    "eval/response_str_len": Name("eval/sampled_length", "in tokens"),
    "eval/online_win_probs": Name(
        "eval/online",
        "of a comparing oracle, with `evaluation.online`; at every step with `evaluation.every: 1`",
    ),
    "eval/rm_acc": Name("ensemble/accuracy", "of training pairs"),
    "eval/model_rollout_acc": Name("ensemble/accuracy", "of training pairs"),
    "eval/model_rollout_win_prob": Name("", "an explorer's own metrics go under `user/`"),
}
"""Metrics of the predecessor, each with ours."""


def ours(name: str) -> str:
    """Return our name for a metric of TRL or of the predecessor; "" if the name is unknown, or the metric has
    no counterpart here."""
    found = TRL.get(name) or PREDECESSOR.get(name)
    return found.ours if found else ""
