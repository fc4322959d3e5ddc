"""Reads a policy's hidden states, and checks that disabling its adapter gives the untrained base.

The trainer's extra passes call it, for token weights that compare the policy with its base and for baselines that read
hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")  # its names in transformers


@contextmanager
def collected_states(backbone: Module, states: str) -> Iterator[list[Tensor]]:
    """Collects the last hidden states (B, L, d) of each forward inside the block.

    states: "post_norm" for the backbone's output, which the LM head reads; "pre_norm" for the input of its final norm.
    """
    collected: list[Tensor] = []
    if states == "pre_norm":
        hook = final_norm(backbone).register_forward_pre_hook(lambda _, inputs: collected.append(inputs[0]))
    else:
        hook = backbone.register_forward_hook(lambda _, __, result: collected.append(result.last_hidden_state))
    try:
        yield collected
    finally:
        hook.remove()


def final_norm(backbone: Module) -> Module:
    """Returns the norm after the last layer. Raises ValueError if the backbone has none under a known name."""
    for name in FINAL_NORMS:
        if isinstance(norm := getattr(backbone, name, None), Module):
            return norm
    raise ValueError(
        f"states=pre_norm reads the input of the final norm, but {type(backbone).__name__} has no norm under a known "
        f"name ({', '.join(FINAL_NORMS)}). Use states=post_norm."
    )


@contextmanager
def disabled(model: Any) -> Iterator[None]:
    """Disables the adapter of a PeftModel inside the block and restores it afterwards, even after an error."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    try:
        with model.disable_adapter():
            yield
    finally:  # when peft enables an adapter, it makes all of it trainable, even parameters that its user froze
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)


def refuse_trained_base(signal: str, model: Any) -> None:
    """Raises ValueError if base parameters are trained too: disabling the adapter does not undo their training."""
    with disabled(model):
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trained:
        raise ValueError(
            f"{len(trained)} parameters of the base are trained, such as {trained[0]}; token_weights={signal} needs a "
            "frozen base to compare with. Set requires_grad=False on them, or use token_weights=surprisal."
        )
