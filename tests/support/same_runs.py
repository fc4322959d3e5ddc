"""Compares everything that two runs left, except for time and memory."""

import pandas as pd

from otb.records import RunDirectory
from tests.support.commands import rows, without_times

COMPARED = {
    "model.safetensors",
    "adapter_model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "baseline.pt",
    "improvement_0.pt",
    "improvement_1.pt",
    "token_weights.pt",
    "mtp_head.pt",
}


def assert_same_run(interrupted, uninterrupted):
    """Asserts equal metrics and evaluations without time and memory, samples, checkpoints, weights and optimizers."""
    mine, other = RunDirectory(interrupted), RunDirectory(uninterrupted)
    assert mine.status()["state"] == other.status()["state"] == "finished"
    steps = [row["step"] for row in rows(mine.metrics_file)]
    assert steps == list(range(1, other.status()["step"] + 1)), "a step stands twice or is missing"
    assert without_times(mine.metrics_file) == without_times(other.metrics_file)
    assert without_times(mine.evaluations_file) == without_times(other.evaluations_file)
    assert mine.checkpoint_steps() == other.checkpoint_steps()
    for step in mine.checkpoint_steps():
        files = {path.name for path in other.checkpoint(step).iterdir()}
        assert {path.name for path in mine.checkpoint(step).iterdir()} == files
        for name in files & COMPARED:
            assert (mine.checkpoint(step) / name).read_bytes() == (other.checkpoint(step) / name).read_bytes(), name
    for here, there in ((mine.rollouts, other.rollouts), (mine.evaluations, other.evaluations)):
        assert {sample.name for sample in here.iterdir()} == {sample.name for sample in there.iterdir()} != set()
        for sample in there.iterdir():
            pd.testing.assert_frame_equal(pd.read_parquet(here / sample.name), pd.read_parquet(sample))
    assert not [path.name for path in mine.path.rglob(".*")], "half-written files are left behind"
