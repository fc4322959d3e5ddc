"""Figures and tables of the variance laboratory: functions of literal tables."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import laboratory, laboratory_figures
from analysis.front_figure import front_figure
from analysis.style import numbers, save
from otb.errors import RunError
from tests.support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
NOISE = {"rloo": 1.0, "otb": 0.8, "energy_probe": 0.5, "sequence_energy_loo": 0.9}


def results(prompts=12, sizes=(4, 8), **changed) -> pd.DataFrame:
    rows = []
    for size in sizes:
        for name, noise in (NOISE | changed).items():
            row = {"estimator": name, "group_size": size, "prompts": prompts, "direction_bias": 0.01}
            row |= {"relative_noise": noise, "over_probe": noise / NOISE["energy_probe"]}
            ends = {f"{key}_{end}": row[key] + shift for key in (*laboratory_figures.RATIOS, "direction_bias")
                    for end, shift in (("low", -0.1), ("high", 0.2))}  # fmt: skip
            rows.append(row | ends)
    return pd.DataFrame(rows)


TOKENS = pd.DataFrame({"prompt": [0, 0, 1, 1], "proxy": [1.0, 1.0, 1.0, 1.0], "exact": [0.0, 1.0, 2.0, 5.0]})


@pytest.mark.parametrize("draw", [laboratory_figures.noise, laboratory_figures.bias_and_noise])
def test_figures_state_the_prompts_and_keep_their_numbers(draw, tmp_path):
    axes = draw(results())
    assert [ax.get_title() for ax in axes] == ["N = 4", "N = 8"]
    assert "12 prompts" in axes[0].figure.get_suptitle() and "95 %" in axes[0].figure.get_suptitle()
    files = save(axes, tmp_path / "figure")
    assert {file.suffix for file in files} == {".pdf", ".png", ".csv"}
    kept = pd.read_csv(tmp_path / "figure.csv")
    pd.testing.assert_frame_equal(kept, results(), check_dtype=False)


def test_noise_orders_the_estimators_and_draws_their_intervals():
    (ax,) = laboratory_figures.noise(results(sizes=(4,)))
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "rloo",
        "sequence_energy_loo",
        "otb",
        "energy_probe",
    ]
    segments = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2]
    assert any(np.allclose(segment, [0.7, 1.0]) for segment in segments)  # otb: 0.8 - 0.1, 0.8 + 0.2


def test_an_unknown_interval_leaves_the_point():
    table = results(sizes=(4,))
    table.loc[table.estimator == "otb", ["relative_noise_low", "relative_noise_high"]] = np.nan
    (ax,) = laboratory_figures.noise(table)
    assert any(np.array_equal(line.get_xdata(), [0.8]) for line in ax.lines)


def test_proxy_shows_which_share_of_the_energy_the_largest_tokens_hold():
    axes = laboratory_figures.proxy(TOKENS)
    assert axes[0].get_title() == "4 tokens of 2 prompts"
    curves = numbers(axes).set_index("share_of_tokens")
    # the largest of four holds 5 / 8 of the exact energy, the largest two 7 / 8; the proxy's are alike
    assert curves.exact[0.25] == pytest.approx(5 / 8) and curves.exact[0.5] == pytest.approx(7 / 8)
    assert curves.proxy[0.25] == pytest.approx(1 / 4) and curves.exact[1.0] == 1


def test_missing_columns_are_named():
    with pytest.raises(RunError, match="no relative_noise_low. Run experiments/variance.py again"):
        laboratory_figures.noise(results().drop(columns="relative_noise_low"))
    with pytest.raises(RunError, match="no direction_bias, direction_bias_high"):
        laboratory_figures.bias_and_noise(results().drop(columns=["direction_bias", "direction_bias_high"]))
    with pytest.raises(RunError, match="no exact"):
        laboratory_figures.proxy(TOKENS.drop(columns="exact"))
    with pytest.raises(RunError, match="no prompts"):
        laboratory_figures.side_by_side({"one": results().drop(columns="prompts")}, (4,))


def test_side_by_side_names_every_measurement_with_its_prompts():
    axes = laboratory_figures.side_by_side({"one": results(), "other": results(24, otb=0.3)}, (4, 8))
    (legend,) = axes[0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["one, 12 prompts", "other, 24 prompts"]
    assert set(numbers(axes).measurement) == {"one", "other"}


def test_markdown_on_a_literal_table():
    lines = laboratory.markdown(results(sizes=(4,)), (4,)).split("\n")
    assert lines[0] == "| estimator | N=4 noise / rloo | N=4 / energy_probe | N=4 1 - cos^2 |"
    assert lines[1] == "|---|---|---|---|"
    assert lines[2] == "| `energy_probe` | 0.50 [0.40, 0.70] | 1.00 [0.90, 1.20] | 0.010 [-0.090, 0.210] |"
    assert [line.split("`")[1] for line in lines[2:]] == ["energy_probe", "otb", "sequence_energy_loo", "rloo"]


def command(*folders, cwd):
    return subprocess.run(
        [sys.executable, "-m", "analysis.laboratory", *map(str, folders)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_command_puts_folders_side_by_side_and_keeps_those_apart_that_differ_in_the_digest_alone(tmp_path):
    folders = [
        tmp_path / name for name in ("arithmetic-tiny-0a0a0a0a", "arithmetic-tiny-1b1b1b1b", "gsm8k-tiny-2c2c2c2c")
    ]
    for folder, sizes in zip(folders, ((2, 4, 8), (2, 4, 8), (4, 8, 16)), strict=True):
        folder.mkdir()
        results(sizes=sizes).to_csv(folder / "estimators.csv", index=False)
    done = command(*folders, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    heads = [line for line in done.stdout.split("\n") if line.startswith("###")]
    names = ["arithmetic-tiny-0a0a0a0a", "arithmetic-tiny-1b1b1b1b", "gsm8k-tiny"]
    assert heads == [f"### {name}, 12 prompts" for name in names]
    assert "N=4 noise" in done.stdout and "N=8 noise" in done.stdout and "N=2 " not in done.stdout
    kept = pd.read_csv(tmp_path / "laboratory.csv")
    assert set(kept.measurement) == set(names)


def measured(folder: Path, table: pd.DataFrame) -> Path:
    folder.mkdir()
    table.to_csv(folder / "estimators.csv", index=False)
    (folder / "config.yaml").write_text("samples: 128\n")
    return folder


@pytest.mark.parametrize("arguments", [[], ["--front", "noise.png"]])
def test_command_refuses_what_is_no_measurement(tmp_path, capsys, arguments):
    for folders in ([], [str(tmp_path)]):
        assert laboratory.main([*folders, *arguments]) == 2
    errors = capsys.readouterr().err
    assert "no estimators.csv" in errors and ("Which measurements?" in errors or "of one folder" in errors)


def test_command_refuses_measurements_without_a_common_group_size(tmp_path, capsys):
    folders = [measured(tmp_path / f"{name}-1", results(sizes=(size,))) for name, size in (("a", 2), ("b", 4))]
    assert laboratory.main([str(folder) for folder in folders]) == 2
    assert "no group size in common" in capsys.readouterr().err


def test_front_figure_has_the_best_estimator_on_top_and_keeps_its_numbers(tmp_path, capsys):
    folder = measured(tmp_path / "arithmetic-tiny-0a0a0a0a", results(sizes=(4, 32), mine_alone=1.2))
    picture = tmp_path / "figures" / "noise.png"
    assert laboratory.main([str(folder), "--front", str(picture)]) == 0
    assert sorted(file.name for file in picture.parent.iterdir()) == ["noise.csv", "noise.png"]
    kept = pd.read_csv(picture.with_suffix(".csv"))
    order = ["energy_probe", "otb", "sequence_energy_loo", "rloo", "mine_alone"]
    assert list(kept.estimator) == order * 2 and list(kept.group_size) == [4] * 5 + [32] * 5
    assert kept.unbiased[:4].tolist() == [True, False, True, True] and kept.unbiased.isna()[4]  # nothing is known
    assert kept.relative_noise_high[1] == pytest.approx(0.8 + 0.2)


def test_front_figure_says_what_was_measured_and_which_estimators_are_biased():
    axes = front_figure(results(sizes=(4, 32)), "tiny policy on arithmetic", 128)
    assert (
        axes[0].figure.get_suptitle()
        == "Gradient noise of the tiny policy on arithmetic: 12 prompts, 128 rollouts of each"
    )
    labels = [label.get_text() for label in axes[0].get_yticklabels()]
    assert labels == ["RLOO", "sequence energy (leave-one-out)", "OTB", "energy probe"]  # from the bottom
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["unbiased", "biased, if only by a factor"]
    markers = {line.get_ydata()[0]: line.get_marker() for line in axes[0].lines if len(line.get_xdata()) == 1}
    assert markers == {0: "o", 1: "o", 2: "D", 3: "o"}
    with pytest.raises(RunError, match="no group size 32"):
        front_figure(results(sizes=(4,)), "tiny policy", 128)
