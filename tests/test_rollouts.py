"""What holds the rollouts of a step: refused where rows do not fit, and the states at their tokens."""

import pytest
import torch

from otb.rollouts import RolloutGroups, TokenStates


def test_token_states_know_the_last_own_token_and_leave_unscored_rollouts_out():
    own = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    states = TokenStates(
        own, torch.zeros(3, 3, 2), torch.zeros(3, 3), torch.zeros(3, 3), scored=torch.tensor([True, False, True])
    )
    assert states.last.tolist() == [[False, True, False], [False, False, True], [False, False, False]]
    assert states.alive.tolist() == [[True, True, False], [False] * 3, [False] * 3]


def test_rollout_groups_refuse_rows_that_do_not_fit():
    rewards, lengths = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="sequence_norms has shape"):
        RolloutGroups(rewards, lengths, sequence_norms=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="prefix_norms has shape"):
        RolloutGroups(rewards, lengths, prefix_norms=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="values has shape"):
        RolloutGroups(rewards, lengths, reduced={"values": torch.zeros(6, 4)})
