"""Head counts and sizes for tests of grouped-query attention."""

from oat.models.attention import Span

GROUPED = [
    Span(0, 4),
    Span(4, 6, prefix=0),
    Span(6, 7, prefix=0),
    Span(7, 12),
    Span(12, 15, prefix=3),
    Span(15, 16),
]
