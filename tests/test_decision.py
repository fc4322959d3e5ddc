"""The push of estimators on a decision: experiments/decision.py."""

import numpy as np
import pytest
import torch

from experiments import decision
from experiments.decision import Decisions, command_line, decided, one_token, pushes
from otb.baselines.group_mean import group_mean
from otb.baselines.otb import otb
from otb.baselines.otb_loo import otb_loo
from otb.baselines.rloo import rloo
from otb.errors import RunError
from otb.laboratory.estimators import Prompt
from otb.laboratory.scores import Measured, Rollout

P = 0.3
EMPTY = np.zeros(0)


def drawn(rollouts: int, right_if_first: float, right_if_not: float) -> Decisions:
    """Two-token responses that decide at the second: wrong ones spend energy on the first, `first` on the second."""
    draw = np.random.default_rng(0)
    first = draw.random(rollouts) < P
    rewards = (draw.random(rollouts) < np.where(first, right_if_first, right_if_not)).astype(float)
    # W of a token is 1 - 2 p + the sum of squared probabilities: with p = 1/2 it is that sum
    sum_sq = np.stack([np.where(rewards == 1, 1.0, 4.0), np.where(first, 3.0, 0.2)], axis=1)
    measured = Measured(
        rewards, np.full(rollouts, 2), np.full(2 * rollouts, np.log(0.5)), np.log(sum_sq).flatten(),
        np.zeros((2 * rollouts, 1)), EMPTY, EMPTY, EMPTY,
    )  # fmt: skip
    at = torch.ones(rollouts, dtype=torch.long)
    return Decisions(Prompt(measured), at, torch.from_numpy(first), torch.full((rollouts,), P))


def mean_and_error(pushed: torch.Tensor) -> tuple[float, float]:
    """Of one partition: its groups share no rollout."""
    return float(pushed[0].mean()), float(pushed[0].std() / len(pushed[0]) ** 0.5)


@pytest.mark.parametrize("right", [(0.8, 0.4), (0.6, 0.6)], ids=["better", "as good"])
@pytest.mark.parametrize("baseline", [rloo, otb_loo], ids=["rloo", "otb_loo"])
def test_an_unbiased_push_is_the_derivative_of_the_mean_reward(baseline, right):
    """J = p a + (1 - p) b has the derivative p (1 - p) (a - b) by the log-odds of p."""
    found = pushes(baseline, drawn(8000, *right), 4)
    assert found.shape == (decision.PARTITIONS, 2000)
    mean, error = mean_and_error(found)
    assert abs(mean - P * (1 - P) * (right[0] - right[1])) < 4 * error


def test_self_inclusion_pushes_away_from_the_decision_that_takes_more_energy():
    """Either decision ends right as often. OTB's baseline lies below the mean reward, as wrong rollouts spend more."""
    mean, error = mean_and_error(pushes(otb, drawn(8000, 0.6, 0.6), 4))
    assert mean < -4 * error


def test_the_groups_are_the_same_for_every_estimator():
    found = drawn(40, 0.8, 0.4)
    torch.testing.assert_close(pushes(group_mean, found, 4), 0.75 * pushes(rloo, found, 4))


def test_a_rollout_that_never_decides_pushes_nothing():
    found = drawn(40, 0.8, 0.4)
    assert (pushes(rloo, found._replace(at=torch.full((40,), -1)), 4) == 0).all()


def test_the_decision_is_the_first_of_the_two_tokens_and_p_is_that_of_the_policy(untrained, tokenizer):
    model = untrained.eval()
    check, box, other = (one_token(tokenizer, text) for text in ("check ", "\\boxed{", "a"))
    responses = [[other, check, box], [box, check, other], [other, other, other]]
    rollouts = [
        Rollout(torch.tensor([5, 6, *ids]), torch.tensor([False, False, True, True, True]), 1.0) for ids in responses
    ]
    found = decided(model, rollouts, [check, box])
    assert found.at.tolist() == [1, 0, -1] and found.first.tolist() == [True, False, False]
    for i, rollout in enumerate(rollouts[:2]):
        logits = model(rollout.ids[None]).logits[0, 1 + int(found.at[i])]  # the token before the decision
        torch.testing.assert_close(found.probability[i], logits[[check, box]].softmax(-1)[0])
    assert found.probability[2] == 0


def test_a_text_of_several_tokens_is_refused(tokenizer):
    with pytest.raises(RunError, match="'check check ' is 2 tokens"):
        one_token(tokenizer, "check check ")


def test_the_command_shows_what_rollouts_do_and_every_estimator(policy, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(decision, "FIT_STEPS", 1)
    monkeypatch.setattr(decision, "PROMPTS_PER_STEP", 2)
    monkeypatch.chdir(tmp_path)
    sizes = ["--prompts", "4", "--rollouts", "8"]
    command_line(["arithmetic", "1", "2", "--policy", str(policy), *sizes])
    shown = capsys.readouterr().out
    assert "| RLOO, N=4 |" in shown and "| energy probe, N=4 |" in shown and "take '1'" in shown


def test_a_task_with_tools_is_refused_with_what_to_try(capsys):
    with pytest.raises(SystemExit):
        command_line(["arithmetic_tools", "1", "2"])
    assert "Try arithmetic_long" in capsys.readouterr().err
