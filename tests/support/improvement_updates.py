"""An improvement update by plain forwards and loops, and a trainer that keeps what its own did to the weights."""

import torch

from otb import OTBTrainer
from tests.support.trainers import log_probs_of


def own_mask(batch) -> torch.Tensor:
    return batch["completion_mask"].bool()


def clipped_gradient(model, batches, phi, longest, temperature=1.0) -> torch.Tensor:
    """The gradient of dr_grpo's clipped loss over all rows of micro-batches of one size, advantages times phi.

    batches: with old_per_token_logps and advantages (b,) or (b, C).
    """
    total, rows = torch.zeros(()), 0
    for batch in batches:
        ratio = (log_probs_of(model, batch, temperature) - batch["old_per_token_logps"]).exp()
        for row, own in enumerate(own_mask(batch)):
            rows += 1
            advantage = (phi * batch["advantages"][row]).expand(own.shape)
            for position in own.nonzero().flatten().tolist():
                r, a = ratio[row, position], advantage[position]
                total = total - torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total / (rows * longest), parameters)
    return torch.cat([gradient.flatten() for gradient in gradients])


def weights_of(trainer) -> torch.Tensor:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad]).clone()


class WatchedTrainer(OTBTrainer):
    """Keeps of every step: weights before and after the improvement update, the batch that it was made on, the new one.

    updates: a dictionary per step. scaled: of every batch, the advantages kept of this process's rollouts, and the
    paper's form of them by loops.
    """

    def __init__(self, *args, **kwargs):
        self.updates, self.scaled = [], []
        super().__init__(*args, **kwargs)

    def _keep_for_improvement(self, output, rollouts, advantages, log_probs):
        super()._keep_for_improvement(output, rollouts, advantages, log_probs)
        lengths, size = rollouts.lengths.flatten().tolist(), self.num_generations
        means = [
            float(row.sum()) / (max(1, length) if len(row) > 1 else 1)
            for row, length in zip(advantages.flatten(0, 1), lengths, strict=True)
        ]
        expected, first = [], self.accelerator.process_index * len(output["advantages"])
        for row, native in enumerate(output["advantages"], start=first):
            group = row // size * size
            total = sum(abs(mean) for mean in means[group : group + size])
            expected.append(native * (size / total if total > 1e-4 else 0))
        self.scaled.append((output["improvement_advantages"], torch.stack(expected)))

    def _improve(self, batches):
        kept, before = self._kept, weights_of(self)
        super()._improve(batches)
        row = {name: values[-1] for name, values in self._metrics["train"].items() if name.startswith("improvement_")}
        rewards = self._rewards_per_function[:, 0]
        after = weights_of(self)
        self.updates.append(
            dict(
                kept=kept, before=before, after=after, row=row, rewards=rewards, new=[dict(batch) for batch in batches]
            )
        )
