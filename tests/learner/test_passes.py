"""The sequences that a pass computes: rows that are equal are computed once, and what nobody reads is not
computed. Values and gradients are those of the whole rows."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tiny_models import build_config, save_model

from oat.learner import limits
from oat.learner import models as passes
from oat.learner.models import SHORTEN_FROM, Critic, LanguageModel, prompt_of, sequences_of
from oat.models.loading import load_lm
from oat.types import Segment, Trajectory

NONE = np.zeros(0, dtype=np.int32)
WANTS = {"policy": {"raw", "sampled", "entropy"}, "critic": {"value", "value_after"}}


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def row_of(prompt: Sequence[int], response: Sequence[int], mask: Sequence[int] | None = None) -> Trajectory:
    count = len(response)
    zeros = np.zeros(count, dtype=np.float32)
    trained = np.ones(count, dtype=bool) if mask is None else np.array(mask, dtype=bool)
    segment = Segment("model", ids(*response), trained, np.zeros(count, dtype=np.int32), zeros, zeros)
    return Trajectory("sampler", (Segment("context", ids(*prompt)), segment), "stop", "")


def group_rows() -> list[Trajectory]:
    """Return 96 rows of 6 to 10 tokens: groups of 12 with few different responses, among them rows without
    trained tokens, one with an untrained token within it, one that is the beginning of others, and an empty
    response."""
    rows = []
    for group in range(8):
        prompt = [1, group + 2, 3, 4, 5, 6]
        rows += [row_of(prompt, [7, 8 + sample % 3, 2, 1][: 3 + sample % 2]) for sample in range(7)]
        rows += [row_of(prompt, [7]), row_of(prompt, [7, 8]), row_of(prompt, [])]
        rows += [row_of(prompt, [7, 8, 2], [1, 0, 1]), row_of(prompt, [9, 9, 9, 9], [0, 0, 0, 0])]
    return rows


def test_equal_rows_are_one_sequence_which_ends_where_it_is_read() -> None:
    """16 rows of two groups: a prompt of 50 tokens, then 0 or 1 and nineteen further tokens, of which the
    last one differs in all rows and is not read."""
    prompts = [np.arange(first, first + 50, dtype=np.int32) for first in (0, 50) for _ in range(8)]
    rows = [np.concatenate([prompts[n], ids(n % 2, *range(18), n)]) for n in range(16)]
    sequences, prefixes, sequence_of_N = sequences_of(rows, prompts, [69] * 16)
    assert [len(sequence) for sequence in sequences] == [69] * 4
    assert prefixes == [50] * 4
    assert sequence_of_N == [0, 1] * 4 + [2, 3] * 4
    for n in range(16):
        assert np.array_equal(sequences[sequence_of_N[n]], rows[n][:69])


@pytest.mark.parametrize("repeats", [5, 6])
def test_a_pass_is_shortened_only_if_it_then_has_far_fewer_tokens(repeats: int) -> None:
    """25 different rows of 12 tokens, of which 5 or 6 are there twice: they have 1.2 or 1.24 times the tokens
    of the different rows."""
    different = [np.full(12, n, dtype=np.int32) for n in range(25)]
    rows = different + different[:repeats]
    sequences, prefixes, sequence_of_N = sequences_of(rows, [NONE] * len(rows), [12] * len(rows))
    assert prefixes is None
    assert len(sequences) == (30 if repeats == 5 else 25)
    assert sequence_of_N == [*range(25), *(range(25, 30) if repeats == 5 else range(6))]


def test_a_small_pass_is_never_shortened() -> None:
    count = (SHORTEN_FROM - 1) // 10
    rows = [ids(*range(10))] * count
    assert sequences_of(rows, [NONE] * count, [5] * count) == (rows, None, list(range(count)))
    rows = [ids(*range(10))] * (count + 1)
    sequences, _, sequence_of_N = sequences_of(rows, [NONE] * (count + 1), [5] * (count + 1))
    assert [sequence.tolist() for sequence in sequences] == [[0, 1, 2, 3, 4]]
    assert sequence_of_N == [0] * (count + 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("gpt_neox"), build_config("gpt_neox"), scale=1.0)


@pytest.mark.parametrize("takes_layouts", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", WANTS)
def test_values_and_gradients_are_those_of_whole_rows(
    path: str, monkeypatch: pytest.MonkeyPatch, name: str, takes_layouts: bool
) -> None:
    """In float64 the outputs of 96 rows, and the gradient of their weighted sum, are those of passes with one
    row each. GPT-NeoX computes no norm in float32, as a Llama does."""
    lm = load_lm(path)
    lm.module.double()
    lm.takes_layouts = takes_layouts
    made = {
        "policy": lambda: LanguageModel(lm, num_tokens=lm.vocab_rows, chunk=64),
        "critic": lambda: Critic(lm, np.random.default_rng(0)).double(),
    }[name]()
    rows, seen = group_rows(), []
    hidden_of = lm.hidden_of
    monkeypatch.setattr(
        lm,
        "hidden_of",
        lambda sequences, *args, **kwargs: seen.append(sequences) or hidden_of(sequences, *args, **kwargs),
    )
    together = made.outputs(rows, {}, WANTS[name])
    assert len(seen[0]) < len(rows)
    assert max(map(len, seen[0])) < max(len(row.ids) for row in rows) + (name == "critic")
    parts = [made.outputs([row], {}, WANTS[name]) for row in rows if row.trained.any()]
    generator = torch.Generator().manual_seed(0)
    gradients = []
    parameters = [parameter for parameter in made.module.parameters() if parameter.requires_grad]
    for outputs in (together, {want: torch.cat([part[want] for part in parts]) for want in WANTS[name]}):
        generator.manual_seed(0)
        total = sum(
            (outputs[want] * torch.randn(len(outputs[want]), generator=generator, dtype=torch.float64)).sum()
            for want in sorted(WANTS[name])
        )
        gradients.append(torch.autograd.grad(total, parameters, allow_unused=True))
    for want in WANTS[name]:
        one = torch.cat([part[want] for part in parts])
        torch.testing.assert_close(together[want], one, rtol=1e-10, atol=1e-10)
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_a_pass_without_trained_tokens_gives_no_values(path: str) -> None:
    model = LanguageModel(load_lm(path), num_tokens=10, chunk=8)
    rows = [row_of([1, 2, 3], [4] * 6, [0] * 6)] * 40
    assert model.outputs(rows, {}, {"raw"})["raw"].shape == (0,)


@pytest.mark.parametrize(
    "rows",
    [
        [limits.row_of(40, 20, number) for number in range(64)],
        [limits.row_of(12, 9, number) for number in range(64)],
    ],
    ids=["long", "prompts of three tokens"],
)
def test_the_rows_of_a_measurement_of_memory_are_all_different(rows: list[Trajectory]) -> None:
    ends = [len(row.ids) - 1 for row in rows]
    sequences, _, _ = sequences_of([row.ids for row in rows], [prompt_of(row) for row in rows], ends)
    assert len(sequences) == len(rows)


def test_the_prompt_is_the_first_context_before_the_model() -> None:
    assert prompt_of(row_of([1, 2], [3])).tolist() == [1, 2]
    alone = Trajectory("recorded", (Segment("context", ids(1, 2)),), "stop", "")
    assert prompt_of(alone).tolist() == []
    assert passes.shared_prompts([ids(1, 2, 3)] * 2, [ids(1, 2)] * 2) == [2, 2]
    assert passes.shared_prompts([ids(1, 2, 3)] * 2, [NONE] * 2) is None
