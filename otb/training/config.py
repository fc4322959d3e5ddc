"""OTBConfig: TRL's GRPOConfig with the options of OTBTrainer."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl import GRPOConfig


class _SingleRollout(int):
    """A group size of 1 that passes TRL's check `num_generations < 2` and counts as 1 everywhere else."""

    def __lt__(self, other: int) -> bool:
        return False


@dataclass
class OTBConfig(GRPOConfig):
    """TRL's GRPOConfig with a few more fields and two other rules.

    `num_generations=1` is allowed: the baseline declares the smallest group that makes sense. `scale_rewards` is
    "none": what divides an advantage belongs to the baseline (`grpo` divides, `otb` does not).

    Raises:
        ValueError: `scale_rewards` is anything else.
    """

    scale_rewards: str = "none"
    log_energy: bool = field(
        default=False, metadata={"help": "Log energy metrics also for baselines that do not need score norms."}
    )
    measure_gradient_noise: bool = field(
        default=False,
        metadata={"help": "Log the gradient noise measured on micro-batches of whole groups, and energy metrics."},
    )

    rows_per_generation: int | None = field(
        default=None,
        metadata={"help": "Rollouts that transformers' generate samples at a time; None: all of a turn."},
    )
    lean_steps: bool = field(
        default=True,
        metadata={
            "help": "Leave out what changes a step by rounding alone: padding, a second forward, backwards of 0 "
            "(lean_loss.py), rollouts that have ended (lean_sampling.py; other random numbers, the same "
            "distribution). False: every pass as TRL makes it."
        },
    )
    geometric_ratio_band: tuple[float, float] | None = field(
        default=None,
        metadata={
            "help": "Drop a rollout where the geometric mean over own tokens of trained / sampled probability leaves "
            "(low, high): Geo-RS of the paper's 14B runs. Needs the sampler's log-probs: vLLM, or sampler_dtype."
        },
    )
    sampler_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Precision of a copy of the policy that samples, 'bfloat16'; its importance ratios are "
            "those of the vllm_importance_sampling_* options. None: the policy samples itself."
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
                "to the baseline. Use scale_rewards='none', and baseline=grpo for division by the group's deviation."
            )
