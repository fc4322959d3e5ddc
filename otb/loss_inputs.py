"""Reads the mapping of tensors that TRL hands from scoring to the loss, for a whole generation or one micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor


def prompts_with_responses(output: dict) -> tuple[Tensor, Tensor]:
    """Returns token ids and attention mask (B, L), prompt first. Raises ValueError for prompts with images."""
    if "pixel_values" in output:
        raise ValueError(
            "The prompts have images (pixel_values), which an extra pass over token ids would not see. Use a baseline "
            "that needs no extra pass, such as baseline=rloo."
        )
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    return ids, torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)


def response_mask(output: dict) -> Tensor:
    """Returns (B, C) bool, True = own token that counts. output: what TRL hands from scoring to the loss."""
    mask = output["completion_mask"].bool()
    return mask & output["tool_mask"].bool() if "tool_mask" in output else mask


def per_position(advantages: Tensor) -> Tensor:
    """Returns advantages that broadcast to every position of a response. (B,) or (B, C) -> (B, 1) or (B, C)."""
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
