"""Fixtures of the tests of ledger/."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from posts import Clock

from oat.ledger import ledger as ledger_module
from oat.ledger import outstanding as outstanding_module
from oat.ledger.ledger import Ledger
from oat.ledger.store import Store
from oat.seeds import Seeds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (ledger_module, outstanding_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Ledger]:
    """Return a function that opens the ledger of this test, as often as it is called."""

    def make(
        oracle: Any,
        *,
        labels: Any = "threshold",
        deadline_s: float = 600.0,
        name: str = "o",
        seed: int = 0,
        **late: Any,
    ) -> Ledger:
        return Ledger(
            Store(tmp_path / "ledger.sqlite"),
            {name: oracle},
            Seeds(seed),
            labels=labels,
            deadline_s=deadline_s,
            **late,
        )

    return make
