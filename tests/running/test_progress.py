"""What a run prints while it works: the time left is about true from the first line on, by a clock of the test."""

import re

import pytest

from experiments.running.progress import LINES_PER_RUN, Progress


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def row(step: int) -> dict:
    return {"step": step, "reward_mean": 0.5, "own_tokens_total": 1000 * step}


def seconds_left(line: str) -> int | None:
    match = re.search(r"left (\d+):(\d\d):(\d\d)$", line)
    return None if match is None else int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])


def lines_by_step(capsys, description: str) -> dict[int, str]:
    """What was printed of a description: step -> line."""
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(rf"{description} \d", line)]
    return {int(re.search(r"(\d+)/\d+", line)[1]): line for line in lines}


@pytest.fixture
def clock():
    return Clock()


def test_a_warm_start_knows_its_time_from_its_first_line(clock, capsys):
    """620 steps of 0.1 s, after 20 s of imports and other preparation."""
    with Progress(80, clock=clock) as progress:
        clock.now += 20
        for step in range(1, 621):
            clock.now += 0.1
            progress.warm_start(step, 620, loss=1.0)
    lines = lines_by_step(capsys, "warm start")
    assert list(lines) == [*range(77, 620, 77), 620] and len(lines) == LINES_PER_RUN + 1
    for step, line in lines.items():
        assert seconds_left(line) == pytest.approx(0.1 * (620 - step), abs=0.51)


def test_a_warm_start_is_explained_once_before_its_first_step(capsys):
    with Progress(80) as progress:
        for step in range(1, 9):
            progress.warm_start(step, 8, loss=1.0)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("warm start: 8 supervised steps on solved problems, because")
    assert "Once per task and machine" in first and len(others) == 8


def test_training_after_a_warm_start_is_timed_by_its_own_steps(clock, capsys):
    """The first step is slow, and an evaluation goes before it: neither is counted."""
    with Progress(80, clock=clock) as progress:
        for step in range(1, 621):
            clock.now += 0.1
            progress.warm_start(step, 620, loss=1.0)
        clock.now += 30
        for step in range(1, 81):
            clock.now += 9 if step == 1 else 2
            progress.step(row(step))
    lines = lines_by_step(capsys, "training")
    assert list(lines) == list(range(10, 81, 10))
    assert {step: seconds_left(line) for step, line in lines.items()} == {step: 2 * (80 - step) for step in lines}


def test_a_resumed_run_is_timed_by_the_steps_that_it_makes_itself(clock, capsys):
    with Progress(80, clock=clock) as progress:
        clock.now += 15
        for step in range(41, 81):
            clock.now += 3
            progress.step(row(step))
    lines = lines_by_step(capsys, "training")
    assert {step: seconds_left(line) for step, line in lines.items()} == {50: 90, 60: 60, 70: 30, 80: 0}


def test_the_first_step_has_no_estimate_where_it_is_printed(clock, capsys):
    """Six steps, each with a line: nothing has been measured yet at the first."""
    with Progress(6, clock=clock) as progress:
        for step in range(1, 7):
            clock.now += 60
            progress.step(row(step))
    lines = lines_by_step(capsys, "training")
    assert lines[1] == "training 1/6  reward 0.50  tokens 1,000"
    assert lines[2] == "training 2/6  reward 0.50  tokens 2,000  left 0:04:00"
    assert [seconds_left(line) for line in lines.values()] == [None, 240, 180, 120, 60, 0]


def test_evaluations_between_the_steps_count_for_the_time_left(clock, capsys):
    """A step takes 1 s, and an evaluation 18 s after every 20th: 1.9 s a step where one lies behind 20 others."""
    with Progress(80, clock=clock) as progress:
        for step in range(1, 81):
            clock.now += 1
            progress.step(row(step))
            clock.now += 18 if step % 20 == 0 else 0
    lines = lines_by_step(capsys, "training")
    assert seconds_left(lines[60]) == pytest.approx(20 * (59 + 2 * 18) / 59, abs=0.51)


def test_a_bar_in_a_terminal_shows_the_same_time(clock):
    """Steps of a minute, for which rich would have no estimate at all."""
    progress = Progress(10, clock=clock)
    progress.bar.disable = False
    shown = []
    for step in range(1, 11):
        clock.now += 60
        progress.step(row(step))
        shown.append(progress.bar.tasks[-1].fields["left"])
    assert shown[:3] == ["", "left 0:08:00", "left 0:07:00"] and shown[-1] == "left 0:00:00"
    assert progress.bar.tasks[-1].completed == 10


def test_lines_of_a_sweep_begin_with_the_name_of_their_run_and_a_quiet_one_prints_nothing(clock, capsys):
    Progress(1, name="3: otb-n4-seed0", clock=clock).step(row(1))
    Progress(1, quiet=True, clock=clock).step(row(1))
    assert capsys.readouterr().out == "3: otb-n4-seed0: training 1/1  reward 0.50  tokens 1,000\n"


def test_an_evaluation_is_a_line_and_its_accuracy_stays_in_the_lines_after_it(clock, capsys):
    progress = Progress(1, clock=clock)
    progress.evaluation({"step": 0, "accuracy": 0.5, "samples": 4, "prompts": 128})
    progress.step(row(1))
    progress.evaluation({"step": 1, "samples": 4, "prompts": 128})
    assert capsys.readouterr().out.splitlines() == [
        "step 0: held-out accuracy 0.500 (avg@4 on 128 prompts)",
        "training 1/1  reward 0.50  held-out 0.50  tokens 1,000",
        "step 1: no sample scored (avg@4 on 128 prompts)",
    ]


def test_further_evaluation_sets_are_named_and_leave_the_held_out_accuracy_alone(capsys):
    with Progress(80) as progress:
        progress.evaluation({"step": 0, "accuracy": 0.25, "samples": 4, "prompts": 8})
        progress.evaluation({"task": "aime24", "step": 0, "accuracy": 0.5, "samples": 4, "prompts": 30})
        progress.evaluation({"task": "amc23", "step": 0, "samples": 4, "prompts": 40})
    assert capsys.readouterr().out.splitlines() == [
        "step 0: held-out accuracy 0.250 (avg@4 on 8 prompts)",
        "step 0: aime24 accuracy 0.500 (avg@4 on 30 prompts)",
        "step 0: no sample scored (avg@4 on 40 prompts)",
    ]
    assert progress.accuracy == 0.25


def test_a_step_longer_than_the_warning_of_slurm_is_said_once(monkeypatch, capsys):
    monkeypatch.setenv("OTB_WARNING_SECONDS", "180")
    with Progress(3, quiet=False) as progress:
        for step, seconds in enumerate((170.0, 400.0, 500.0), start=1):
            progress.step(row(step) | {"seconds_step": seconds})
    printed = capsys.readouterr().out
    assert printed.count("hydra.launcher.signal_delay_s") == 1
    assert "step 2 took 400 s, longer than the 180 s between SLURM's warning and the time limit" in printed
