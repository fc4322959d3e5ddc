"""Defines OTBConfig: TRL's GRPOConfig with the options of OTBTrainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig


class _SingleRollout(int):
    """Represents a group size of 1: it passes TRL's check `num_generations < 2` and equals 1 everywhere else."""

    def __lt__(self, other: int) -> bool:
        return False


@dataclass
class OTBConfig(GRPOConfig):
    """Extends TRL's GRPOConfig with a few fields and changes two of its rules.

    `num_generations=1` is allowed, because the baseline declares the smallest group that it can use. `scale_rewards`
    must be "none", because the baseline decides whether advantages are divided (`grpo` divides them, `otb` does not).

    Raises:
        ValueError: `scale_rewards` is not "none".
    """

    scale_rewards: str = "none"
    log_energy: bool = field(
        default=False, metadata={"help": "Log energy metrics even for baselines that do not need score norms."}
    )
    measure_gradient_noise: bool = field(
        default=False,
        metadata={"help": "Log energy metrics and the gradient noise, measured on micro-batches of whole groups."},
    )

    rows_per_generation: int | None = field(
        default=None,
        metadata={"help": "Rollouts that transformers' generate samples at once; None: all rollouts of a turn."},
    )
    lean_steps: bool = field(
        default=True,
        metadata={
            "help": "Leave out work that changes a step only by rounding: padding, a second forward, backwards of 0 "
            "(lean_loss.py), and sampling of rollouts that have ended (lean_sampling.py: other random numbers, the "
            "same distribution). False: make every pass as TRL does."
        },
    )
    geometric_ratio_band: tuple[float, float] | None = field(
        default=None,
        metadata={
            "help": "Drop a rollout if the geometric mean of trained / sampled probability over its own tokens lies "
            "outside (low, high): Geo-RS of the paper's 14B runs. Needs the sampler's log-probs: vLLM or sampler_dtype."
        },
    )
    sampler_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Sample with a copy of the policy in this precision, 'bfloat16'; the vllm_importance_sampling_* "
            "options apply to its importance ratios. None: sample with the policy itself."
        },
    )

    def __post_init__(self):
        if self.num_generations == 1:
            self.num_generations: int = _SingleRollout(1)
        super().__post_init__()
        self.num_generations = int(self.num_generations)
        if self.scale_rewards != "none":
            raise ValueError(
                f"scale_rewards={self.scale_rewards!r} divides advantages after the baseline; OTBConfig leaves scaling "
                "to the baseline. Use scale_rewards='none', and baseline=grpo to divide by the group's deviation."
            )
