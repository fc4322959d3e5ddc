"""Orders the prompts of a run. RunTrainer uses it instead of TRL's sampler."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class PromptSampler(Sampler):
    """Yields the rows of a whole run in TRL's order: each prompt `group_size` times, each batch `uses` times.

    Unlike in TRL, (seed, epoch) alone determines the permutation of an epoch. A run that resumes in its third epoch
    therefore sees the prompts of the third epoch. All arms of a comparison see the same prompts in the same order,
    because the permutation depends neither on the group size nor on the length of the run; a longer run extends a
    shorter one.

    Args:
        rows: prompts in the data set.
        prompts_per_batch: prompts of one generation.
        group_size: rollouts per prompt.
        uses: how many micro-batches use one generation.
        micro_batches: the number of micro-batches of the whole run.
        seed: seed of the permutations.
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
