"""The prompts and pairs that a run reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oat.algorithms.base import Objective
from oat.assemble.fingerprints import Inputs
from oat.config.settings import Config, SamplingConfig, SourceConfig
from oat.data.formats import UNPAIRED
from oat.data.index import cache_folders
from oat.data.prompts import Prompts, Source
from oat.errors import ConfigError
from oat.models.identity import hash_of
from oat.resolve.resolved import Resolved
from oat.seeds import Seeds
from oat.text.renderer import Renderer


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompts of one run.

    Attributes:
        context: largest number of tokens in a sequence of the policy; None: no limit.
        folder: the run directory, for indexes and for copies of data that can only be read in order; None:
            there is no directory.
    """

    resolved: Resolved
    renderer: Renderer
    context: int | None
    seeds: Seeds
    folder: Path | None

    def training(self) -> Prompts:
        """Read the prompts of training. If their responses are recorded, read the responses too.

        Raises:
            DataError: a source cannot be read.
            ConfigError: the algorithm judges each recorded response by a label or a score, and some have
                neither; or the algorithm would learn responses whose label is false.
        """
        p, objective = self.resolved.config.prompts, self.resolved.objective
        entries = (SourceConfig(p.path, split=p.split),) if isinstance(p.path, str) else p.path
        sources = [
            Source(entry) if isinstance(entry, str) else Source(entry.path, entry.weight, entry.split)
            for entry in entries
        ]
        room = {"room": self.context, "too_long": p.too_long} if p.responses else self._room()
        prompts = Prompts(
            sources,
            self.renderer,
            self.seeds,
            max_prompts=p.max_prompts,
            epochs=p.epochs,
            shuffle=p.shuffle,
            responses=p.responses,
            score_key=p.score_key,
            numbers=objective.numbers,
            **self._common(),
            **room,
        )
        if p.responses:
            _check_scores(self.resolved.config, objective, prompts)
        return prompts

    def held_out(self) -> Prompts | None:
        """Read the prompts that the model answers in evaluations. Return None if there are none.

        Raises:
            DataError: the prompts cannot be read.
        """
        e = self.resolved.config.answering
        if e is None:
            return None
        assert e.path is not None, "an evaluation that answers has prompts"
        own = {"max_prompts": e.max_prompts, **self._common(), **self._room()}
        return Prompts([Source(e.path, split=e.split)], self.renderer, self.seeds, **own)

    def pairs(self) -> Prompts | None:
        """Read the held-out pairs that evaluations measure. Return None if there are none. The responses are
        in the columns `prompts.responses` or, if training reads no responses, in `chosen` and `rejected`.

        Raises:
            DataError: the pairs cannot be read.
        """
        config = self.resolved.config
        e, p = config.evaluation, config.prompts
        if e is None or e.pairs is None:
            return None
        own: dict[str, Any] = {
            **self._common(),
            "max_prompts": e.max_prompts,
            "numbers": self.resolved.objective.numbers,
            "responses": pair_columns(config),
            "score_key": p.score_key,
            "reference_key": None,
            "room": self.context,
            "too_long": p.too_long,
        }
        return Prompts([Source(e.pairs, split=e.split)], self.renderer, self.seeds, **own)

    def _common(self) -> dict[str, Any]:
        """Return the options with which all prompts and pairs of a run are read."""
        p, indexes = self.resolved.config.prompts, [self.folder / "indexes"] if self.folder else []
        return {
            "prompt_key": p.prompt_key,
            "reference_key": p.reference_key,
            "max_tokens": p.max_tokens,
            "on_bad_record": p.on_bad_record,
            "folder": self.folder,
            "caches": [*indexes, *cache_folders()],
        }

    def _room(self) -> dict[str, Any]:
        """Return the option `room`: the largest number of tokens in a prompt to which the policy responds;
        None if it is unknown. With `sampling.overflow: refuse`, this is the context less the longest
        response, and the option `room_is` is a text for messages that explains the difference."""
        sampling = self.resolved.config.sampling
        if self.context is None or sampling.overflow != "refuse":
            return {"room": self.context}
        new = sampling.max_new_tokens
        is_default = ", the default" if new == SamplingConfig.max_new_tokens else ""
        return {
            "room": self.context - new,
            "room_is": f" ({self.context} tokens less sampling.max_new_tokens: {new}{is_default})",
        }


def pair_columns(config: Config) -> tuple[str, ...]:
    """Return the names of the columns with the two responses of a held-out pair."""
    return config.prompts.responses or ("chosen", "rejected")


def inputs_of_held_out(config: Config, held_out: Prompts | None, pairs: Prompts | None) -> Inputs:
    """Return the fingerprints of the held-out prompts and of the held-out pairs. What the run does not have
    is left out."""
    e, found = config.evaluation, Inputs()
    if e is None:
        return found
    for name, path, source in (("held_out", e.path, held_out), ("pairs", e.pairs, pairs)):
        if source is not None:
            found[name] = {"of": hash_of(repr((path, e.split, e.max_prompts))), "is": source.digests}
    return found


def _check_scores(config: Config, objective: Objective, prompts: Prompts) -> None:
    """Refuse data with one recorded response per record in two cases:

    * Records have labels, and the algorithm ignores them.
    * The algorithm judges each response by a label or a score, and some records have neither.

    Raises:
        ConfigError: one of the two cases holds.
    """
    p, name = config.prompts, config.algorithm.name
    setting = objective.setting_for.get("answers")
    if len(p.responses) > 1:
        return
    if UNPAIRED in prompts.formats and not objective.reads_answers:
        way = f"; set algorithm.{setting}: 1 to learn the others alone, or 0 for all" if setting else ""
        raise ConfigError(
            f"{name} would learn every response, also those whose label is false (the data are unpaired "
            f"preferences){way}"
        )
    if config.oracle.name != "recorded" or not objective.judges_singly or p.score_key is not None:
        return
    if UNPAIRED in prompts.formats and len(prompts.formats) > 1:
        others = " and ".join(sorted(prompts.formats - {UNPAIRED}))
        raise ConfigError(
            f"prompts.path has sources whose records have labels, and others that are {others}, whose "
            "responses would all be worth 1; add a column 'label' to these, or set prompts.score_key to a "
            "column that all have"
        )
    if "label" not in prompts.columns:
        known = " (the data have a column 'score')" if "score" in prompts.columns else ""
        without = f"remove algorithm.{setting} to learn every response" if setting else "add a column 'label'"
        raise ConfigError(
            f"prompts.score_key is not set: {name} would take every response in {p.responses[0]!r} for worth "
            "1, since the data have neither labels nor scores that it reads; set prompts.score_key to the "
            f"column of their scores{known}, or {without}"
        )
