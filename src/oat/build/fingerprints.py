"""Fingerprints of the inputs that the rows of a run are made from, beside its configuration. They stand in
`environment.json`, and are held against the inputs that are there when the run goes on.

| | | another one is |
| --- | --- | --- |
| `models` | what is read of `model.path`, `.adapter` and `.reference` (`models/identity.py`) | refused |
| `weights` | likewise; of those that the run still reads | refused |
| `template` | the text of the chat template | refused |
| `prompts` | a digest of each source | refused |
| `held_out`, `pairs` | the same of evaluation | warned of |
| `oracles` | by field: version, and what it is made of (`ledger/versions.py`) | refused, unless accepted |
| `modules` | a hash of each of the user's own files that were imported | warned of |
| `readers` | versions of the libraries that read configurations and tokenizers | |

Fingerprints contain no path, so a run may be moved; `of` is a hash of how the configuration names an input. A
fork keeps the fingerprints of the other run in `fork.json`, so it no longer needs that run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from oat.config.settings import Config
from oat.errors import ConfigError, ModelError, TemplateError, warn
from oat.files import parse_json, start
from oat.models.causal_lm import CausalLM
from oat.models.identity import (
    adapter_identity,
    are_same,
    differences,
    hash_of,
    model_identity,
    readers,
    tokenizer_identity,
    weights_identity,
)
from oat.models.loading import load_config
from oat.models.lora import is_adapter_directory
from oat.oracles.base import Oracle
from oat.plugins.loading import own_files
from oat.rundir.provenance import entries, recorded_inputs
from oat.text.templates import load_template

Inputs = dict[str, Any]
"""Fingerprints, as plain JSON."""
Roles = Mapping[str, tuple[str, Oracle]]
"""Each oracle with its address, by the field that names it: `oracle`, `evaluation.oracle`,
`evaluation.gold`."""
Blame = Callable[[str], AbstractContextManager[None]]
"""`Resolved.blame`: within it errors say where a field stands."""

CHANGEABLE = ("reward",)
"""Inputs that may be accepted although they have changed (`--accept-changed`)."""
FORK_FILE = "fork.json"
GIVEN = "given"
"""The folder of a run for models and records that were given as Python objects."""
_MOST_LINES = 5
_TEMPLATES = {
    "tokenizer": "chat_template.jinja, or `chat_template` in tokenizer_config.json",
    "chatml": "of this program",
}


def recorded(run_dir: Path, step: int | None = None) -> Inputs | None:
    """The fingerprints of the last process that made rows of a run; None where no process has recorded any.

    Args:
        step: only processes that made rows up to this checkpoint count.

    Raises:
        ConfigError: `environment.json` is not what was written there.
    """
    found = recorded_inputs(entries(run_dir / "environment.json"), step)
    if found is not None:
        return found
    with suppress(OSError, ValueError, AttributeError):
        return parse_json((run_dir / FORK_FILE).read_text(encoding="utf-8")).get("inputs")
    return None


def inputs_of_models(config: Config, lm: CausalLM, tokenizer: Any) -> Inputs:
    """The fingerprints of all files that decide model and text, but for weights and template.

    Args:
        lm: the policy; its configuration is enough.

    Raises:
        ModelError: the reference, or an adapter, cannot be read.
    """
    ends = {"generation_config.json": {"eos_token_id": sorted(lm.eos_ids)}}
    policy = {**model_identity(lm.module.config), **ends, **tokenizer_identity(tokenizer)}
    models = {"model.path": {"of": hash_of(config.model.path), "is": policy}}
    for field, path in (("model.adapter", config.model.adapter), ("model.reference", config.model.reference)):
        if path is not None:
            found = (
                adapter_identity(path) if is_adapter_directory(path) else model_identity(load_config(path))
            )
            models[field] = {"of": hash_of(path), "is": found}
    return {"readers": readers(), "models": models}


def inputs_of_template(config: Config, tokenizer: Any) -> Inputs:
    """The fingerprint of the template's text, if there is a template.

    Raises:
        TemplateError: it is missing.
    """
    template = config.render.template
    return (
        {}
        if template is None
        else {"template": {"of": hash_of(template), "is": hash_of(load_template(template, tokenizer))}}
    )


def refuse_other_models(config: Config, known: Inputs | None, now: Inputs, blame: Blame) -> None:
    """Hold the fingerprints of models and template against the known ones.

    Raises:
        ModelError, TemplateError: a file or a field is another.
    """
    if known is None:
        return
    same_readers = known.get("readers") == now["readers"]
    read = (
        ""
        if same_readers
        else f" (what reads it was {_versions(known.get('readers', {}))} and is {_versions(now['readers'])})"
    )
    for field, (before, after) in _both(known, now, "models").items():
        if field == "model.path" or before.get("of") == after["of"]:
            with blame(field):
                _refuse(differences(before.get("is", {}), after["is"], same_readers=same_readers), read)
    before, after = known.get("template", {}), now.get("template", {})
    if before.get("of") == after.get("of") and before.get("is") != after.get("is"):
        with blame("render.template"):
            file = _TEMPLATES.get(str(config.render.template), "the file")
            raise TemplateError(
                f"the text of the chat template ({file}) is not what this run began with; put it back as "
                "it was, or begin a new run"
            )


def weights_read(config: Config, *, has_reference: bool, is_begun: bool) -> list[str]:
    """The fields whose weights a run computes with as their files have them.

    Args:
        has_reference: the run has a reference.
        is_begun: the run has a checkpoint, which holds the policy's weights, and those of a reference that
            follows the policy.
    """
    model = config.model
    is_fixed = has_reference and not (is_begun and model.reference_update is not None)
    starts = not is_begun or (is_fixed and model.reference is None)
    return [
        *(["model.path"] if starts or model.lora is not None else []),
        *(["model.adapter"] if starts and model.adapter is not None else []),
        *(["model.reference"] if is_fixed and model.reference is not None else []),
    ]


def inputs_of_weights(config: Config) -> Inputs:
    """The fingerprints of the weights on this machine; a hub model that was not loaded yet has none."""
    paths = {
        "model.path": config.model.path,
        "model.adapter": config.model.adapter,
        "model.reference": config.model.reference,
    }
    return {
        "weights": {
            field: {"of": hash_of(path), "is": weights_identity(path)}
            for field, path in paths.items()
            if path is not None
        }
    }


def refuse_other_weights(known: Inputs | None, now: Inputs, fields: Sequence[str], blame: Blame) -> None:
    """Hold the fingerprints of the weights of these fields against the known ones.

    Raises:
        ModelError: the weights are others.
    """
    for field, (before, after) in _both(known or {}, now, "weights").items():
        if field in fields and (field == "model.path" or before.get("of") == after["of"]):
            with blame(field):
                _refuse(differences(before.get("is", {}), after["is"]))


def inputs_of_oracles(roles: Roles, versions: Mapping[str, str]) -> Inputs:
    """The fingerprints of the oracles, by field.

    Args:
        versions: of the oracles, by address.
    """
    found = {}
    for field, (address, oracle) in roles.items():
        found[field] = {"of": hash_of(address), "version": versions[address], "made_of": oracle.made_of}
    return {"oracles": found}


def versions_of(known: Inputs | None, roles: Roles) -> dict[str, str]:
    """The version of each oracle, by address: the known one where all that the oracle is made of is the same,
    so that a file that was only saved again changes nothing; otherwise the one that the oracle states."""
    found = {}
    for field, (address, oracle) in roles.items():
        before = _before(known, field, address)
        is_same = bool(before.get("made_of")) and are_same(before["made_of"], oracle.made_of)
        found[address] = str(before["version"]) if is_same else oracle.version or ""
    return found


def refuse_changed_oracles(known: Inputs | None, roles: Roles, changed: set[str], blame: Blame) -> None:
    """Refuse oracles whose files have changed. An oracle that has only declared another version goes on.

    Args:
        changed: the addresses of the oracles that have answered in another version.

    Raises:
        ConfigError: an oracle's files have changed; names file and field.
    """
    for field, (address, oracle) in roles.items():
        now = {file: fields for file, fields in oracle.made_of.items() if file != "options"}
        before = _before(known, field, address).get("made_of")
        is_known = before is not None and not are_same(before, oracle.made_of)
        lines = differences(before or {}, now) if is_known else [f"{file}: its text" for file in now]
        if address in changed and lines:
            with blame(f"{field}.name"):
                raise ConfigError(
                    f"it has changed since this run last asked it:{_listed(lines)}\nput it back as it "
                    "was; or go on with --accept-changed reward (accept_changed=['reward'] from Python): "
                    "then it is asked anew, and rows from there on have oracle/changes, since two rewards "
                    "are in one curve; or begin a run of its own (another --run_dir)"
                )


def warn_of_changed_oracles(known: Inputs | None, roles: Roles, run_dir: Path) -> None:
    """Warn of oracles of an evaluation that are not those that the run has asked."""
    versions = versions_of(known, roles)
    for field, (address, _) in roles.items():
        if _before(known, field, address).get("version", versions[address]) != versions[address]:
            warn(
                f"{field} {address} has changed since {run_dir} asked it, so what it says here is not to "
                "be held against that run's own numbers"
            )


def warn_of_other_prompts(known: Inputs | None, now: Inputs) -> None:
    """Warn of held-out prompts, or pairs, that are not those of earlier evaluations."""
    for name, what in (("held_out", "prompts (evaluation.path)"), ("pairs", "pairs (evaluation.pairs)")):
        before, after = (known or {}).get(name, {}), now.get(name, {})
        if before.get("of") == after.get("of") and before.get("is") != after.get("is"):
            warn(
                f"the held-out {what} are not those that this run has been evaluated on, so evaluations "
                "before and after are not to be held against each other; put the data back as they were, if "
                "that is not meant"
            )


class OwnFiles:
    """Holds the user's own files that a process has imported so far against those of earlier processes of a
    run.

    Args:
        known: the fingerprints of those processes.
        roles: the oracles, whose files `refuse_changed_oracles` looks at.
    """

    def __init__(self, known: Inputs | None, roles: Roles):
        self.base = start()
        self.before: dict[str, str] = dict((known or {}).get("modules", {}))
        self.said = {file.partition(" of ")[0] for _, oracle in roles.values() for file in oracle.made_of}

    def __call__(self) -> dict[str, str]:
        """Return the hashes of the files by name, also of those that only earlier processes have imported.
        A file that has changed is warned of once."""
        now = own_files(self.base)
        changed = [
            name
            for name, digest in now.items()
            if self.before.get(name, digest) != digest and name not in self.said
        ]
        if changed:
            self.said.update(changed)
            warn(
                "code of yours has changed since this run last used it, and it may compute otherwise "
                f"from here on: {', '.join(changed)}"
            )
        return {**self.before, **now}


def _both(known: Inputs, now: Inputs, section: str) -> dict[str, tuple[Inputs, Inputs]]:
    """The fingerprints before and now, by the fields that both have."""
    before, after = known.get(section, {}), now.get(section, {})
    return {field: (before[field], after[field]) for field in after if field in before}


def _before(known: Inputs | None, field: str, address: str) -> Inputs:
    found = (known or {}).get("oracles", {}).get(field, {})
    return found if found.get("of") == hash_of(address) else {}


def _refuse(lines: Sequence[str], read: str = "") -> None:
    if lines:
        raise ModelError(
            f"what is read of it is not what this run began with{read}:{_listed(lines)}\nput the files "
            "back as they were, or begin a new run (another --run_dir)"
        )


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_MOST_LINES], *more])


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items())) or "unknown"
