"""The units of metrics."""

import fnmatch
import re

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
