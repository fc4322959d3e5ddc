"""Names every metric once, with its unit and its definition. It imports no torch, because analysis reads it.

`python -m otb.records.metric_names` prints docs/metrics.md, the table of these names.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """The unit and the definition of one metric."""

    unit: str
    definition: str


# A metric that is not measured is absent from a row, never 0.
METRICS = {
    "step": Metric("1", "optimizer steps done; one step consumes one batch of rollouts"),
    "own_tokens": Metric("tokens", "tokens that the policy sampled in this step, including masked rollouts"),
    "tool_tokens": Metric("tokens", "tokens that tools added to the responses of this step"),
    "own_tokens_total": Metric("tokens", "own tokens since the start of the run; evaluations are not counted"),
    "tool_tokens_total": Metric("tokens", "tool tokens since the start of the run"),
    "reward_mean": Metric("reward", "mean over the scored rollouts of the step"),
    "reward_spread": Metric("reward", "standard deviation over the scored rollouts of the step"),
    "accuracy": Metric(
        "share",
        "scored rollouts with reward 1; absent with several reward functions or a weight other than 1, because a "
        "weighted sum is no grade",
    ),
    "unscored": Metric("share", "rollouts that no reward function could score; absent when there were none"),
    "grade_correct": Metric("share", "rollouts whose final answer equals the reference; maths tasks only"),
    "grade_wrong": Metric("share", "rollouts with a readable answer that differs from the reference; maths tasks only"),
    "grade_unparsable": Metric("share", "rollouts without a final answer, or with an unreadable one; maths tasks only"),
    "grade_timeout": Metric("share", "rollouts whose grader ran out of time; unscored; maths tasks only"),
    "grade_error": Metric("share", "rollouts whose grader failed for another reason; unscored; maths tasks only"),
    "response_length_mean": Metric("tokens", "own tokens per rollout, mean"),
    "response_length_max": Metric("tokens", "own tokens per rollout, largest"),
    "equal_reward_groups": Metric("share", "prompt groups whose scored rollouts all have the same reward"),
    "dropped_by_mismatch": Metric(
        "share", "rollouts whose geometric mean ratio is outside geometric_ratio_band; they are not trained on"
    ),
    "mismatch_mean": Metric(
        "nats", "absolute difference between the policy's and the sampler's log pi per own token, mean"
    ),
    "mismatch_max": Metric(
        "nats", "absolute difference between the policy's and the sampler's log pi per own token, largest"
    ),
    "importance_ratio_min": Metric("1", "trained / sampled probability of an own token, clipped, smallest"),
    "importance_ratio_mean": Metric("1", "trained / sampled probability of an own token, clipped, mean"),
    "importance_ratio_max": Metric("1", "trained / sampled probability of an own token, clipped, largest"),
    "log_ppl_abs_diff_mean": Metric(
        "nats", "absolute value of a rollout's mean of the policy's minus the sampler's log pi, mean over rollouts"
    ),
    "log_ppl_abs_diff_max": Metric(
        "nats", "absolute value of a rollout's mean of the policy's minus the sampler's log pi, largest"
    ),
    "mismatch_kl": Metric("nats", "KL(sampler, policy) per own token: mean of the sampler's log pi minus the policy's"),
    "mismatch_k3": Metric(
        "nats",
        "KL(sampler, policy) per own token, k3: mean of ratio - 1 - log ratio; ratio = trained / sampled "
        "probability, not clipped",
    ),
    "mismatch_chi2_token": Metric(
        "1", "chi^2 of trained and sampled probability per own token: mean of ratio^2, minus 1"
    ),
    "mismatch_chi2_seq": Metric(
        "1",
        "chi^2 of trained and sampled probability of whole rollouts: mean of the squared product of a rollout's "
        "ratios, minus 1",
    ),
    "truncated": Metric("share", "rollouts that ended at the length limit"),
    "gradient_norm": Metric("norm", "Euclidean norm of the whole gradient before clipping"),
    "loss": Metric("1", "policy loss of the step, summed over its micro-batches"),
    "entropy": Metric(
        "nats", "entropy of the policy at the sampling temperature over own tokens; mean of micro-batches"
    ),
    "kl": Metric(
        "nats", "k3 estimate of KL(policy, reference) over own tokens; mean of micro-batches; with trainer.beta > 0"
    ),
    "learning_rate": Metric("1", "learning rate of the step"),
    "length_baseline": Metric("tokens", "mean response length of the first steps, against which a surge is measured"),
    "length_surge_step": Metric("1", "optimizer steps done when the mean response length surged; absent before that"),
    "improvement_mu": Metric("reward", "mean reward of the step, which enters the window"),
    "improvement_mu_his": Metric(
        "reward", "mean of the window of earlier steps' mean rewards; once the window is full"
    ),
    "improvement_xi": Metric(
        "1",
        "(mu - mu_his) / sigma_his: distance of the step's mean reward from the window's mean in standard "
        "deviations of the window",
    ),
    "improvement_phi": Metric("1", "factor of the previous batch's advantages in the improvement update"),
    "improvement_ratio_mean": Metric(
        "1",
        "ratio to the policy that sampled the previous batch, mean over its own tokens; absent without an "
        "improvement update",
    ),
    "improvement_clip_fraction": Metric(
        "share", "own tokens of the previous batch whose ratio was clipped; absent without an improvement update"
    ),
    "improvement_gradient_norm": Metric(
        "norm", "Euclidean norm of the improvement update's gradient; absent without such an update"
    ),
    "advantage_mean": Metric("reward", "mean over own tokens of the advantages used"),
    "advantage_spread": Metric("reward", "standard deviation over own tokens of the advantages used"),
    "advantage_max": Metric("reward", "largest absolute advantage used"),
    "baseline_mean": Metric("reward", "mean of the baseline over own tokens"),
    "baseline_spread": Metric("reward", "standard deviation of the baseline over own tokens"),
    "token_weight_gini": Metric("1", "Gini coefficient of a rollout's token weights, mean over rollouts; 0 = equal"),
    "token_weight_support": Metric(
        "share",
        "effective support 1 / (T sum_t w_t^2) of a rollout's token weights w_t, which sum to 1 over its T own "
        "tokens; mean over rollouts; 1 = equal",
    ),
    "token_weight_mean": Metric("1", "factor of the advantages, mean over own tokens; not 1 with normalise=running"),
    "token_signal_mean": Metric(
        "of the signal",
        "signal of the token weights (arca: norm of the residual), mean over own tokens; absent with uniform weights",
    ),
    "token_signal_max": Metric("of the signal", "signal of the token weights, largest; absent with uniform weights"),
    "mtp_cross_entropy": Metric("nats", "-log pi of the auxiliary head per own token, at the sampling temperature"),
    "mtp_lambda": Metric(
        "1",
        "weight of the head's policy loss, mean over the forwards of the step; 0 in the first update of a batch; "
        "with mode=occ and occ_as_code",
    ),
    "mtp_c": Metric(
        "nats^2",
        "sum over the own tokens of a forward of d d_head: the changes in the policy's (d) and its head's (d_head) "
        "log pi since the tokens were sampled; with mode=occ, absent in the first update of a batch",
    ),
    "mtp_v2": Metric("nats^2", "sum over the own tokens of a forward of d_head^2; as mtp_c"),
    "mtp_cosine": Metric("1", "cosine of d and d_head; as mtp_c"),
    "energy_mean": Metric(
        "norm^2",
        "realized energy W_T = sum_t w_t per scored rollout, mean; w is the proxy, with token_weights= times the "
        "token's squared factor",
    ),
    "energy_spread": Metric("norm^2", "realized energy per scored rollout, standard deviation"),
    "total_power": Metric(
        "reward^2 norm^2", "token-diagonal power sum_t w_t A_t^2 per scored rollout, mean; A before token_weights="
    ),
    "verl_power": Metric(
        "reward^2 norm^2",
        "verl's form of total_power: W_T (mean_t A_t)^2 per scored rollout, mean; the same for one A per rollout",
    ),
    "gradient_noise": Metric(
        "norm^2",
        "trace of the covariance of one prompt group's gradient, unbiased; from two batch sizes (arXiv "
        "1812.06162); with measure_gradient_noise=true. The gradients are the loss's: with dr_grpo a group's "
        "gradient is sum_t A_t grad log pi_t / (group_size x max_completion_length), and the step's is the mean over "
        "its groups",
    ),
    "gradient_signal": Metric(
        "norm^2", "squared norm of the true gradient, unbiased, so it may be negative; as gradient_noise"
    ),
    "verl_noise": Metric(
        "mixed", "verl's form of gradient noise: (verl_power - gradient_norm^2) / (rollouts of the step - 1)"
    ),
    "seconds_sampling": Metric("s", "time to generate the rollouts of the step, tools included"),
    "seconds_scoring": Metric("s", "time in reward functions"),
    "seconds_advantages": Metric(
        "s", "time for score norms, baseline and advantages, including a forward unless the loss shares its own"
    ),
    "seconds_improvement": Metric("s", "time for the improvement update; absent without one"),
    "seconds_loss": Metric("s", "rest of the step: loss forward (which score norms may share), backward, optimizer"),
    "seconds_step": Metric("s", "wall time of the step, without evaluations and checkpoints"),
    "peak_memory_bytes": Metric(
        "bytes",
        "largest device memory allocated so far; on a CPU, resident memory, which in a sweep includes less of the "
        "libraries",
    ),
    "turns_mean": Metric("turns", "assistant turns per rollout, mean"),
    "tool_calls": Metric("calls", "tool calls of the step"),
    "tool_failed": Metric("share", "tool calls whose code raised an error"),
    "tool_timed_out": Metric("share", "tool calls that reached a limit of time, memory or output"),
    "tool_refused": Metric("share", "tool calls not run: malformed, over a limit, or past the last turn"),
    "tool_seconds": Metric(
        "s", "running time of programs, summed over the calls; a shared program counts for each call"
    ),
    "cut_by_turns": Metric("share", "rollouts ended by the turn limit"),
    "cut_by_length": Metric("share", "rollouts ended by the length limit"),
    "never_called": Metric("share", "rollouts without a tool call"),
}
EVALUATION_METRICS = {
    "step": Metric("1", "optimizer steps done before this evaluation"),
    "accuracy": Metric("share", "avg@k: held-out samples with reward 1, k samples per prompt"),
    "pass_at_k": Metric(
        "share", "held-out prompts with at least one sample of reward 1, among prompts with a scored sample"
    ),
    "samples": Metric("1", "k, samples per prompt"),
    "prompts": Metric("1", "held-out prompts"),
    "response_length_mean": Metric("tokens", "own tokens per sample, mean"),
    "unscored": Metric("share", "samples that could not be scored; absent when there were none"),
    "own_tokens_total": Metric("tokens", "own tokens of training before this evaluation"),
    "seconds": Metric("s", "wall time of the evaluation"),
}
# Metrics that differ between two runs of one configuration; on one CPU all others are equal, bit for bit.
TIME_AND_MEMORY = frozenset(
    name for name in METRICS if name.startswith("seconds_") or name in ("peak_memory_bytes", "tool_seconds")
) | {"seconds"}


def metric_table() -> str:
    """Returns the metric names as a Markdown table; docs/metrics.md is this text."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m otb.records.metric_names`. A metric that is not measured is absent. `mismatch_*`,",
        "`importance_ratio_*` and `log_ppl_*` exist if vLLM or a copy of the policy samples; `length_*_step` and",
        "`length_baseline`, `improvement_*`, `token_weight_*` and `token_signal_*`, `mtp_*` with the",
        "[method](neighbours.md) of that name.",
        "",
    ]
    for title, metrics in (("metrics.jsonl", METRICS), ("evaluations.jsonl", EVALUATION_METRICS)):
        lines += [f"## {title}", "", "| name | unit | definition |", "|---|---|---|"]
        lines += [f"| `{name}` | {metric.unit} | {metric.definition} |" for name, metric in metrics.items()]
        lines.append("")
    return "\n".join(lines[:-1])


if __name__ == "__main__":
    print(metric_table())
