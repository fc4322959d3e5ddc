"""Orders the prompts of a run; run_trainer.py gives it to the trainer instead of TRL's own sampler."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class PromptSampler(Sampler):
    """Yields the rows of a whole run in TRL's order: prompts `group_size` times each, batches `uses` times each.

    Unlike TRL's, the permutation of an epoch follows from (seed, epoch) alone, so that a run resumed in its third epoch
    sees the prompts of the third; and it depends on neither group size nor length, so that every arm of a comparison
    sees the same prompts in the same order, and more steps continue a run.

    Args:
        rows: prompts in the dataset.
        prompts_per_batch: prompts of one generation.
        group_size: rollouts per prompt.
        uses: how often a generation is used, once per micro-batch that is made of it.
        micro_batches: forwards of the whole run.
        seed: of the permutations.
    """

    def __init__(self, rows: int, prompts_per_batch: int, group_size: int, uses: int, micro_batches: int, seed: int):
        self.rows, self.prompts_per_batch, self.group_size = rows, prompts_per_batch, group_size
        self.uses, self.seed = uses, seed
        self.generations = -(-micro_batches // uses)

    def __len__(self) -> int:
        return self.generations * self.prompts_per_batch * self.group_size * self.uses

    def __iter__(self) -> Iterator[int]:
        prompts = self._prompts()
        for _ in range(self.generations):
            batch = [next(prompts) for _ in range(self.prompts_per_batch)]
            for _ in range(self.uses):
                for prompt in batch:
                    yield from [prompt] * self.group_size

    def _prompts(self) -> Iterator[int]:
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            yield from torch.randperm(self.rows, generator=generator).tolist()
            epoch += 1
