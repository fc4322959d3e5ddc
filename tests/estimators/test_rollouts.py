"""Tests that RolloutGroups refuses shapes that do not fit, and that `joined` pads tensors of different widths."""

import pytest
import torch

from otb.rollouts import RolloutGroups, TokenStates, joined


def test_token_states_know_the_last_own_token_and_leave_unscored_rollouts_out():
    own = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    states = TokenStates(
        own, torch.zeros(3, 3, 2), torch.zeros(3, 3), torch.zeros(3, 3), scored=torch.tensor([True, False, True])
    )
    assert states.last.tolist() == [[False, True, False], [False, False, True], [False, False, False]]
    assert states.alive.tolist() == [[True, True, False], [False] * 3, [False] * 3]


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("lengths", (2, 4), "must both be"),
        ("score_norms", (2, 4, 5), "score_norms has shape"),
        ("sequence_norms", (3, 2), "sequence_norms has shape"),
        ("prefix_norms", (2, 3), "prefix_norms has shape"),
        ("values", (6, 4), "values has shape"),
    ],
)
def test_rollout_groups_refuse_rows_that_do_not_fit(name, shape, said):
    given = {"lengths": torch.ones(2, 3, dtype=torch.long)}
    given |= {"reduced": {name: torch.zeros(shape)}} if name == "values" else {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=said):
        RolloutGroups(torch.zeros(2, 3), **given)


def test_a_field_that_the_baseline_did_not_declare_is_refused_with_the_declaration_that_it_lacks():
    rollouts = RolloutGroups(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.int), score_norms=torch.ones(1, 2, 1))
    assert rollouts.required("score_norms") is rollouts.score_norms
    with pytest.raises(ValueError, match=r"sequence_norms=None.*@declare\(needs=\{'sequence_norms'\}\)"):
        rollouts.required("sequence_norms")


def test_chunks_are_joined_and_padded_with_0_to_the_widest():
    chunks = [torch.ones(1, 2, 2), torch.ones(2, 1, 2)]
    assert joined(chunks, dim=1)[:, :, 0].tolist() == [[1, 1], [1, 0], [1, 0]]
    assert joined([torch.ones(2), torch.zeros(1)], dim=1).tolist() == [1, 1, 0]  # no dimension 1
