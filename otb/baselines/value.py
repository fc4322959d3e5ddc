"""Value model: learns a critic, as PPO does with GAE at lambda = 1; the advantage is R - V(prefix).

V_t = head . [h_t; 1] is a linear value head on the policy's detached final hidden states, with its own Adam. The loss
mean_t (V_t - R)^2 is quadratic in the head, so sum_t phi_t phi_t^T and each rollout's sum_t phi_t give its gradient,
and no hidden states are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.ridge_probe import features, sum_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from otb.rollouts import RolloutGroups, TokenStates


@declare(needs={"hidden_states"}, per_token=True, unbiased=True)
class Value:
    """A baseline V_t (P, G, T) of a head trained on earlier steps, which works with one rollout a group.

    learning_rate: Adam's. Adam moves every coordinate of the head by about this much in a step, so V moves by d times
        as much and a wide model needs a smaller rate. The default suits the tiny policy (d = 96): within 10 steps the
        loss is as low as with a head fitted in closed form.
    epochs: Adam steps per training step, each on the gradient of all the step's own tokens.

    Unbiased: V_t is a function of the prefix before token t and of earlier steps, and E[s_t | prefix] = 0. The head
    starts at 0, so the first step has no baseline.
    Cost: one no-grad forward a step (even if TRL makes one itself), tokens x d^2 for the moments. PPO's critic, which
    is as large as the policy, would cost a second training pass and could learn more than a linear head.
    Choose it as the usual critic. `energy_probe` is the same linear function of the same states, but fitted in closed
    form, with the weights that occur in the gradient's variance, and without a rate to tune.
    """

    def __init__(self, learning_rate: float = 1e-3, epochs: int = 10):
        if isinstance(learning_rate, bool) or not learning_rate > 0:
            raise ValueError(f"learning_rate={learning_rate} must be above 0. Try learning_rate=0.001.")
        if type(epochs) is not int or epochs < 1:
            raise ValueError(f"epochs={epochs} must be a whole number >= 1: Adam steps per update. Try epochs=10.")
        self.learning_rate, self.epochs = learning_rate, epochs
        self._head: Tensor | None = None  # (d + 1,)
        self._optimizer: torch.optim.Adam | None = None

    def reduce(self, tokens: TokenStates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns rows and totals.

        Rows: values (B, T), states (B, d + 1) = sum_t phi_t. Totals: moments (d + 1, d + 1).
        """
        phi = features(tokens)
        counted = tokens.alive.to(phi).unsqueeze(-1)
        values = tokens.log_probs.new_zeros(tokens.own.shape)
        if self._head is not None:
            values = (phi @ self._head.detach().to(phi)).to(tokens.log_probs.dtype)
        rows = {"values": values, "states": (counted.mT @ phi).squeeze(1)}
        return rows, {"moments": (counted * phi).flatten(0, 1).mT @ phi.flatten(0, 1)}

    def __call__(self, rollouts: RolloutGroups) -> Tensor:
        """Returns V_t (P, G, T)."""
        return rollouts.reduced["values"]

    def update(self, rollouts: RolloutGroups) -> None:
        """Trains the head for `epochs` steps of Adam; does nothing if no own token counts."""
        moments = rollouts.totals["moments"].to(sum_dtype(rollouts.rewards.device))
        if not (tokens := moments[-1, -1]) > 0:
            return
        states = rollouts.reduced["states"][rollouts.scored].to(moments)
        target = rollouts.rewards[rollouts.scored].to(moments) @ states
        head = moments.new_zeros(len(moments)) if self._head is None else self._head
        optimizer = self._optimizer
        if optimizer is None or head.device != moments.device:  # new, or restored from a checkpoint
            head, optimizer = self._placed(head.detach().to(moments))
        for _ in range(self.epochs):
            head.grad = 2 * (moments @ head.detach() - target) / tokens
            optimizer.step()

    def _placed(self, values: Tensor) -> tuple[Tensor, torch.optim.Adam]:
        """Makes these values the trained head, keeps an earlier optimizer's state, and returns head and optimizer."""
        import torch

        earlier = None if self._optimizer is None else self._optimizer.state_dict()
        self._head = torch.nn.Parameter(values)
        self._optimizer = torch.optim.Adam([self._head], lr=self.learning_rate)
        if earlier is not None:
            self._optimizer.load_state_dict(earlier)
        return self._head, self._optimizer

    def state_dict(self) -> dict:
        """Returns the head and the optimizer's state; {} before the first update."""
        if self._head is None or self._optimizer is None:
            return {}
        return {"head": self._head.detach().clone(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned."""
        self._head = self._optimizer = None
        if state:
            _, optimizer = self._placed(state["head"].clone())
            optimizer.load_state_dict(state["optimizer"])
