"""What the models of a run start from, as the settings say it."""

from dataclasses import replace

from oat.config.settings import ModelConfig
from oat.models.beside import is_adapter_directory


def has_own_reference(model: ModelConfig) -> bool:
    """Return True if the reference has weights of its own. Return False if the policy has an adapter,
    and the reference uses the frozen weights of the policy."""
    return model.lora is None or not (starts_alike(model) or is_adapter_directory(model.reference or ""))


def starts_alike(model: ModelConfig) -> bool:
    """Return True if the reference starts from the files of the policy."""
    return model.reference in (None, model.path)


def has_own_critic(model: ModelConfig) -> bool:
    """Return True if the critic starts from another model than the policy."""
    return model.critic not in (None, model.path)


def critic_model(model: ModelConfig) -> ModelConfig:
    """Return the settings of the model that the critic's backbone starts from. A critic that starts from
    another model than the policy gets a new adapter, if the policy has one."""
    if model.critic is None or not has_own_critic(model):
        return model
    return replace(model, path=model.critic, adapter=None, frozen=())
