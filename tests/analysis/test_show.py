"""python -m analysis.runs.show: a prompt group in the terminal."""

import io

import pandas as pd
import pytest
from rich.cells import cell_len
from rich.console import Console

from analysis.runs import show
from analysis.runs.samples import read_samples
from analysis.runs.token_colours import background, largest
from otb.records import RunDirectory


@pytest.fixture
def run(tmp_path):
    """A run with samples of steps 20 and 40: a group of two rollouts, the second with a tool's answer."""
    directory = RunDirectory(tmp_path / "run")
    directory.rollouts.mkdir(parents=True)
    directory.config_file.write_text("steps: 40\n")
    common = {"prompt": 0, "prompt_text": "what is 1 + 1 ?"}
    tokens = ["I think ", "so\n", "\x1b[2J", "[bold]2[/bold]"]
    for step in (20, 40):
        rows = [
            {**common, "step": step, "rollout": 0, "reward": 1.0, "tokens": tokens, "own": [True] * 4,
             "advantages": [0.5, 0.25, 0.125, 0.0], "energies": [0.5, 1.0, 1.25, 2.25]},
            {**common, "step": step, "rollout": 1, "reward": float("nan"), "tokens": ["call ", "output ", "end"],
             "own": [True, False, True], "advantages": [-1.0, -0.5], "energies": [1.0, 3.0]},
        ]  # fmt: skip
        pd.DataFrame(rows).to_parquet(directory.rollouts / f"step-{step:08d}.parquet")
    return directory


def shown(run, step=None, by="advantage", colour=False):
    console = Console(file=io.StringIO(), width=80, force_terminal=colour, color_system="truecolor" if colour else None)
    show.show_group(console, read_samples(run.path, step, failed=True), 0, by)
    return console.file.getvalue()


def test_a_group_is_shown_with_its_prompt_legend_rewards_and_tokens(run):
    text = shown(run)
    assert "step 40, prompt 0 of 1 kept, 2 rollouts" in text and "what is 1 + 1 ?" in text
    assert "colour:  -1.00  less likely  0  more likely  +1.00" in text
    assert "rollout 0  reward 1  4 tokens  advantage +0.000 to +0.500  energy 2.25" in text
    assert "rollout 1  unscored  2 tokens  advantage -1.000 to -0.500  energy 3.00" in text
    assert "call output end" in text


def test_the_first_group_whose_rewards_differ_is_shown_unless_another_is_asked_for(run):
    samples = read_samples(run.path).assign(reward=1.0)
    mixed = samples.assign(prompt=3, reward=[1.0, 0.0])
    both = pd.concat([samples, mixed])
    for asked, expected in ((None, 3), (0, 0)):
        console = Console(file=io.StringIO(), width=80)
        show.show_group(console, both, asked, "advantage")
        assert f"prompt {expected} of 2 kept" in console.file.getvalue()


def test_lines_fit_80_columns_and_no_token_can_move_the_cursor_or_mean_markup(run):
    text = shown(run)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text and "\\x1b[2J" in text and "[bold]2[/bold]" in text and "so\u21b5\n" in text


def test_tokens_are_coloured_by_advantage_or_by_the_energy_they_add(run):
    rollout = read_samples(run.path).iloc[0]
    assert show.token_values(rollout, "advantage") == [0.5, 0.25, 0.125, 0.0]
    assert show.token_values(rollout, "energy") == [0.5, 0.5, 0.25, 1.0]
    by_advantage, by_energy = shown(run, colour=True), shown(run, by="energy", colour=True)
    assert "48;2;86;180;233mcall" in by_advantage  # -1, the largest of the group, in full blue
    assert "48;2;0;158;115mend" in by_energy  # 2, the largest of the group, in full green
    assert "48;2;255;255;255m[bold]2" in by_advantage  # 0 is white


def test_colours_go_from_white_to_the_full_colour_of_the_largest_value():
    assert background(0.0, 2.0) == background(0.0, 0.0) == (255, 255, 255)
    assert background(2.0, 2.0) == (230, 159, 0) and background(-2.0, 2.0) == (86, 180, 233)
    assert background(1.0, 2.0) == (242, 207, 128)  # half way: 255 - (255 - 230) / 2, ...
    assert background(2.0, 2.0, "energy") == (0, 158, 115)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stands_out(value):
    assert show.style_of(value, 1.0, "advantage").reverse
    assert largest([[value, -0.5], [0.25]]) == 0.5


def test_an_earlier_step_can_be_chosen_and_a_missing_one_lists_those_there_are(run, capsys):
    assert "step 20" in shown(run, step=20)
    assert show.main([str(run.path), "--step", "30"]) == 2
    assert "step=30 has no samples" in (message := capsys.readouterr().err) and "kept: 20, 40." in message


def test_the_rollouts_of_all_processes_of_a_failed_step_are_shown(run):
    for name, prompt in (("failed-00000041", 0), ("failed-00000041-rank1", 1)):
        rows = pd.read_parquet(run.rollouts / "step-00000040.parquet").assign(step=41, prompt=prompt)
        rows.to_parquet(run.rollouts / f"{name}.parquet")
    assert sorted(set(read_samples(run.path, failed=True)["prompt"])) == [0, 1]
    assert set(read_samples(run.path)["step"]) == {40}  # figures of a run draw what it kept on purpose


def test_what_cannot_be_shown_is_said(run, capsys, tmp_path):
    assert show.main([str(run.path), "--prompt", "7"]) == 2
    assert "prompt=7 is not among the kept prompt groups; kept: 0." in capsys.readouterr().err
    assert show.main([str(tmp_path)]) == 2
    assert f"is no run directory: it has no config.yaml. Try {run.path}." in capsys.readouterr().err
    samples = pd.read_parquet(run.rollouts / "step-00000040.parquet").assign(energies=None)
    samples.to_parquet(run.rollouts / "step-00000040.parquet")
    assert show.main([str(run.path), "--by", "energy"]) == 2
    assert "hold no energies: their baseline needs none. Run again with log_energy=true" in capsys.readouterr().err
    assert show.main([str(run.path)]) == 0
