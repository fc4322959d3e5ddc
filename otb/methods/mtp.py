"""Predicts the token after the next one with a head of its own, and computes what the head's loss is made of.

The head is DeepSeek-V3's (arXiv 2412.19437, section 2.2): with h_t the last hidden state of the policy, which has seen
tokens up to y_t,

    h'_t = block(M [RMSNorm(h_t); RMSNorm(Emb(y_{t+1}))])        log pi_head(y_{t+2}) = log softmax(LMHead(h'_t) / T)

with Emb and LMHead shared with the policy. h_t is what the policy's LM head reads; a shipped head was trained on what
the policy's final norm is given. otb/mtp_training.py trains the head. Tensors in, tensors out.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from trl.kernels import ChunkedLogProbFunction

VOCABULARY_TILE = 32768  # logits of one token that are held at a time, as TRL's fused LM head does


class MTPHead(nn.Module):
    """One more layer of the policy's own kind that predicts the token after the next one.

    Its weights follow from the seed alone, in float32; the global random state stays as it was. Embedding and LM head
    are the policy's and no part of it.

    causal: a transformers model whose backbone is built from `num_hidden_layers` equal layers, takes `inputs_embeds`
    and ends with a norm: the architectures of otb.methods.auxiliary.ARCHITECTURES.
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
        self.block.set_input_embeddings(None)  # the policy's are used
        self.state_norm, self.embedding_norm = nn.RMSNorm(width, eps), nn.RMSNorm(width, eps)

    def forward(self, states: Tensor, embedded: Tensor, attention_mask: Tensor) -> Tensor:
        """Returns h' (B, L, d). states: h_t; embedded: Emb(y_{t+1}), both (B, L, d); attention_mask (B, L) of y_t."""
        both = torch.cat([self.state_norm(states), self.embedding_norm(embedded)], dim=-1)
        mixed = self.projection(both)
        return self.block(inputs_embeds=mixed, attention_mask=attention_mask, use_cache=False).last_hidden_state


def one_layer(config: Any) -> Any:
    """Returns the configuration of a backbone of one layer, the kind of the last one, without a vocabulary."""
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
    """Returns the head's log-probs of the last `width` tokens, each in the place of the token that it predicts.

    ids, attention_mask (B, L); states (B, L, d), what the policy's backbone returned for them -> (B, width), 0 for the
    first two tokens of a row, which the head predicts nothing of. detached: no gradient reaches the policy.
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
    """Tells which of the last `width` tokens the head predicts: two tokens stand before them. (B, L) -> bool."""
    return functional.pad(attention_mask[:, :-2], (2, 0))[:, -width:].bool()


# ---- lambda


def products(changes: Tensor, head_changes: Tensor, own: Tensor) -> Tensor:
    """Returns the sums over own tokens of d d_head, d_head^2 and d^2, float32 (3,). All (B, C), own bool.

    d: how much a log-prob has changed since the token was sampled. Sums of several processes are added up.
    """
    d, d_head = changes.float().masked_fill(~own, 0), head_changes.float().masked_fill(~own, 0)
    return torch.stack([(d * d_head).sum(), d_head.square().sum(), d.square().sum()])


def ratio_of_sums(c: float, v2: float, lambda_plus: float, eps: float, limit: float | None) -> float:
    """Returns lambda = lambda_plus c / (v2 + eps), at most `limit` in size: the paper's formula.

    c, v2: the first two of `products`. It may be negative, and is 0 where nothing has changed.
    """
    return limited(lambda_plus * c / (v2 + eps), limit)


def mean_of_ratios(changes: Tensor, gaps: Tensor, eps: float) -> Tensor:
    """Returns the sum over all positions of d gap / (gap^2 + eps), and their number, float32 (2,).

    Their quotient, times lambda_plus, is lambda as the authors' code has it (github.com/MarkXCloud/RL-MTP,
    megatron_actor.py): no response mask, and in the place of the head's change the gap of its log-probs now to those
    of the *policy* when the tokens were sampled. changes, gaps (B, C).
    """
    ratios = changes.float() * gaps.float() / (gaps.float().square() + eps)
    return torch.stack([ratios.sum(), torch.tensor(float(ratios.numel()), device=ratios.device)])


def limited(value: float, limit: float | None) -> float:
    """Returns a number whose size is at most `limit`; None for no limit."""
    return value if limit is None else max(-limit, min(limit, value))


# ---- the head's policy loss


def clipped(log_ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Returns -min(r A, clip(r, 1 - low, 1 + high) A) per token. log_ratios (B, C); advantages (B, C or 1)."""
    ratios = log_ratios.exp()
    return -torch.min(ratios * advantages, ratios.clamp(1 - low, 1 + high) * advantages)


def aggregated(per_token: Tensor, own: Tensor, loss_type: str, longest: int, tokens: float) -> Tensor:
    """Returns the loss of a forward from that of its tokens (B, C), as TRL does for each loss_type.

    own (B, C) bool. longest: tokens that a response may have, of dr_grpo. tokens: those that dapo divides by.
    """
    per_token = per_token * own
    if loss_type == "grpo":
        return (per_token.sum(-1) / own.sum(-1).clamp(min=1)).mean()
    divisors: dict[str, Any] = {"bnpo": own.sum().clamp(min=1), "dr_grpo": len(own) * longest, "dapo": tokens}
    return per_token.sum() / divisors[loss_type]
