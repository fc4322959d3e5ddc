"""Holds the options of a multi-token-prediction head, and refuses options that it cannot work with.

The head predicts the token after the next one (otb/methods/mtp.py). The mode decides how its loss acts on the policy;
with `occ` the loss is weighted by how well policy and head move together (arXiv 2605.28184). OTBTrainer takes the
options as `auxiliary`, and otb/methods/auxiliary_head.py computes the loss. Importing this file imports no torch.
"""

from __future__ import annotations

from typing import Literal

from otb.refusals import Code, Options, Taken
from otb.values import Rule, is_positive, refuse_out_of_range, refuse_unknown

MODES = ("detach", "ce", "policy", "occ", "occ_as_code")
ARCHITECTURES = ("qwen3", "qwen2", "llama", "mistral", "mimo")  # values of model_type that heads were tested with
LOSS_TYPES = ("dr_grpo", "dapo", "grpo", "bnpo")  # which clip the ratio token by token
ONE_LOSS = "changes tokens of the policy's loss, and not of its head's"
WITH_POLICY_LOSS = (
    Taken("loss_type", LOSS_TYPES, "does not clip the ratio token by token, as the head's policy loss does"),
    Taken("importance_sampling_level", ("token",), ONE_LOSS),
    Taken("off_policy_mask_threshold", (None,), ONE_LOSS),
    Taken("top_entropy_quantile", (1.0,), ONE_LOSS),
    Taken("delta", (None,), ONE_LOSS),
)
NEVER = ("use_liger_kernel", "cast_lm_head_to_fp32", "fp16", "torch_compile")  # untested beside a head
PLAIN_MODULES = "beside an auxiliary head: it reads hidden states and the LM head's weight from plain torch modules"
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

    def refuse(self, options: Options) -> None:
        """Raises ValueError for options that a head cannot work with, or was not tested with."""
        off, with_loss = ("auxiliary", None), ("auxiliary.mode", "ce")
        options.refuse_sharding("an auxiliary head reads whole weights", off)
        if options.improvement is not None:
            rule = (
                "trains on a batch once more, and what a head would be measured against there has not been worked out"
            )
            raise options.refusal("improvement", rule, ("improvement", None), off)
        options.refuse_others((Taken(option, (False,), PLAIN_MODULES) for option in NEVER), off)
        if options.peft_config:
            rule = (
                "is an adapter of LoRA beside an auxiliary head; whether its loss should reach one has not been tested"
            )
            raise options.refusal("peft_config", rule, f"no {options.key('peft_config')}", off)
        if options.optimizers is not None and options.optimizers[0] is not None:
            given = Code(f"({type(options.optimizers[0]).__name__}, ...)")
            rule = "does not know the head's parameters, which the trainer's own optimizer gets"
            raise options.refusal("optimizers", rule, "no optimizers", off, value=given)
        if self.mode in ("detach", "ce"):
            return
        options.refuse_others(WITH_POLICY_LOSS, with_loss)
        accumulated, iterations = options.gradient_accumulation_steps or 1, options.num_iterations or 1
        if self.has_lambda and (options.steps_per_generation or accumulated) * iterations <= accumulated:
            rule = f"makes one update per batch, and mode={self.mode} measures what earlier updates of it have changed"
            fixes = ("num_iterations", 2), ("auxiliary.mode", "policy")
            raise options.refusal("num_iterations", rule, *fixes, value=iterations)


def refuse_architecture(model_type: str) -> None:
    """Raises ValueError for a model that no head has been built for. model_type: of its configuration."""
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type={model_type}: an auxiliary head is one more layer of the model's own kind, and that has been "
            f"tested for {', '.join(ARCHITECTURES)}. Use such a model, or auxiliary=none."
        )
