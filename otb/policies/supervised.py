"""Trains on solved problems with TRL's SFTTrainer: a warm start for policies that solve nothing yet.

experiments/warm_start.py calls it. The tiny policy has its own loop (tiny_warm_start.py), because all numbers of this
project depend on the weights that this loop produces.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WARMUP_SHARE = 0.05  # of the steps


@dataclass(frozen=True)
class Supervision:
    """Options of `supervised`: AdamW with a linear warm-up and a cosine decay to 0, gradients clipped at norm 1.

    forward: chats per forward; forwards: forwards per optimizer step. bf16: the forward computes in bfloat16.
    """

    steps: int
    forward: int
    forwards: int
    learning_rate: float
    seed: int
    bf16: bool
    use_cpu: bool


def supervised(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[list[dict]],
    how: Supervision,
    lora: PeftConfig | None = None,
    progress: Callable[[int, int, float], None] | None = None,
    tools: list[dict] | None = None,
) -> tuple[PreTrainedModel, list[float]]:
    """Trains the policy on the last message of every chat and returns it with the loss of each step, in nats per token.

    Prompts and padding never enter the loss. lora: trains adapters, which are merged into the weights at the end.
    progress(step, steps, loss) is called after each step. tools: JSON schemas of the tools that the chats call; every
    assistant message is then learned, but no reply of a tool. Raises ValueError if the chat template does not mark the
    assistant's tokens.
    """
    losses: list[float] = []

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                losses.append(logs["loss"])
                if progress is not None:
                    progress(state.global_step, how.steps, logs["loss"])

    with tempfile.TemporaryDirectory() as folder:  # TRL requires one; nothing is saved there
        trainer = sft_trainer(model, tokenizer, chats, how, lora, folder, tools)
        trainer.add_callback(Losses())
        trainer.train()
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    return (trained.merge_and_unload() if lora is not None else trained), losses


def sft_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[list[dict]],
    how: Supervision,
    lora: PeftConfig | None,
    folder: str,
    tools: list[dict] | None = None,
) -> SFTTrainer:
    """Returns TRL's trainer over the chats of all steps, in order. folder: the trainer may write there."""
    in_order = ordered(chats, how)
    if tools is None:
        rows = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in in_order]
    else:
        rows = [{"messages": chat, "tools": tools} for chat in in_order]
    trainer = SFTTrainer(
        model,
        options(how, folder, by_turns=tools is not None),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora,
    )
    trainer.remove_callback(PrinterCallback)  # it prints every row
    return trainer


def ordered(chats: list[list[dict]], how: Supervision) -> list[list[dict]]:
    """Returns the chats of all steps: random passes over `chats`, sorted by length within a step.

    Each forward then has chats of similar length; mixed lengths would be half padding.
    """
    draw, size = random.Random(how.seed), how.forward * how.forwards
    drawn: list[list[dict]] = []
    while len(drawn) < how.steps * size:
        drawn += draw.sample(chats, len(chats))
    steps = [drawn[start : start + size] for start in range(0, how.steps * size, size)]
    return [chat for step in steps for chat in sorted(step, key=lambda chat: len(str(chat)))]


def options(how: Supervision, folder: str, by_turns: bool) -> SFTConfig:
    """Returns the trainer's options. folder: the trainer may write there. by_turns: learn every assistant message."""
    return SFTConfig(
        output_dir=folder,
        max_steps=how.steps,
        per_device_train_batch_size=how.forward,
        gradient_accumulation_steps=how.forwards,
        train_sampling_strategy="sequential",  # `ordered` has drawn the order
        learning_rate=how.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP_SHARE,
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=how.seed,
        bf16=how.bf16,
        use_cpu=how.use_cpu,
        gradient_checkpointing=not how.use_cpu,
        completion_only_loss=None if by_turns else True,
        assistant_only_loss=by_turns,
        max_length=None,
        dataloader_pin_memory=not how.use_cpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
