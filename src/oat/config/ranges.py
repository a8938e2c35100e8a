"""Ranges of the numbers in a configuration."""

from typing import Annotated

from msgspec import Meta

Whole = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[float, Meta(ge=0, le=1e308)]
Positive = Annotated[float, Meta(gt=0, le=1e308)]
Share = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
CpuShare = Annotated[float, Meta(ge=1e-4, le=1e308)]
"""Logical CPUs of a Ray cluster, which counts no smaller share."""
