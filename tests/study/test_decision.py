"""The push of estimators on a decision: study/scripts/decision.py."""

import itertools

import numpy as np
import pytest
import torch

from otb.advantages import advantages
from otb.baselines.group_mean import group_mean
from otb.baselines.otb import otb
from otb.baselines.otb_loo import otb_loo
from otb.baselines.rloo import rloo
from otb.errors import RunError
from otb.laboratory.estimators import Prompt
from otb.laboratory.scores import Measured, Rollout
from otb.rollouts import RolloutGroups
from study.scripts import decision_push
from study.scripts.decision_push import PromptDecisions, decisions_of, half_of, pushes, two_tokens, whatever_is_chosen

RIGHT = 0.6


def exact_push(baseline, p: float, before=(4.0, 1.0), decided=None) -> float:
    """The mean push on a choice of probability p that is worth nothing, over all groups of four two-token responses.

    before: energy of the first token, of wrong and of right responses. decided: energy of the second, the choice; by
    default that of a choice between two tokens.
    """
    kinds = torch.tensor(list(itertools.product((0, 1), repeat=8))).view(-1, 4, 2)
    first, rewards = kinds.unbind(-1)
    chance = (torch.where(first == 1, p, 1 - p) * torch.where(rewards == 1, RIGHT, 1 - RIGHT)).prod(1)
    of_choice = torch.tensor(decided or (2 * p**2, 2 * (1 - p) ** 2))
    norms = torch.stack([torch.tensor(before)[rewards], of_choice[first]], -1)
    groups = RolloutGroups(rewards.float(), torch.full((256, 4), 2), norms)
    at_choice = advantages(groups, baseline(groups)).expand(-1, -1, 2)[..., 1]
    return float((chance * (at_choice * (first - p)).mean(1)).sum())


@pytest.mark.parametrize("baseline", [rloo, otb_loo, group_mean], ids=["rloo", "otb_loo", "group_mean"])
@pytest.mark.parametrize("p", [0.3, 0.7])
def test_a_choice_that_is_worth_nothing_is_not_pushed(baseline, p):
    assert exact_push(baseline, p) == pytest.approx(0, abs=1e-6)


def test_otb_pushes_a_worthless_choice_towards_the_likelier_side_where_wrong_rollouts_spend_more():
    assert exact_push(otb, 0.3) < -0.003
    assert exact_push(otb, 0.7) == pytest.approx(-exact_push(otb, 0.3), abs=1e-6)
    assert exact_push(otb, 0.3, before=(1.0, 4.0)) > 0.002  # and away from it where right ones do
    for nothing in ({"p": 0.5}, {"p": 0.3, "decided": (1.0, 1.0)}, {"p": 0.3, "before": (2.0, 2.0)}):
        assert exact_push(otb, **nothing) == pytest.approx(0, abs=1e-6)


def drawn(rollouts: int, p: float = 0.3, right_if_first: float = 0.8, right_if_not: float = 0.4) -> PromptDecisions:
    """Two-token responses that decide at the second, after a first token that took no choice."""
    draw = np.random.default_rng(0)
    first = draw.random(rollouts) < p
    rewards = (draw.random(rollouts) < np.where(first, right_if_first, right_if_not)).astype(float)
    log_probs = np.log(np.stack([np.full(rollouts, 0.5), np.where(first, p, 1 - p)], 1)).flatten()
    sum_squares = np.log(np.tile([0.5, p**2 + (1 - p) ** 2], rollouts))
    empty, hidden = np.zeros(0), np.zeros((2 * rollouts, 1))
    measured = Measured(rewards, np.full(rollouts, 2), log_probs, sum_squares, hidden, empty, empty, empty)
    return PromptDecisions(
        Prompt(measured), torch.ones(rollouts, dtype=torch.long), torch.from_numpy(first), torch.full((rollouts,), p)
    )


@pytest.mark.parametrize("baseline", [rloo, otb_loo], ids=["rloo", "otb_loo"])
def test_an_unbiased_push_is_the_derivative_of_the_mean_reward(baseline):
    """J = p a + (1 - p) b has the derivative p (1 - p) (a - b) by the log-odds of p."""
    found = pushes(baseline, drawn(8000), 4)
    assert found.shape == (decision_push.PARTITIONS, 2000)
    of_groups = found[0]  # one partition: its groups share no rollout
    assert abs(of_groups.mean() - 0.3 * 0.7 * (0.8 - 0.4)) < 4 * of_groups.std() / len(of_groups) ** 0.5


def test_the_groups_are_the_same_for_every_estimator():
    torch.testing.assert_close(pushes(group_mean, drawn(40), 4), 0.75 * pushes(rloo, drawn(40), 4))


def test_the_pushes_of_two_halves_of_the_rollouts_add_up():
    found, half = drawn(40), torch.arange(40) < 20
    halves = pushes(otb, half_of(found, half), 4) + pushes(otb, half_of(found, ~half), 4)
    torch.testing.assert_close(halves, pushes(otb, found, 4))


def test_a_rollout_that_never_decides_pushes_nothing():
    assert (pushes(rloo, drawn(40)._replace(at=torch.full((40,), -1)), 4) == 0).all()


def test_the_energy_of_a_decision_can_be_its_mean_over_what_could_have_been_chosen():
    found, p = drawn(40), 0.3
    changed = whatever_is_chosen(found).prompt.score_norms
    assert changed[:, 0].equal(found.prompt.score_norms[:, 0])
    torch.testing.assert_close(changed[:, 1], torch.full((40,), p * 2 * (1 - p) ** 2 + (1 - p) * 2 * p**2))
    assert found.prompt.score_norms[:, 1].unique().numel() == 2  # the rollouts themselves are as they were


def test_the_decision_is_the_first_of_the_two_tokens_and_p_is_that_of_the_policy(untrained, tokenizer):
    model = untrained.eval()
    (check, box), (other, _) = two_tokens(tokenizer, "check ", "\\boxed{"), two_tokens(tokenizer, "a", "b")
    responses = [[other, check, box], [box, check, other], [other, other, other]]
    own = torch.tensor([False, False, True, True, True])
    found = decisions_of(model, [Rollout(torch.tensor([5, 6, *ids]), own, 1.0) for ids in responses], [check, box])
    assert found.at.tolist() == [1, 0, -1] and found.first.tolist() == [True, False, False]
    for i in range(2):
        ids = torch.tensor([[5, 6, *responses[i]]])
        logits = model(ids).logits[0, 1 + int(found.at[i])]  # of the token before the decision
        torch.testing.assert_close(found.probability[i], logits[[check, box]].softmax(-1)[0])
    assert found.probability[2] == 0


@pytest.mark.parametrize(("texts", "named"), [(("check check ", "a"), "check check"), (("a", "a"), "'a'")])
def test_what_is_no_decision_between_two_tokens_is_refused(tokenizer, texts, named):
    with pytest.raises(RunError, match=f"{named}.*two different single ones"):
        two_tokens(tokenizer, *texts)


def test_the_tables_show_what_rollouts_do_every_estimator_and_the_parts_of_otb(policy, monkeypatch, tmp_path):
    small = {"TASK": "arithmetic", "FIRST": "1", "SECOND": "2", "ROLLOUTS": 8, "FIT_STEPS": 1, "PROMPTS_PER_STEP": 2}
    for name, value in small.items():
        monkeypatch.setattr(decision_push, name, value)
    monkeypatch.chdir(tmp_path)
    rollouts, estimators, parts, halves = decision_push.tables([str(policy), str(policy)], 3)
    assert "take '1'" in rollouts and {"RLOO, N=4", "energy probe, N=4"} <= set(estimators.estimator)
    assert "the energy of what is chosen" in set(parts.part) and list(halves.iloc[:, 0]) == ["less", "more"]
