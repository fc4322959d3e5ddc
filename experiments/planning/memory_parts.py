"""Memory of one process by part, from dimensions alone. Pure functions without torch; each says where it is from.

How far they are from measured peaks stands in docs/plan.md (benchmarks/memory_model.py). All are bytes; a token is a
position of the padded batch. experiments/planning/memory.py puts them together, moment by moment.
"""

from __future__ import annotations

from experiments.planning.architectures import Architecture
from experiments.planning.step import Step
from otb.training.options import CHUNKS

TILE = (4096, 32768)  # tokens x vocabulary of TRL's fused LM head: trl/kernels/chunked_logprob.py, trl/trainer/utils.py
# Tiles alive at once. With Triton one tile is worked on in place; without it (a CPU), torch makes these many copies.
GPU_TILES = {"forward": 1.0, "backward": 1.0}
CPU_TILES = {"forward": 4.0, "backward": 8.25}
# Bytes that autograd keeps of one layer, per token, for backward: (x hidden, x query width, x (query + key width)). The
# last are the head norms. Counted with torch.autograd.graph.saved_tensors_hooks; tests/planning/test_plan.py counts
# again.
KEPT_BY_LAYER = {
    "float32": (24, 0, 8),
    "bfloat16": (16, 0, 6),  # bfloat16 weights, as FSDP2 and ZeRO-3 gather them
    "mixed": (26, 0, 6),  # float32 weights under autocast: a linear keeps a cast copy of its input for itself
    "lora float32": (16, 0, 4),
    "lora bfloat16": (18, 2, 4),
}
DEEPSPEED_LIVE = 1_000_000_000  # stage3_max_live_parameters and sub_group_size, DeepSpeed's defaults
DEEPSPEED_BUCKET = 500_000_000  # reduce_bucket_size, in numbers; two of them with overlap_comm


# ---- what stays over the step


def weights(step: Step) -> float:
    """Returns bytes of the weights: 4 per trained parameter (float32), 2 of zero3 in bfloat16, over the processes.

    Frozen weights beneath LoRA have the dtype of the forward (experiments/running/train.py, weights_dtype). A copy that
    samples has 2 for each of all. A reference model is a second copy of the trained ones: TRL loads it in their dtype,
    and shards it where they are.
    """
    per_trained = (step.number if step.parallel == "zero3" else 4) * (2 if step.reference else 1)
    copied = 2.0 * (step.trained + step.frozen) if step.sampler == "hf_bfloat16" else 0.0
    return (per_trained * step.trained + step.number * step.frozen) * step.share + copied


def optimizer(step: Step) -> float:
    """Returns bytes of AdamW's two moments: 8 per trained parameter; zero3 adds the float32 weights themselves, 4."""
    return (12 if step.parallel == "zero3" else 8) * step.trained * step.share


def gradients(step: Step) -> float:
    """Returns bytes of the gradients once all of a step exist.

    Under fsdp2 the gradients of all forwards but the last are not reduced, and stay whole in float32 until it
    (accelerate's no_sync -> set_requires_gradient_sync(False); torch FSDPParam.to_accumulated_grad_if_needed), unless
    sync_each_forward.
    """
    if step.parallel == "fsdp2" and step.accumulates and not step.sync_each_forward:
        return 4.0 * step.trained
    return reduced_gradients(step)


def reduced_gradients(step: Step) -> float:
    """Returns bytes of the gradients that the update reads: 4 per trained parameter, 2 of zero3 in bfloat16."""
    return (step.number if step.parallel == "zero3" else 4) * step.trained * step.share


def buckets(step: Step) -> float:
    """Returns bytes of the communication buffers that stay over the step.

    DDP's buckets are a second copy of all gradients: accelerate leaves its gradient_as_bucket_view off. zero3 has two.
    """
    if step.processes == 1:
        return 0.0
    if step.parallel == "ddp":
        return 4.0 * step.trained
    return 2.0 * step.number * min(DEEPSPEED_BUCKET, step.trained) if step.parallel == "zero3" else 0.0


def update_buffers(step: Step) -> float:
    """Returns bytes that AdamW's update needs: the root of all second moments at once (foreach), 4 each.

    zero3 updates groups of up to sub_group_size parameters. On a CPU torch goes through the parameters one by one.
    """
    if not step.on_gpu:
        return 2 * 4.0 * step.architecture.embedding_parameters if step.lora_rank is None else 0.0
    of_process = step.trained * step.share
    return 4.0 * (min(DEEPSPEED_LIVE, of_process) if step.parallel == "zero3" else of_process)


# ---- what a forward and a backward pass need


def copies(step: Step, backward: bool) -> float:
    """Returns bytes of weights in the dtype of the forward, beside those that are stored.

    mixed: autocast keeps a bfloat16 copy of every layer until a forward ends; for backward, of one layer if it is
    checkpointed. fsdp2: the gathered layer, the next one and the buffer they come in, embedding and LM head; backward
    adds a layer's gradient (bfloat16) and two float32 buffers to reduce it. zero3: up to stage3_max_live_parameters.
    """
    architecture, layer = step.architecture, step.architecture.layer_parameters
    if step.precision == "mixed":
        return 2.0 * layer * (1 if backward and step.checkpointing else architecture.layers)
    if step.processes == 1 or step.parallel == "ddp":
        return 0.0
    if step.parallel == "zero3":
        return step.number * float(min(DEEPSPEED_LIVE, architecture.parameters))
    embeddings = architecture.embedding_parameters * (1 if architecture.tied else 2)
    gathered = step.number * (3.0 * layer + embeddings)
    trained_layer = step.trained / architecture.layers if step.lora_rank else layer
    return gathered + ((step.number + 2 * 4.0) * trained_layer if backward else 0.0)


def kept_by_layer(step: Step, rollouts: int) -> float:
    """Returns bytes that autograd keeps of one layer for its backward pass, without those of weights.

    Per token: norms and inputs of linears (KEPT_BY_LAYER), query, key, value (repeated to all heads) and output of the
    attention, its log-sum-exp (float32), a row of the mask, four tensors of the MLP.
    """
    a = step.architecture
    hidden, query, head_norm = KEPT_BY_LAYER[step.precision]
    per_token = hidden * a.hidden + (query + 4 * step.number) * a.query_width + 4 * a.heads
    per_token += 4 * step.number * a.intermediate + step.number * step.width
    per_token += 7 * step.number * (step.lora_rank or 0)
    if a.model_type == "qwen3":
        per_token += head_norm * (a.query_width + a.key_width)
    return float(per_token * rollouts * step.width)


def mask(step: Step, rollouts: int) -> float:
    """Returns bytes of the boolean attention mask (B, 1, L, L) that transformers makes of a padded batch for sdpa."""
    return float(rollouts * step.width**2)


def activations(step: Step) -> float:
    """Returns bytes kept between forward and backward: of every layer its input if checkpointed, else all it keeps."""
    tokens, a = step.forward * step.width, step.architecture
    per_layer = step.residual * a.hidden * tokens if step.checkpointing else kept_by_layer(step, step.forward)
    final_norm = (4 + 2 * step.residual) * a.hidden * tokens
    return a.layers * per_layer + final_norm + mask(step, step.forward)


def working_set(step: Step) -> float:
    """Returns bytes of a layer's backward pass: what it recomputes, gradients of two MLP tensors and the residual."""
    tokens, a = step.forward * step.width, step.architecture
    transient = (2 * step.number * a.intermediate + 2 * step.residual * a.hidden) * tokens
    return transient + (kept_by_layer(step, step.forward) if step.checkpointing else 0.0)


def passing_layer(step: Step, rollouts: int, width: int) -> float:
    """Returns bytes of a layer's forward without gradient: three tensors of the MLP, or the attention's."""
    a = step.architecture
    mlp = 3 * step.number * a.intermediate
    attention = 5 * step.number * a.query_width + step.number * width
    return float(rollouts * width * (max(mlp, attention) + 2 * (step.residual + step.number) * a.hidden))


def head_positions(step: Step, rollouts: int) -> int:
    """Returns the positions that the LM head scores: those of the response; on a CPU all (trl's `compact`)."""
    return rollouts * (step.response if step.on_gpu else step.width - 1)


def head_tiles(step: Step, rollouts: int, direction: str) -> float:
    """Returns bytes of the fused LM head's tiles of logits: at most 4096 positions x 32768 of the vocabulary each."""
    tokens = min(head_positions(step, rollouts), TILE[0])
    number = step.number if step.on_gpu else 4
    tiles = (GPU_TILES if step.on_gpu else CPU_TILES)[direction]
    return tiles * number * tokens * min(step.architecture.vocabulary, TILE[1])


def head_gradients(step: Step) -> float:
    """Returns bytes of the fused head's float32 gradients: of its hidden states, and of its weights if trained."""
    of_weights = 4.0 * step.architecture.embedding_parameters if step.lora_rank is None else 0.0
    return of_weights + 4.0 * head_positions(step, step.forward) * step.architecture.hidden


def logits_avoided(step: Step) -> float:
    """Returns bytes of the float32 logits (B, T, V) of one forward, which the fused head never makes."""
    return 4.0 * step.forward * step.response * step.architecture.vocabulary


def pass_rollouts(step: Step) -> int:
    """Returns the rollouts of one forward of the extra pass: one of `CHUNKS` parts of a step's, or a micro-batch.

    With vLLM, and of a reference model, the pass is TRL's, of whole micro-batches.
    """
    in_chunks = step.sampler == "hf" and not step.reference
    return min(step.forward, -(-step.rollouts // CHUNKS)) if in_chunks else step.forward


# ---- sampling


def kv_bytes_per_token(architecture: Architecture, number: int = 2) -> int:
    """Returns bytes of the KV cache per token: 2 (key, value) x layers x key-value heads x head_dim x number."""
    return 2 * architecture.layers * architecture.key_width * number


def vllm_weights(step: Step) -> float:
    """Returns bytes of vLLM's copy of the policy on one GPU: 2 per parameter over the tensor-parallel GPUs."""
    return 2.0 * step.architecture.parameters / step.tensor_parallel


def vllm_room(step: Step, length: float | None = None) -> float:
    """Returns how many rollouts of `length` tokens (None: full length) the KV cache of one vLLM engine holds at a time.

    An engine is tensor_parallel GPUs, over which key-value heads are divided. Below 1 vLLM refuses to start.
    """
    free = step.memory_share * step.card - vllm_weights(step)
    of_a_rollout = kv_bytes_per_token(step.architecture, step.number) * (length or step.width)
    return free / (of_a_rollout / min(step.tensor_parallel, step.architecture.kv_heads))


def sampling(step: Step) -> dict[str, float]:
    """Returns the parts that sampling adds to weights and optimizer.

    hf: the cache of all rows at full length (float32 where mixed: keys come out of a float32 residual stream, and the
    cache takes their dtype), the forward of the prompts, float32 logits of one position three times. zero3 gathers all
    weights (ds3_gather_for_generation). vllm: its share of the GPU; the largest weight whole, as it is handed over.
    """
    a = step.architecture
    if not step.generates:
        share = step.memory_share * step.card if step.sampler == "vllm" else 0.0
        return {"vllm": share, "copies": 4.0 * a.embedding_parameters}
    rows = min(step.rows or step.rollouts, step.rollouts)
    cache = kv_bytes_per_token(a, step.residual) * rows * step.width
    of_prompts = passing_layer(step, rows, step.prompt) + rows * step.prompt**2
    gathered = step.number * float(a.parameters) if step.parallel == "zero3" else copies(step, backward=False)
    logits = (step.number + 3 * 4.0) * rows * a.vocabulary
    return {"kv_cache": float(cache), "activations": max(of_prompts, logits), "copies": gathered}
