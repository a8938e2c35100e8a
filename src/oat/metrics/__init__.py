"""The list of all metrics, their units, and the collection of a step's numbers."""

from oat.metrics.counterparts import why_unknown
from oat.metrics.names import NAMES, listed, unit
from oat.metrics.row import UNREPEATABLE, Metrics, repeatable

__all__ = ["NAMES", "UNREPEATABLE", "Metrics", "listed", "repeatable", "unit", "why_unknown"]
