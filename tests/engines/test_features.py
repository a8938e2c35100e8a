"""Features of responses: those that the engine keeps while it samples, and those of a second pass, are the
pooled hidden states of transformers' own model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from engines import KEYS, build_engine, groups_of, run
from tiny_models import FAMILIES, NUM_TOKENS

from oat.engines.decoding import Pooling
from oat.models.causal_lm import CausalLM
from oat.models.loading import load_lm
from oat.rollout.features import FromSampling, SecondPass
from oat.types import Request, Sampling

POOLINGS = [
    Pooling(-1, False),
    Pooling(1, False),
    Pooling("all", False),
    Pooling(-1, True),
    Pooling("all", True),
]
LENGTHS = (3, 9, 1)
SAMPLES = 5


@pytest.fixture(scope="module")
def lms(paths: Mapping[str, str]) -> dict[str, CausalLM]:
    return {family: load_lm(path) for family, path in paths.items()}


def requests_of(sampling: Sampling) -> list[Request]:
    """Return five requests for each of three prompts."""
    generator = np.random.default_rng(5)
    prompts = [generator.integers(1, NUM_TOKENS, length).astype(np.int32) for length in LENGTHS]
    return [
        Request(ids, sampling, KEYS.key("features", number, sample))
        for number, ids in enumerate(prompts)
        for sample in range(SAMPLES)
    ]


@torch.no_grad()
def states(module: Any, ids: np.ndarray, layer: Any) -> torch.Tensor:
    """Return the hidden states of a layer, or of all layers side by side, (T, D)."""
    found = module(input_ids=torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True)
    layers = found.hidden_states[1:] if layer == "all" else [found.hidden_states[layer]]
    return torch.cat([layer[0] for layer in layers], dim=-1)


@pytest.mark.inventory(63)
@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_pooled_hidden_states(lms: Any, family: str, pooling: Pooling) -> None:
    lm = lms[family]
    requests = requests_of(Sampling(6))
    completions = run(build_engine(lm, pooling=pooling), requests)
    groups = groups_of(requests, completions, SAMPLES)
    own = FromSampling(lm, pooling.layer, "last" if pooling.takes_last else "mean")
    passed = SecondPass(
        lm, pooling.layer, "last" if pooling.takes_last else "mean", name="reference", weights=0
    )
    kept_GD, computed_GD = own.of(groups), passed.of(groups)
    for number, group in enumerate(groups):
        for sample, row in enumerate(group.trajectories):
            all_TD = states(lm.module, row.ids, pooling.layer)
            begin = len(row.segments[0].ids)
            drawn_TD = all_TD[begin - 1 : -1]
            expected = drawn_TD[-1] if pooling.takes_last else drawn_TD.mean(dim=0)
            found = torch.from_numpy(kept_GD[number][sample])
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            second = all_TD[-1] if pooling.takes_last else expected
            torch.testing.assert_close(
                torch.from_numpy(computed_GD[number][sample]), second, rtol=1e-4, atol=1e-4
            )
    assert own.width == passed.width == kept_GD[0].shape[1]


@pytest.mark.parametrize("options", [{"max_rows": 4}, {"cache_gb": 2e-5}, {"deterministic": True}], ids=str)
def test_rows_that_wait_or_leave_keep_their_features(lms: Any, options: dict[str, Any]) -> None:
    """The features are those of an engine with room for all rows, up to rounding."""
    lm, pooling, requests = lms["llama"], Pooling("all", False), requests_of(Sampling(6))
    plain = run(build_engine(lm, pooling=pooling), requests)
    for one, other in zip(plain, run(build_engine(lm, pooling=pooling, **options), requests), strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.features, other.features, rtol=1e-4, atol=1e-5)


def test_without_pooling_there_are_none(lms: Any) -> None:
    assert all(
        completion.features is None
        for completion in run(build_engine(lms["llama"]), requests_of(Sampling(2)))
    )
