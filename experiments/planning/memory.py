"""Memory of one process at each moment of a step, from dimensions alone. Pure functions without torch, all in bytes.

A step passes through moments that hold different things: sampling, the extra pass, the LM head, the backward pass of a
layer, the end of the backward pass, the optimizer's update. `moments` returns every part at each; the peak is the
largest sum. A token is a position of the padded batch. docs/plan.md compares the peaks with measured ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.planning.architectures import Architecture
from otb.training.options import CHUNKS

PARTS = ("weights", "gradients", "optimizer", "copies", "buckets", "activations", "lm_head", "kv_cache", "vllm")
SAMPLES_HERE = ("hf", "hf_bfloat16")  # `rollouts_by` that is transformers' generate
TILE = (4096, 32768)  # tokens x vocabulary of TRL's fused LM head: trl/kernels/chunked_logprob.py, trl/trainer/utils.py
# Tiles alive at once. Triton works on one tile in place; without it (a CPU) torch makes these many copies.
GPU_TILES = {"forward": 1.0, "backward": 1.0}
CPU_TILES = {"forward": 4.0, "backward": 8.25}
# Bytes that autograd keeps of one layer, per token, for backward: (x hidden, x query width, x (query + key width)). The
# last are the head norms. tests/planning/test_plan.py counts them with torch.autograd.graph.saved_tensors_hooks.
KEPT_BY_LAYER = {
    "float32": (24, 0, 8),
    "bfloat16": (16, 0, 6),  # bfloat16 weights, as FSDP2 and ZeRO-3 gather them
    "mixed": (26, 0, 6),  # float32 weights under autocast: each linear module keeps a cast copy of its input
    "lora float32": (16, 0, 4),
    "lora bfloat16": (18, 2, 4),
}
DEEPSPEED_LIVE = 1_000_000_000  # stage3_max_live_parameters and sub_group_size, DeepSpeed's defaults
DEEPSPEED_BUCKET = 500_000_000  # reduce_bucket_size, in numbers; overlap_comm uses two buckets


@dataclass(frozen=True)
class Step:
    """What the memory of one process depends on.

    Args:
        dtype: of the forward: float32 or bfloat16. The optimizer updates float32 weights in both.
        rollouts: of this process in a step; forward: of them in one forward.
        prompt, response: widths of the padded batch, in tokens.
        lora_rank: of LoRA on `lora_targets` (None: all linear modules); None where all parameters are trained.
        parallel: ddp, fsdp2 or zero3, over `processes`.
        checkpointing: gradient checkpointing, of whole layers.
        sync_each_forward: whether fsdp2 reduces gradients after every forward of a step (`sync_each_batch` of
            accelerate); by default it does so only after the last, and keeps them whole until then.
        sampler: hf, hf_bfloat16, vllm (in this process) or vllm_server (on other GPUs); rows: generated at a time by
            the first two.
        tensor_parallel, memory_share, sleep: of vllm; memory_share is of `card`, the bytes of a GPU.
        on_gpu: False for the formulas of a CPU, against which peaks are measured.
        reference: whether a second copy of the policy is held, from which the KL term is measured.
    """

    architecture: Architecture
    dtype: str
    rollouts: int
    forward: int
    prompt: int
    response: int
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | None = None
    parallel: str = "ddp"
    processes: int = 1
    checkpointing: bool = True
    sync_each_forward: bool = False
    sampler: str = "hf"
    rows: int | None = None
    tensor_parallel: int = 1
    memory_share: float = 0.3
    sleep: bool = True
    card: float = 80e9
    on_gpu: bool = True
    reference: bool = False

    @property
    def accumulates(self) -> bool:
        """Whether a step has several forwards, so gradients exist before the last."""
        return self.rollouts > self.forward

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        if self.lora_rank is None:
            return self.architecture.parameters
        return self.architecture.lora_parameters(self.lora_rank, self.lora_targets)

    @property
    def frozen(self) -> int:
        return 0 if self.lora_rank is None else self.architecture.parameters

    @property
    def share(self) -> float:
        """The share of weights, gradients and optimizer that this process holds: 1 under ddp."""
        return 1.0 if self.parallel == "ddp" else 1.0 / self.processes

    @property
    def generates(self) -> bool:
        """Whether transformers' generate samples, from the policy or from a bfloat16 copy of it."""
        return self.sampler in SAMPLES_HERE

    @property
    def number(self) -> int:
        """Bytes of a number that the forward computes."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def precision(self) -> str:
        """The key of KEPT_BY_LAYER."""
        if self.lora_rank is not None:
            return f"lora {self.dtype}"
        return "mixed" if self.dtype == "bfloat16" and self.parallel == "ddp" else self.dtype

    @property
    def residual(self) -> int:
        """Bytes of a number of the residual stream, which has the dtype of the embedding: float32 if mixed."""
        return 4 if self.precision == "mixed" else self.number

    @property
    def width(self) -> int:
        return self.prompt + self.response

    @property
    def embedding_gradient(self) -> float:
        """Bytes of the float32 gradient of the embedding, or of the LM head."""
        return 4.0 * self.architecture.embedding_parameters if self.lora_rank is None else 0.0


def moments(step: Step) -> dict[str, dict[str, float]]:
    """Returns name of the moment -> part -> bytes. The peak of the process is the largest sum.

    Between steps there are no gradients (transformers sets them to None); inside a step they all exist once a forward
    is done. Tied embeddings get a gradient from both their uses, and the head's waits for the embedding's.
    """
    of_pass, tied, embedding = pass_rollouts(step), step.architecture.tied, step.embedding_gradient
    always = {"weights": weights(step), "optimizer": optimizer(step), "buckets": buckets(step)}
    training = always | {"vllm": 0.0 if step.sleep or step.sampler != "vllm" else step.memory_share * step.card}
    training |= {"gradients": gradients(step) if step.accumulates else 0.0, "activations": activations(step)}
    forward, backward = copies(step, backward=False), copies(step, backward=True)
    tiles, head = head_tiles(step, step.forward, "forward"), head_tiles(step, step.forward, "backward")
    scored = dict(training, gradients=0.0, copies=forward, lm_head=head_tiles(step, of_pass, "forward"))
    done = dict(training, gradients=gradients(step), activations=0.0, copies=backward)
    return {
        "sampling": always | sampling(step),
        "extra pass": dict(scored, activations=passing_layer(step, of_pass, step.width) + mask(step, of_pass)),
        "LM head": dict(training, copies=forward, lm_head=max(tiles, head + head_gradients(step))),
        "backward of a layer": dict(
            training,
            activations=activations(step) + working_set(step),
            copies=backward,
            lm_head=embedding if tied else 0.0,
        ),
        "end of backward": dict(done, lm_head=embedding * (1 + tied) if step.accumulates or tied else 0.0),
        "update": dict(training, gradients=reduced_gradients(step), activations=0.0, copies=update_buffers(step)),
    }


def peak(step: Step) -> tuple[str, dict[str, float]]:
    """Returns the moment with the largest sum and its parts."""
    return max(moments(step).items(), key=lambda item: sum(item[1].values()))


def needed(step: Step) -> float:
    """Returns the bytes of the peak."""
    return sum(peak(step)[1].values())


def state(step: Step) -> float:
    """Returns the bytes of weights, gradients and optimizer, which no batch size makes smaller."""
    return weights(step) + reduced_gradients(step) + optimizer(step)


# ---- what stays over the step


def weights(step: Step) -> float:
    """Returns the bytes of the weights: 4 per trained parameter (float32), 2 under zero3 in bfloat16.

    Frozen weights beneath LoRA have the dtype of the forward (experiments/running/train.py, weights_dtype). A copy that
    samples has 2 for each parameter. A reference model is a second copy of the trained weights: TRL loads it in their
    dtype, and shards it where they are sharded.
    """
    per_trained = (step.number if step.parallel == "zero3" else 4) * (2 if step.reference else 1)
    copied = 2.0 * (step.trained + step.frozen) if step.sampler == "hf_bfloat16" else 0.0
    return (per_trained * step.trained + step.number * step.frozen) * step.share + copied


def optimizer(step: Step) -> float:
    """Returns the bytes of AdamW's moments: 8 per trained parameter; zero3 adds the float32 weights, 4."""
    return (12 if step.parallel == "zero3" else 8) * step.trained * step.share


def gradients(step: Step) -> float:
    """Returns the bytes of the gradients once all of a step exist.

    Under fsdp2 the gradients of all forwards but the last are not reduced, and stay whole in float32
    (accelerate's no_sync -> set_requires_gradient_sync(False); torch FSDPParam.to_accumulated_grad_if_needed), unless
    sync_each_forward.
    """
    if step.parallel == "fsdp2" and step.accumulates and not step.sync_each_forward:
        return 4.0 * step.trained
    return reduced_gradients(step)


def reduced_gradients(step: Step) -> float:
    """Returns the bytes of the gradients that the update reads: 4 per trained parameter, 2 under zero3 in bfloat16."""
    return (step.number if step.parallel == "zero3" else 4) * step.trained * step.share


def buckets(step: Step) -> float:
    """Returns the bytes of the communication buffers that stay over the step.

    DDP's buckets are a second copy of all gradients: accelerate leaves its gradient_as_bucket_view off. zero3 has two.
    """
    if step.processes == 1:
        return 0.0
    if step.parallel == "ddp":
        return 4.0 * step.trained
    return 2.0 * step.number * min(DEEPSPEED_BUCKET, step.trained) if step.parallel == "zero3" else 0.0


def update_buffers(step: Step) -> float:
    """Returns the bytes that AdamW's update needs: the root of all second moments at once (foreach), 4 each.

    zero3 updates groups of up to sub_group_size parameters. On a CPU torch goes through the parameters one by one.
    """
    if not step.on_gpu:
        return 2 * step.embedding_gradient
    of_process = step.trained * step.share
    return 4.0 * (min(DEEPSPEED_LIVE, of_process) if step.parallel == "zero3" else of_process)


# ---- what a forward and a backward pass need


def copies(step: Step, backward: bool) -> float:
    """Returns the bytes of weights in the dtype of the forward, beside those that are stored.

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
    trained_layer = step.trained / architecture.layers if step.lora_rank else layer
    gathered = step.number * (3.0 * layer + embeddings)
    return gathered + ((step.number + 2 * 4.0) * trained_layer if backward else 0.0)


def kept_by_layer(step: Step, rollouts: int) -> float:
    """Returns the bytes that autograd keeps of one layer for its backward pass, without those of weights.

    Per token: norms and inputs of linear modules (KEPT_BY_LAYER), query, key, value (repeated to all heads) and output
    of the attention, its log-sum-exp (float32), a row of the mask, four tensors of the MLP.
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
    """Returns the bytes of the boolean mask (B, 1, L, L) that transformers makes of a padded batch for sdpa."""
    return float(rollouts * step.width**2)


def activations(step: Step) -> float:
    """Returns the bytes kept between forward and backward: a layer's input if checkpointed, else all that it keeps."""
    tokens, a = step.forward * step.width, step.architecture
    per_layer = step.residual * a.hidden * tokens if step.checkpointing else kept_by_layer(step, step.forward)
    final_norm = (4 + 2 * step.residual) * a.hidden * tokens
    return a.layers * per_layer + final_norm + mask(step, step.forward)


def working_set(step: Step) -> float:
    """Returns the bytes of a layer's backward: what it recomputes, gradients of two MLP tensors and the residual."""
    tokens, a = step.forward * step.width, step.architecture
    transient = (2 * step.number * a.intermediate + 2 * step.residual * a.hidden) * tokens
    return transient + (kept_by_layer(step, step.forward) if step.checkpointing else 0.0)


def passing_layer(step: Step, rollouts: int, width: int) -> float:
    """Returns the bytes of a layer's forward without gradient: three tensors of the MLP, or the attention's."""
    a = step.architecture
    mlp = 3 * step.number * a.intermediate
    attention = 5 * step.number * a.query_width + step.number * width
    return float(rollouts * width * (max(mlp, attention) + 2 * (step.residual + step.number) * a.hidden))


def head_positions(step: Step, rollouts: int) -> int:
    """Returns the positions that the LM head scores: those of the response; on a CPU all (trl's `compact`)."""
    return rollouts * (step.response if step.on_gpu else step.width - 1)


def head_tiles(step: Step, rollouts: int, direction: str) -> float:
    """Returns the bytes of the fused LM head's tiles of logits, each at most TILE."""
    tokens = min(head_positions(step, rollouts), TILE[0])
    number, tiles = (step.number, GPU_TILES) if step.on_gpu else (4, CPU_TILES)
    return tiles[direction] * number * tokens * min(step.architecture.vocabulary, TILE[1])


def head_gradients(step: Step) -> float:
    """Returns the bytes of the fused head's float32 gradients: of its hidden states, and of its weights if trained."""
    return step.embedding_gradient + 4.0 * head_positions(step, step.forward) * step.architecture.hidden


def logits_avoided(step: Step) -> float:
    """Returns the bytes of the float32 logits (B, T, V) of one forward, which the fused head never makes."""
    return 4.0 * step.forward * step.response * step.architecture.vocabulary


def pass_rollouts(step: Step) -> int:
    """Returns the rollouts of one forward of the extra pass: one of `CHUNKS` parts of a step's, or a micro-batch.

    With vLLM, and of a reference model, the pass is TRL's, of whole micro-batches.
    """
    in_chunks = step.sampler == "hf" and not step.reference
    return min(step.forward, -(-step.rollouts // CHUNKS)) if in_chunks else step.forward


# ---- sampling


def kv_bytes_per_token(architecture: Architecture, number: int = 2) -> int:
    """Returns the bytes of the KV cache per token: 2 (key, value) x layers x key-value heads x head_dim x number."""
    return 2 * architecture.layers * architecture.key_width * number


def vllm_weights(step: Step) -> float:
    """Returns the bytes of vLLM's copy of the policy on one GPU: 2 per parameter over the tensor-parallel GPUs."""
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
