"""KTO: desirable responses, the baseline from responses to other prompts, the loss, and the data formats of
TRL."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import World, make_group, make_questions, oat, write_jsonl

from oat.algorithms.kto import KTO, KTOConfig, mismatched
from oat.errors import ConfigError
from oat.learner.batching import view_of
from oat.learner.reduction import Reduction
from oat.types import Answer, Batch, Feedback, Item, Mark, Segment, Trajectory


def item(
    number: int,
    samples: list[tuple[str, float]],
    marks: tuple[Mark, ...] | None = None,
    prompt: int | None = None,
    length: int = 1,
) -> Item:
    """Return scored samples of a prompt of `length` tokens, all with the id `number`, or `prompt` if
    given."""
    group = make_group(number, *(text for text, _ in samples))
    context = Segment("context", np.full(length, number if prompt is None else prompt, dtype=np.int32))
    group = replace(
        group,
        trajectories=tuple(replace(row, segments=(context, *row.segments[1:])) for row in group.trajectories),
    )
    (question,) = make_questions([group], "score", 0, oracle="o")
    answer = Answer(
        question.key, tuple(score for _, score in samples), marks or ("ok",) * len(samples), len(samples)
    )
    return Item(group, question, answer, None)


def numbers(model: str, rows: Sequence[Trajectory]) -> torch.Tensor:
    """Return (K,) made-up numbers in float64 that depend on the prompt, the response's length and the token's
    place."""
    low = {"policy": 0.1, "reference": 0.7}[model]
    parts = [
        low * (1 + row.ids[0]) + np.sin(len(row.completion) * np.arange(1, row.trained.sum() + 1))
        for row in rows
    ]
    return -torch.from_numpy(np.concatenate(parts)) - 1.0


def forward(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
    assert wants == {"raw"}
    return {"raw": numbers(model, rows)}


def prepared(*items: Item, **options: Any) -> tuple[KTO, Batch]:
    algorithm = KTO(KTOConfig(prompts=max(1, len(items)), **options))
    return algorithm, algorithm.prepare(Feedback(0, items, 9), forward, np.random.default_rng(0))


def loss_of(algorithm: KTO, batch: Batch, raw: torch.Tensor) -> torch.Tensor:
    view = view_of(batch)
    return Reduction(batch)(
        algorithm.losses({"policy": {"raw": raw}}, view)["loss/preference"], view, view.group_of_N, first=True
    )


ITEMS = item(1, [("abcd", 1.0), ("ab", 0.0)]), item(2, [("a", 0.25), ("abc", 0.5)])


def test_who_is_desirable() -> None:
    """A response is desirable if its score reaches the threshold. A missing score and an empty response are
    left out."""
    _, batch = prepared(*ITEMS, item(3, [("ab", 1.0), ("", 1.0), ("abc", 1.0)], ("ok", "ok", "abstain")))
    assert [row.text for row in batch.rows] == ["abcd", "ab", "a", "abc", "ab"]
    assert batch.columns["is_desirable_U"].tolist() == [True, False, False, True, True]
    assert (batch.metrics["rows/trained"], batch.metrics["kto/desirable_frac"]) == (5, 0.6)
    assert batch.group_of_N.tolist() == [0, 0, 1, 1, 2]
    _, batch = prepared(*ITEMS, threshold=0.25, lambda_desirable=2.0, lambda_undesirable=0.5)
    assert batch.columns["weight_U"].tolist() == [2.0, 0.5, 2.0, 2.0]


def test_the_baseline_by_hand() -> None:
    """Response i + 2 follows prompt i, and responses have one token. The log-ratios are ln 4, ln 2, -ln 2 and
    ln 2, so the baseline is ln(4 * 2) / 4."""
    ratios = {(1, "c"): math.log(4), (1, "d"): math.log(2), (2, "a"): -math.log(2), (2, "b"): math.log(2)}

    def given(model: str, rows: Sequence[Trajectory], wants: set[str]) -> dict[str, torch.Tensor]:
        return {
            "raw": torch.tensor(
                [ratios.get((int(row.ids[0]), row.text), 0.0) if model == "policy" else 0.0 for row in rows]
            )
        }

    items = item(1, [("a", 1.0), ("b", 0.0)]), item(2, [("c", 1.0), ("d", 0.0)])
    algorithm = KTO(KTOConfig(prompts=2, beta=1.0))
    batch = algorithm.prepare(Feedback(0, items, 4), given, np.random.default_rng(0))
    assert batch.metrics["kto/baseline"] == pytest.approx(math.log(8) / 4)
    assert batch.metrics["kto/baseline_rows"] == 4
    # The log-ratios of its own responses are all the baseline plus log 3: 1/4 from certain where desirable,
    # 3/4 where not.
    raw = torch.full((4,), math.log(8) / 4 + math.log(3))
    assert loss_of(algorithm, batch, raw).item() == pytest.approx((0.25 + 0.75) / 2)
    ratios = {key: -value for key, value in ratios.items()}
    assert (
        algorithm.prepare(Feedback(0, items, 4), given, np.random.default_rng(0)).metrics["kto/baseline"]
        == 0.0
    ), "never below 0"


def test_the_divergence_is_of_what_the_sampler_drew_in_this_step() -> None:
    """The KL metric is over the tokens sampled in this step. Their log-ratios are ln 2 and -ln 2, so k3 is
    1/2 - 1 + ln 2 and 2 - 1 - ln 2, with mean 1/4. The reference gap is over all tokens."""
    recorded, older = item(2, [("a", 0.0)]), item(3, [("b", 1.0)])
    recorded = replace(
        recorded,
        group=replace(
            recorded.group, trajectories=(replace(recorded.group.trajectories[0], slot="recorded"),)
        ),
    )
    algorithm = KTO(KTOConfig(prompts=2))
    batch = algorithm.prepare(
        Feedback(0, (item(1, [("ab", 1.0)]), recorded), 2, older=(older,)), forward, np.random.default_rng(0)
    )
    assert [row.text for row in batch.rows] == ["b", "ab", "a"]
    raw = batch.columns["reference_logps_K"] + torch.tensor([3.0, math.log(2), -math.log(2), 5.0])
    found = algorithm.metrics({"policy": {"raw": raw}}, view_of(batch))
    assert found["kl/reference"][0].mean().item() == pytest.approx(0.25)
    assert found["logps/reference_gap"][0].mean().item() == pytest.approx((8 + 2 * math.log(2)) / 4)
    assert found["kl/reference"][1] == found["logps/reference_gap"][1] == "K"


def test_responses_to_other_prompts() -> None:
    rows = [
        t
        for n in range(3)
        for t in item(n, [("ab" * (n + 1), 0.0), ("a", 0.0)], length=n + 1).group.trajectories
    ]
    found = mismatched(rows)
    assert [(int(row.ids[0]), row.text) for row in found] == [
        (0, "abab"),
        (0, "a"),
        (1, "ababab"),
        (1, "a"),
        (2, "ab"),
        (2, "a"),
    ]
    assert all(
        row.ids.tolist() == [row.ids[0]] * (row.ids[0] + 1) + list(range(len(row.text))) for row in found
    )
    assert all(row.trained.sum() == len(row.text) for row in found)


def test_what_has_no_room_or_is_no_other_prompt_is_left_out() -> None:
    """The baseline leaves out a mismatched sequence that is longer than every sequence of the step, a prompt
    that occurs twice, and a step with one prompt."""
    long_prompt, long_response = item(1, [("ab", 0.0)], length=9), item(2, [("abcdefghi", 0.0)], length=1)
    assert [
        len(row.ids)
        for row in mismatched([*long_prompt.group.trajectories, *long_response.group.trajectories])
    ] == [3]
    twice = [t for n in range(2) for t in item(n, [("a", 0.0), ("b", 0.0)], prompt=7).group.trajectories]
    assert mismatched(twice) == ()
    _, batch = prepared(item(1, [("a", 1.0), ("b", 0.0)]))
    assert (batch.metrics["kto/baseline"], batch.metrics["kto/baseline_rows"]) == (0.0, 0.0)


def slow(
    batch: Batch, policy: Sequence[float], reference: Sequence[float], baseline: float, labels: Sequence[bool]
) -> float:
    """Return the loss with beta 0.3 and weights 2 and 0.5, from lists with one number per token."""
    ends = np.cumsum([int(row.trained.sum()) for row in batch.rows])[:-1]
    terms = []
    for p, q, is_desirable in zip(
        np.split(np.array(policy), ends), np.split(np.array(reference), ends), labels, strict=True
    ):
        above = 0.3 * (p.sum() - q.sum() - baseline)
        value = 1 / (1 + math.exp(-above if is_desirable else above))
        terms.append((2.0 if is_desirable else 0.5) * (1 - value))
    return sum(terms) / len(terms)


def test_loss_and_gradient_are_those_of_plain_python() -> None:
    algorithm, batch = prepared(*ITEMS, beta=0.3, lambda_desirable=2.0, lambda_undesirable=0.5)
    baseline = batch.metrics["kto/baseline"]
    others = [(1, "a"), (1, "abc"), (2, "abcd"), (2, "ab")]
    slow_baseline = 0.0
    for prompt, text in others:
        (row,) = item(prompt, [(text, 0.0)]).group.trajectories
        slow_baseline += float((numbers("policy", [row]) - numbers("reference", [row])).sum()) / 4
    assert baseline == pytest.approx(slow_baseline) != 0
    raw, reference = numbers("policy", batch.rows).requires_grad_(), numbers("reference", batch.rows).tolist()
    loss = loss_of(algorithm, batch, raw)
    loss.backward()
    labels, policy = [True, False, False, True], raw.tolist()
    assert loss.item() == pytest.approx(slow(batch, policy, reference, baseline, labels), rel=1e-7), (
        "z is kept in float32"
    )
    assert raw.grad is not None
    for token in range(len(policy)):
        ends = [
            slow(batch, [v + h * (k == token) for k, v in enumerate(policy)], reference, baseline, labels)
            for h in (1e-5, -1e-5)
        ]
        assert raw.grad[token].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-9)


def test_reported_rewards() -> None:
    algorithm, batch = prepared(*ITEMS, beta=0.3)
    raw, view = numbers("policy", batch.rows), view_of(batch)
    metrics = algorithm.metrics({"policy": {"raw": raw}}, view)
    rewards = 0.3 * view.row_sum(raw - numbers("reference", batch.rows))
    torch.testing.assert_close(metrics["kto/reward_desirable"][0], rewards[[0, 3]])
    torch.testing.assert_close(metrics["kto/reward_undesirable"][0], rewards[[1, 2]])


def test_nothing_judged_is_an_empty_batch() -> None:
    _, batch = prepared(item(1, [("a", 1.0)], ("failed",)))
    assert (batch.size, batch.metrics["rows/trained"], batch.metrics["kto/desirable_frac"]) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 0),
        ("threshold", math.nan),
        ("beta", 0.0),
        ("lambda_desirable", -1.0),
        ("lambda_undesirable", math.inf),
    ],
)
def test_settings_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{field} is "):
        KTOConfig(**{field: value})  # type: ignore[arg-type]


FORMATS = {
    "unpaired preference": [
        {"prompt": f"{n}+1=", "completion": "ab"[: 1 + n % 2], "label": n % 4 == 0} for n in range(8)
    ],
    "preference": [{"prompt": f"{n}+1=", "chosen": "ab", "rejected": "b"} for n in range(8)],
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_trl(world: World, tmp_path: Path, name: str) -> None:
    """A KTO run on a data format of TRL needs only the path. A recorded pair gives one desirable and one
    undesirable response."""
    path = write_jsonl(tmp_path / "data.jsonl", FORMATS[name])
    changes = {
        "prompts": {
            "path": str(path),
            "epochs": 1,
            **({"responses": ["chosen", "rejected"]} if name == "preference" else {}),
        }
    }
    changes |= {
        "oracle.name": "recorded",
        "algorithm": {"name": "kto", "prompts": 8},
        "evaluation": None,
        "stop.max_steps": 5,
    }
    assert oat("train", world.config("kto", tmp_path, changes)) == 0
    (_, row) = (json.loads(line) for line in (tmp_path / "kto" / "metrics.jsonl").read_text().splitlines())
    assert row["rows/trained"] == row["kto/baseline_rows"] == (16 if name == "preference" else 8)
    assert row["kto/desirable_frac"] == (0.5 if name == "preference" else 0.25)
    assert row["kto/reward_desirable"] == row["kto/reward_undesirable"] == 0.0
    assert row["logps/reference_gap"] == 0.0
    assert "kl/reference" not in row, "nobody sampled the responses from the policy"
