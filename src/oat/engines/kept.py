"""The pages that stay in the cache between the turns of episodes."""

from collections.abc import Iterable, Sequence

import numpy as np

from oat.engines.paged_cache import PagedCache
from oat.types import Request


class Kept:
    """Rows of a cache that wait for the next turns of their episodes. A row is known by the key of its
    request.

    Attributes:
        cache: the cache, in which all rows are parked.
    """

    def __init__(self, cache: PagedCache):
        self.cache = cache
        self._rows: dict[int, tuple[int, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, key: int, row: int, ids: np.ndarray) -> None:
        """Note a row of the cache.

        Args:
            key: the key of its request.
            ids: the tokens whose keys and values the row has.
        """
        self._rows[key] = row, ids

    def rows_of(self, requests: Sequence[Request]) -> np.ndarray:
        """Return, for each request, the row with which it goes on; -1 if there is none. The request must
        begin with the row's tokens, and have at least one more. No row is returned twice."""
        found = np.full(len(requests), -1)
        left = dict(self._rows)
        for number, request in enumerate(requests):
            row, ids = left.get(request.key, (-1, request.ids))
            if len(ids) < len(request.ids) and np.array_equal(ids, request.ids[: len(ids)]):
                found[number] = row
                del left[request.key]
        return found

    def drop(self, keys: Iterable[int]) -> None:
        """Drop the pages of the requests with these keys. If none is left, the cache is not tidied up: the
        caller lets go of it."""
        keys = set(keys)
        if self._rows.keys() <= keys:
            self._rows.clear()
        for key in keys:
            if key in self._rows:
                self.cache.free(self._rows.pop(key)[0])
