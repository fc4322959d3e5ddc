"""Computes exact squared score norms over all trainable parameters with backward passes, as a yardstick for the proxy.

`scores` returns weighted sums of the tokens' scores s_t = d log pi_t / d parameters; sequence norms and prefix norms
are norms of such sums. The trainer calls it for baselines that declare sequence_norms or prefix_norms. It is meant for
small models.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from otb.errors import RunError

MAX_PARAMETERS = 50_000_000  # trainable parameters
NUMBERS_AT_ONCE = 32_000_000  # in the scores of one chunk: 128 MB in float32


class TooManyParameters(RunError, ValueError):
    """The policy is too large for exact norms, or has no trainable parameters."""


def sequence_norms(model, ids: Tensor, attention_mask: Tensor, own: Tensor, temperature: float, weights=None) -> Tensor:
    """Returns ||sum_t weights_t s_t||^2 per rollout, with one backward each.

    ids, attention_mask (B, L): prompts with responses, padded anywhere. own (B, L) bool, True = own token. weights
    (B, L) float: factors of the tokens' scores, rho under importance sampling; None = 1 -> (B,) float32. Only trainable
    parameters of `model` count; the model should be in evaluation mode. Raises TooManyParameters.
    """
    parameters, norms = trainable(model), []
    for row in range(len(ids)):
        log_probs = own_log_probs(model, ids[row], attention_mask[row], own[row], temperature)
        rho = torch.ones_like(log_probs) if weights is None else weights[row][own[row]].to(log_probs)
        norms.append(squared_norms(scores(log_probs, parameters, rho.unsqueeze(0)))[0])
    return torch.stack(norms)


def prefix_norms(model, ids: Tensor, attention_mask: Tensor, own: Tensor, temperature: float, weights=None) -> Tensor:
    """Returns ||sum_{j<=t} weights_j s_j||^2 for every own token t, with one backward each.

    Arguments as in `sequence_norms` -> (B, T), packed to own tokens; the last value repeats after the last own token.
    """
    parameters, own_tokens = trainable(model), own.sum(-1)
    norms = torch.zeros(len(ids), int(own_tokens.max()) if len(ids) else 0, device=ids.device)
    for row, length in enumerate(own_tokens.tolist()):
        log_probs = own_log_probs(model, ids[row], attention_mask[row], own[row], temperature)
        rho = torch.ones_like(log_probs) if weights is None else weights[row][own[row]].to(log_probs)
        prefixes = rho.expand(length, length).tril()  # row t: the weights of the tokens up to t
        done = 0
        for chunk in prefixes.split(rows_at_once(parameters)) if length else ():
            norms[row, done : done + len(chunk)] = squared_norms(scores(log_probs, parameters, chunk))
            done += len(chunk)
    return kept_after_end(norms, own_tokens)


def kept_after_end(norms: Tensor, lengths: Tensor) -> Tensor:
    """Returns prefix norms (..., T) that repeat the last own token's value at t >= lengths (...); 0 without tokens."""
    if not norms.shape[-1]:
        return norms
    last = norms.gather(-1, (lengths.long() - 1).clamp(min=0).unsqueeze(-1))
    return torch.where(torch.arange(norms.shape[-1], device=norms.device) < lengths.unsqueeze(-1), norms, last)


def scores(log_probs: Tensor, parameters: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Returns sum_t weights_kt s_t for each k: a tensor (K, *shape) per parameter. log_probs (T,), weights (K, T).

    A row of ones gives the score of the sequence, the identity the score of each token, and a lower triangle the scores
    of the prefixes. The graph is retained.
    """
    if len(weights) == 1:  # no need for vmap
        gradients = torch.autograd.grad(log_probs, parameters, weights[0], retain_graph=True, materialize_grads=True)
        return [gradient.unsqueeze(0) for gradient in gradients]
    return list(
        torch.autograd.grad(
            log_probs, parameters, weights, is_grads_batched=True, retain_graph=True, materialize_grads=True
        )
    )


def squared_norms(vectors: list[Tensor]) -> Tensor:
    """Returns squared norms over all parameters, summed in float64 if the device has it.

    A tensor (K, ...) per parameter -> (K,) float32.
    """
    dtype = torch.float32 if vectors[0].device.type == "mps" else torch.float64
    squares = [torch.linalg.vector_norm(vector.flatten(1), dim=1, dtype=dtype).square() for vector in vectors]
    return sum(squares[1:], start=squares[0]).float()


def own_log_probs(model, ids: Tensor, attention_mask: Tensor, own: Tensor, temperature: float) -> Tensor:
    """Returns log pi of one rollout's own tokens, with a graph.

    ids, attention_mask, own (L,) -> (T,), float32 or float64.
    """
    kept = attention_mask.bool()
    ids, own = ids[kept], own[kept]
    if not own.any():
        return torch.zeros(0, device=ids.device, requires_grad=True)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels' backward cannot be batched
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1][own[1:]]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return (logits / temperature).log_softmax(-1).gather(-1, ids[own].unsqueeze(-1)).squeeze(-1)


def rows_at_once(parameters: list[Tensor]) -> int:
    """Returns how many scores are computed at once: as many as fit in NUMBERS_AT_ONCE numbers, and at least one."""
    return max(1, NUMBERS_AT_ONCE // sum(parameter.numel() for parameter in parameters))


def trainable(model) -> list[Tensor]:
    """Returns the parameters with requires_grad. Raises TooManyParameters if there are none or too many."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in parameters)
    if not 0 < numbers <= MAX_PARAMETERS:
        raise TooManyParameters(
            f"The policy has {numbers:,} trainable parameters; exact score norms work for 1 to {MAX_PARAMETERS:,}, "
            "because they cost a backward pass per rollout or per own token. Use LoRA (model.lora.r=16), or the proxy: "
            "baseline=sequence_energy for ob_exact, baseline=otb for otb_exact."
        )
    return parameters
