"""Memory of one process at each moment of a step. Pure functions without torch.

A step passes through moments that hold different things: sampling, the extra pass, the LM head, the backward pass of a
layer, the end of the backward pass, the optimizer's update. `moments` gives the bytes of every part at each
(memory_parts.py), and the peak is that of the largest sum. docs/plan.md compares it with measured peaks.
"""

from __future__ import annotations

from experiments.planning.memory_parts import (
    activations,
    buckets,
    copies,
    gradients,
    head_gradients,
    head_tiles,
    mask,
    optimizer,
    pass_rollouts,
    passing_layer,
    reduced_gradients,
    sampling,
    update_buffers,
    weights,
    working_set,
)
from experiments.planning.step import Step

PARTS = ("weights", "gradients", "optimizer", "copies", "buckets", "activations", "lm_head", "kv_cache", "vllm")


def moments(step: Step) -> dict[str, dict[str, float]]:
    """Returns name of the moment -> part -> bytes. The peak of the process is the largest sum.

    Between steps there are no gradients (transformers sets them to None); inside a step they all exist once a forward
    is done. Tied embeddings get a gradient from both their uses, and the head's waits for the embedding's.
    """
    a, accumulated = step.architecture, gradients(step) if step.accumulates else 0.0
    always = {"weights": weights(step), "optimizer": optimizer(step), "buckets": buckets(step)}
    training = always | {"vllm": 0.0 if step.sleep or step.sampler != "vllm" else step.memory_share * step.card}
    training |= {"gradients": accumulated, "activations": activations(step)}
    embedding_gradient = 4.0 * a.embedding_parameters if step.lora_rank is None else 0.0
    of_pass = pass_rollouts(step)
    return {
        "sampling": always | sampling(step),
        "extra pass": training
        | {
            "gradients": 0.0,
            "activations": passing_layer(step, of_pass, step.width) + mask(step, of_pass),
            "copies": copies(step, backward=False),
            "lm_head": head_tiles(step, of_pass, "forward"),
        },
        "LM head": training
        | {
            "copies": copies(step, backward=False),
            "lm_head": max(
                head_tiles(step, step.forward, "forward"),
                head_tiles(step, step.forward, "backward") + head_gradients(step),
            ),
        },
        "backward of a layer": training
        | {
            "activations": activations(step) + working_set(step),
            "copies": copies(step, backward=True),
            "lm_head": embedding_gradient if a.tied else 0.0,
        },
        "end of backward": training
        | {
            "gradients": gradients(step),
            "activations": 0.0,
            "copies": copies(step, backward=True),
            "lm_head": embedding_gradient * (2 if a.tied else 1) if step.accumulates or a.tied else 0.0,
        },
        "update": training | {"gradients": reduced_gradients(step), "activations": 0.0, "copies": update_buffers(step)},
    }


def peak(step: Step) -> tuple[str, dict[str, float]]:
    """Returns the moment with the largest sum and its parts."""
    return max(moments(step).items(), key=lambda item: sum(item[1].values()))


def state(step: Step) -> float:
    """Returns bytes of weights, gradients and optimizer: what no batch size makes smaller."""
    return weights(step) + reduced_gradients(step) + optimizer(step)
