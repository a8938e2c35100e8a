"""The sampling settings of the requests that an engine gets."""

from dataclasses import fields, replace

from oat.config.settings import Config
from oat.resolve.resolved import Resolved
from oat.types import Sampling


def make_sampling(resolved: Resolved) -> Sampling:
    """Return the sampling settings of training."""
    sampling = plain_sampling(resolved.config)
    return replace(sampling, keep_sets=resolved.requires.ratio_based and sampling.truncates)


def plain_sampling(config: Config) -> Sampling:
    """Return the sampling settings of evaluations. They record no kept sets."""
    names = [f.name for f in fields(Sampling) if f.name != "keep_sets"]
    return Sampling(**{name: getattr(config.sampling, name) for name in names})
