"""Figures as functions of a table: they state the seeds, raise on what is missing, and keep the plotted numbers."""

import io
import itertools
import json
import re
import zlib

import numpy as np
import pandas as pd
import pytest
from fontTools.ttLib import TTFont
from matplotlib.layout_engine import ConstrainedLayoutEngine

from analysis import style
from analysis.arms import ARMS
from analysis.by_run import by_run
from analysis.cost import cost_table, time_and_memory
from analysis.group_size import accuracy_by_group_size, final_accuracy, final_words
from analysis.learning_curves import gradient_norm_and_accuracy, learning_curves
from analysis.noise import power_per_run, variance
from analysis.palette import rgb
from analysis.report.drawing import Figure, draw
from analysis.report.figures import MAIN_ARMS
from analysis.report.sample_figures import run_of_a_mixed_group
from analysis.runs.load import load
from analysis.runs.samples import read_group, read_samples, sample_steps
from analysis.stability import stability, stability_table
from analysis.token_consumption import default_target
from analysis.token_figure import token_consumption, tokens_by_arm
from analysis.token_positions import energy_against_reward, group_numbers, shown_rollouts, token_positions
from otb.errors import RunError
from tests.support.analysis_runs import group, write_run, write_sweep


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return load(write_sweep(tmp_path_factory.mktemp("sweep")), cache=False).used


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    style.plt.close("all")


def first(axes):
    return np.ravel(axes)[0]


FIGURES = {
    "learning_curves": learning_curves,
    "over_tokens": lambda table: learning_curves(table, x="own_tokens_total"),
    "reward": lambda table: learning_curves(table, "reward_mean"),
    "figure_1": gradient_norm_and_accuracy,
    "variance": variance,
    "group_size": accuracy_by_group_size,
    "tokens": lambda table: token_consumption(table, 0.8),
    "stability": stability,
    "cost": time_and_memory,
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_states_its_seeds_and_fits_a_column_or_a_page(table, name):
    axes = FIGURES[name](table)
    figure = first(axes).figure
    titles = [ax.get_title(loc) for ax in figure.axes for loc in ("left", "center")]
    assert any("3 seeds" in title for title in titles)
    assert figure.get_figwidth() in (style.COLUMN, style.PAGE)
    assert len(style.numbers(axes)) > 0


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_mixes_settings_or_draws_nothing(table, name):
    other = table.assign(setting=table.setting.astype(str).where(table.seed != 1, "another"))
    with pytest.raises(RunError, match="mixes 2 settings"):
        FIGURES[name](other)
    with pytest.raises(RunError):
        FIGURES[name](table.iloc[:0])


def test_the_plotted_numbers_are_saved_beside_pdf_and_png(table, tmp_path):
    files = style.save(learning_curves(table), tmp_path / "figures" / "curve", title="A curve", about="Made by: me")
    assert [file.suffix for file in files] == [".pdf", ".png", ".csv"] and all(file.stat().st_size for file in files)
    numbers = pd.read_csv(files[2])
    otb = numbers[(numbers.baseline == "otb") & (numbers.group_size == 4)].set_index("step")
    # seeds gain 0.03, 0.0305 and 0.031 a step from 0.4: 0.705 on average at step 10, capped at 0.9 at step 20
    assert otb.estimate[10] == pytest.approx(0.4 + 10 * 0.0305)
    assert otb.low[10] < otb.estimate[10] < otb.high[10] and otb.estimate[20] == 0.9
    assert set(numbers.seeds) == {3}
    paper = files[0].read_bytes()
    assert b"/MediaBox [ 0 0 234 " in paper  # 3.25 inches in points: a column of a two-column paper
    # every font is TrueType and embedded; Type 3 fonts, which journals refuse, would have no file
    assert paper.count(b"/FontFile2") == paper.count(b"/Type /FontDescriptor") > 0 and b"/Type3" not in paper
    streams = [zlib.decompress(part) for part in re.findall(rb"stream\r?\n(x.*?)\r?\nendstream", paper, re.DOTALL)]
    fonts = [TTFont(io.BytesIO(stream)) for stream in streams if stream[:4] == b"\0\1\0\0"]
    assert fonts and all("glyf" in font and not {"GDEF", "GPOS", "GSUB"} & set(font.keys()) for font in fonts)
    assert b"/Title (A curve)" in paper and b"/Subject (Made by: me)" in paper
    assert b"Description\0Made by: me" in files[1].read_bytes()  # the PNG says the same


def test_a_figure_of_a_report_is_laid_out_once_for_all_its_files(table, tmp_path, monkeypatch):
    """The layout for another resolution would be another picture."""
    layouts, execute = [], ConstrainedLayoutEngine.execute
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *args: layouts.append(execute(*args)))
    drawn = draw(Figure("curve", "A curve.", (table,), lambda: learning_curves(table)), tmp_path)
    assert drawn.svg and {file.suffix for file in drawn.files} == {".pdf", ".png", ".csv"} and len(layouts) == 1


def test_a_figure_of_many_seeds_draws_some_of_them_says_so_and_averages_all(table, monkeypatch):
    def lines(axes):
        return [line for line in axes.lines if (line.get_gid() or "").startswith("run:")]

    whole = learning_curves(table)
    monkeypatch.setattr("analysis.curves.SEED_LINES", 13)  # of 6 arms: two lines each
    part = learning_curves(table)
    assert len(lines(whole)) == 18 and len(lines(part)) == 12
    assert "3 seeds per arm, 2 drawn" in part.get_title("left") and "drawn" not in whole.get_title("left")
    pd.testing.assert_frame_equal(style.numbers(part), style.numbers(whole))


def test_the_rows_of_a_run_come_in_the_order_of_steps_whatever_the_table_has():
    rows = {"run": ["b", "a", "b", "a"], "step": [2, 1, 1, 0], "reward": [0.4, 0.1, 0.3, 0.0]}
    runs = [(name, list(run["reward"])) for name, run in by_run(pd.DataFrame(rows), "reward")]
    assert runs == [("a", [0.0, 0.1]), ("b", [0.3, 0.4])]
    assert list(by_run(pd.DataFrame(rows).iloc[:0], "reward")) == []


MACHADO = {  # how linear RGB looks to the three kinds of colour-blind readers (Machado et al. 2009, severity 1)
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.mark.parametrize("seen_as", MACHADO)
def test_the_arms_of_the_first_figure_differ_to_colour_blind_readers(seen_as):
    def lab(colour):  # CIE L*a*b* of what such a reader sees
        encoded = np.array(rgb(colour)) / 255
        linear = np.clip(MACHADO[seen_as] @ ((encoded + 0.055) / 1.055) ** 2.4, 0, 1)
        to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        x, y, z = np.cbrt(to_xyz @ linear / [0.9505, 1, 1.089])
        return np.array([116 * y, 500 * (x - y), 200 * (y - z)])

    seen = [lab(ARMS[name].colour) for name in MAIN_ARMS]
    distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
    assert min(distances) > 12  # 2.3 is the least that an eye tells apart in patches side by side; lines are thin


def test_two_seeds_give_raw_lines_and_no_interval(table):
    axes = learning_curves(table[table.seed < 2])
    assert style.numbers(axes).low.isna().all() and len(axes.collections) == 0
    assert axes.get_title("left") == "2 seeds per arm; no interval below 3 seeds"  # and no word of a band
    assert "band: 95 % interval" in learning_curves(table).get_title("left")


def test_unequal_seeds_are_stated(table):
    axes = learning_curves(table[(table.baseline != "otb") | (table.seed < 2)])
    assert axes.get_title("left").startswith("2-3 seeds")


def test_every_seed_is_a_line_that_names_its_run(table):
    axes = learning_curves(table)
    names = {line.get_gid() for line in axes.lines} - {None}
    assert names == {f"run:{run}" for run in table.run.unique()}


def test_the_final_accuracy_never_counts_the_evaluation_before_training(tmp_path):
    """Evaluated at steps 0, 10 and 20: final is the mean of the last two; at 0 and 20: the last one alone."""
    write_run(tmp_path, "otb", seed=0, steps=20, every=10, rate=0.02)  # 0.4, 0.6, 0.8
    write_run(tmp_path, "otb", seed=1, steps=20, every=20, rate=0.02)  # 0.4, 0.8
    write_run(tmp_path, "otb", seed=2, steps=20, every=30, rate=0.02)  # 0.4
    runs = final_accuracy(load(tmp_path, cache=False).used).set_index("seed")
    assert runs.final.to_dict() == pytest.approx({0: 0.7, 1: 0.8})  # seed 2 was not measured at the end
    assert runs.averaged.to_dict() == {0: 2, 1: 1} and runs["first"].to_dict() == {0: 0.4, 1: 0.4}
    assert final_words(runs).endswith("of the only one where a run has one after step 0")
    assert final_words(runs.loc[[0]]) == "mean of the last two evaluations"
    assert final_words(runs.loc[[1]]) == "the only evaluation after step 0"


def test_runs_that_were_evaluated_before_training_alone_have_no_final_accuracy(tmp_path):
    write_run(tmp_path, "otb", steps=20, every=30)
    with pytest.raises(RunError, match=r"evaluated after step 0.*evaluation.every=10"):
        final_accuracy(load(tmp_path, cache=False).used)


@pytest.mark.parametrize(("seeds", "x"), [(1, "own_tokens_total"), (3, "own_tokens_total"), (1, "step"), (3, "step")])
def test_evaluations_are_markers_and_nothing_but_straight_lines_lies_between(table, seeds, x):
    """N=4 samples 1,600 tokens a step and is evaluated every 10 steps."""
    of_arm = table[(table.baseline == "otb") & (table.group_size == 4) & (table.seed < seeds)]
    axes = learning_curves(of_arm, x=x)
    marked = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    step = 10 * (1600 if x == "own_tokens_total" else 1)
    for line in marked:
        assert list(line.get_xdata()) == [0, step, 2 * step, 3 * step, 4 * step]
    assert len(marked) == seeds + (seeds == 3) and axes.get_xscale() == "linear"
    assert all(len(line.get_xdata()) in (0, 5) for line in axes.lines)  # no point where nothing was measured


def test_rows_of_every_step_have_no_markers(table):
    assert {line.get_marker() for line in learning_curves(table, "reward_mean").lines} <= {"", "None"}


def test_baselines_of_one_group_size_stand_side_by_side(table):
    axes = accuracy_by_group_size(table[table.group_size == 4])
    assert axes.get_xlabel() == "group size N=4" and axes.get_xscale() == "linear"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["OTB", "GRPO", "RLOO"]
    assert all(line.get_linestyle() == "None" for line in axes.lines)  # no line through one point


def test_steps_have_whole_ticks_and_logarithmic_axes_plain_numbers(table):
    left, right = gradient_norm_and_accuracy(table)
    left.figure.canvas.draw()
    assert all(float(tick).is_integer() for axes in (left, right) for tick in axes.get_xticks())
    low, high = left.get_ylim()  # gradient norms from 0.1 to 0.15
    shown = [
        label.get_text()
        for label, at in zip(left.get_yticklabels(), left.get_yticks(), strict=True)
        if low <= at <= high
    ]
    assert len(shown) >= 3 and all(re.fullmatch(r"0\.\d+", text) for text in shown)


def test_shares_begin_at_0_and_no_point_is_cut_by_the_frame(table):
    _, *panels = stability(table)
    for axes in panels:
        points = np.concatenate([line.get_ydata() for line in axes.lines])
        assert axes.get_ylim()[0] == 0 and points.max() < axes.get_ylim()[1]
        assert not any(line.get_clip_on() for line in axes.lines)


def test_a_missing_cell_of_the_grid_is_named_with_its_command(table):
    holed = table[~((table.baseline == "rloo") & (table.group_size == 32))]
    with pytest.raises(RunError, match=r"RLOO, N=32.*run.py -m baseline=rloo group_size=32"):
        accuracy_by_group_size(holed)


def test_a_metric_in_no_run_says_how_to_get_it(table):
    with pytest.raises(RunError, match="log_energy=true"):
        variance(table.drop(columns="total_power"))
    with pytest.raises(RunError, match="evaluation.every"):
        learning_curves(table.assign(evaluation_accuracy=np.nan))


def test_arms_without_energy_are_named_on_the_variance_figure(table):
    axes = variance(table.assign(total_power=table.total_power.where(table.baseline != "rloo")))
    assert "not recorded: RLOO, N=32, RLOO, N=4" in axes[0].get_title("left")


def test_measured_noise_stands_beside_the_proxies_on_one_scale(tmp_path):
    for baseline, noise in (("grpo", 3.0), ("otb", 2.0)):
        for seed in range(3):
            measured = {"gradient_noise": noise, "gradient_signal": 0.1, "verl_noise": noise / 5}
            write_run(tmp_path, baseline, seed=seed, measures=lambda step, row=measured: row)
    axes = variance(load(tmp_path, cache=False).used)
    titles = [ax.get_title("left").split("\n")[0] for ax in axes]
    assert len(titles) == 3 and titles[::2] == ["measured gradient noise", "verl's form of the noise"]
    assert len({ax.get_ylim() for ax in axes}) == 1 and "relative to OTB" in axes[0].get_ylabel()
    shown = style.numbers(axes).groupby(["metric", "baseline"]).estimate.mean()
    for metric, ratio in (("gradient_noise", 1.5), ("verl_noise", 1.5), ("total_power", 2.0)):
        assert shown[metric, "otb"] == pytest.approx(1) and shown[metric, "grpo"] == pytest.approx(ratio)


def test_relative_power_by_hand(table):
    run = table[(table.run == "otb-n4-seed0") & (table.step.between(1, 2))]
    # total_power 0.1, energy 1, reward variance p (1 - p) at accuracies 0.43 and 0.46
    expected = (0.1 + 0.1) / (0.43 * 0.57 + 0.46 * 0.54)
    assert power_per_run(run).loc["otb-n4-seed0"] == pytest.approx(expected)


def test_tokens_to_the_target_by_hand(table):
    rows = tokens_by_arm(table[table.seed == 0], 0.8).set_index(["baseline", "group_size"])
    # otb: 0.4 at step 0, 0.7 at step 10, 0.9 (capped) at step 20: 0.8 at step 15; 1,600 tokens a step at N=4
    assert rows["mean"]["otb", 4] == pytest.approx(15 * 1600)
    # grpo: 0.6 at step 10, 0.8 at step 20; at N=32 eight times the tokens
    assert rows["mean"]["grpo", 32] == pytest.approx(20 * 1600 * 8)


def test_the_default_target_lies_within_what_the_weakest_arm_reaches(table):
    assert default_target(table) == pytest.approx(0.4 + 0.9 * 0.5)


def test_a_collapsed_and_a_diverged_seed_are_dead_on_the_stability_figure(tmp_path):
    for seed in range(4):
        write_run(tmp_path, "otb", seed=seed)
        write_run(tmp_path, "grpo", seed=seed, collapse_at=20 if seed == 0 else None)
    (tmp_path / "grpo-n4-seed1" / "status.json").write_text(json.dumps({"state": "failed", "error": "loss=nan"}))
    runs = stability_table(load(tmp_path).used).set_index("run")
    assert runs.collapsed[["grpo-n4-seed0", "grpo-n4-seed1", "grpo-n4-seed2"]].tolist() == [True, True, False]
    # ten-step mean 0.02 k / 10 + about 0.7 (10 - k) / 10 falls below half of its peak after k = 6 steps, or 5
    assert runs.collapsed_at["grpo-n4-seed0"] in (24, 25) and runs.collapsed_at["grpo-n4-seed1"] == 40
    alive = stability(load(tmp_path).used)[0].lines
    assert [line.get_ydata()[-1] for line in alive] == pytest.approx([1.0, 0.5], abs=0.01)


def test_time_per_step_is_a_median_over_steps(table):
    runs = cost_table(table)
    assert runs.advantage_share.tolist() == pytest.approx([0.04] * len(runs))
    assert runs.peak_gib.tolist() == pytest.approx([0.5] * len(runs))


def test_an_outside_trl_run_stands_in_the_reward_curves(table):
    outside = pd.DataFrame({"run": "theirs", "outcome": "finished", "step": [1, 2], "reward_mean": [0.3, 0.4]})
    axes = learning_curves(table, "reward_mean", outside=outside)
    assert style.numbers(axes).baseline.iloc[-1] == "TRL: theirs"


# ---- samples


def test_tool_tokens_have_no_energy_and_no_advantage():
    numbers = group_numbers(group())
    assert numbers.token.tolist() == ["7", "+", "8", "1", "!"]
    assert numbers.baseline.tolist() == [0.5, 0.25, 0.0, 0.5, 0.25]  # not reward - advantage, see group()


def test_token_positions_draw_the_group_with_its_text(tmp_path):
    run = write_run(tmp_path)
    assert sample_steps(run) == [40]
    axes = token_positions(read_group(run))
    assert [len(ax.lines) for ax in axes[:3]] == [2, 2, 2]
    assert [text.get_text() for text in axes[3].texts] == ["7", "+", "8"]
    assert axes[1].get_title() == "baseline"
    older = read_group(run).drop(columns="baselines")
    assert token_positions(older)[1].get_title() == "baseline (not kept)"


def test_the_texts_below_a_group_are_of_different_rewards_where_there_are_any():
    rewards = [1.0] * 8 + [0.0, 0.0]
    numbers = pd.DataFrame({"rollout": range(10), "reward": rewards})
    assert shown_rollouts(numbers) == [0, 1, 2, 3, 8, 9]  # two wrong ones, and the first four right ones
    assert shown_rollouts(numbers[:8]) == [0, 1, 2, 3, 4, 5]


def test_a_group_whose_rewards_differ_is_read_from_an_earlier_step_where_the_last_has_none(tmp_path):
    run = write_run(tmp_path)
    group().assign(step=60, reward=1.0).to_parquet(run / "rollouts" / "step-00000060.parquet")
    assert set(read_group(run).step) == {40} and set(read_group(run, 60).step) == {60}


def test_the_run_whose_rewards_differ_is_the_one_that_is_drawn(tmp_path):
    names = [write_run(tmp_path, seed=seed).name for seed in range(2)]
    group().assign(reward=1.0).to_parquet(tmp_path / names[0] / "rollouts" / "step-00000040.parquet")
    loaded = load(tmp_path, cache=False)
    assert run_of_a_mixed_group(loaded, names) == names[1] and run_of_a_mixed_group(loaded, names[:1]) == names[0]


def test_energy_against_reward_by_hand():
    axes = energy_against_reward(group())
    numbers = style.numbers(axes)
    # energies 1 (reward 1) and 1.5 (reward 0): mean 1.25; weighted mean reward 1 / 2.5, plain 0.5
    assert numbers.relative_energy.tolist() == [0.8, 1.2]
    assert numbers.baseline_shift.tolist() == pytest.approx([-0.1, -0.1])
    with pytest.raises(RunError, match="unequal rewards"):
        energy_against_reward(group().assign(reward=1.0))


def test_samples_that_are_not_there_say_how_to_get_them(tmp_path):
    run = write_run(tmp_path)
    with pytest.raises(RunError, match="step=7 has no samples.*kept: 40"):
        read_samples(run, 7)
    with pytest.raises(RunError, match="prompt=3 is not among the kept prompt groups; kept: 0."):
        read_group(run, prompt=3)
    (run / "rollouts" / "step-00000040.parquet").unlink()
    with pytest.raises(RunError, match="rollouts.every"):
        read_samples(run)
    with pytest.raises(RunError, match="log_energy=true"):
        group_numbers(group().assign(energies=None))


def test_run_picture_needs_no_pandas(tmp_path):
    import subprocess
    import sys

    run = write_run(tmp_path)
    code = (
        "import sys; from pathlib import Path; from analysis.run_picture import run_picture; "
        "from otb.records import RunDirectory; print(run_picture(RunDirectory(sys.argv[1])).name); "
        "assert not {'pandas', 'scipy', 'torch', 'pyarrow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    assert done.stdout.strip() == "learning_curve.png", done.stderr
