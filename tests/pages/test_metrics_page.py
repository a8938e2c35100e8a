"""docs/metrics.md has every metric with its unit and meaning, and the names that TRL and the predecessor have
for them."""

import re
from fnmatch import fnmatchcase

import metrics_page
import pytest

from oat.metrics import NAMES, unit
from oat.metrics.counterparts import PREDECESSOR, TRL, ours
from oat.metrics.names import _UNITS

GROUPS = {
    "misc": """pi_beta_version global_step policy_sgd_step pi_buffer_len elapse update_interval prompt_epoch
        gradient_update_elapse lr query_step prompt_consumed r_buffer_len""",
    "actor": """total_time chosen_avg_str_len rejected_avg_str_len init_clash_ratio same_response_ratio
        loss_mask pair_edit_dist
        chosen_id generate_time oracle_time first_action_win_prob generate_avg_str_len rewards_mean
        rewards_std rewards_std_per_prompt minibatch_accuracy no_eos_count num_data model_data_ratio
        avg_margins selected_margins avg_scores selected_scores""",
    "explorer": """model_data_ratio model_chosen_rewards model_rejected_rewards model_pred_prob_min
        model_pred_prob_max model_pred_prob_mean sel_pair_ep_uct_mean sel_pair_ep_uct_std
        sel_prompt_ep_uct_mean sel_prompt_ep_uct_std all_ep_uct_mean agreed_best_resp_std
        not_agreed_best_resp_std""",
    "train/rm": "loss_rew loss_reg chosen_rewards rejected_rewards lambda",
    "eval": """rm_win_rate rm_win_rate_prob elapse response_str_len online_win_probs rm_acc model_rollout_acc
        model_rollout_win_prob""",
}
"""The predecessor's key groups, as its description lists them."""


def test_the_page_is_the_one_that_the_code_makes() -> None:
    assert metrics_page.PAGE.read_text(encoding="utf-8") == metrics_page.page(), (
        "python tests/metrics_page.py"
    )


def test_the_page_names_every_metric_with_unit_and_meaning() -> None:
    """The names, units and meanings are read from the page itself."""
    text = metrics_page.PAGE.read_text(encoding="utf-8").split("## Names of TRL")[0]
    rows = {
        name: (counted_in, meaning)
        for name, counted_in, meaning in re.findall(r"^\| `(\S+)` \| (.+?) \| (.+) \|$", text, re.MULTILINE)
    }
    assert rows.keys() == NAMES.keys()
    assert {name: meaning.replace(r"\|", "|") for name, (_, meaning) in rows.items()} == NAMES
    assert all(counted_in == (unit(name) or "–") for name, (counted_in, _) in rows.items())


def test_units() -> None:
    """Every pattern of units matches a metric, and every metric matches a pattern."""
    patterns = [pattern for some in _UNITS.values() for pattern in some]
    assert [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in NAMES)] == []
    assert [name for name in NAMES if not any(fnmatchcase(name, pattern) for pattern in patterns)] == []
    expected = {
        "time/step_s": "s",
        "eval/pass@8": "share",
        "eval/majority@4": "score",
        "eval/sampled_win_rate_low": "share",
        "user/mine": "",
    }
    expected |= {
        "eval/gold_failed": "0 or 1",
        "eval/greedy_length": "tokens",
        "answers/tied_frac": "share",
        "loss/sft": "nats a token",
        "loss/kl": "",
    }
    assert {name: unit(name) for name in expected} == expected


@pytest.mark.inventory(118)
def test_names_elsewhere_lead_to_metrics_that_exist() -> None:
    named = {name.ours for names in (TRL, PREDECESSOR) for name in names.values()}
    assert named - {"", "step"} <= NAMES.keys()
    assert all(name.ours or name.note for names in (TRL, PREDECESSOR) for name in names.values()), (
        "without a counterpart it says where to look"
    )
    for group, keys in GROUPS.items():
        assert {key for key in PREDECESSOR if key.startswith(f"{group}/")} == {
            f"{group}/{key}" for key in keys.split()
        }
    assert (
        ours("rewards/chosen"),
        ours("misc/query_step"),
        ours("completions/min_length"),
        ours("eval/sampled"),
    ) == (
        *("pairs/reward_chosen", "oracle/queries"),
        *("", ""),
    )
