"""What the recipes of this folder are rewarded for: short words."""

import re
from collections.abc import Sequence


def plain(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """Minus the mean number of letters of a word; a story without a word is worth -20."""
    words = [re.findall(r"\w+", text) for text in completions]
    return [-sum(map(len, each)) / len(each) if each else -20.0 for each in words]
