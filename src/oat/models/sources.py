"""Which tensor of a model's files fills which tensor of the module.

Transformers renames tensors of files: it adds or removes the prefix of the backbone, brings old names up to
date, and puts the experts of a layer together. So two tensors of different names may fill the same place, and
transformers then takes one of them without a word. Here they are found by transformers' own rules.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from oat.errors import ModelError
from oat.models.weight_files import are_equal, cached_files, tensors_of


class Source(NamedTuple):
    """A tensor of the files that fills a tensor of the module, alone or as one piece of it.

    Attributes:
        name: its name in the files.
        converter: number of the rule that puts it together with others; -1: it fills the place alone.
        piece: which piece of the place it is; empty for the whole.
    """

    name: str
    converter: int
    piece: str


def refuse_two_sources(module: Any, path: str) -> None:
    """Refuse files in which two tensors of different values fill the same tensor of a module.

    Args:
        module: the module that was made from the files; it may be without values.
        path: a directory, or a hub model in the local cache.

    Raises:
        ModelError: there are such tensors.
    """
    places: dict[str, list[Source]] = {}
    for place, source in _sources(module, tensors_of(cached_files(path))):
        places.setdefault(place, []).append(source)
    wrong = [
        (place, pair) for place, found in places.items() for pair in _rivals(found) if not _agree(path, *pair)
    ]
    if wrong:
        place, (one, other) = wrong[0]
        raise ModelError(
            f"the files of {path} have two tensors for `{place}`, `{one.name}` and `{other.name}`, which "
            f"differ, and so for {len({place for place, _ in wrong})} tensors of the model: nobody can tell "
            "which are meant; remove those that do not belong to it"
        )


def _sources(module: Any, names: Iterable[str]) -> Iterator[tuple[str, Source]]:
    """Yield the name of a tensor of the module, and a tensor of the files that fills it."""
    rules = get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    number_of = {
        pattern: number for number, rule in enumerate(converters) for pattern in rule.source_patterns
    }
    own, prefix = module.state_dict(), module.base_model_prefix
    for name in sorted(names, key=dot_natural_key):  # some rules depend on the order
        place, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if place not in own and name in own:
            place, pattern = rename_source_key(name, [], [], prefix, own)
        if place not in own:
            continue
        if pattern is None:
            yield place, Source(name, -1, "")
            continue
        rule = converters[number_of[pattern]]
        piece = rename_source_key(name, renamings, [])[0].removeprefix(f"{prefix}.")
        first, *others = rule.target_patterns
        for other in {place, *(place.replace(first, other) for other in others)}:
            yield other, Source(name, number_of[pattern], piece)


def _rivals(sources: list[Source]) -> Iterator[tuple[Source, Source]]:
    """Yield pairs of sources of one place of which only one can be used."""
    for number, one in enumerate(sources):
        for other in sources[:number]:
            if one.converter != other.converter or one.piece == other.piece:
                yield other, one


def _agree(path: str, one: Source, other: Source) -> bool:
    return one.converter == other.converter and are_equal(path, one.name, other.name)
