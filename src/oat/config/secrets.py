"""Removal of secrets from configurations, texts and messages that leave the run.

In a configuration, the values of two kinds of fields are hidden: headers, and fields whose names sound like
secrets (`api_key`, `token`). In every text, these are hidden:
* the values of these fields;
* the values of environment variables whose names sound like secrets, or that a field `*_env` names;
* the user in a URL, and the parameters of a URL whose names sound like secrets;
* keys of services with a known form (`sk-...`, `hf_...`, `Bearer ...`).

A value of a field or a variable with fewer than 6 characters is not hidden in texts.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
_CALLED = (
    r"(?:api[_-]?key|access[_-]?key|private[_-]?key|secret[_-]?key|token|secret|password|passwd|passphrase"
    r"|authorization|bearer|credentials?|cookie)"
)
_FIELD = re.compile(rf"(?:.*[._-])?{_CALLED}|key|auth|pass|pwd", re.IGNORECASE)
_HEADERS = re.compile(r"(?:.*[._-])?headers", re.IGNORECASE)
_VARIABLE = re.compile(
    r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)(?:_.*)?", re.IGNORECASE
)
_USER = re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/?#\s@]+@", re.IGNORECASE)
_QUERY = re.compile(rf"([?&;](?:[\w.-]*[._-])?(?:{_CALLED}|key|sig|signature|auth)=)[^&;#\s]+", re.IGNORECASE)
_KNOWN = re.compile(
    r"\b(?:sk-(?=[\w-]*\d)[\w-]{12,}|hf_[A-Za-z0-9]{16,}|gh[a-z]_\w{16,}|xox[a-z]-[\w-]{8,}|AKIA[A-Z0-9]{16}"
    r"|AIza[\w-]{16,})"
    r"|(?<=\bBearer )[\w.~+/=-]{6,}"
)
"""Pattern of keys with a known form: those of some services, and any key after `Bearer`."""
_SHORTEST = 6
"""Least number of characters of a value that is hidden in texts."""
_SUSPECT = re.compile(
    r"key|tok[en]{0,2}n(?!s|i|_?id)|secret|passw|passphrase|pwd|auth|cred|api|cookie|bearer|header", re.I
)
_RANDOM = re.compile(r"(?<![\w./-])(?=(?:[A-Za-z]*\d){3})(?=(?:\d*[A-Za-z]){3})[A-Za-z0-9]{20,}(?![\w./-])")
"""Pattern of a long word of letters and digits in which no path and no name has a part."""


class Hider:
    """Hides the secrets of a configuration, and those in the environment variables of this process. Only the
    constructor reads the variables.

    Args:
        tree: the configuration as plain data.

    Attributes:
        tree: the configuration without secrets.
    """

    def __init__(self, tree: Mapping[str, Any]):
        called = {value for name, value in os.environ.items() if _VARIABLE.fullmatch(name)}
        named = {os.environ.get(name, "") for name in _variables(tree)}
        known = {*called, *named, *_secrets(tree)}
        self._values = sorted(
            {value.strip() for value in known if len(value.strip()) >= _SHORTEST}, key=len, reverse=True
        )
        self.tree: dict[str, Any] = self._tree(tree)

    def text(self, text: str) -> str:
        """Return the text with each secret replaced by `HIDDEN`."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return _KNOWN.sub(HIDDEN, _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text)))

    def _tree(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                str(name): _hidden(item) if is_hidden(str(name)) else self._tree(item)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._tree(item) for item in value]
        return self.text(value) if isinstance(value, str) else value


def is_hidden(name: str) -> bool:
    """Return True if the field's name sounds like a secret, or the field holds headers. Its value is then
    hidden."""
    return bool(_FIELD.fullmatch(name) or _HEADERS.fullmatch(name))


def is_suspect(name: str) -> bool:
    """Return True if a name that no table has may be that of a secret, also if it is misspelt. Only messages
    use it: to hide too much there does no harm."""
    return is_hidden(name) or bool(_SUSPECT.search(name))


def looks_secret(text: str) -> bool:
    """Return True if a text has a key of a known form, a user in a URL, or is a long random word."""
    return any(pattern.search(text) for pattern in (_KNOWN, _USER, _QUERY, _RANDOM))


def _hidden(value: Any) -> Any:
    """Return the value of a hidden field with `HIDDEN` in place of each text. None, "" and the names of
    headers stay."""
    if isinstance(value, Mapping):
        return {str(name): _hidden(item) for name, item in value.items()}
    return value if value is None or value == "" else HIDDEN


def _secrets(tree: Any) -> Iterator[str]:
    """Yield the texts in hidden fields (`is_hidden`)."""
    if isinstance(tree, Mapping):
        for name, item in tree.items():
            yield from _texts(item) if is_hidden(str(name)) else _secrets(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _secrets(item)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        yield from value.split()[1:]  # "Bearer ..."
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _variables(tree: Any) -> Iterator[str]:
    """Yield the names of the environment variables that fields `*_env` name."""
    if isinstance(tree, Mapping):
        for name, item in tree.items():
            if str(name).endswith("_env") and isinstance(item, str):
                yield item
            else:
                yield from _variables(item)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _variables(item)
