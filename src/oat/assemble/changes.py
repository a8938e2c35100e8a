"""What `oat` computes otherwise than before, without a setting that would bring the old way back. A run that
an earlier version began goes on with what is computed now, and says so once.

`environment.json` has, for each process that made rows, the names of the changes that its version knew. What
an earlier version computed wrongly is right in begun runs too. A difference that a user may want to keep is a
setting (`Said.earlier` of `config/fields.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oat.config.load import dump
from oat.config.settings import Config
from oat.config.stored import lacking
from oat.errors import ConfigError, OatError
from oat.models.beside import ends_of, has_dropout, has_left_over_adapter
from oat.models.loading import load_tokenizer
from oat.resolve.oracles import shows_groups
from oat.rundir.provenance import entries
from oat.text.control_tokens import is_own
from oat.text.decoding import Decoder
from oat.text.encoding import Encoder


@dataclass(frozen=True)
class Change:
    """A change of what `oat` computes.

    Attributes:
        name: a name that stays the same; `environment.json` records it.
        says: a sentence for the user of a run that was begun before: what is otherwise now, and why. It
            begins with a small letter and ends without a full stop.
        concerns: function that says whether a run with this configuration computes something else now, or
            would if it was begun now.
        is_kept: True: the run goes on as it was begun, by a setting (`Said.earlier`), and `says` tells so.
    """

    name: str
    says: str
    concerns: Callable[[Config], bool]
    is_kept: bool = False


def _asks(config: Config, *oracles: str) -> bool:
    """Return True if a configuration names one of these oracles, for training or for evaluations."""
    tree = dump(config)
    evaluation = tree["evaluation"] or {}
    sections = tree["oracle"], evaluation.get("oracle"), evaluation.get("gold")
    return any(_names(section, oracles) for section in sections)


def _names(section: Any, oracles: Collection[str]) -> bool:
    """Return True if a section of an oracle, or a section within it, names one of these oracles."""
    if isinstance(section, Mapping):
        return section.get("name") in oracles or any(
            not isinstance(value, str) and _names(value, oracles) for value in section.values()
        )
    if isinstance(section, list | tuple):
        return any(_names(each, oracles) for each in section)
    return section in oracles


def _decoder(config: Config) -> Decoder | None:
    """Return a decoder with the policy's tokenizer; None if the tokenizer cannot be loaded."""
    try:
        tokenizer = load_tokenizer(config.model.path)
    except OatError:  # what is wrong with it is said where it is needed
        return None
    return Decoder(tokenizer, Encoder(tokenizer))


def _has_marked_beginnings(config: Config) -> bool:
    """Return True if the policy's tokenizer puts a blank before every text."""
    decoder = _decoder(config)
    return decoder is not None and decoder.knows_place


def _has_other_ends(config: Config) -> bool:
    """Return True if a response without a template may end otherwise than with one end-of-text behind it."""
    if config.render.template is not None:
        return False
    decoder = _decoder(config)
    usual = ([], [decoder.tokenizer.eos_token_id]) if decoder else ()
    return bool(config.prompts.responses) or (decoder is not None and decoder.suffix not in usual)


def _has_beginnings(config: Config) -> bool:
    """Return True if the policy's tokenizer puts tokens before every text without a template."""
    decoder = _decoder(config) if config.render.template is None else None
    return decoder is not None and bool(decoder.prefix)


def _has_own_tokens(config: Config) -> bool:
    """Return True if the policy's tokenizer has tags of reasoning and calls that became ordinary text."""
    decoder = _decoder(config) if config.render.template is not None else None
    earlier = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    return decoder is not None and any(is_own(text) for text in decoder.ids.keys() - earlier)


def _loses_blanks(config: Config) -> bool:
    """Return True if texts of the policy's tokenizer lost blanks beside an added or an unknown token."""
    decoder = _decoder(config)
    return decoder is not None and bool(
        Encoder(decoder.tokenizer).takers() or (decoder.knows_place and decoder.unknown)
    )


def _has_left_over_adapter(config: Config) -> bool:
    model, e = config.model, config.evaluation
    oracles = [config.oracle, *(each for each in (e and e.oracle, e and e.gold) if each is not None)]
    given = [getattr(oracle, "options", {}).get("path") for oracle in oracles]
    paths = [model.path, model.reference, model.critic, *given]
    return any(isinstance(path, str) and has_left_over_adapter(path) for path in paths)


def _has_own_ends(config: Config) -> bool:
    """Return True if a token that a model writes within its turn ends a text."""
    decoder = _decoder(config)
    return decoder is not None and any(
        is_own(decoder.added.get(id, ""))
        for id in ends_of(config.model.path)
        if id != decoder.tokenizer.eos_token_id
    )


def _keeps_rewards(config: Config) -> bool:
    return config.oracle.whole_groups is False and shows_groups(config)


CHANGES: tuple[Change, ...] = (
    Change(
        "judge_readings_agree",
        "the oracle judge reads log-probabilities where the reply's text has the verdict, and gives no "
        "verdict if the two disagree, or where a score was cut; before, it could take another token for the "
        "verdict (docs/oracles/judge.md); recorded answers stay, and equal questions are asked anew",
        lambda config: _asks(config, "judge"),
    ),
    Change(
        "gradient_norm_in_float64",
        "the norm of a gradient is summed in float64; before, its fifth digit could be wrong, and for large "
        "models its third; optim/grad_norm and the clip to learner.max_grad_norm differ by as much",
        lambda config: True,
    ),
    Change(
        "unbiased_kl_slope",
        "the gradient of a KL with algorithm.kl_unbiased is the ratio times the log-ratio times that of the "
        "log-probability; before, kl_max_log_ratio or a temperature other than 1 could turn it away from the "
        "reference",
        lambda config: bool(config.algorithm.options.get("kl_unbiased")),
    ),
    Change(
        "left_over_adapters",
        "an adapter that stands in the folder of a whole model is not used (docs/models.md#files): before, "
        "it was loaded beside the model, though the weights may have it merged into them already",
        _has_left_over_adapter,
    ),
    Change(
        "whole_groups",
        "it goes on as it began: a reward function gets equal responses of a group once, and its rewards are "
        "used again (oracle.whole_groups: false); a new run shows it whole groups",
        _keeps_rewards,
        is_kept=True,
    ),
    Change(
        "tools",
        "oat.environments.tools reads calls in every form in which published chat templates write them, but "
        "not within thoughts, checks their arguments by the annotations of the tools, and tells the model of "
        "a tool's own exceptions, which ended the run; what a tool writes for a terminal is 80 columns "
        "wide in any terminal",
        lambda config: config.sampling.environment is not None,
    ),
    Change(
        "recorded_calls",
        "the arguments of tool calls in the data are written as the template takes them, where JSON text was "
        "encoded a second time",
        lambda config: config.render.template not in (None, "chatml"),
    ),
    Change(
        "calls_are_read_back",
        "a recorded call of a tool is refused if it has fields that are not known, or if what the template "
        "writes is not read back as this call; before, it was learned without these fields, or as another "
        "call; the value of ShareGPT's `function_call` is a call, and was a text (docs/data.md)",
        lambda config: config.render.template not in (None, "chatml"),
    ),
    Change(
        "strict_calls",
        "a call of the model that has other fields than a name and arguments is an error, which the model "
        "reads; before, its tool was called without them; names of tools may have characters such as / and :",
        lambda config: config.sampling.environment is not None,
    ),
    Change(
        "texts_in_pieces",
        "a text behind another one is encoded as in the whole text; before, the tokenizer of this model put "
        "a blank between a prompt and its recorded response, and sampled texts lost the blank at their "
        "beginning",
        _has_marked_beginnings,
    ),
    Change(
        "ends_of_plain_texts",
        "without a chat template, a recorded response that has an end gets no second one; and what the "
        "tokenizer puts behind every text ends the response; before, it could stand in front of it",
        _has_other_ends,
    ),
    Change(
        "one_beginning",
        "without a chat template, a text that itself begins with what the tokenizer puts before every text, "
        "such as <s>, gets no second one",
        _has_beginnings,
    ),
    Change(
        "own_tokens",
        "special tokens of reasoning and calls in the assistant's texts, such as [THINK], are read as these "
        "tokens (docs/data.md#text-to-tokens); before, all but four were read as ordinary text",
        _has_own_tokens,
    ),
    Change(
        "kept_blanks",
        "texts of responses keep blanks that they lost with this tokenizer: beside special tokens that take "
        "white space away, and behind an unknown character",
        _loses_blanks,
    ),
    Change(
        "sampled_ends",
        "in episodes of several turns, the template's end of turn is not added behind another token that "
        "ended the response, such as <|eom_id|>",
        lambda config: config.sampling.environment is not None and config.render.template is not None,
    ),
    Change(
        "numbers_as_numbers",
        "the rules exact_match and math compare a reference that is a number as a number (42.0 equals 42, "
        "docs/oracles/rules.md); recorded answers stay, and are used again",
        lambda config: _asks(config, "exact_match", "math"),
    ),
    Change(
        "opened_responses",
        "the oracles format and regex read what the template has written of a response at the end of its "
        "prompt, such as <think> (docs/oracles/rules.md); recorded answers stay, and equal questions are "
        "asked anew",
        lambda config: _asks(config, "format", "regex"),
    ),
    Change(
        "opened_records",
        "a recorded response that begins with what its own prompt has opened, in any brackets, does not "
        "repeat it (docs/data.md)",
        lambda config: bool(config.prompts.responses) and config.render.template not in (None, "chatml"),
    ),
    Change(
        "stops_that_close",
        "the text of a response has its stop string if that closes a tag which the text opens (</answer>)",
        lambda config: any("/" in stop for stop in config.sampling.stop),
    ),
    Change(
        "answers_behind_thoughts",
        "the rule exact_match also compares what follows a response's thoughts, as behind </think>; recorded "
        "answers stay, and are used again",
        lambda config: _asks(config, "exact_match"),
    ),
    Change(
        "whole_responses",
        "a reward model reads the whole response, where its chat template leaves out thoughts or other "
        "parts; without a chat template, it reads control tokens in a response as ordinary text "
        "(docs/oracles/reward_model.md); recorded answers stay, and are used again",
        lambda config: _asks(config, "reward_model"),
    ),
    Change(
        "ends_that_close",
        "the text of a response has a token of reasoning, an answer or a call that ends it, such as "
        "</answer> in the generation_config.json of the model",
        _has_own_ends,
    ),
    Change(
        "no_dropout_of_merges",
        "the tokenizer's dropout is switched off; before, a text had other ids at each call",
        lambda config: has_dropout(config.model.path),
    ),
    Change(
        "whole_calls",
        "a call of a tool without its closing mark, before another one, is read or told as an error; before, "
        "it was left out; and a tool's result says whose it is, where the chat template writes a name or an "
        "id beside it",
        lambda config: config.sampling.environment is not None,
    ),
    Change(
        "sent_fields",
        "the oracle remote sends the further fields of a prompt's messages, such as tool_calls; before, the "
        "server read the messages without them; recorded answers stay, and are used again",
        lambda config: _asks(config, "remote"),
    ),
    Change(
        "opened_answers",
        "the oracle countdown reads an answer whose <answer> the end of its prompt has written; recorded "
        "answers stay, and equal questions are asked anew",
        lambda config: _asks(config, "countdown"),
    ),
    Change(
        "far_ratios",
        "in the loss of cpgd, a token whose ratio of probabilities is beyond e^20 has a gradient; before, it "
        "had none",
        lambda config: config.algorithm.name == "cpgd",
    ),
)
"""All changes, oldest first. A change is removed when no run from before it can be continued any more."""


def known_changes() -> list[str]:
    """Return the names of all changes, as `environment.json` records them."""
    return [change.name for change in CHANGES]


def untold(run_dir: Path, config: Config) -> Iterator[str]:
    """Yield a sentence for each change that concerns a begun run, and that no process of the run knew.

    Args:
        run_dir: the run's directory. For a fork that is still to be made, the directory of the original run.

    Raises:
        ConfigError: `environment.json` cannot be read as a list of entries.
    """
    lists = [
        entry.get("changes") for entry in entries(run_dir / "environment.json") if isinstance(entry, dict)
    ]
    told = {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}
    for change in CHANGES:
        if change.name not in told and change.concerns(config):
            since = "" if change.is_kept else "from here on "
            yield f"{run_dir}: an earlier version of oat began this run, and {since}{change.says}"


def refuse_removed(run_dir: Path) -> None:
    """Refuse the `config.yaml` of a run if settings were removed from it by hand. Without them, it would look
    as if a version that lacked them had begun the run.

    Raises:
        ConfigError: settings were removed; or `environment.json` cannot be read as a list of entries.
    """
    known = _known_in(run_dir)
    removed = lacking(run_dir / "config.yaml") if known and known[0] else []
    if removed:
        raise ConfigError(
            f"{run_dir / 'config.yaml'} lacks {' and '.join(removed)}, which the run wrote there when it "
            "began; write it again as it was"
        )


def _known_in(run_dir: Path) -> list[list[str]]:
    """Return the names of changes in each entry of a run's `environment.json`; empty lists for the entries of
    versions that knew none."""
    found = [entry for entry in entries(run_dir / "environment.json") if isinstance(entry, dict)]
    lists = [entry.get("changes") for entry in found]
    return [[*map(str, names)] if isinstance(names, list) else [] for names in lists]
