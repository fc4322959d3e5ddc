"""Computes exact score vectors d log pi(y_t) / d theta of every own token, over all trainable parameters.

The vectors (tokens x parameters) are too large to keep, so a rollout keeps their exact norms and a fixed random sketch
of each. Sketches preserve inner products: over the choice of signs, <sketch(x), sketch(y)> is unbiased for <x, y> and
has a standard deviation of about |x||y| / sqrt(size). Derivatives come from torch.autograd, one backward a token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from otb.exact_norms import own_log_probs, rows_at_once, scores, squared_norms, trainable

TOKENS_TOGETHER = 16  # tokens that share a forward; with more, backward passes through more later tokens in vain


@dataclass(frozen=True)
class Rollout:
    """One rollout, without padding.

    ids (L,): prompt and response. own (L,) bool: the policy sampled the token. reward: NaN = unscored.
    """

    ids: Tensor
    own: Tensor
    reward: float


class Sketch:
    """A fixed random linear map of parameters to `size` numbers; it adds coordinate j with a random sign to j % size.

    It is a count sketch (Charikar et al. 2002) that uses j % size as its hash. A prime size keeps the rows of weight
    matrices from being added to each other.
    """

    def __init__(self, parameters: list[Tensor], size: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.size, self._signs = size, []
        for parameter in parameters:
            signs = torch.randint(0, 2, (-(-parameter.numel() // size), size), generator=generator)
            self._signs.append((signs * 2 - 1).to(parameter))

    def __call__(self, vectors: list[Tensor]) -> Tensor:
        """Sketches K vectors. A tensor (K, *shape) per parameter -> (K, size)."""
        total = torch.zeros(len(vectors[0]), self.size, device=vectors[0].device)
        for vector, signs in zip(vectors, self._signs, strict=True):
            flat = torch.nn.functional.pad(vector.flatten(1), (0, signs.numel() - vector[0].numel()))
            total += (flat.unflatten(1, signs.shape) * signs).sum(1)
        return total


@dataclass(frozen=True)
class Measured:
    """Measurements of M rollouts of one prompt, with their own tokens concatenated (S = sum of lengths).

    rewards (M,) float; lengths (M,) int. Per token: log_probs, log_sum_sq_probs (S,); hidden_states (S, d), the final
    hidden state that predicts the token. With scores: token_norms (S,) = ||s_t||^2, prefix_norms (S,) = ||sum_{j<=t}
    s_j||^2, both exact, and sketches (S, size); these three are empty without scores.
    """

    rewards: np.ndarray
    lengths: np.ndarray
    log_probs: np.ndarray
    log_sum_sq_probs: np.ndarray
    hidden_states: np.ndarray
    token_norms: np.ndarray
    prefix_norms: np.ndarray
    sketches: np.ndarray

    def save(self, path) -> None:
        """Writes the measurements to an .npz file."""
        with open(path, "wb") as file:
            np.savez(file, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(cls, path) -> Measured:
        """Reads what `save` wrote."""
        with np.load(path) as stored:
            return cls(**{field.name: stored[field.name] for field in fields(cls)})

    def padded(self, name: str, dtype=torch.float32) -> Tensor:
        """Returns a per-token field as (M, T, ...), 0 past the last own token."""
        values = torch.from_numpy(getattr(self, name)).to(dtype)
        padded = torch.zeros(len(self.lengths), int(self.lengths.max()), *values.shape[1:], dtype=dtype)
        own = torch.arange(padded.shape[1]) < torch.from_numpy(self.lengths).unsqueeze(1)
        padded[own] = values
        return padded


def measure(model, rollouts: list[Rollout], temperature: float, sketch: Sketch | None) -> Measured:
    """Measures everything that the estimators read of one prompt's rollouts. sketch: None to measure no scores.

    Raises ValueError if the policy has too many trainable parameters (`otb.exact_norms.trainable`).
    """
    parameters = trainable(model) if sketch is not None else []
    per_rollout: dict[str, list[Tensor]] = {field.name: [] for field in fields(Measured)}
    for rollout in rollouts:
        of_tokens = forward(model, rollout, temperature)
        if sketch is not None:
            of_tokens |= score_vectors(model, rollout, temperature, parameters, sketch)
        for name, values in of_tokens.items():
            per_rollout[name].append(values.cpu())
    columns = {name: torch.cat(values).numpy() if values else np.zeros(0) for name, values in per_rollout.items()}
    columns["rewards"] = np.array([rollout.reward for rollout in rollouts])
    columns["lengths"] = np.array([int(rollout.own.sum()) for rollout in rollouts])
    return Measured(**columns)


@torch.no_grad()
def forward(model, rollout: Rollout, temperature: float) -> dict[str, Tensor]:
    """Returns probabilities and hidden states of the own tokens of one rollout, at the sampling temperature."""
    before = rollout.own.roll(-1)  # positions that predict an own token
    ids = rollout.ids.to(model.device).unsqueeze(0)
    output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    log_probs = (output.logits[0][before].float() / temperature).log_softmax(-1)
    chosen = ids[0][rollout.own.to(ids.device)].unsqueeze(-1)
    return {
        "log_probs": log_probs.gather(-1, chosen).squeeze(-1),
        "log_sum_sq_probs": (2 * log_probs).logsumexp(-1),
        "hidden_states": output.hidden_states[-1][0][before].float(),
    }


def score_vectors(model, rollout: Rollout, temperature: float, parameters, sketch: Sketch) -> dict[str, Tensor]:
    """Returns exact norms of the tokens' and the prefixes' scores, and the tokens' sketches."""
    ids, own = rollout.ids.to(model.device), rollout.own.to(model.device)
    sketches, token_norms, prefix_norms = [], [], []
    before = [torch.zeros_like(parameter).unsqueeze(0) for parameter in parameters]  # score of the prefix
    for places in own.nonzero().squeeze(-1).split(min(TOKENS_TOGETHER, rows_at_once(parameters))):
        so_far = ids[: int(places[-1]) + 1]  # later tokens do not affect these scores, but would slow down backward
        chosen = torch.zeros_like(so_far, dtype=torch.bool).index_fill(0, places, True)
        log_probs = own_log_probs(model, so_far, torch.ones_like(so_far), chosen, temperature)
        vectors = scores(log_probs, parameters, torch.eye(len(places), device=ids.device))
        sketches.append(sketch(vectors))
        prefixes = [(earlier + vector.cumsum(0)) for earlier, vector in zip(before, vectors, strict=True)]
        before = [prefix[-1:].clone() for prefix in prefixes]
        token_norms.append(squared_norms(vectors))
        prefix_norms.append(squared_norms(prefixes))
    return {
        "sketches": torch.cat(sketches),
        "token_norms": torch.cat(token_norms),
        "prefix_norms": torch.cat(prefix_norms),
    }
