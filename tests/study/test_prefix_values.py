"""How the chance to end right moves along rollouts: study/scripts/prefix_values.py."""

import numpy as np
import pandas as pd
import pytest

from study.scripts.prefix_figure import explained_variance


def made_up(knows: float, prompts: int = 200, rollouts: int = 4, continuations: int = 8) -> pd.DataFrame:
    """One prefix of each rollout. With probability `knows` its V is the reward, else one half."""
    draw = np.random.default_rng(0)
    shape = (prompts, rollouts)
    reward = draw.integers(0, 2, shape).astype(float)
    chance = np.where(draw.random((prompts, 1)) < knows, reward, 0.5)
    value = draw.binomial(continuations, chance) / continuations
    error = np.sqrt(value * (1 - value) / (continuations - 1))
    columns = {"prompt": np.indices(shape)[0], "reward": reward, "value": value, "value_error": error}
    return pd.DataFrame({name: column.ravel() for name, column in columns.items()} | {"position": 6, "length": 8})


@pytest.mark.parametrize("knows", [0.0, 0.5, 1.0])
def test_few_continuations_do_not_hide_what_a_prefix_explains(knows):
    (row,) = explained_variance(made_up(knows)).itertuples()
    assert row.share == 0.75
    assert row.low <= knows + 1e-9 and row.high >= knows - 1e-9
    assert row.explained == pytest.approx(knows, abs=0.08)


def test_rollouts_of_one_prompt_are_not_counted_as_independent():
    """Every prompt forty times over: as many prompts, the same interval."""
    once = made_up(0.5, prompts=10)
    often = pd.concat([once] * 40, ignore_index=True)
    pd.testing.assert_frame_equal(explained_variance(once), explained_variance(often))
