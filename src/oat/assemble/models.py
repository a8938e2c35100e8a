"""Functions that load the language models of a run, each in its precision and on its device."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from oat.config.settings import Config, ModelConfig
from oat.engines.kind import Traits
from oat.errors import ConfigError, ModelError
from oat.hardware.memory import give_back_freed_memory, keep_few_kernels
from oat.hardware.threads import LARGE
from oat.models.adapter_files import described_adapter
from oat.models.beside import is_adapter_directory
from oat.models.causal_lm import CausalLM
from oat.models.identity import Identity, hash_of
from oat.models.loading import load_tokenizer
from oat.models.lora import LoadModel, load_model
from oat.models.sources import ModelSource, lms_of
from oat.models.value_head import check_value_head
from oat.resolve.model_starts import critic_model, has_own_critic, has_own_reference, starts_alike
from oat.resolve.resolved import Resolved
from oat.seeds import Seeds
from oat.text.renderer import Renderer
from oat.text.vocabulary import check_vocabulary


def device_of(profile: str) -> torch.device:
    """Return the device of the models under a compute profile.

    Raises:
        ConfigError: the profile is "gpu", and torch finds no CUDA device.
    """
    if profile == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            "compute.profile is 'gpu', and torch finds no CUDA device: use a machine with one and a build "
            "of torch for it, or set the field to cpu"
        )
    return torch.device("cuda" if profile == "gpu" else "cpu")


def device_notes(profile: str) -> tuple[str, ...]:
    """Return sentences for people about the device; empty if there is nothing to say."""
    if profile == "cpu" and torch.cuda.is_available():
        return (
            "this machine has a CUDA device, and nothing will run on it; a new run with compute.profile: gpu "
            "uses it",
        )
    return ()


def load_models(
    config: Config, needs: Collection[str], seeds: Seeds, load: LoadModel = load_model
) -> dict[str, CausalLM]:
    """Load the learner's models and return them by name; see `model_sources`. The backbones have no output
    embeddings.

    Args:
        load: function that loads one model.

    Raises:
        ConfigError, ModelError: see `device_of` and `load_model`.
    """
    keep_few_kernels()
    sources = model_sources(config, needs, seeds)
    policy = sources["policy"]
    lm = lms_of({"policy": policy}, load)["policy"]
    if sum(parameter.numel() for parameter in lm.module.parameters()) > LARGE:
        give_back_freed_memory()
    # Models of one source are read one by one. A copy would lie at other addresses than the pages of a file,
    # and products of one row may round differently there: a reference would change the bits of the policy.
    lms = lms_of(sources, load, {policy: lm})
    for name in lms.keys() & {"critic", "reward"}:
        lms[name].drop_head()
    return lms


def model_sources(
    config: Config,
    needs: Collection[str],
    seeds: Seeds,
    lms: Mapping[str, CausalLM] | None = None,
    identities: Mapping[str, Identity] | None = None,
) -> dict[str, ModelSource]:
    """Return the sources of the models of a run, by name: that of the policy, and those in `needs`:
    "reference", "critic" (the critic's backbone), "reward" (the reward model's backbone).

    With an adapter, the models share the policy's frozen weights, except a critic that starts from another
    model. If the reference has no weights of its own (`has_own_reference`), it shares them too.

    Args:
        lms: models of this process that are made already, of policy and reference.
        identities: what the configurations of models must be, by the hash of their paths.

    Raises:
        ConfigError: see `device_of`.
    """
    device, seed, lms = device_of(config.compute.profile), seeds.key("init", "policy"), lms or {}
    identities = identities or {}
    identity = identities.get(hash_of(config.model.path), {})
    policy = ModelSource(config.model, device, seed, identity, lm=lms.get("policy"))
    sources = {"policy": policy}
    if "reference" in needs:
        reference = reference_source(config, policy)
        identity = identities.get(hash_of(reference.path), {})
        sources["reference"] = replace(reference, identity=identity, lm=lms.get("reference"))
    for name in ("critic", "reward"):
        if name in needs:
            is_own = name == "critic" and has_own_critic(config.model)
            seed = seeds.key("init", name)
            sources[name] = _own_critic(config, policy, seed) if is_own else _another(policy, seed)
    return sources


def load_policy(resolved: Resolved) -> CausalLM:
    """Load, on the CPU, the model that the policy starts from."""
    return load_model(resolved.config.model)


def slot_sources(
    resolved: Resolved,
    seeds: Seeds,
    lms: Mapping[str, CausalLM],
    load: LoadModel = load_model,
    *,
    identities: Mapping[str, Identity] | None = None,
) -> dict[str, ModelSource]:
    """Return the sources of the engine's models, by slot. A slot shares a model of this process if the engine
    can, and the two always have the same version.

    Args:
        lms: models of this process by name: of the learner, or of features.
        load: function that makes a model. If it is not `load_model`, it makes those that are not shared too.
        identities: as in `model_sources`.
    """
    config, traits = resolved.config, resolved.engine
    shares = traits.capabilities.shares_weights
    if not shares:
        model = replace(config.model, dtype=traits.dtype, reference_dtype=None)
        config = replace(config, model=model)
    shared = lms if shares else {}
    needs = {"reference"} & (resolved.slots | shared.keys())
    sources = model_sources(config, needs, seeds, shared, identities)
    policy, sampler = sources["policy"], sources["policy"]
    if config.learner.sync_every > 1:
        sampler = _another(policy, seeds.key("init", "sampler"))
    slots = {"sampler": sampler, **sources}
    if load is load_model:
        return slots
    return {name: replace(slots[name], lm=lm) for name, lm in lms_of(slots, load).items()}


def shared_slots(config: Config) -> list[frozenset[str]]:
    """Return the sets of slots that share a model: `sampler` and `policy`, unless the sampler's weights may
    be older than the policy's."""
    return [] if config.learner.sync_every > 1 else [frozenset({"sampler", "policy"})]


def slot_dtypes(engine: Traits) -> dict[str, torch.dtype]:
    """Return the precision of each slot's weights. If slots share the learner's weights, return an empty
    dict."""
    if engine.capabilities.shares_weights:
        return {}
    return dict.fromkeys(("sampler", "policy", "reference"), getattr(torch, engine.dtype))


def check_tokenizer(lm: CausalLM, path: str, renderer: Renderer) -> None:
    """Refuse a tokenizer whose number of ids does not suit the model.

    Args:
        path: the model's path, for messages.

    Raises:
        ModelError: `check_vocabulary` fails, or the tokenizer has none of the ids with which the model ends a
            text.
    """
    check_vocabulary(renderer.tokenizer, lm.vocab_rows, f"the tokenizer of {path}")
    if lm.eos_ids and not any(id < renderer.num_tokens for id in lm.eos_ids):
        raise ModelError(
            f"its generation_config.json ends a text with id {lm.eos_ids[0]}, and its tokenizer has ids "
            f"below {renderer.num_tokens}; give the tokenizer that belongs to the model"
        )


def check_critic(critic: CausalLM, path: str, renderer: Renderer, longest: int | None) -> None:
    """Refuse a critic that cannot read the policy's sequences, or whose head is no value head.

    Args:
        path: `model.critic`.
        longest: largest number of tokens in a sequence; None: no limit is known.

    Raises:
        ModelError: see `check_reference` and `check_value_head`; or the critic's context is shorter than the
            sequences.
    """
    check_reference(critic, path, renderer)
    context = critic.context_length
    if longest is not None and context is not None and context < longest:
        raise ModelError(
            f"it reads at most {context} tokens, and a prompt with its response may have {longest}; give a "
            "model with a longer context, or lower prompts.max_tokens or sampling.max_new_tokens"
        )
    check_value_head(path, critic)


def check_reference(reference: CausalLM, path: str, renderer: Renderer) -> None:
    """Refuse a reference that cannot read the ids that the policy writes. If the reference's tokenizer cannot
    be loaded, only the number of rows of its embeddings is checked.

    Raises:
        ModelError: the reference's embeddings have fewer rows than the policy's tokenizer has tokens, or far
            more (`check_vocabulary`). Or the two tokenizers give a token different ids.
    """
    if renderer.num_tokens > reference.vocab_rows:
        raise ModelError(
            f"its embeddings have {reference.vocab_rows} rows, and the policy's tokenizer has "
            f"{renderer.num_tokens} tokens; give a model of the same family"
        )
    check_vocabulary(renderer.tokenizer, reference.vocab_rows, "the policy's tokenizer")
    try:
        theirs: dict[str, int] = load_tokenizer(path).get_vocab()
    except ModelError:
        return
    ours: dict[str, int] = renderer.tokenizer.get_vocab()
    others = [token for token in sorted(ours.keys() & theirs.keys()) if ours[token] != theirs[token]]
    if others:
        token = others[0]
        raise ModelError(
            f"its tokenizer gives {len(others)} of {len(ours)} tokens other ids than the policy's, for "
            f"example {token!r} {theirs[token]} instead of {ours[token]}; give a model of the same family"
        )


def reference_source(config: Config, policy: ModelSource) -> ModelSource:
    """Return the source of the reference. It is one of three: the policy with its adapter off; a second
    adapter on the policy's frozen weights; a model with weights of its own.

    Args:
        policy: the source of the policy.
    """
    model = config.model
    if not has_own_reference(model):
        if model.reference is not None and is_adapter_directory(model.reference):
            lora = described_adapter(model.reference)[0]
            adapted = replace(policy, model=replace(model, adapter=model.reference, lora=lora))
            return replace(adapted, base=policy, field="model.reference")
        is_start = model.reference is None and (
            model.adapter is not None or model.reference_update is not None
        )
        if is_start:
            return _another(policy, policy.seed)
        return replace(policy, model=replace(model, adapter=None, lora=None), base=policy, lm=None)
    own = ModelConfig(
        model.reference or model.path,
        dtype=model.reference_dtype or model.dtype,
        frozen=model.frozen if starts_alike(model) else (),
    )
    if model.reference is not None and is_adapter_directory(model.reference):
        own = replace(
            own, path=model.path, adapter=model.reference, lora=described_adapter(model.reference)[0]
        )
    device = torch.device(model.reference_device or policy.device)
    return ModelSource(own, device, field="model.reference")


def _own_critic(config: Config, policy: ModelSource, seed: int) -> ModelSource:
    return ModelSource(
        critic_model(config.model), policy.device, seed, field="model.critic", needs_head=False
    )


def _another(policy: ModelSource, seed: int) -> ModelSource:
    """Return the source of a second copy of the model that the policy starts from. With an adapter, only the
    adapter is a copy.

    Args:
        seed: seed of the adapter's initial weights.
    """
    return replace(policy, seed=seed, base=policy if policy.model.lora is not None else None, lm=None)
