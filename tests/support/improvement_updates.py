"""Computes an improvement update with plain forwards and loops, and watches a trainer's update of the weights."""

import torch

from otb import OTBTrainer
from otb.methods.improvement_update import ImprovementUpdate
from tests.support.trainers import log_probs_of


def own_mask(batch) -> torch.Tensor:
    return batch["completion_mask"].bool()


def clipped_gradient(model, batches, phi, longest, temperature=1.0) -> torch.Tensor:
    """Returns the gradient of dr_grpo's clipped loss over micro-batches of one size, with advantages times phi.

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


class WatchedUpdate(ImprovementUpdate):
    """Keeps of every step the weights before and after the improvement update, the batch that it used, and the new one.

    updates: a dictionary per step. scaled: for every batch, the kept advantages of this process's rollouts, and the
    same computed from the paper's formula in loops.
    """

    def __init__(self, improvement):
        super().__init__(improvement)
        self.updates, self.scaled = [], []

    def finish(self, step):
        super().finish(step)
        lengths, native = step.rollouts.lengths.flatten().tolist(), step.output["advantages"]
        size = self.trainer.num_generations
        means = [
            float(row.sum()) / (max(1, length) if len(row) > 1 else 1)
            for row, length in zip(step.advantages.flatten(0, 1), lengths, strict=True)
        ]
        expected, first = [], self.trainer.accelerator.process_index * len(native)
        for row, advantages in enumerate(native, start=first):
            group = row // size * size
            total = sum(abs(mean) for mean in means[group : group + size])
            expected.append(advantages * (size / total if total > 1e-4 else 0))
        self.scaled.append((step.output["improvement_advantages"], torch.stack(expected)))

    def batches(self, batches):
        kept, before = self._kept, weights_of(self.trainer)
        batches = super().batches(batches)
        metrics = self.trainer._metrics["train"]
        row = {name: values[-1] for name, values in metrics.items() if name.startswith("improvement_")}
        update = {"kept": kept, "before": before, "after": weights_of(self.trainer), "row": row}
        update |= {"rewards": self.trainer._rewards_per_function[:, 0], "new": [dict(batch) for batch in batches]}
        self.updates.append(update)
        return batches


class WatchedTrainer(OTBTrainer):
    """Watches the improvement update of an OTBTrainer; WatchedUpdate describes `updates` and `scaled`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.watched = WatchedUpdate(self.improvement)
        self.watched.attach(self)
        self.methods[0] = self.watched
        self.updates, self.scaled = self.watched.updates, self.watched.scaled
