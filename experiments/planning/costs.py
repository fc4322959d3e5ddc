"""Tokens, hours and disk of a run by arithmetic. Pure functions; what they assume is conf/plan.yaml's.

Not counted: tools' run time, grading, the hand-over of weights to vLLM, loading, checkpoints being written.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.planning.memory import Step, kv_bytes_per_token, vllm_room


@dataclass(frozen=True)
class Card:
    """One GPU: bytes of memory, dense bfloat16 operations a second, bytes a second from its memory."""

    memory: float
    flops: float
    bandwidth: float


@dataclass(frozen=True)
class Rates:
    """Assumed throughputs, named and explained in conf/plan.yaml."""

    training_utilization: float
    training_tokens_per_second: float | None
    sampling_efficiency: float
    sampling_tokens_per_second: float | None
    hf_seconds_per_token: float


@dataclass(frozen=True)
class Run:
    """The size of a run.

    Args:
        mean_response: own and tool tokens of a response, on average.
        scores: whether the arm needs score norms, which take a forward of their own (vLLM runs make it anyway).
        evaluations, evaluation_rollouts: how many, and the rollouts of each; None where the prompts are not known.
        extra_gpus: beside those that train, of a vLLM server.
        improves: whether each step has a second update, on the batch before, which takes a forward for log-probs too.
    """

    steps: int
    rollouts: int
    mean_response: float
    scores: bool
    evaluations: int
    evaluation_rollouts: int | None
    extra_gpus: int = 0
    improves: bool = False


@dataclass(frozen=True)
class Hours:
    """GPU-hours of a run by what they are spent on; None where a part cannot be estimated."""

    sampling: float | None
    training: float
    evaluation: float | None

    @property
    def total(self) -> float | None:
        parts = (self.sampling, self.training, self.evaluation)
        return None if None in parts else sum(parts)


def response_tokens(run: Run) -> float:
    """Returns the own and tool tokens of a run's training rollouts."""
    return run.steps * run.rollouts * run.mean_response


def evaluation_tokens(run: Run) -> float | None:
    """Returns the own and tool tokens of all its evaluations."""
    if run.evaluation_rollouts is None:
        return None
    return run.evaluations * run.evaluation_rollouts * run.mean_response


def forward_flops(step: Step) -> float:
    """Returns operations of a forward per token: 2 per parameter of layers and LM head, and those of the attention.

    The attention takes 4 x layers x query width x length: with a mask no kernel leaves half of the padded length out.
    It is the convention of PaLM's model FLOP utilization (arXiv 2204.02311, appendix B).
    """
    a = step.architecture
    matrices = a.layers * a.layer_parameters + a.embedding_parameters
    return 2.0 * matrices + 4.0 * a.layers * a.query_width * step.width


def training_seconds(step: Step, run: Run, card: Card, rates: Rates) -> float:
    """Returns seconds of one step's extra pass, forwards and backward passes.

    A batch is as wide as its longest response, and among hundreds of rollouts one reaches the limit: every rollout
    counts as `step.width` positions. A backward pass is two forwards; one where only adapters are trained.
    """
    positions = step.rollouts * step.width
    updates = 2 if run.improves else 1
    if rates.training_tokens_per_second is not None:
        return updates * positions / rates.training_tokens_per_second
    measures = run.scores or run.improves or step.sampler != "hf"
    passes = updates * (3 if step.lora_rank is None else 2) + (1 if measures else 0)
    return positions * passes * forward_flops(step) / (card.flops * rates.training_utilization)


def decoding_seconds(step: Step, sequences: float, mean_response: float, card: Card, rates: Rates) -> float:
    """Returns seconds in which one engine samples a token for each of `sequences`: the larger of two bounds.

    Bandwidth: the weights and every sequence's cache (half its response on average) are read once per token.
    Computation: 2 operations per parameter and sequence. Both at `sampling_efficiency` of the card.
    """
    a = step.architecture
    gpus = 1 if step.generates else step.tensor_parallel
    # Float32 weights under autocast: generate reads them, writes bfloat16 copies and reads those, for every token.
    per_parameter, number = (8, 4) if step.sampler == "hf" and step.precision == "mixed" else (step.number, step.number)
    cache = sequences * kv_bytes_per_token(a, number) * (step.prompt + mean_response / 2)
    bandwidth = (per_parameter * a.parameters + cache) / (gpus * card.bandwidth)
    computation = 2.0 * a.parameters * sequences / (gpus * card.flops)
    return max(bandwidth, computation) / rates.sampling_efficiency


def sampling_seconds(step: Step, rollouts: float, mean_response: float, card: Card, rates: Rates) -> float | None:
    """Returns seconds in which this process samples `rollouts`, or None where sharded weights meet HF generate.

    vLLM keeps as many sequences at a time as its cache holds, and is never faster than one response of full length by
    itself. HF generate runs batch after batch, each to its longest response.
    """
    if step.generates:
        if step.parallel != "ddp" and step.processes > 1:
            return None  # weights are gathered from the other GPUs for every token
        rows = min(step.rows or rollouts, rollouts)
        if rates.sampling_tokens_per_second is not None:
            return rollouts * mean_response / rates.sampling_tokens_per_second
        per_token = max(rates.hf_seconds_per_token, decoding_seconds(step, rows, mean_response, card, rates))
        return -(-rollouts // rows) * step.response * per_token
    if rates.sampling_tokens_per_second is not None:
        return rollouts * mean_response / rates.sampling_tokens_per_second
    of_engine = rollouts * step.tensor_parallel
    at_once = max(1.0, min(of_engine, vllm_room(step, step.prompt + mean_response)))
    all_tokens = of_engine * mean_response / at_once * decoding_seconds(step, at_once, mean_response, card, rates)
    longest = step.response * decoding_seconds(step, 1, step.response, card, rates)
    return max(all_tokens, longest)


def hours(step: Step, run: Run, card: Card, rates: Rates) -> Hours:
    """Returns the GPU-hours of a run. step: of one process, which samples as many rollouts as the others."""
    gpu_hours = (step.processes + run.extra_gpus) / 3600
    engines_share = step.processes / run.extra_gpus if step.sampler == "vllm_server" else 1
    sampled = sampling_seconds(step, step.rollouts * engines_share, run.mean_response, card, rates)
    evaluation = None
    if run.evaluation_rollouts is not None:
        of_process = run.evaluation_rollouts / (run.extra_gpus or step.processes)
        evaluated = sampling_seconds(step, of_process, run.mean_response, card, rates)
        evaluation = None if evaluated is None else run.evaluations * evaluated * gpu_hours
    return Hours(
        sampling=None if sampled is None else run.steps * sampled * gpu_hours,
        training=run.steps * training_seconds(step, run, card, rates) * gpu_hours,
        evaluation=evaluation,
    )


def disk(step: Step, run: Run, kept_rollouts: int, bytes_per_token: float) -> dict[str, float]:
    """Returns bytes on disk by what they are for.

    A checkpoint to resume from has float32 weights and AdamW's moments, 12 bytes per trained parameter. Under ddp the
    best one has these weights, 4 bytes; under fsdp2 and zero3 both have the whole policy in `dtype` beside the parts
    that only a resumed run reads, and the best one has nothing else (experiments/running/run_trainer.py, RESUME_FILES).
    While one is written, the last one still lies beside it. kept_rollouts: those in rollouts/.
    """
    sharded = step.parallel in ("fsdp2", "zero3")
    whole = float(step.number * step.trained) if sharded else 0.0
    return {
        "last checkpoint": 12.0 * step.trained + whole,
        "best checkpoint": whole if sharded else 4.0 * step.trained,
        "while one is written": 12.0 * step.trained + whole,
        "rollouts kept": kept_rollouts * run.mean_response * bytes_per_token,
    }
