"""Fingerprints of a run's inputs. The configuration and the inputs together decide the rows of
`metrics.jsonl`. Fingerprints are stored in `environment.json`. When the run is continued, they are compared
with those of the present inputs.

| key | content | a change is |
| --- | --- | --- |
| `models` | files of `model.path`, `.adapter`, `.reference`, `.critic` (`models/identity.py`) | refused |
| `weights` | checksums of the weights of these models and of an explorer's files | refused, if read again |
| `template` | the text of the chat template | refused |
| `prompts` | a digest of each source | refused |
| `held_out`, `pairs` | digests of the data of `evaluation.path` and `.pairs` | warned of |
| `oracles` | version and files of each oracle (`ledger/versions.py`) | of files: refused, unless accepted |
| `modules` | a hash of each of the user's own files that were imported | warned of |
| `readers` | versions of the libraries that read configurations and tokenizers | named in messages |

If only an oracle's version changed, the run warns. `weights` are read again if no checkpoint has them.

Most fingerprints have an entry `of`: a hash of the settings that name the input. They are compared only if
`of` is unchanged, except for `model.path`, which is always compared. No absolute path is stored. A fork
stores the fingerprints of the original run in `fork.json`, so it no longer needs that run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from oat.config.settings import Config
from oat.errors import ConfigError, ModelError, TemplateError, warn
from oat.files import parse_json, start
from oat.models.beside import is_adapter_directory
from oat.models.causal_lm import CausalLM
from oat.models.ensemble import refuse_missing
from oat.models.identity import (
    adapter_identity,
    are_same,
    differences,
    hash_of,
    listed,
    model_identity,
    readers,
    tokenizer_identity,
    weights_identity,
)
from oat.models.loading import load_config
from oat.models.scoring import hash_of_files
from oat.oracles.base import Oracle
from oat.plugins.loading import own_files
from oat.rundir.provenance import FORK_FILE, entries, recorded_inputs
from oat.text.chat_template import load_template

Inputs = dict[str, Any]
"""Fingerprints by the keys of the table above, as plain JSON."""
Roles = Mapping[str, tuple[str, Oracle]]
"""The address of an oracle and the oracle, for each field that names one: `oracle`, `evaluation.oracle` and
`evaluation.gold`."""
Blame = Callable[[str], AbstractContextManager[None]]
"""The type of `Resolved.error_context`: it returns a context in which errors say where a field was set."""

CHANGEABLE = ("reward",)
"""Names of the inputs whose change a user may accept (`--accept-changed`)."""
GIVEN = "given"
"""The folder in a run directory for models and records that were given as Python objects."""
START = "explorer.ensemble.start"
"""The field that names the ensemble from which that of an explorer starts."""
_UNKNOWN = ("", "None")
"""The versions that older releases of `oat` recorded for a user's oracle that stated none."""
_TEMPLATES = {
    "tokenizer": "chat_template.jinja, or `chat_template` in tokenizer_config.json",
    "chatml": "of this program",
}


def recorded(run_dir: Path, step: int | None = None) -> Inputs | None:
    """Return the newest fingerprints that processes of a run recorded. If no process recorded any, return
    those in `fork.json`, which only a fork has. If `fork.json` has none, return None.

    Args:
        step: leave out each process whose first row is later than row `step`. If no fingerprints remain,
            return the oldest that a process recorded. None: leave out no process.

    Raises:
        ConfigError: `environment.json` cannot be read as a list of entries.
    """
    found = recorded_inputs(entries(run_dir / "environment.json"), step)
    if found is not None:
        return found
    with suppress(OSError, ValueError, AttributeError):
        return parse_json((run_dir / FORK_FILE).read_text(encoding="utf-8")).get("inputs")
    return None


def inputs_of_models(
    config: Config, lm: CausalLM, tokenizer: Any, error_context: Blame = lambda _: nullcontext()
) -> Inputs:
    """Return the fingerprints of models and tokenizer, except those of weights and template.

    Args:
        lm: the policy; only its configuration is read.

    Raises:
        ModelError: the reference, the critic's start, or an adapter cannot be read.
    """
    ends = {"generation_config.json": {"eos_token_id": sorted(lm.eos_ids)}}
    policy = {**model_identity(lm.module.config), **ends, **tokenizer_identity(tokenizer)}
    models = {"model.path": {"of": hash_of(config.model.path), "is": policy}}
    for field, path in _paths(config).items():
        if field == "model.path":
            continue
        with error_context(field):
            is_adapter = is_adapter_directory(path)
            found = adapter_identity(path) if is_adapter else model_identity(load_config(path))
        models[field] = {"of": hash_of(path), "is": found}
    return {"readers": readers(), "models": models}


def inputs_of_template(config: Config, tokenizer: Any) -> Inputs:
    """Return the fingerprint of the template's text; empty if there is no template.

    Raises:
        TemplateError: the template is missing.
    """
    template = config.render.template
    return (
        {}
        if template is None
        else {"template": {"of": hash_of(template), "is": hash_of(load_template(template, tokenizer))}}
    )


def refuse_other_models(config: Config, known: Inputs | None, now: Inputs, error_context: Blame) -> None:
    """Refuse models and a template whose fingerprints differ from the known ones.

    Args:
        known: the fingerprints of earlier processes; None: nothing is compared.
        now: the fingerprints of the present inputs.

    Raises:
        ModelError, TemplateError: a model, or the template, has changed.
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
            with error_context(field):
                _refuse(differences(before.get("is", {}), after["is"], same_readers=same_readers), read)
    before, after = known.get("template", {}), now.get("template", {})
    if before.get("of") == after.get("of") and before.get("is") != after.get("is"):
        with error_context("render.template"):
            file = _TEMPLATES.get(str(config.render.template), "the file")
            raise TemplateError(
                f"the text of the chat template ({file}) is not what this run began with; put it back as "
                "it was, or begin a new run"
            )


def weights_read(config: Config, *, has_reference: bool, has_critic: bool, is_begun: bool) -> list[str]:
    """Return the fields whose weights a run reads from their files.

    Args:
        has_reference: True if the run has a reference.
        has_critic: True if the run has a critic that starts from `model.critic`.
        is_begun: True if the run has a checkpoint. The weights that are learned, and those of a reference
            that follows the policy, are then read from the checkpoint.
    """
    model = config.model
    is_fixed = has_reference and not (is_begun and model.reference_update is not None)
    starts = not is_begun or (is_fixed and model.reference is None)
    return [
        *(["model.path"] if starts or model.lora is not None or model.frozen else []),
        *(["model.adapter"] if starts and model.adapter is not None else []),
        *(["model.reference"] if is_fixed and model.reference is not None else []),
        *(["model.critic"] if has_critic and (not is_begun or model.lora is not None) else []),
    ]


def inputs_of_weights(config: Config) -> Inputs:
    """Return the fingerprints of the weights that are on this machine. The fingerprint of a hub model that
    was not downloaded yet is empty."""
    return {
        "weights": {
            field: {"of": hash_of(path), "is": weights_identity(path)}
            for field, path in _paths(config).items()
        }
    }


def inputs_of_explorer(
    backbone: str | None, start: str | None, error_context: Blame = lambda _: nullcontext()
) -> Inputs:
    """Return the fingerprints of the files that an explorer reads, by field.

    Args:
        backbone: a backbone of its own (`explorer.features.backbone`); None: there is none.
        start: the ensemble that its own starts from (`explorer.ensemble.start`); None: there is none.

    Raises:
        ModelError: there are no such files.
    """
    found: Inputs = {}
    for field, path in (("explorer.features.backbone", backbone), (START, start)):
        if path is not None:
            with error_context(field):
                if field == START:
                    refuse_missing(path)
                found[field] = {"of": hash_of(path), "is": {"files": {"hash": hash_of_files(path)}}}
    return found


def _paths(config: Config) -> dict[str, str]:
    """Return the paths of the models of a configuration, by field."""
    paths = {name: getattr(config.model, name) for name in ("path", "adapter", "reference", "critic")}
    return {f"model.{name}": path for name, path in paths.items() if path is not None}


def refuse_other_weights(
    known: Inputs | None, now: Inputs, fields: Sequence[str], error_context: Blame
) -> None:
    """Refuse weights whose fingerprints differ from the known ones.

    Args:
        fields: the fields whose weights the run reads; only these are compared.

    Raises:
        ModelError: weights have changed.
    """
    for field, (before, after) in _both(known or {}, now, "weights").items():
        if field in fields and (field == "model.path" or before.get("of") == after["of"]):
            with error_context(field):
                _refuse(differences(before.get("is", {}), after["is"]))


def inputs_of_oracles(roles: Roles, versions: Mapping[str, str]) -> Inputs:
    """Return the fingerprints of the oracles, by field.

    Args:
        versions: the version of each oracle, by address.
    """
    found = {}
    for field, (address, oracle) in roles.items():
        found[field] = {"of": hash_of(address), "version": versions[address], "made_of": oracle.made_of}
    return {"oracles": found}


def versions_of(known: Inputs | None, roles: Roles) -> dict[str, str]:
    """Return the version of each oracle, by address:

    * If all files and options of the oracle are unchanged, the version in `known`. So a file that was only
      saved again changes nothing.
    * If an older release of `oat` recorded a user's oracle without files and with "" or "None" as its
      version, this text. So the run uses its recorded answers again.
    * Otherwise the version that the oracle states.
    """
    found = {}
    for field, (address, oracle) in roles.items():
        before = _before(known, field, address)
        is_same = bool(before.get("made_of")) and are_same(before["made_of"], oracle.made_of)
        was_unknown = before.get("made_of") == {} and before["version"] in _UNKNOWN and bool(oracle.made_of)
        found[address] = str(before["version"]) if is_same or was_unknown else oracle.version or ""
    return found


def refuse_changed_oracles(
    known: Inputs | None, roles: Roles, changed: set[str], error_context: Blame
) -> None:
    """Refuse an oracle if its files have changed since it gave the recorded answers. If only the version that
    it declares has changed, do not refuse it.

    Args:
        changed: addresses of the oracles whose version is not the one that gave the recorded answers.

    Raises:
        ConfigError: an oracle's files have changed. The message names file and field.
    """
    for field, (address, oracle) in roles.items():
        now = {file: fields for file, fields in oracle.made_of.items() if file != "options"}
        before = _before(known, field, address).get("made_of")
        is_known = before is not None and not are_same(before, oracle.made_of)
        lines = differences(before or {}, now) if is_known else [f"{file}: its text" for file in now]
        if address in changed and lines:
            with error_context(f"{field}.name"):
                is_played = oracle.name == "environment"
                raise ConfigError(
                    f"{'the environment' if is_played else 'it'} has changed since this run last asked it:"
                    f"{listed(lines)}\nput it back as it was; or go on with --accept-changed reward "
                    "(accept_changed=['reward'] from Python): then it is asked anew, and rows from there on "
                    f"have oracle/changes, since two {'environments' if is_played else 'rewards'} are in one "
                    "curve; or begin a run of its own (another --run_dir)"
                )


def warn_of_changed_oracles(known: Inputs | None, roles: Roles, run_dir: Path) -> None:
    """Warn of each oracle that has changed since the run in `run_dir` asked it."""
    versions = versions_of(known, roles)
    for field, (address, _) in roles.items():
        if _before(known, field, address).get("version", versions[address]) != versions[address]:
            warn(
                f"{field} {address} has changed since {run_dir} asked it, so what it says here is not to "
                "be held against that run's own numbers"
            )


def warn_of_other_prompts(known: Inputs | None, now: Inputs) -> None:
    """Warn if the held-out prompts or pairs are not those of the run's earlier evaluations."""
    for name, what in (("held_out", "prompts (evaluation.path)"), ("pairs", "pairs (evaluation.pairs)")):
        before, after = (known or {}).get(name, {}), now.get(name, {})
        if before.get("of") == after.get("of") and before.get("is") != after.get("is"):
            warn(
                f"the held-out {what} are not those that this run has been evaluated on, so evaluations "
                "before and after are not to be held against each other; put the data back as they were, if "
                "that is not meant (an earlier version of oat read no column `system` of the same data, and "
                "could split common beginnings inside a word)"
            )


class OwnFiles:
    """Compares the user's own files that this process has imported with those that earlier processes of the
    run have imported.

    Args:
        known: the fingerprints of the earlier processes.
        roles: the oracles. Their files are not compared here, since `refuse_changed_oracles` compares them.
    """

    def __init__(self, known: Inputs | None, roles: Roles):
        self.base = start()
        self.before: dict[str, str] = dict((known or {}).get("modules", {}))
        self.said = {file.partition(" of ")[0] for _, oracle in roles.values() for file in oracle.made_of}

    def __call__(self) -> dict[str, str]:
        """Return the hash of each file by its name, including files that only earlier processes imported.
        Warn once of each file that has changed."""
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
    """Return the pair of the known and the present fingerprint for each field that has both."""
    before, after = known.get(section, {}), now.get(section, {})
    return {field: (before[field], after[field]) for field in after if field in before}


def _before(known: Inputs | None, field: str, address: str) -> Inputs:
    found = (known or {}).get("oracles", {}).get(field, {})
    return found if found.get("of") == hash_of(address) else {}


def _refuse(lines: Sequence[str], read: str = "") -> None:
    if lines:
        raise ModelError(
            f"what is read of it is not what this run began with{read}:{listed(lines)}\nput the files "
            "back as they were, or begin a new run (another --run_dir)"
        )


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items())) or "unknown"
