"""Predicts the token after the next one with a separate head, and computes the terms of the head's loss.

The head is DeepSeek-V3's (arXiv 2412.19437, section 2.2). Let h_t be the policy's last hidden state after tokens up to
y_t. Then

    h'_t = block(M [RMSNorm(h_t); RMSNorm(Emb(y_{t+1}))])        log pi_head(y_{t+2}) = log softmax(LMHead(h'_t) / T)

with the policy's Emb and LMHead. h_t is the input of the policy's LM head; only a shipped head reads the input of the
final norm instead, because it was trained on that. otb/methods/auxiliary_head.py trains the head. The functions here
take and return tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from trl.kernels import ChunkedLogProbFunction

VOCABULARY_TILE = 32768  # logits per token in memory at once, as in TRL's fused LM head


class MTPHead(nn.Module):
    """Predicts the token after the next one with one more layer of the policy's architecture.

    The seed alone determines the weights, in float32; the global random state does not change. The head uses the
    policy's embedding and LM head, but does not contain them.

    causal: a transformers model whose backbone has `num_hidden_layers` equal layers, takes `inputs_embeds` and ends
    with a norm, as in otb.methods.auxiliary.ARCHITECTURES.
    """

    def __init__(self, causal: Any, seed: int):
        super().__init__()
        config = one_layer(causal.config)
        width, eps = config.hidden_size, config.rms_norm_eps
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.block = type(causal.base_model)(config).float()
            self.projection = nn.Linear(2 * width, width, bias=False)
            nn.init.normal_(self.projection.weight, std=config.initializer_range)
        self.block.set_input_embeddings(None)  # the policy's embedding is used
        self.state_norm, self.embedding_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)

    def forward(self, states: Tensor, embedded: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns h' (B, L, d). states h_t and embedded Emb(y_{t+1}): (B, L, d). attention_mask of y_t: (B, L)."""
        both = torch.cat([self.state_norm(states), self.embedding_norm(embedded)], dim=-1)
        mixed = self.projection(both)
        return self.block(inputs_embeds=mixed, attention_mask=attention_mask, use_cache=False).last_hidden_state


def one_layer(config: Any) -> Any:
    """Returns the configuration of a backbone with one layer, of the last layer's type, and no vocabulary."""
    config = copy.deepcopy(config)
    if (kinds := getattr(config, "layer_types", None)) is not None:
        config.layer_types = kinds[-1:]
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 1, None
    return config


def head_log_probs(
    head: MTPHead,
    causal: Any,
    ids: Tensor,
    attention_mask: Tensor,
    states: Tensor,
    width: int,
    temperature: float,
    detached: bool,
) -> Tensor:
    """Returns the head's log-probs of the last `width` tokens. Each is stored at the position of the token it scores.

    ids, attention_mask (B, L); states (B, L, d): the policy's hidden states for them -> (B, width). The first two
    tokens of a row get 0, because the head does not predict them. detached: no gradient reaches the policy.
    """
    states, embedded = states[:, :-2], causal.get_input_embeddings()(ids[:, 1:-1])
    lm_head = causal.get_output_embeddings()
    weight, bias = lm_head.weight, lm_head.bias
    if detached:
        states, embedded, weight = states.detach(), embedded.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    predicting = head(states, embedded, attention_mask[:, :-2])[:, -width:]
    targets = ids[:, 2:][:, -width:]
    log_probs, *_ = ChunkedLogProbFunction.apply(
        predicting.flatten(0, 1), weight, bias, targets.flatten(), temperature, VOCABULARY_TILE, None, 1.0, ()
    )
    log_probs = log_probs.view(targets.shape)
    return functional.pad(log_probs, (width - log_probs.size(1), 0))


def predicted(attention_mask: Tensor, width: int) -> Tensor:
    """Tells which of the last `width` tokens the head predicts: those after two tokens. (B, L) -> (B, width) bool."""
    return functional.pad(attention_mask[:, :-2], (2, 0))[:, -width:].bool()


# ---- lambda


def products(changes: Tensor, head_changes: Tensor, own: Tensor) -> Tensor:
    """Returns the sums over own tokens of d d_head, d_head^2 and d^2, float32 (3,).

    changes d, head_changes d_head: (B, C), how much the policy's and the head's log-probs have changed since the token
    was sampled. own: (B, C) bool. The caller adds the sums of all processes.
    """
    d, d_head = changes.float().masked_fill(~own, 0), head_changes.float().masked_fill(~own, 0)
    return torch.stack([(d * d_head).sum(), d_head.square().sum(), d.square().sum()])


def ratio_of_sums(c: float, v2: float, lambda_plus: float, eps: float, limit: float | None) -> float:
    """Returns lambda = lambda_plus c / (v2 + eps), clipped to [-limit, limit]: the paper's formula.

    c, v2: the first two sums of `products`. Lambda can be negative; it is 0 if nothing has changed.
    """
    return limited(lambda_plus * c / (v2 + eps), limit)


def mean_of_ratios(changes: Tensor, gaps: Tensor, eps: float) -> Tensor:
    """Returns the sum over all positions of d gap / (gap^2 + eps), and the number of positions, float32 (2,).

    Their quotient times lambda_plus is lambda in the authors' code (github.com/MarkXCloud/RL-MTP, megatron_actor.py).
    This code has no response mask, and it uses a gap instead of the head's change: the head's log-prob now minus the
    *policy's* log-prob when the token was sampled. changes, gaps (B, C).
    """
    ratios = changes.float() * gaps.float() / (gaps.float().square() + eps)
    return torch.stack([ratios.sum(), torch.tensor(float(ratios.numel()), device=ratios.device)])


def limited(value: float, limit: float | None) -> float:
    """Returns the value clipped to [-limit, limit]; limit None for no clipping."""
    return value if limit is None else max(-limit, min(limit, value))


# ---- the head's policy loss


def clipped(log_ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Returns -min(r A, clip(r, 1 - low, 1 + high) A) per token. log_ratios (B, C); advantages (B, C or 1)."""
    ratios = log_ratios.exp()
    return -torch.min(ratios * advantages, ratios.clamp(1 - low, 1 + high) * advantages)


def aggregated(per_token: Tensor, own: Tensor, loss_type: str, longest: int, tokens: float) -> Tensor:
    """Returns the loss of a forward from the losses of its tokens (B, C), aggregated as TRL does for each loss_type.

    own: (B, C) bool. longest: the most tokens that a response may have; dr_grpo divides by it. tokens: the number by
    which dapo divides.
    """
    per_token = per_token * own
    if loss_type == "grpo":
        return (per_token.sum(-1) / own.sum(-1).clamp(min=1)).mean()
    divisors: dict[str, Any] = {"bnpo": own.sum().clamp(min=1), "dr_grpo": len(own) * longest, "dapo": tokens}
    return per_token.sum() / divisors[loss_type]
