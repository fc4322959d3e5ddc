"""Trains with a baseline of your own: a function in this script. `python examples/own_baseline.py [MODEL]`.

docs/add_a_baseline.md says what a baseline may ask for, and how to make one a choice of `experiments/run.py`.
"""

from functools import partial

from datasets import Dataset
from train import MODEL, ON_A_GPU, reward, rows  # from the example beside this one

from otb import OTBConfig, OTBTrainer
from otb.baselines import declare


# A group of one rollout has no others to be compared with: the trainer refuses it. No rollout is part of its own
# baseline, so the expected gradient stays that of the expected reward. A baseline that reads score norms would say
# needs={"score_norms"} here, and pay a forward pass for them.
@declare(min_group_size=2, unbiased=True)
def shrunken_mean(rollouts, share=0.5):
    """Returns a mix of the mean of a rollout's group, without itself, and the mean of the other prompts, (P, G, 1)."""
    rewards = rollouts.rewards.nan_to_num()  # (P, G): P prompts, G rollouts each; NaN = could not be scored
    scored = rollouts.scored.to(rewards.dtype)
    total, count = rewards.sum(1, keepdim=True), scored.sum(1, keepdim=True)  # (P, 1)
    group = (total - rewards) / (count - scored).clamp(min=1)  # (P, G)
    elsewhere = (rewards.sum() - total) / (scored.sum() - count).clamp(min=1)  # (P, 1)
    # Anything that broadcasts to (P, G, T), T own tokens; the trainer subtracts it from the reward of every own token.
    return ((1 - share) * group + share * elsewhere).unsqueeze(-1)


if __name__ == "__main__":
    args = OTBConfig(
        output_dir="out",
        num_generations=4,
        per_device_train_batch_size=64,
        max_completion_length=64,
        max_steps=100,
        use_cpu=not ON_A_GPU,
        bf16=ON_A_GPU,
    )
    trainer = OTBTrainer(
        model=MODEL,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        baseline=partial(shrunken_mean, share=0.3),
    )
    trainer.train()
