"""A plugin of pytest: `build_engine` makes each engine from a model source, in a process that cannot import
the learner. The folder of the source has a configuration and no weights; these come from an iterator, tensor
by tensor.

    pytest --noconftest -p source_engines tests/engines/test_engine_torch.py
"""

import importlib.abc
import sys
from typing import Any

import engines
import pytest
from source_of import source_of
from tiny_models import FAMILIES, NUM_TOKENS, build_config, save_model

from oat.engines.embedded import Embedded
from oat.engines.torch import TorchEngine
from oat.engines.torch_config import TorchEngineConfig
from oat.models.causal_lm import CausalLM
from oat.models.sources import lms_of

SETTINGS = ("max_rows", "cache_gb", "deterministic")


class NoLearner(importlib.abc.MetaPathFinder):
    """Refuses to import the learner."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition("oat.learner")[1] and name.split(".")[:2] == ["oat", "learner"]:
            raise ImportError("this process has no learner")


def build_engine(lm: CausalLM, *, context_length: int | None = None, **options: Any) -> Any:
    given = {"num_tokens": NUM_TOKENS, "stop_ids": [0], "decode": engines.DECODE, **options}
    sources = {"sampler": source_of(lm)}
    if context_length is not None:
        return TorchEngine(lms_of(sources), context_length=context_length, **given)  # type: ignore[arg-type]
    dtype = sources["sampler"].model.dtype
    own = {name: given.pop(name) for name in SETTINGS if name in given}
    settings = TorchEngineConfig(dtype=dtype, **own)  # type: ignore[arg-type]
    return Embedded.make(settings, sources, **{"threads": None, "pooling": None, **given})  # type: ignore[arg-type]


sys.meta_path.insert(0, NoLearner())
assert not any(name.startswith("oat.learner") for name in sys.modules)
engines.build_engine = build_engine


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {family: save_model(tmp_path_factory.mktemp(family), build_config(family)) for family in FAMILIES}


@pytest.fixture
def figure() -> Any:
    """Take the figures of the fault table, which is made by other calls."""
    return lambda text: None
