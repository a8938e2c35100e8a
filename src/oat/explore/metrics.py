"""The metrics `explorer/*` of a step, from the notes of its questions (`Question.notes`).

The explorers of this package write these notes about a pair:

    belief             mean over members of the probability that the first candidate wins
    reward_first, reward_second    mean over members of the candidate's reward
    pair_variance      variance over members of the difference of rewards
    prompt_variance    mean of this variance over all pairs of different candidates of the prompt
    gap                by how much the members expect their best candidate to exceed the best one by the mean
    second_std         standard deviation over members of the second candidate's reward
    clash              1 if the rule chose one candidate twice, and the ensemble did not replace its pair
    model              1 if the pair was chosen for the ensemble's label

The notes of a user's explorer are reported as their means.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from oat.types import ENSEMBLE, Feedback, Item


def pair_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the metrics of the questions that a step took, from the notes of this package's explorers. A
    metric is left out if no question has its notes."""
    known = [item for item in feedback.asked if "belief" in item.question.notes]
    return _of_pairs(known) if known else {}


def margin_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the metrics of the questions of the explorer `apl`, which writes these notes:

    entropy        predictive entropy of the prompt, nats
    margin         difference of the implicit rewards of the pair, nats
    mean_margin    mean of this difference over all pairs of the prompt
    """
    noted = [item for item in feedback.asked if item.question.notes]
    found = {f"explorer/{name}": _mean(_notes(noted, name)) for name in ("entropy", "margin", "mean_margin")}
    return {name: value for name, value in found.items() if value is not None}


def users_metrics(feedback: Feedback) -> dict[str, float]:
    """Return the mean over a step's questions of each note of a user's explorer."""
    noted = [item for item in feedback.asked if item.question.notes]
    names = sorted({name for item in noted for name in item.question.notes})
    return {f"user/explorer/{name}": float(np.mean(_notes(noted, name))) for name in names}


def _of_pairs(items: Sequence[Item]) -> dict[str, float]:
    model = [item for item in items if item.question.notes.get("model")]
    clashing = [item for item in items if item.question.notes.get("clash")]
    others = [item for item in items if not item.question.notes.get("clash")]
    by_oracle = [item for item in items if item.label is not None and item.question.oracle != ENSEMBLE]
    audited = [item for item in by_oracle if item.question.notes.get("model")]
    found: dict[str, float | None] = {
        "explorer/clash_frac": len(clashing) / len(items),
        "explorer/clash_second_std": _mean(_notes(clashing, "second_std")),
        "explorer/second_std": _mean(_notes(others, "second_std")),
        "explorer/pair_variance": _mean(_notes(items, "pair_variance")),
        "explorer/prompt_variance": _mean(_notes(items, "prompt_variance")),
        "explorer/gap": _mean(_notes(items, "gap")),
        "explorer/agreement": _mean([_agrees(item) for item in by_oracle]),
    }
    if model:
        found |= {
            "explorer/model_frac": len(model) / len(items),
            "explorer/model_belief": _mean(_notes(model, "belief")),
            "explorer/model_belief_min": min(_notes(model, "belief")),
            "explorer/model_belief_max": max(_notes(model, "belief")),
            "explorer/model_reward_chosen": _mean(_notes(model, "reward_first")),
            "explorer/model_reward_rejected": _mean(_notes(model, "reward_second")),
            "explorer/model_pair_variance": _mean(_notes(model, "pair_variance")),
            "explorer/model_pair_variance_std": float(np.std(_notes(model, "pair_variance"))),
            "explorer/model_prompt_variance": _mean(_notes(model, "prompt_variance")),
            "explorer/model_prompt_variance_std": float(np.std(_notes(model, "prompt_variance"))),
            "explorer/audit_accuracy": _mean([float(item.label == 0) for item in audited]),
            "explorer/audit_win_prob": _mean([item.answer.values[0] for item in audited]),
        }
    return {name: value for name, value in found.items() if value is not None}


def _notes(items: Iterable[Item], name: str) -> list[float]:
    return [notes[name] for notes in map(_notes_of, items) if name in notes]


def _notes_of(item: Item) -> Mapping[str, float]:
    return item.question.notes


def _agrees(item: Item) -> float:
    """Return 1 if the ensemble, before it learned from this pair, gave the winner the higher mean reward, and
    1/2 if both had the same."""
    notes = item.question.notes
    margin = notes["reward_first"] - notes["reward_second"]
    return 0.5 if margin == 0 else float((margin > 0) == (item.label == 0))


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
