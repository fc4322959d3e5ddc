"""Figures of the study, and the tables of collapses."""

from itertools import product

import pandas as pd
import pytest

from analysis.style import plt
from study import collapses, figures
from tests.support.study_rows import SEEDS, made_up


def test_c2_is_tabulated_by_setting_and_drawn_by_learning_rate():
    """OTB lives everywhere; RLOO falls to no reward at step 11 of the highest rate."""
    made = []
    for rate, seed, baseline in product((3e-4, 3e-3), range(3), ("otb", "rloo")):
        run = made_up(baseline, seed=seed, rate=rate) | {"varied": "rollouts_by=hf"}
        if baseline == "rloo" and rate == 3e-3:
            run["accuracy"] = " ".join(["1"] * 10 + ["0"] * 10)
        made.append(run)
    table = collapses.cells(pd.DataFrame(made)).set_index(["learning_rate", "baseline"])
    assert table.collapsed.to_dict() == {(3e-4, "otb"): 0, (3e-4, "rloo"): 0, (3e-3, "otb"): 0, (3e-3, "rloo"): 3}
    assert table.collapsed_at[3e-3, "rloo"] == 16  # the mean of 10 steps falls below a half
    page = collapses.cells_section(table.reset_index())
    assert "| 0.003 | `rollouts_by=hf` | 3 of 3, median step 16 |" in page and "| 0 of 3 |" in page
    assert collapses.room_section(table.reset_index()) == []  # two rates
    axes = collapses.survival(pd.DataFrame(made))
    assert [len(panel.get_lines()) for panel in axes] == [2]  # at 3e-4 nothing collapses: a line of text, no panel
    (legend,) = axes[0].figure.legends
    assert legend.get_title().get_text() == "no run of any arm collapsed at learning rate 0.0003"
    assert "3 runs per arm, 3 seeds" in axes[0].get_title()
    more = pd.concat([pd.DataFrame(made).assign(learning_rate=rate) for rate in range(1, 6)])
    axes = collapses.survival(more)  # four side by side, the fifth below the first
    assert [panel.get_xlabel() for panel in axes] == ["", "step", "step", "step", "step"]
    assert len({panel.get_position().x0 for panel in axes}) == 4


def test_curves_over_tokens_are_straight_between_the_evaluations():
    """RLOO at N = 32 is at 0.4 at the start and at 0.6 with 80,000 tokens: nothing was measured in between."""
    made = [made_up("otb", 4, seed, 0.8) for seed in range(3)]
    made += [made_up("rloo", 32, seed, 0.8, tokens=8000.0) for seed in range(3)]
    _, right = figures.curves_over_tokens(pd.DataFrame(made))
    assert right.get_xscale() == "linear" and "interpolation" in right.get_xlabel()
    (mean,) = [line for line in right.get_lines() if line.get_linestyle() == "--"]
    assert list(mean.get_xdata()) == [0, 80e3, 160e3] and list(mean.get_ydata()) == pytest.approx([0.4, 0.6, 0.8])
    marks = [line for line in right.get_lines() if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in marks] == [[0, 10e3, 20e3], [0, 80e3, 160e3]]
    plt.close(right.figure)


def test_curves_of_one_group_size_need_one_panel():
    made = [made_up(baseline, 4, seed, 0.8) for baseline in ("otb", "rloo") for seed in range(3)]
    axes = figures.curves_over_tokens(pd.DataFrame(made))
    assert len(axes) == len(axes[0].figure.axes) == 1
    plt.close(axes[0].figure)


def test_figures_name_the_claim_and_their_task(tmp_path, monkeypatch):
    made = [made_up(*arm, seed, 0.8, "a_task") for arm in (("otb", 4), ("rloo", 4), ("rloo", 32)) for seed in SEEDS]
    titles = {}

    def keep(axes, path, pictures):
        titles[path.name] = figures.figure_of(axes).get_suptitle()
        plt.close(figures.figure_of(axes))
        return [path]

    monkeypatch.setattr(figures, "save", keep)
    collapsing = pd.DataFrame(made[:20]).assign(varied="")
    figures.figures({"claim_c3_c4": pd.DataFrame(made), "claim_c2": collapsing}, {}, tmp_path)
    assert titles == {
        "c2_a_task": "Runs alive on a_task",
        "c3_a_task": "Final accuracy on a_task",
        "c4_a_task": "Accuracy over tokens on a_task",
    }


def test_a_smaller_gradient_moves_the_best_rate_and_the_breaking_one_alike():
    """OTB is RLOO at half its rate, and was not run where it would break; of GRPO the lowest rate is the best."""
    of_rate = {1: (0.7, 0), 2: (0.9, 1), 4: (0.8, 4), 8: (0.1, 10)}  # final accuracy, collapsed runs of ten
    made = [("rloo", rate, *end) for rate, end in of_rate.items()]
    made += [("otb", 2 * rate, *end) for rate, end in of_rate.items() if rate < 8]
    made += [("grpo", rate, 1 / rate, collapsed) for rate, (_, collapsed) in of_rate.items()]
    table = pd.DataFrame(made, columns=["baseline", "learning_rate", "final", "collapsed"])
    (row,) = collapses.room(table.assign(varied="sgd", runs=10)).to_dict("records")
    columns = ("ends highest at", "half collapse at", "room")
    assert [row[f"RLOO: {column}"] for column in columns] == ["2", "8", "2 to 4"]
    assert [row[f"OTB: {column}"] for column in columns] == ["4", "none", "at least 2"]
    assert row["GRPO: room"] == "at least 4 to 8"
    assert collapses.room(table.assign(varied="sgd", runs=9)).empty  # too few seeds
