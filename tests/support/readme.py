"""The files that the README tells people to write."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


README = (ROOT / "README.md").read_text(encoding="utf-8")


def files() -> dict[str, str]:
    """Return the README's files by name. Each is a code block under `<!-- file: NAME -->`."""
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", README, flags=re.DOTALL))
