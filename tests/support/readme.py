"""The README, the tour, and the files that the two tell people to write."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, TOUR = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/tour.md"))


def files(page: str = TOUR) -> dict[str, str]:
    """Return a page's files by name. Each is a code block under `<!-- file: NAME -->`."""
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", page, flags=re.DOTALL))


def commands(page: str = TOUR) -> list[str]:
    """Return the lines of a page's block under `<!-- run -->`."""
    block = re.search(r"<!-- run -->\n```sh\n(.*?)```", page, flags=re.DOTALL)
    assert block is not None
    return [line for line in block[1].splitlines() if line.strip()]
