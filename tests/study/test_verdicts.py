"""Verdicts of the study on made-up rows whose answer is known."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from analysis.claims.rules import NOT_SUPPORTED, RESAMPLES, RULES, SUPPORTED, UNDECIDED
from analysis.claims.runs import censored_text, saved
from analysis.token_consumption import saving
from otb.errors import RunError
from study import collected as rows
from study import verdicts
from study.run import ROWS
from tests.support.study_rows import SEEDS, arms, made_up, rows_of, spoken

# ---- verdicts


def noise(**relative: float) -> pd.DataFrame:
    """Measured noise of OTB relative to RLOO, named like start_4, with an interval of .03 to each side."""
    rows = [
        {
            "task": "arithmetic",
            "stage": stage,
            "policies": verdicts.POLICIES,
            "estimator": "otb",
            "group_size": int(size),
        }
        | {"relative_noise": value, "relative_noise_low": value - 0.03, "relative_noise_high": value + 0.03}
        for name, value in relative.items()
        for stage, size in [name.split("_")]
    ]
    return pd.DataFrame(rows)


LOW = {f"{stage}_{size}": 0.8 for stage in verdicts.STAGES for size in (4, 32)}


@pytest.mark.parametrize(
    ("relative", "verdict"),
    [
        (LOW, SUPPORTED),
        (LOW | {"half_32": 0.95}, NOT_SUPPORTED),  # the whole interval lies above .9
        (LOW | {"half_32": 0.92}, UNDECIDED),
        (LOW | {"half_8": 0.95}, SUPPORTED),  # N = 4 and N = 32 speak
    ],
)
def test_c1_is_decided_by_the_noisiest_stage_at_the_small_and_the_large_n(relative, verdict):
    comparisons = verdicts.gradient_noise(noise(**relative))
    assert spoken(comparisons) == verdict
    judged = {name: value for name, value in relative.items() if not name.endswith("_8")}
    assert comparisons[0].effect.estimate == max(judged.values())


def test_c1_waits_for_every_stage_and_every_policy():
    half = {name: value for name, value in LOW.items() if not name.startswith("end")}
    assert verdicts.gradient_noise(noise(**half))[0][-3:-1] == (UNDECIDED, "end: nothing")
    assert verdicts.gradient_noise(noise(**LOW).assign(policies=2))[0].why == "2 of 3 policies"


def test_c3_is_supported_where_small_n_is_not_worse_by_two_points_and_empty_where_the_rival_does_as_well():
    comparisons = verdicts.accuracy_at_small_n(arms(otb_4=0.80, rloo_32=0.81, rloo_4=0.70))
    assert spoken(comparisons) == SUPPORTED and comparisons[0].why.startswith("probability of improvement")
    comparisons = verdicts.accuracy_at_small_n(arms(otb_4=0.80, rloo_32=0.81, rloo_4=0.805))
    assert spoken(comparisons) == SUPPORTED and comparisons[0].why.startswith("empty: RLOO, N=4 matches")


def test_c3_is_not_supported_where_small_n_is_worse_by_more():
    assert spoken(verdicts.accuracy_at_small_n(arms(otb_4=0.70, rloo_32=0.81, rloo_4=0.70))) == NOT_SUPPORTED


def test_nothing_is_decided_with_fewer_than_ten_seeds():
    made = [made_up(*arm, seed, 0.8) for arm in (("otb", 4), ("rloo", 32), ("rloo", 4)) for seed in range(9)]
    runs = verdicts.runs_of(pd.DataFrame(made))
    for comparisons in (verdicts.accuracy_at_small_n(runs), verdicts.tokens_saved(runs)):
        assert spoken(comparisons) == UNDECIDED and "fewer than 10 seeds" in comparisons[0].why


def test_an_arm_with_two_runs_of_a_seed_is_refused():
    made = [made_up(rate=rate, seed=seed) for rate in (3e-4, 1e-4) for seed in SEEDS]
    with pytest.raises(RunError, match="OTB, N=4 has two runs of seed 0 on arithmetic"):
        verdicts.runs_of(pd.DataFrame(made))


def test_c4_reads_the_saving_off_the_tokens():
    made = [made_up("otb", 4, seed, 0.8) for seed in SEEDS] + [made_up("rloo", 4, seed, 0.8) for seed in SEEDS]
    made += [made_up("rloo", 32, seed, 0.8, tokens=8000.0) for seed in SEEDS]
    first, second, *_ = verdicts.tokens_saved(verdicts.runs_of(pd.DataFrame(made)))
    assert first.effect.estimate == pytest.approx(7 / 8) and second.effect.estimate == pytest.approx(0)
    assert first.verdict == NOT_SUPPORTED and "RLOO, N=4 alone saves 0.875" in first.why


def test_c4_waits_for_every_arm_that_may_set_the_target_and_for_one_that_is_well_above_the_start():
    arms_of_c4 = {"otb_4": 0.8, "rloo_4": 0.8, "rloo_32": 0.8}
    waiting = [made_up("energy_probe", 4, 0, 0.9), *rows_of(**arms_of_c4)]
    first, *_ = verdicts.tokens_saved(verdicts.runs_of(pd.DataFrame(waiting)))
    assert first.verdict == UNDECIDED and "energy probe, N=4: 1" in first.why
    first, *_ = verdicts.tokens_saved(arms(**dict.fromkeys(arms_of_c4, 0.48)))  # from .4: its target, .432, is near
    assert first.verdict == UNDECIDED and first.why.startswith("the target is too near to the start, 0.400")


def test_a_run_that_breaks_early_speaks_against_its_arm_whatever_its_few_tokens():
    """Censored at its own tokens it would leave the comparison to the runs that did well."""
    made = [made_up("otb", 4, seed, 0.8) for seed in SEEDS] + [
        made_up("rloo", 4, seed, 0.8, tokens=2000.0) for seed in SEEDS
    ]
    whole = saved(verdicts.runs_of(pd.DataFrame(made)), ("otb", 4), ("rloo", 4), 0.7)
    assert whole.estimate == pytest.approx(1 / 2)
    for row in made[:4]:  # runs of OTB
        row |= {"evaluation_accuracy": "0.4 0.1 0", "evaluation_own_tokens_total": "0 10 20"}
        row |= {"accuracy": " ".join(["0.5"] * 5 + ["0"] * 15), "own_tokens_total": " ".join(map(str, range(20)))}
    broken = saved(verdicts.runs_of(pd.DataFrame(made)), ("otb", 4), ("rloo", 4), 0.7)
    assert broken.estimate == pytest.approx(
        1 - (6 * 1 + 4 * 2) / (10 * 2)
    )  # up to where RLOO arrives, with twice the tokens


def test_c4_says_where_a_comparison_is_cut_off():
    """No run of OTB gets to the target in its 8 evaluations; RLOO's get there long after the last of them."""
    made = [made_up("otb", 4, seed, 0.5) for seed in SEEDS]
    made += [made_up("rloo", 32, seed, 0.8, tokens=80000.0) for seed in SEEDS]
    runs = verdicts.runs_of(pd.DataFrame(made))
    text = censored_text((runs, ("otb", 4)), (runs, ("rloo", 32)), 0.72)
    assert text.startswith("10 of 10 runs of OTB, N=4 censored, cut off at ") and text.endswith("a lower bound")
    assert censored_text((runs, ("otb", 4)), (runs, ("rloo", 4)), 0.72) == "RLOO, N=4 was not run"


def test_a_saving_is_called_a_lower_bound_where_no_run_of_the_rival_arrives_before_it_is_cut_off():
    """The rival's runs arrive never, or one of ten does with 10,000 tokens; OTB's last run ends with 20,000."""
    made = [made_up("otb", 4, seed, 0.8 if seed else 0.5) for seed in SEEDS]

    def text(arriving: int) -> str:
        rival = [made_up("rloo", 4, seed, 0.8 if seed < arriving else 0.5, tokens=500.0 + 200 * seed) for seed in SEEDS]
        runs = verdicts.runs_of(pd.DataFrame(made + rival))
        return censored_text((runs, ("otb", 4)), (runs, ("rloo", 4)), 0.72)

    censored = "1 of 10 runs of OTB, N=4 censored"
    assert text(0) == f"{censored}, 10 of 10 runs of RLOO, N=4 censored: a lower bound"
    assert text(1) == f"{censored}, 9 of 10 runs of RLOO, N=4 censored"


def test_ends_of_the_savings_that_are_judged_do_not_hang_on_the_seed_of_the_bootstrap():
    """On arithmetic, against RLOO at N = 4, with 2,000 resamples the lower end was .004 to .023."""
    runs = verdicts.runs_of(rows.read(ROWS / "claim_c3_c4.csv").query("baseline in ['otb', 'rloo']"))
    best = verdicts.runs_of(rows.read(ROWS / "claim_c3_c4_32.csv")).best_final
    ours, theirs = (runs.consumption((arm, 4), verdicts.TARGETS[0] * best) for arm in ("otb", "rloo"))
    found = [saving(ours, theirs, resamples=RESAMPLES, seed=seed) for seed in range(4)]
    spoken = saved(runs, ("otb", 4), ("rloo", 4), verdicts.TARGETS[0] * best)
    assert spoken == found[0]
    assert np.ptp([interval.low for interval in found]) < 0.003 > np.ptp([interval.high for interval in found])
    assert [interval.low for interval in found] == pytest.approx([0.0104] * 4, abs=0.0015)  # of all 92,378 draws


def test_c4_is_not_refuted_by_a_lower_bound():
    """Every run of OTB arrives with an eighth of the tokens but one, which ends before any of the rival's arrives."""
    made = [made_up("otb", 4, seed, 0.8 if seed else 0.5) for seed in SEEDS]
    made += [made_up("rloo", 4, seed, 0.8, tokens=3000.0) for seed in SEEDS]
    made += [made_up("rloo", 32, seed, 0.8, tokens=80000.0) for seed in SEEDS]
    first, *others = verdicts.tokens_saved(verdicts.runs_of(pd.DataFrame(made)))
    assert first.effect.high < RULES["C4"]["claimed"]
    assert first.verdict == UNDECIDED and first.original.startswith("not supported, because it let a saving")
    (medians,) = (other for other in others if other.what.endswith("by medians"))
    assert medians.effect.estimate == pytest.approx(1 - 1 / 80) and not medians.verdict


def test_c2_counts_settings_that_have_ten_seeds_of_both():
    """RLOO falls in every run of the highest rate. A third rate lacks a seed, and its fall is not counted."""
    made = []
    for rate, seed, baseline in product((3e-4, 9e-4, 3e-3), SEEDS, ("otb", "rloo")):
        if (rate, seed) != (9e-4, 9):
            run = made_up(baseline, seed=seed, rate=rate) | {"varied": "rollouts_by=hf"}
            if baseline == "rloo" and rate > 3e-4:
                run["accuracy"] = " ".join(["1"] * 10 + ["0"] * 10)
            made.append(run)
    (found,) = verdicts.collapses(pd.DataFrame(made))
    assert found.what == "RLOO (10 of 20) minus OTB (0 of 20)" and found.verdict == SUPPORTED
    assert found.why == "2 of 30 settings were run, and in 1 of them some runs collapse and others do not"
    assert found.original == "undecided, because it asked for all 30 settings of the grid"
    assert found.effect.seeds == 10
    few = pd.DataFrame(made).query("seed < 2")
    (found,) = verdicts.collapses(few)
    assert found.what == "RLOO (4 of 6) minus OTB (0 of 6)" and found.effect.seeds == 2
    assert (
        found.verdict == UNDECIDED
        and found.why.startswith("3 of 30 settings were run")
        and "fewer than 10" in found.why
    )
    (found,) = verdicts.collapses(few[few.baseline == "otb"])
    assert found.verdict == UNDECIDED and found.why == "no setting has both arms"


def test_c2_beside_its_grid_speaks_no_verdict_of_its_own():
    made = [made_up(arm, seed=seed, rate=1.6e-3) | {"varied": ""} for seed in SEEDS for arm in ("otb", "rloo")]
    for run in made[1::2]:
        run["accuracy"] = " ".join(["1"] * 10 + ["0"] * 10)
    found = verdicts.collapses_beside(pd.DataFrame(made), "rates between")
    assert found.what == "rates between: RLOO (10 of 10) minus OTB (0 of 10)"
    assert (found.verdict, found.why) == ("", f"under the same rule: {SUPPORTED}")
    made.append(made_up("otb", seed=0, rate=2e-3) | {"varied": ""})
    found = verdicts.collapses_beside(pd.DataFrame(made), "rates between")
    assert found.why == f"under the same rule: {SUPPORTED}; settings with too few seeds, left out: 1"


def test_rollouts_of_a_step_are_divided_in_two_ways():
    wide = arms(otb_4=0.8, rloo_4=0.8)
    found = verdicts.rollouts_divided(wide, arms(rloo_32=0.7))
    assert [comparison.what.partition(":")[0] for comparison in found] == ["RLOO", "RLOO"]
    assert found[0].effect.estimate == pytest.approx(0.7 - 0.625)  # means of the last two evaluations
    assert found[1].why == "no run censored" and not found[1].verdict
    assert found[0].why.startswith("probability of improvement")


def test_c5_is_read_off_the_benchmark(tmp_path):
    def spoken_at(value: float) -> str:
        rows = [{"name": verdicts.OVERHEAD, "unit": "ratio", "value": value, "low": value - 0.02, "high": value + 0.02}]
        rows.append({"name": verdicts.LEAN_STEP, "unit": "ratio", "value": 1.0, "low": 0.9, "high": 1.1})
        pd.DataFrame(rows).assign(pairs=40).to_csv(tmp_path / "results.csv", index=False)
        return spoken(verdicts.cost(tmp_path / "results.csv"))

    assert [spoken_at(value) for value in (0.3, 0.49, 0.7)] == [SUPPORTED, UNDECIDED, NOT_SUPPORTED]
    assert verdicts.cost(tmp_path / "none.csv") == []
