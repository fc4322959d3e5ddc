"""Multiplies the advantage of own token t by a factor f_t whose mean over a rollout is 1: token weights.

A signal per token decides which tokens carry the gradient: f_t = T w_t and w_t = (signal_t + eps)^p / sum_k (signal_k +
eps)^p. With `arca` (arXiv 2606.00257) the signal is the distance by which LoRA has moved the hidden state that predicts
the token. `Passes` measures the signal and multiplies the score norms by f_t^2. `WeightedAdvantages` multiplies the
advantages by f_t after the baseline is subtracted, so the gradient is the sum of f_t A_t s_t. Importing this file
imports no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from otb.methods import Method, Step
from otb.refusals import Code, Options
from otb.values import Rule, is_positive, refuse_out_of_range, refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor

# signal -> the quantity that the trainer measures at each position for it; "" = none.
MEASURES = {
    "uniform": "",
    "surprisal": "log_probs",
    "entropy_reduction": "entropies",
    "divergence": "log_ratios",
    "arca": "residuals",
}
STATE = "token_weights.pt"  # file in a checkpoint: the running mean
RULES = {
    "power": Rule("above 0; larger ones sharpen the weights", is_positive, 1),
    "eps": Rule("a number >= 0, which is added to the signal", lambda value: 0 <= value < math.inf, 1e-8),
    "decay": Rule("in [0, 1]: the share of the earlier sums kept", lambda value: 0 <= value <= 1, 0.9),
}
OF_THE_BASE = frozenset({"log_ratios", "residuals"})  # measured against the same model with its adapter disabled
# Prefixes of LoRA initialisations that subtract the adapter's initial product from the base.
INTO_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class TokenWeights:
    """Turns a signal per own token into factors of the advantages, and keeps the running mean if one is used.

    signal:
        "arca": ||h_t - h_t^base||_2, with h_t the last hidden state that predicts token t, and the base = the policy
            with LoRA's adapter disabled.
        "divergence": |log pi_t - log pi_t^base|.
        "surprisal": -log pi_t.
        "entropy_reduction": max(0, H_t - H_{t+1}), with H_{t+1} the entropy at the next own token; 0 at the last.
        "uniform": no signal, f_t = 1, the control.
    power: p. The paper's formula has 1; the sweep in its code ran with 2.
    eps: added to the signal, as in the paper's code.
    states: the hidden states of "arca": "post_norm", after the model's final norm, as in the paper's code, or
        "pre_norm".
    normalise: "trajectory" divides by the rollout's sum, as the paper does. "running" divides by the mean of (signal +
        eps)^p over the own tokens of earlier steps; the factors are 1 until a step has had a signal.
    decay: factor of the running sums per step.

    "trajectory" makes every non-zero baseline biased. The sum contains the signals after token t, which depend on token
    t, so E[f_t B_t s_t] is not 0 even if B_t is a function of the prefix.
    With "running" and "arca", f_t is a function of the prefix before token t and of earlier steps, so an unbiased
    baseline stays unbiased.
    The other signals depend on token t itself, so a baseline is biased with either normaliser.
    In all cases the trainer ascends a weighted objective, not the expected reward.
    tests/methods/test_token_weights.py checks this on all responses of two tokens.

    Raises ValueError for values out of range.
    """

    def __init__(
        self,
        signal: Literal["arca", "surprisal", "entropy_reduction", "divergence", "uniform"],
        power: float = 1.0,
        eps: float = 1e-8,
        states: Literal["post_norm", "pre_norm"] = "post_norm",
        normalise: Literal["trajectory", "running"] = "trajectory",
        decay: float = 0.9,
    ):
        refuse_unknown("signal", signal, tuple(MEASURES))
        refuse_unknown("states", states, ("post_norm", "pre_norm"))
        refuse_unknown("normalise", normalise, ("trajectory", "running"))
        refuse_out_of_range({"power": power, "eps": eps, "decay": decay}, RULES)
        if states != "post_norm" and signal != "arca":
            raise ValueError(
                f"states={states} says which hidden states signal=arca compares, but signal={signal} reads none. Use "
                "states=post_norm."
            )
        self.signal, self.power, self.eps, self.states = signal, power, eps, states
        self.normalise, self.decay = normalise, decay
        self._sum = self._count = 0.0  # of (signal + eps)^p over the own tokens of earlier steps

    @property
    def measure(self) -> str:
        """The quantity that the trainer measures for the signal, from MEASURES; "" for none, which needs no forward."""
        return MEASURES[self.signal]

    @property
    def reads_base(self) -> bool:
        """Tells whether the signal needs the base, which costs one forward without gradient."""
        return self.measure in OF_THE_BASE

    def refuse(self, options: Options) -> None:
        """Raises ValueError if the signal needs the base and disabling the adapter does not give it.

        options.peft_config: a peft configuration, or a mapping of its fields.
        """
        lora, what = options.peft_config, options.says("token_weights", self.signal)
        adapter = ("peft_config", Code("LoraConfig(...)"))
        if not self.reads_base:
            return
        if not lora:
            rule = (
                "compares the policy with its base, the weights with LoRA's adapter disabled, and there is no adapter"
            )
            raise options.refusal("token_weights", rule, adapter, ("token_weights", "surprisal"), value=self.signal)
        fields = lora if isinstance(lora, dict) else vars(lora)
        if (bias := fields.get("bias", "none")) != "none":
            rule = f"trains biases of the base itself, which {what} takes for what the adapter has not moved"
            raise options.refusal("peft_config.bias", rule, ("peft_config.bias", "none"), value=bias)
        if str(start := fields.get("init_lora_weights", True)).lower().startswith(INTO_THE_BASE):
            rule = f"subtracts the adapter's first product from the base, and {what} compares with the base before"
            name = "peft_config.init_lora_weights"
            raise options.refusal(name, rule, (name, True), value=start)
        if getattr(lora, "is_prompt_learning", False):
            rule = f"puts positions of its own before the hidden states, and {what} compares position by position"
            raise options.refusal("peft_config", rule, adapter)

    def signals(self, measured: Tensor, own: Tensor) -> Tensor:
        """Returns the signal (B, T), >= 0. measured (B, T): the quantity `measure`, packed; own (B, T) bool."""
        if self.signal == "entropy_reduction":
            return entropy_reductions(measured, own)
        return (-measured if self.signal == "surprisal" else measured.abs()).clamp(min=0)

    def factors(self, signals: Tensor | None, own: Tensor) -> Tensor:
        """Returns the factors f_t. signals (B, T) >= 0, own (B, T) bool -> (B, T), 0 after the last own token.

        signals None, for uniform weights -> ones (B, 1).
        """
        import torch

        if signals is None:
            return torch.ones(len(own), 1, device=own.device)
        raw = sharpened(signals, own, self.power, self.eps)
        if self.normalise == "trajectory":
            return trajectory_factors(raw, own, has_signal(signals, own, self.eps))
        return raw * (self._count / self._sum) if self._sum else own.to(raw)

    def update(self, signals: Tensor, own: Tensor) -> None:
        """Updates the running mean after a step. signals (..., T), own (..., T) bool: the rollouts of all processes."""
        if self.normalise != "running" or not has_signal(signals.flatten(), own.flatten(), self.eps):
            return  # a fresh adapter has moved nothing: the mean would be eps^p, and later factors would explode
        raw = sharpened(signals, own, self.power, self.eps)
        self._sum = self.decay * self._sum + float(raw.sum())
        self._count = self.decay * self._count + float(own.sum())

    def state_dict(self) -> dict[str, float]:
        """Returns the running sums, which are the same in all processes."""
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores what `state_dict` returned."""
        self._sum, self._count = state["sum"], state["count"]


def residuals(states: Tensor, base_states: Tensor) -> Tensor:
    """Returns ||h - h_base||_2 in float32. (B, T, d) of the policy and of its base -> (B, T)."""
    return (states.float() - base_states.float()).norm(dim=-1)


def weighted_norms(score_norms: Tensor, factors: Tensor | None) -> Tensor:
    """Returns the squared norms of f_t s_t. score_norms (B, T); factors (B, T or 1), None for f_t = 1 -> (B, T)."""
    return score_norms if factors is None else score_norms * factors.square()


def sharpened(signals: Tensor, own: Tensor, power: float, eps: float) -> Tensor:
    """Returns (signal + eps)^p of own tokens, 0 elsewhere. signals (..., T) >= 0, own (..., T) bool -> (..., T)."""
    return (signals + eps).pow(power).masked_fill(~own, 0)


def has_signal(signals: Tensor, own: Tensor, eps: float) -> Tensor:
    """Tells which rollouts have signals that sum to more than eps. signals, own (..., T) -> (..., 1) bool."""
    return signals.masked_fill(~own, 0).sum(-1, keepdim=True) > eps


def trajectory_factors(raw: Tensor, own: Tensor, counted: Tensor) -> Tensor:
    """Returns T raw_t / sum_k raw_k, with T the number of own tokens of the rollout; 1 for rollouts without a signal.

    raw (..., T) >= 0, own (..., T) bool, counted (..., 1) bool, True for rollouts with a signal -> (..., T).
    """
    scale = own.sum(-1, keepdim=True) / raw.sum(-1, keepdim=True)
    return (raw * scale).where(counted, own.to(raw))


def entropy_reductions(entropies: Tensor, own: Tensor) -> Tensor:
    """Returns max(0, H_t - H_{t+1}), 0 at the last own token. entropies (B, T), packed; own (B, T) bool -> (B, T)."""
    import torch

    reductions = (entropies[:, :-1] - entropies[:, 1:]).clamp(min=0).masked_fill(~own[:, 1:], 0)
    return torch.nn.functional.pad(reductions, (0, 1)) if own.shape[1] else entropies


class WeightedAdvantages(Method):
    """Multiplies the advantages by the factors from `Passes`, and updates the running mean of the weights."""

    def __init__(self, weights: TokenWeights):
        self.weights = weights

    def learners(self) -> dict[str, TokenWeights]:
        return {STATE: self.weights} if self.weights.normalise == "running" else {}

    def weighed(self, step: Step) -> None:
        from otb.metrics import token_weight_metrics

        factors = self.trainer.gathered(step.factors)
        signals = None if step.signals is None else self.trainer.gathered(step.signals)
        own = step.rollouts.reached(factors.shape[-1])
        self.trainer.record(token_weight_metrics(signals, factors, own))
        if signals is not None:
            self.weights.update(signals, own)
        step.advantages = step.advantages * factors
