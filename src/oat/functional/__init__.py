"""The mathematics of losses, advantages and sampling, as pure functions of tensors."""
