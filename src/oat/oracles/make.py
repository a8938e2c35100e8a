"""Makes oracles from names, functions, classes and objects."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oat.errors import ConfigError, did_you_mean
from oat.files import start
from oat.oracles.base import Oracle
from oat.oracles.callables import CallableComparison, CallableOracle, QueryReward
from oat.oracles.users import UsersOracle
from oat.plugins.calls import bare, guarded
from oat.plugins.loading import keywords, shown_name
from oat.plugins.registry import ORACLES


def build_oracle(name: str, options: Mapping[str, Any], device: str = "cpu") -> Oracle:
    """Make an oracle from its name.

    Args:
        name: one of our names, or a user's `path/to/file.py:Name` or `package.module:Name`.
        device: default of the option `device`, for an oracle of ours that has this option.

    Raises:
        ConfigError: the name is unknown, its code cannot be loaded, or no oracle can be made of it
            (`make_oracle`).
    """
    found = ORACLES.load(name)
    if name in ORACLES:
        computes = inspect.isclass(found) and "device" in (keywords(found) or ())
        return _made(found, name, {"device": device, **options} if computes else options, reads_group=False)
    oracle = make_oracle(found, name, options)
    if oracle.version is None:
        name_source(oracle, found, name)
    return oracle


def name_source(oracle: Oracle, code: Any, name: str) -> None:
    """Set an oracle's `version` and `made_of` from the source of the code that computes its values.

    Args:
        code: a function or a class.
        name: the name of the code in the configuration.
    """
    place, version, text = _source(code, name)
    oracle.version = version
    oracle.made_of = {place: {"text": text}} if version else {}


def make_oracle(found: Any, name: str, options: Mapping[str, Any]) -> Oracle:
    """Make an oracle of a user's function, class or object:

    * A function with the first parameters `prompts, first, second` becomes a `CallableComparison`.
    * A function with the first parameters `queries, prompts` becomes a `QueryReward`.
    * Any other function becomes a `CallableOracle`.
    * A class with `submit` and `collect` is constructed with the options as keywords. The new object becomes
      a `UsersOracle`.
    * An object with `submit` and `collect` becomes a `UsersOracle`.

    Args:
        found: the function, class or object.
        name: for messages and `Answer.by`.

    Raises:
        ConfigError: `found` is none of these, a class or an object lacks a member of an oracle, the
            constructor fails, or an option is missing or unknown.
    """
    oracle = _made(found, name, options)
    return oracle if isinstance(oracle, CallableOracle) else UsersOracle(oracle)


def _made(found: Any, name: str, options: Mapping[str, Any], *, reads_group: bool | None = None) -> Oracle:
    if inspect.isclass(found):
        return _construct(found, name, options)
    if hasattr(found, "submit"):
        return _sound(found, name)
    if not callable(found):
        raise ConfigError(
            f"the oracle {name} is {type(found).__name__}, neither a function nor a class; name a reward "
            "function or an oracle class"
        )
    if options:
        raise ConfigError(
            f"the oracle {name} is a function and takes no options; remove {', '.join(options)}, or make "
            "it a class"
        )
    first = _parameters(found)[:3]
    if first[:2] == ["queries", "prompts"]:
        return QueryReward(found, name)
    return (
        CallableComparison(found, name)
        if first == ["prompts", "first", "second"]
        else CallableOracle(found, name, reads_group=reads_group)
    )


def oracle_options(name: str) -> set[str] | None:
    """Return the names of the options that an oracle takes: for a class, the keywords of its constructor; for
    a function, an empty set. Return None if the constructor takes **kwargs.

    Raises:
        ConfigError: the name is unknown, or its code cannot be loaded.
    """
    found = ORACLES.load(name)
    return keywords(found) if inspect.isclass(found) else set()


def is_shown_groups(name: str) -> bool:
    """Return True if a name is that of a user's reward function that does not declare `reads_group = False`.

    Raises:
        ConfigError: the code cannot be loaded.
    """
    found = ORACLES.load(name)
    if inspect.isclass(found) or hasattr(found, "submit") or not callable(found):
        return False
    return name not in ORACLES and _made(found, name, {}).reads_group


def _source(found: Any, name: str) -> tuple[str, str, str]:
    """Return the place of a function's or class's source, the hash of the source, and a second hash.

    The source is the whole file, and the place is the file's name. For an object that was given from Python,
    the source is the object's own lines, and the place is `name`. The second hash equals the first, except
    for a lambda: then it is the hash of the compiled code, because the source may hold other code too. If the
    source cannot be read, the place is `name`, and both hashes are "".
    """
    try:
        if name.startswith("python:"):
            place, source = name, inspect.getsource(found).encode()
        else:
            file = Path(inspect.getsourcefile(found) or "").resolve()
            place, source = shown_name(file, start()) or file.name, file.read_bytes()
    except (OSError, TypeError):
        return name, "", ""
    is_lambda = getattr(found, "__name__", "") == "<lambda>"
    return (
        place,
        _hash(source),
        _hash(repr(_plain_code(found.__code__)).encode()) if is_lambda else _hash(source),
    )


def _plain_code(code: Any) -> Any:
    """Return the contents of a code object, without its file name and line numbers."""
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        [_plain_code(each) if inspect.iscode(each) else each for each in code.co_consts],
    )


def _hash(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()[:16]


def _construct(cls: type, name: str, options: Mapping[str, Any]) -> Oracle:
    _check_methods(cls, name)
    signature, takes = inspect.signature(cls), keywords(cls)
    for option in options:
        if takes is not None and option not in takes:
            raise ConfigError(f"the oracle {name} has no option {option!r}; {did_you_mean(option, takes)}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"the oracle {name} cannot be built: {error}; give it among the oracle's options"
        ) from error
    with guarded(
        name,
        lambda what: ConfigError(
            f"the oracle {name} cannot be made: {bare(what)}; repair its constructor, or its options"
        ),
    ):
        oracle = cls(**options)
    return _sound(oracle, name)


def _check_methods(oracle: Any, name: str) -> None:
    missing = [method for method in ("submit", "collect") if _lacks(oracle, method)]
    if missing:
        raise ConfigError(
            f"the oracle {name} lacks {' and '.join(missing)}; see the Oracle protocol in oat/oracles/base.py"
        )


def _lacks(oracle: Any, method: str) -> bool:
    found = getattr(oracle, method, None)
    return not callable(found) or getattr(found, "__func__", found) is getattr(Oracle, method)


def _sound(oracle: Any, name: str) -> Oracle:
    _check_methods(oracle, name)
    if getattr(oracle, "answers", None) not in ("compare", "score") or not isinstance(
        getattr(oracle, "durable", None), bool
    ):
        raise ConfigError(
            f'the oracle {name} must have `answers`, "compare" or "score", and `durable`, true or false; '
            "see oat/oracles/base.py"
        )
    if getattr(oracle, "gives_steps", None) == "tokens" and getattr(oracle, "cacheable", True):
        raise ConfigError(
            f"the oracle {name} gives rewards of steps in tokens, and equal texts may have different tokens; "
            "set `cacheable = False` on it, or give the steps in characters"
        )
    sound: Oracle = oracle
    return sound


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # some built-in functions have no signature
        return []
