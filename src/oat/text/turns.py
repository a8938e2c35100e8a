"""The turns of an episode as plain data, for the files that people read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from oat.text.renderer import Renderer
from oat.types import Trajectory


@dataclass(frozen=True)
class Turns:
    """A function that returns the turns of an episode.

    Args:
        renderer: the renderer that made the texts of the responses.
    """

    renderer: Renderer

    def __call__(self, episode: Trajectory) -> list[dict[str, Any]] | None:
        """Return what follows the prompt, in order, as dicts with `author`, `text` and `reward`. Return None
        if there is one response only, or if the trajectory is recorded.

        The text of a response (author "model") is that which the environment got. The text of a message of
        the environment (author "context") has the special tokens and the template's words around it, as the
        model read it; its reward is None. So is that of a response without a reward of its own.
        """
        turns = episode.segments
        if episode.slot == "recorded" or len(turns) < 3:
            return None
        return [
            {
                "author": turn.author,
                "text": self._decode(turn.author)(turn.ids, before.ids if len(before.ids) else ()),
                "reward": turn.reward,
            }
            for before, turn in pairwise(turns)
        ]

    def _decode(self, author: str) -> Callable[[np.ndarray, Sequence[int] | np.ndarray], str]:
        return self.renderer.text if author == "model" else self.renderer.decode
