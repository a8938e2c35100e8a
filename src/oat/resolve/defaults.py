"""What open settings get from other settings, as `oat check` shows it."""

from collections.abc import Iterator

from oat.config.fields import UNSAID, settings_below
from oat.config.settings import LoraConfig
from oat.resolve.parts import setting
from oat.resolve.resolved import Resolved


def derived(resolved: Resolved) -> Iterator[str]:
    """Yield a sentence for each setting that is left open and follows from another setting: by its field, or
    by the `defaults` of a part."""
    for path, value, _, said in settings_below(resolved.config):
        if said.follows is not UNSAID and path not in resolved.origins:
            found = said.follows.value(resolved)
            is_filled = said.follows.fills != "never"
            if found is not None and (is_filled or value in (None, found)):
                text = _text(value if is_filled else found)
                yield f"{'.'.join(path)}: {text}, {said.follows.words(resolved)}"
    for field, source in resolved.derived.items():
        path = tuple(field.split("."))
        if path not in resolved.origins:
            yield f"{field}: {_text(setting(resolved.config, path))}, {source}"


def _text(value: object) -> str:
    if isinstance(value, LoraConfig):
        return f"of rank {value.rank}"
    if isinstance(value, tuple):
        return ", ".join(each if each.isidentifier() else repr(each) for each in value)
    return str(value)
