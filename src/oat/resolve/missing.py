"""What a configuration names and is not there.

A run refuses it anyway when it opens it, with the same message. Commands ask this module first, since the
run's own modules take seconds to import.
"""

from pathlib import Path

from oat.config.settings import SourceConfig
from oat.data.sources import ENDINGS, open_records
from oat.files import absolute
from oat.models.beside import locate
from oat.plugins.loading import load_symbol
from oat.resolve.parts import setting
from oat.resolve.resolved import Resolved


def refuse_missing(resolved: Resolved) -> None:
    """Refuse a model's directory or a file of data or of an oracle's code that is missing.

    Raises:
        ModelError, DataError, ConfigError: it is so.
    """
    config = resolved.config
    with resolved.error_context("model.path"):
        locate(config.model.path)
    for field in ("prompts.path", "evaluation.path", "evaluation.pairs"):
        value = setting(config, tuple(field.split(".")))
        for entry in value if isinstance(value, tuple) else (value,):
            with resolved.error_context(field):
                _open_missing(entry.path if isinstance(entry, SourceConfig) else entry or "")
    with resolved.error_context("oracle.name"):
        code = config.oracle.name.rpartition(":")[0]
        if code.endswith(".py") and not absolute(code).exists():
            load_symbol(config.oracle.name)


def _open_missing(name: str) -> None:
    """Open a file of records that is missing, for the error about it."""
    if Path(name).suffix.lower() in ENDINGS and not absolute(name).exists():
        next(iter(open_records(name, name)))
