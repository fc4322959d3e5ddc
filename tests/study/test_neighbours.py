"""Methods beside the baseline, compared with and without."""

import numpy as np
import pandas as pd
import pytest

from analysis.style import plt
from study import neighbours
from tests.support.study_rows import made_up


def with_method(varied: str, final: float, **given) -> list[dict]:
    return [made_up(seed=seed, final=final + 0.01 * (seed % 3 - 1), **given) | {"varied": varied} for seed in range(5)]


def test_methods_are_compared_with_off_seed_by_seed():
    made = [*with_method("improvement=none", 0.8), *with_method("improvement=pipo", 0.85)]
    found = neighbours.comparison(pd.DataFrame(made), "improvement=none").set_index("variant")
    pipo = found.loc["improvement=pipo"]
    # of the last two of three evaluations, .6 and .8 against .625 and .85
    assert pipo.difference == pytest.approx(0.0375)
    assert pipo.difference_low == pytest.approx(pipo.difference_high)  # the same spread over seeds in both
    assert (pipo.own_tokens, pipo.seeds, pipo.collapsed) == (20_000, 5, 0)
    assert np.isnan(found.difference["improvement=none"])


def test_gradient_noise_is_the_mean_power_of_a_prompt_group_and_compared_by_its_ratio():
    made = [*with_method("improvement=none", 0.8), *with_method("improvement=pipo", 0.8)]
    for row in made:
        norm = 0.5 * (1 + row["seed"]) * (3 if row["varied"] == "improvement=pipo" else 1)
        row |= {"prompts_per_step": 16, "gradient_norm": f"{norm} {7 * norm} nan"}  # nan: where a run has diverged
    off, pipo = neighbours.comparison(pd.DataFrame(made), "improvement=none").sort_values("variant").to_dict("records")
    # 16 (1 + 49) / 2 x norm^2; of the seeds' norms .5 to 2.5 the middle three are averaged, by their logarithms
    assert off["noise"] == pytest.approx(400 * (1.0 * 1.5 * 2.0) ** (2 / 3))
    assert [pipo[f"noise_ratio{end}"] for end in ("", "_low", "_high")] == pytest.approx([9, 9, 9])
    assert np.isnan(off["noise_ratio"])


def test_the_page_of_methods_has_a_table_and_a_figure_per_recipe_that_has_rows(tmp_path):
    made = [*with_method("improvement=none", 0.8), *with_method("improvement=pipo", 0.85)]
    rows_of = {"neighbours_improvement": pd.DataFrame(made)}
    neighbours.write_methods(rows_of, tmp_path)
    page = (tmp_path / "comparison.md").read_text()
    assert "Improvement updates" in page and "Token weights" not in page and "`improvement=pipo`" in page
    assert (tmp_path / "figures" / "neighbours_improvement.png").stat().st_size > 5000
    assert neighbours.write_methods({}, tmp_path / "none") == [] and not (tmp_path / "none").exists()


def test_a_question_that_several_recipes_answer_is_one_table(tmp_path):
    off, decayed, cosine = ("schedule.floor=1.0", "schedule.floor=0.1", "trainer.lr_scheduler_type=cosine")
    rows_of = {
        "neighbours_schedule": pd.DataFrame([*with_method(off, 0.1), *with_method(decayed, 0.1)]),
        "neighbours_schedule_cosine": pd.DataFrame(with_method(cosine, 0.3)),
    }
    neighbours.write_methods(rows_of, tmp_path)
    page = (tmp_path / "comparison.md").read_text()
    assert page.count("\n## ") == 1 and "-m study neighbours_schedule neighbours_schedule_cosine`" in page
    (found,) = pd.read_csv(tmp_path / "comparison.csv").query("variant == @cosine").to_dict("records")
    assert found["difference"] == pytest.approx(0.15)  # of the last two of three evaluations, half of .2 and .2


def test_a_figure_of_methods_has_a_row_for_each_learning_rate():
    made = [
        run
        for rate in (2e-4, 2e-3)
        for varied in ("schedule.floor=1.0", "schedule.floor=0.1")
        for run in with_method(varied, 0.8, rate=rate)
    ]
    ((ax,),) = neighbours.drawing(
        neighbours.comparison(pd.DataFrame(made), "schedule.floor=1.0"), "title", "schedule.floor=1.0"
    )
    named = [text.get_text() for text in ax.get_yticklabels()]
    assert [name.rpartition(", ")[2] for name in named] == ["learning rate 0.002", "learning rate 0.0002"]
    plt.close(ax.figure)
