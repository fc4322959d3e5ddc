"""docs/forecast.md: its comparison with the true gradient comes from docs/figures/forecast.csv."""

import numpy as np
import pandas as pd
import pytest

from experiments.measuring.forecast_table import OFF
from tests.support.commands import ROOT

SIZES = (4, 32)


def comparison(rows: pd.DataFrame) -> str:
    """The table of the page, measured : forecast, and a line per task with the size of the errors."""
    tasks = list(dict.fromkeys(rows.task))
    columns = [(task, size) for task in tasks for size in SIZES]
    cells = rows.set_index(["task", "group_size", "estimator"])
    order = cells.loc[tasks[0], SIZES[0]].sort_values("measured").index
    lines = ["| measured : forecast | " + " | ".join(f"`{task}`, N = {size}" for task, size in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for name in [name for name in order if name != "rloo"]:
        found = [cells.loc[(task, size, name)] for task, size in columns]
        lines.append(f"| `{name}` | " + " | ".join(f"{one.measured:.2f} : {one.forecast:.2f}" for one in found) + " |")
    lines.append("")
    others = rows[~rows.estimator.isin(["rloo", "group_mean"])]  # equal by definition
    for task in tasks:
        some = others[others.task == task]
        errors = np.expm1(np.log(some.forecast / some.measured).abs())
        worst = some.loc[errors.idxmax()]
        ranks = [part.forecast.corr(part.measured, method="spearman") for _, part in some.groupby("group_size")]
        lines.append(
            f"- `{task}`, {some.group_size.nunique()} group sizes: median error {errors.median():.0%}, 90th percentile "
            f"{errors.quantile(0.9):.0%}, largest {errors.max():.0%} (`{worst.estimator}`, N = {worst.group_size});\n"
            f"  rank correlation over estimators at least {min(ranks):.2f}."
        )
    return "\n".join(lines)


def test_comparison_on_the_page_is_that_of_its_rows():
    page = (ROOT / "docs" / "forecast.md").read_text()
    _, _, rest = page.partition("<!-- comparison -->\n")
    shown, _, _ = rest.partition("\n<!-- end of comparison -->")
    assert shown == comparison(pd.read_csv(ROOT / "docs" / "figures" / "forecast.csv"))


def test_sentence_states_the_largest_error_of_the_comparison_in_whole_tenths():
    rows = pd.read_csv(ROOT / "docs" / "figures" / "forecast.csv")
    errors = np.expm1(np.log(rows.forecast / rows.measured).abs())
    for with_tools, stated in OFF.items():
        largest = errors[rows.task.str.endswith("_tools") == with_tools].max()
        assert stated == pytest.approx(np.ceil(10 * largest) / 10)


def test_rows_of_the_comparison_are_whole():
    rows = pd.read_csv(ROOT / "docs" / "figures" / "forecast.csv")
    assert rows.notna().all().all() and (rows.groupby(["task", "group_size"]).estimator.nunique() == 11).all()
    for name in ("forecast", "measured"):
        assert (rows[f"{name}_low"] <= rows[name] + 1e-6).all() and (rows[name] <= rows[f"{name}_high"] + 1e-6).all()
        assert (rows[rows.estimator == "rloo"][name] == 1).all()
