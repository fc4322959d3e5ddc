"""Value model: a learned critic, as in PPO with GAE at lambda = 1. The advantage is R - V(prefix).

V_t = head . [h_t; 1], a linear value head on the policy's final hidden states, detached, with an Adam of its own. The
loss mean_t (V_t - R)^2 is quadratic in the head, so that its gradient follows from sum_t phi_t phi_t^T and from the
rollouts' sum_t phi_t, and no hidden states are held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from otb.baselines import declare
from otb.baselines.ridge_probe import features, sum_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from otb.rollouts import RolloutGroups, TokenStates


@declare(needs={"hidden_states"}, per_token=True, unbiased=True)
class Value:
    """V_t (P, G, T), of the head that earlier steps left. Works with one rollout a group.

    learning_rate: of Adam, which moves every coordinate of the head by about as much in a step: V moves by d times
        that, so that a wide model wants a smaller rate. The default is for the tiny policy (d = 96), where the loss
        stands in 10 steps at that of a head fitted in closed form.
    epochs: its steps per training step, each on the gradient of all the step's own tokens.

    Unbiased: V_t is a function of the prefix before token t and of earlier steps, and E[s_t | prefix] = 0. The head
    begins at 0, so that the first step has no baseline.
    Cost: one no-grad forward a step (also where TRL makes one of its own), tokens x d^2 for the moments. A critic of
    its own size, as PPO has, would cost a second training pass and could see more than a linear head does.
    Choose it as the critic that everybody knows. `energy_probe` is the same linear function of the same states, fitted
    in closed form, with the weights that the gradient's variance has, and without a rate to tune.
    """

    def __init__(self, learning_rate: float = 1e-3, epochs: int = 10):
        if isinstance(learning_rate, bool) or not learning_rate > 0:
            raise ValueError(f"learning_rate={learning_rate} must be above 0. Try learning_rate=0.001.")
        if type(epochs) is not int or epochs < 1:
            raise ValueError(f"epochs={epochs} must be a whole number >= 1: Adam steps per update. Try epochs=10.")
        self.learning_rate, self.epochs = learning_rate, epochs
        self._head: Tensor | None = None  # (d + 1,)
        self._optimizer = None

    def reduce(self, tokens: TokenStates) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rows: values (B, T), states (B, d + 1) = sum_t phi_t; totals: moments (d + 1, d + 1)."""
        phi = features(tokens)
        counted = tokens.alive.to(phi).unsqueeze(-1)
        values = tokens.log_probs.new_zeros(tokens.own.shape)
        if self._head is not None:
            values = (phi @ self._head.detach().to(phi)).to(tokens.log_probs.dtype)
        rows = {"values": values, "states": (counted.mT @ phi).squeeze(1)}
        return rows, {"moments": (counted * phi).flatten(0, 1).mT @ phi.flatten(0, 1)}

    def __call__(self, rollouts: RolloutGroups) -> Tensor:
        return rollouts.reduced["values"]

    def update(self, rollouts: RolloutGroups) -> None:
        moments = rollouts.totals["moments"].to(sum_dtype(rollouts.rewards.device))
        if not (tokens := moments[-1, -1]) > 0:
            return
        states = rollouts.reduced["states"][rollouts.scored].to(moments)
        target = rollouts.rewards[rollouts.scored].to(moments) @ states
        if self._head is None or self._head.device != moments.device:  # new, or restored from a checkpoint
            self._place(moments.new_zeros(len(moments)) if self._head is None else self._head.detach().to(moments))
        for _ in range(self.epochs):
            self._head.grad = 2 * (moments @ self._head.detach() - target) / tokens
            self._optimizer.step()

    def _place(self, head: Tensor) -> None:
        """Makes `head` the trained parameter; an optimizer that there was goes on with its state."""
        import torch

        earlier = None if self._optimizer is None else self._optimizer.state_dict()
        self._head = torch.nn.Parameter(head)
        self._optimizer = torch.optim.Adam([self._head], lr=self.learning_rate)
        if earlier is not None:
            self._optimizer.load_state_dict(earlier)

    def state_dict(self) -> dict:
        if self._head is None:
            return {}
        return {"head": self._head.detach().clone(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._head = self._optimizer = None
        if state:
            self._place(state["head"].clone())
            self._optimizer.load_state_dict(state["optimizer"])
