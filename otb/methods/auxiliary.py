"""Holds the options of a multi-token-prediction head, and refuses options that it cannot work with.

The head predicts the token after the next one (otb/methods/mtp.py). The mode decides how its loss acts on the policy;
with `occ` the loss is weighted by how well policy and head move together (arXiv 2605.28184). OTBTrainer takes the
options as `auxiliary`, and otb/methods/auxiliary_head.py computes the loss. Importing this file imports no torch.
"""

from __future__ import annotations

from typing import Any, Literal

from otb.values import Rule, is_positive, refuse_out_of_range, refuse_unknown

MODES = ("detach", "ce", "policy", "occ", "occ_as_code")
ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral", "mimo")  # values of model_type that heads were tested with
LOSS_TYPES = ("dr_grpo", "dapo", "grpo", "bnpo")  # which clip the ratio token by token
# Options of the policy's loss that change single tokens of it -> the value at which they do nothing.
LEFT_ALONE = {
    "importance_sampling_level": "token",
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "delta": None,
}
NEVER = ("use_liger_kernel", "cast_lm_head_to_fp32", "fp16", "torch_compile")  # untested beside a head
RULES = {
    "weight": Rule("above 0", is_positive, 0.1),
    "lambda_plus": Rule("above 0", is_positive, 1),
    "eps": Rule("above 0: it is added to lambda's denominator", is_positive, 1e-8),
    "limit": Rule("above 0, or null for none", is_positive, 1, optional=True),
    "warmup": Rule("a whole number of steps >= 0", lambda value: value >= 0, 20, whole=True),
}


class MultiTokenPrediction:
    """Holds the options of the head: its loss, and how this loss acts on the policy.

    mode:
        "detach": the head learns by cross-entropy from the policy's states; no gradient reaches the policy. The
            control.
        "ce": `weight` times the cross-entropy trains both.
        "policy": `weight` times the head's clipped policy loss trains both.
        "occ": lambda times the head's clipped policy loss trains both. lambda = `lambda_plus` <d, d_head> /
            (||d_head||^2 + `eps`); d and d_head are the changes of the own tokens' log-probs since they were sampled,
            under the policy and under the head.
        "occ_as_code": like "occ", with lambda computed as in the authors' code; see otb.methods.mtp.mean_of_ratios.
    weight: factor of the head's loss in the modes "ce" and "policy".
    limit: largest |lambda|; None for no limit, as in the paper.
    ratio_to: denominator of the ratio in the head's policy loss. "main": the policy's probability when the token was
        sampled, as in the paper. "head": the head's probability at that moment.
    warmup: optimizer steps from the start of the run in which every mode acts as "detach", because a fresh head has
        learnt nothing.
    weights: "fresh", or "shipped" for a head that comes with the model's weights, as MiMo's does.

    Raises ValueError for values out of range.
    """

    def __init__(
        self,
        mode: Literal["detach", "ce", "policy", "occ", "occ_as_code"],
        weight: float = 0.1,
        lambda_plus: float = 1.0,
        eps: float = 1e-8,
        limit: float | None = None,
        ratio_to: Literal["main", "head"] = "main",
        warmup: int = 0,
        weights: Literal["fresh", "shipped"] = "fresh",
    ):
        refuse_unknown("mode", mode, MODES)
        refuse_unknown("ratio_to", ratio_to, ("main", "head"))
        refuse_unknown("weights", weights, ("fresh", "shipped"))
        self.mode, self.weight, self.lambda_plus, self.eps = mode, weight, lambda_plus, eps
        self.limit, self.ratio_to, self.warmup, self.weights = limit, ratio_to, warmup, weights
        refuse_out_of_range(vars(self), RULES)

    def acts(self, step: int) -> bool:
        """Tells whether the head's loss reaches the policy in the update after `step` optimizer steps."""
        return self.mode != "detach" and step >= self.warmup

    @property
    def has_lambda(self) -> bool:
        """Tells whether the weight of the head's loss is measured."""
        return self.mode.startswith("occ")

    @property
    def reads_old_head(self) -> bool:
        """Tells whether the head's log-probs from the moment of sampling are needed."""
        return self.mode == "occ" or (self.ratio_to == "head" and self.mode in ("policy", "occ_as_code"))


def refuse_both(improvement: object | None, auxiliary: object | None) -> None:
    """Raises ValueError for a head beside improvement updates. None: there is none of the two."""
    if improvement is not None and auxiliary is not None:
        raise ValueError(
            "improvement= trains on the last batch once more, and what an auxiliary head's changes would be measured "
            "against there has not been worked out. Leave out improvement=, or auxiliary=."
        )


def refuse_auxiliary(args: Any, auxiliary: MultiTokenPrediction, lora: Any = None, optimizers: Any = None) -> None:
    """Raises ValueError for options that a head cannot work with, or has not been tested with.

    args: a GRPOConfig, or what has some of its attributes. lora: a peft configuration or its fields, None without.
    optimizers: as in transformers.Trainer.
    """
    for option in NEVER:
        if getattr(args, option, False):
            raise ValueError(
                f"{option}=True beside an auxiliary head: the head reads hidden states and the LM head's weight as "
                f"plain torch modules have them. Use {option}=False, or auxiliary=none."
            )
    if lora:
        raise ValueError(
            "an adapter of LoRA beside an auxiliary head: the head is trained whole, and whether its loss should reach "
            "an adapter has not been tested. Leave model.lora (in a script peft_config) out, or use auxiliary=none."
        )
    if optimizers is not None and optimizers[0] is not None:
        raise ValueError(
            f"optimizers=({type(optimizers[0]).__name__}, ...) does not know the head's parameters, which the "
            "trainer's own gets. Leave optimizers out."
        )
    if auxiliary.mode in ("detach", "ce"):
        return
    loss_type = getattr(args, "loss_type", LOSS_TYPES[0])
    if loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={loss_type!r}: the head's policy loss clips the ratio token by token, as "
            f"{', '.join(LOSS_TYPES)} do. Use one of these, or auxiliary.mode=ce."
        )
    for option, neutral in LEFT_ALONE.items():
        if (value := getattr(args, option, neutral)) != neutral:
            raise ValueError(
                f"{option}={value} changes tokens of the policy's loss, and not of its head's. Use "
                f"{option}={'null' if neutral is None else neutral}, or auxiliary.mode=ce."
            )
    accumulated = getattr(args, "gradient_accumulation_steps", 1)
    iterations = getattr(args, "num_iterations", 1)
    of_a_generation = (getattr(args, "steps_per_generation", None) or accumulated) * iterations
    if auxiliary.has_lambda and of_a_generation <= accumulated:
        raise ValueError(
            f"num_iterations={iterations} makes one update per batch, and mode={auxiliary.mode} measures what updates "
            "of a batch have changed: lambda would be 0 throughout, a run with detach. Use "
            "num_iterations=2, or auxiliary.mode=policy."
        )


def refuse_architecture(model_type: str) -> None:
    """Raises ValueError for a model that no head has been built for. model_type: of its configuration."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={model_type}: an auxiliary head is one more layer of the model's own kind, and that has been "
            f"tested for {', '.join(ARCHITECTURES)}. Use such a model, or auxiliary=none."
        )
