"""C1 of the study: the moments of a policy are kept, pooled over policies and measured by commands."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from otb.errors import RunError
from otb.laboratory.statistics import estimator_statistics
from study import collected as rows
from study import measure, run, verdicts
from study import moments as kept_noise


def moments(shift=0.0, prompts=4) -> pd.DataFrame:
    """Moments of RLOO and OTB over prompts, the later ones noisier. shift: added to every power."""
    return pd.DataFrame(
        [
            {"prompt": prompt, "estimator": name, "group_size": 4, "power": power * (1 + prompt) + shift, "signal": 0.5}
            | {"overlap": 0.5, "truth": 0.5}
            for name, power in (("rloo", 4.0), ("otb", 3.0))
            for prompt in range(prompts)
        ]
    )


def test_moments_of_a_policy_are_kept_once_and_pooled_over_policies(tmp_path):
    """The statistics of two policies are those of their sums, over the prompts that both were measured on."""
    file = tmp_path / "claim_c1.csv"
    for seed in (1, 2, 2):
        kept_noise.add(moments(shift=seed - 1), ("arithmetic", seed, "start"), file)
    assert kept_noise.measured(file) == {("arithmetic", 1, "start"), ("arithmetic", 2, "start")}
    found = kept_noise.relative_noise(pd.read_csv(file)).set_index("estimator")
    assert len(pd.read_csv(file)) == 16 and list(found.prompts) == [4, 4] and list(found.policies) == [2, 2]
    assert found.relative_noise["otb"] == pytest.approx((3 * 10 + 2 - 2) / (4 * 10 + 2 - 2))
    assert found.by_policy["otb"] == pytest.approx(((3 * 10 - 2) / (4 * 10 - 2), (3 * 10 + 2) / (4 * 10 + 2)))


def test_intervals_of_c1_take_what_policies_make_of_a_prompt_together_and_are_stretched_for_the_number_of_prompts():
    """A second policy of the same moments says nothing new, and four prompts need Student's t."""
    parts = [moments().assign(task="arithmetic", stage="start", seed=seed) for seed in (1, 2)]
    alone = kept_noise.relative_noise(parts[0]).set_index("estimator").loc["otb"]
    ends = ["relative_noise_low", "relative_noise_high"]
    both = kept_noise.relative_noise(pd.concat(parts)).set_index("estimator").loc["otb"]
    assert both[ends].tolist() == pytest.approx(alone[ends].tolist())
    plain = estimator_statistics(moments()).set_index("estimator").loc["otb"]
    factor = scipy.stats.t.ppf(0.975, 3) / scipy.stats.norm.ppf(0.975) * np.sqrt(4 / 3)
    for name, positive in (("relative_noise", True), ("bias", False)):
        taken = np.log if positive else np.asarray
        values = [taken(float(of[f"{name}{end}"])) for of in (plain, alone) for end in ("", "_low", "_high")]
        assert values[4:] == pytest.approx([values[0] + factor * (end - values[0]) for end in values[1:3]])
    with pytest.raises(RunError, match="not measured on the same prompts"):
        kept_noise.relative_noise(pd.concat([parts[0], parts[1][parts[1].prompt > 0]]))


def test_c1_measures_what_has_no_rows_by_the_commands_that_a_user_types(tmp_path, monkeypatch):
    typed = []

    def command(name, *arguments):
        typed.append((name, *arguments))
        if name == "warm_start":
            return
        place = Path(next(a for a in arguments if a.startswith("runs_dir=")).partition("=")[2])
        if name == "run":  # which keeps its last checkpoint, and is skipped where it has made more steps
            steps = int(next(a for a in arguments if a.startswith("steps=")).partition("=")[2])
            checkpoints = place / "task" / "run" / "checkpoints"
            kept = max([steps, *(int(path.name[5:]) for path in checkpoints.glob("*"))])
            shutil.rmtree(checkpoints, ignore_errors=True)
            (checkpoints / f"step-{kept:08d}").mkdir(parents=True)
        else:
            (place / "variance" / "m").mkdir(parents=True, exist_ok=True)
            row = {"prompt": 0, "estimator": "otb", "group_size": 4, "power": 1, "signal": 1, "overlap": 1, "truth": 1}
            pd.DataFrame([row]).to_csv(place / "variance" / "m" / "moments.csv")

    monkeypatch.setattr(measure, "command", command)
    monkeypatch.setattr(run, "RUNS", str(tmp_path / "runs"))
    run.study({"claim_c1": 1}, None, None, tmp_path)
    assert [line[0] for line in typed] == ["variance", "run", "variance", "run", "variance"]
    assert "steps=40" in typed[1] and "steps=80" in typed[3]
    assert kept_noise.measured(tmp_path / "claim_c1.csv") == {("arithmetic", 1, stage) for stage in verdicts.STAGES}
    run.study({"claim_c1": 1}, None, None, tmp_path)
    assert len(typed) == 5
    run.study({"claim_c1": 1}, None, None, tmp_path / "other rows")  # as make study QUICK=1 after make study
    assert typed[5:] == typed[:5]
    del typed[5:]

    for _ in range(2):  # the second time there is nothing to do
        run.study({"claim_c1_real": None}, None, None, tmp_path, ["model.name=weights"])
    assert [line[0] for line in typed[5:]] == ["warm_start", "variance"] and "model.name=weights" in typed[5]
    warm = next(given for given in typed[5] if given.startswith("output="))
    assert warm.replace("output=", "model.name=") in typed[6] and "model.lora.r=4" in typed[6]
    assert kept_noise.measured(tmp_path / "claim_c1_real.csv") == {(rows.REAL, 0, "start")}
