"""Trains a model with OTB: a TRL script in which `GRPOTrainer` became `OTBTrainer`. `python examples/train.py [MODEL]`.

MODEL is an id of the Hugging Face hub or a local folder. Needs `pip install -e .` and nothing else of this project.
"""

import sys

import torch
from datasets import Dataset

from otb import OTBConfig, OTBTrainer

MODEL = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen2.5-0.5B-Instruct"
ON_A_GPU = torch.cuda.is_available()
QUESTION = "What is {} + {}? Answer with the number alone."

# Like TRL, the trainer wants a column `prompt`; further columns such as `answer` are handed to the reward function.
rows = [
    {"prompt": [{"role": "user", "content": QUESTION.format(a, b)}], "answer": str(a + b)}
    for a in range(10, 30)
    for b in range(10, 30)
]


def reward(completions, answer, **columns):
    """Returns 1 for the right number and 0 for anything else; None for a row without an answer: it cannot be scored."""
    texts = [completion[-1]["content"].strip() for completion in completions]
    return [float(text == right) if right else None for text, right in zip(texts, answer, strict=True)]


if __name__ == "__main__":
    args = OTBConfig(  # a trl.GRPOConfig with a few fields more
        output_dir="out",
        num_generations=8,  # rollouts of a prompt; 1 is allowed too
        per_device_train_batch_size=64,  # rollouts of a step: 8 prompts
        max_completion_length=64,
        loss_type="dr_grpo",  # sums over tokens and divides by a constant, as the theory does
        lr_scheduler_type="constant",
        learning_rate=1e-6,
        max_steps=100,
        use_cpu=not ON_A_GPU,
        bf16=ON_A_GPU,
    )
    # The paper's baseline is the default. Another one: baseline=rloo, after `from otb.baselines.rloo import rloo`.
    trainer = OTBTrainer(model=MODEL, reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows))
    trainer.train()
