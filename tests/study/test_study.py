"""The study: rows that know which run they are of, rates by the rule, verdicts by the rules, a page from csv alone."""

import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from analysis.style import plt
from analysis.token_consumption import saving
from experiments.checks import check
from experiments.running.command_line import CONF
from otb.errors import RunError
from otb.laboratory.statistics import estimator_statistics
from otb.records.config_keys import WHERE_AND_HOW
from study import collapses, figures, rates, verdicts
from study import collected as rows
from study import measure as study_noise
from study import moments as kept_noise
from study import neighbours as methods
from study import pages as report
from study import run as study
from study.__main__ import main
from study.verdicts import NOT_SUPPORTED, SUPPORTED, UNDECIDED
from tests.support.commands import ROOT

RUNS = ROOT / "tests" / "data" / "runs"
STEPS = np.array([0, 10, 20])
SEEDS = range(verdicts.SEEDS)


def a_run():
    return next(iter(sorted(path.parent for path in RUNS.rglob("metrics.jsonl"))))


def made_up(baseline="otb", group_size=4, seed=0, final=0.8, task="arithmetic", rate=1e-3, tokens=1000.0) -> dict:
    """A row whose accuracy goes straight from .4 to `final`, evaluated at three steps."""
    accuracy = 0.4 + (final - 0.4) * STEPS / STEPS[-1]
    cells = {
        "evaluation_step": STEPS,
        "evaluation_accuracy": accuracy,
        "evaluation_own_tokens_total": tokens * STEPS,
        "evaluation_response_length_mean": [20] * 3,
        "own_tokens_total": tokens * np.arange(1, STEPS[-1] + 1),
        **{name: [1] * STEPS[-1] for name in ("accuracy", "gradient_norm", "response_length_mean", "truncated")},
    }
    facts = {"key": f"{task}-{baseline}-{group_size}-{seed}-{rate}", "task": task, "baseline": baseline}
    facts |= {"group_size": group_size, "prompts_per_step": 16, "learning_rate": rate, "seed": seed, "steps": 20}
    facts |= {"outcome": "finished", "libraries": "", "commit": "", "device": "cpu"}
    return facts | {name: rows.joined(pd.Series(values)) for name, values in cells.items()}


def rows_of(**finals: float) -> list[dict]:
    """Returns ten rows of each arm, named like otb_4, whose final accuracies have a spread of .002."""
    made = []
    for name, final in finals.items():
        baseline, _, size = name.rpartition("_")
        made += [made_up(baseline, int(size), seed, final + 0.001 * (seed % 3 - 1)) for seed in SEEDS]
    return made


def arms(**finals: float) -> verdicts.Runs:
    return verdicts.Runs(pd.DataFrame(rows_of(**finals)))


def spoken(comparisons) -> str:
    (verdict,) = [comparison.verdict for comparison in comparisons if comparison.verdict]
    return verdict


# ---- rows


def test_a_run_directory_has_the_key_of_the_configuration_that_it_was_made_from():
    run = a_run()
    config = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    assert rows.row_of(run)["key"] == rows.key_of(config)


def test_the_key_changes_with_what_is_computed_and_not_with_where():
    config = OmegaConf.to_container(OmegaConf.load(a_run() / "config.yaml"))
    where = [name for name in WHERE_AND_HOW if name in config and name != "steps"]
    assert len(where) >= 4
    assert rows.key_of(config | dict.fromkeys(where, "elsewhere")) == rows.key_of(config)
    for name in ("seed", "steps", "learning_rate", "group_size"):
        assert rows.key_of(config | {name: 77}) != rows.key_of(config)


def test_a_row_gives_back_the_curves_of_its_run(tmp_path):
    run = a_run()
    rows.add([rows.row_of(run)], tmp_path / "rows.csv")
    table = rows.steps_table(rows.read(tmp_path / "rows.csv"))
    evaluations = pd.read_json(run / "evaluations.jsonl", lines=True)
    metrics = pd.read_json(run / "metrics.jsonl", lines=True)
    evaluated = table[table.evaluation_accuracy.notna()]
    np.testing.assert_allclose(evaluated.evaluation_accuracy, evaluations.accuracy, rtol=1e-4)
    np.testing.assert_allclose(table.gradient_norm.dropna(), metrics.gradient_norm, rtol=1e-4)
    assert table.step.tolist() == sorted({0, *metrics.step})


def test_what_a_method_did_stands_in_the_rows_of_runs_that_had_it(tmp_path):
    run, file = tmp_path / "run", tmp_path / "rows.csv"
    shutil.copytree(a_run(), run)
    steps = pd.read_json(run / "metrics.jsonl", lines=True)
    steps["token_weight_support"] = np.linspace(0.5, 1, len(steps))
    steps.to_json(run / "metrics.jsonl", orient="records", lines=True)
    rows.add([rows.row_of(a_run())], file)
    rows.add([rows.row_of(run) | {"key": "of a method"}], file)
    cells = dict(zip(rows.read(file).key, rows.read(file).token_weight_support, strict=True))
    np.testing.assert_allclose(rows.numbers(cells.pop("of a method")), steps.token_weight_support, rtol=1e-4)
    assert list(cells.values()) == [""]


def test_rows_are_added_once_whatever_is_added_again(tmp_path):
    file = tmp_path / "rows.csv"
    assert rows.add([made_up(seed=1), made_up(seed=0)], file) == 2
    before = file.read_bytes()
    assert rows.add([made_up(seed=1, final=0.1)], file) == 0 and file.read_bytes() == before
    assert rows.add([made_up(seed=2)], file) == 1
    assert rows.read(file).seed.tolist() == [0, 1, 2]


def test_only_runs_that_are_asked_for_are_collected(tmp_path):
    wanted = rows.row_of(a_run())["key"]
    assert rows.collect(RUNS, {wanted: ""}, tmp_path / "rows.csv") == 1
    assert rows.keys_in(tmp_path / "rows.csv") == {wanted} and "varied" not in rows.read(tmp_path / "rows.csv")
    rows.collect(RUNS, {wanted: "improvement=pipo"}, tmp_path / "methods.csv")
    assert rows.read(tmp_path / "methods.csv").varied.tolist() == ["improvement=pipo"]


def test_runs_of_the_real_model_have_a_task_of_their_own(tmp_path):
    wanted = rows.row_of(a_run())["key"]
    rows.collect(RUNS, {wanted: ""}, tmp_path / "claim_c3_c4_real.csv")
    assert rows.read(tmp_path / "claim_c3_c4_real.csv").task.tolist() == [rows.REAL]


def test_committed_rows_are_of_the_recipes_that_name_them():
    """Every row is a run that its recipe asks for: nothing was run by hand, and no seed was replaced."""
    for file in sorted(study.ROWS.glob("*.csv")):
        assert file.stem in study.RECIPES
        if file.stem == study.MEASURED_REAL:
            assert kept_noise.measured(file) == {(rows.REAL, 0, "start")}
            continue
        if file.stem in study.MEASURED:
            with study.composing(file.stem) as (_, sweep):
                asked = study_noise.policies(sweep.hydra.runtime.choices.task, study.runs_of(sweep, file.stem, None))
            assert kept_noise.measured(file) <= set(asked)
            continue
        wanted = set(study.keys_of(file.stem, seeds=None))
        assert rows.keys_in(file) <= wanted, file.name


# ---- learning rates


def search(scores: dict[float, float]) -> pd.DataFrame:
    return pd.DataFrame(
        [made_up(rate=rate, final=final, seed=seed) for rate, final in scores.items() for seed in (100, 101)]
    )


def test_the_rate_with_the_highest_mean_accuracy_is_chosen_and_of_equal_ones_the_smaller():
    best = rates.chosen(rates.scores(search({3e-4: 0.7, 1e-3: 0.8, 3e-3: 0.5})))
    assert best[["learning_rate", "edge"]].values.tolist() == [[1e-3, False]]
    best = rates.chosen(rates.scores(search({1e-4: 0.6, 3e-4: 0.8, 1e-3: 0.8005, 3e-3: 0.5})))
    assert best[["learning_rate", "edge"]].values.tolist() == [[3e-4, False]]


def test_an_arm_gets_no_rate_before_both_seeds_have_run_and_the_next_one_where_the_best_is_an_end_of_the_list():
    tried = {3e-4: 0.8, 1e-3: 0.7, 3e-3: 0.5}
    assert rates.chosen(rates.scores(search(tried))).empty
    best = rates.chosen(rates.scores(search(tried | {1e-4: 0.85})))
    assert best[["learning_rate", "edge"]].values.tolist() == [[1e-4, True]]  # the next one was tried, once
    middle = search({3e-4: 0.7, 1e-3: 0.8, 3e-3: 0.5})
    assert len(rates.chosen(rates.scores(middle))) == 1
    assert rates.chosen(rates.scores(middle[(middle.seed == 100) | (middle.learning_rate < 3e-3)])).empty


def test_a_diverged_run_keeps_its_last_accuracy_to_the_end():
    made = search({1e-3: 0.8, 3e-3: 0.8})
    made.loc[made.learning_rate == 3e-3, ["evaluation_accuracy", "outcome"]] = ["0.4", "diverged"]
    assert list(rates.scores(made).score) == pytest.approx([0.7, 0.4])


def test_rates_are_found_again_and_one_that_is_missing_names_its_search(tmp_path):
    begun = [
        made_up("rloo", rate=rate, seed=seed) for rate in (3e-4, 1e-3) for seed in (100, 101)
    ]  # a search that is not done
    rows.add([*search({3e-4: 0.8, 1e-3: 0.9, 3e-3: 0.5}).to_dict("records"), *begun], tmp_path / "rows.csv")
    rates.write_rates([tmp_path / "rows.csv"], tmp_path / "rates.yaml")
    assert rates.tuned_rate("arithmetic", "otb", 4, tmp_path / "rates.yaml") == 1e-3
    with pytest.raises(RunError, match="no learning rate for task=arithmetic baseline=rloo group_size=4"):
        rates.tuned_rate("arithmetic", "rloo", 4, tmp_path / "rates.yaml")
    with pytest.raises(RunError, match="no learning rate for task=arithmetic baseline=otb group_size=32"):
        rates.tuned_rate("arithmetic", "otb", 32, tmp_path / "rates.yaml")


def test_a_run_whose_rate_was_not_searched_for_is_refused_with_the_search_to_run():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", ["experiment=claim_c3_c4", "group_size=8"])
    with pytest.raises(RunError, match="no learning rate for task=arithmetic baseline=otb group_size=8. Run its"):
        check(cfg)


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
    assert verdicts.gradient_noise(noise(**half))[0][-2:] == (UNDECIDED, "end: nothing")
    assert verdicts.gradient_noise(noise(**LOW).assign(policies=2))[0].why == "2 of 3 policies"


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

    monkeypatch.setattr(study_noise, "typed", command)
    monkeypatch.setattr(study, "RUNS", str(tmp_path / "runs"))
    study.study({"claim_c1": 1}, None, None, tmp_path)
    assert [line[0] for line in typed] == ["variance", "run", "variance", "run", "variance"]
    assert "steps=40" in typed[1] and "steps=80" in typed[3]
    assert kept_noise.measured(tmp_path / "claim_c1.csv") == {("arithmetic", 1, stage) for stage in verdicts.STAGES}
    study.study({"claim_c1": 1}, None, None, tmp_path)
    assert len(typed) == 5
    study.study({"claim_c1": 1}, None, None, tmp_path / "other rows")  # as make study QUICK=1 after make study
    assert typed[5:] == typed[:5]
    del typed[5:]

    for _ in range(2):  # the second time there is nothing to do
        study.study({study.MEASURED_REAL: None}, None, None, tmp_path, ["model.name=weights"])
    assert [line[0] for line in typed[5:]] == ["warm_start", "variance"] and "model.name=weights" in typed[5]
    warm = next(given for given in typed[5] if given.startswith("output="))
    assert warm.replace("output=", "model.name=") in typed[6] and "model.lora.r=4" in typed[6]
    assert kept_noise.measured(tmp_path / "claim_c1_real.csv") == {(rows.REAL, 0, "start")}


def test_c3_is_supported_where_small_n_is_not_worse_by_two_points_and_empty_where_the_rival_does_as_well():
    comparisons = verdicts.accuracy_at_small_n(arms(otb_4=0.80, rloo_32=0.81, rloo_4=0.70))
    assert spoken(comparisons) == SUPPORTED and comparisons[0].why.startswith("probability of improvement")
    comparisons = verdicts.accuracy_at_small_n(arms(otb_4=0.80, rloo_32=0.81, rloo_4=0.805))
    assert spoken(comparisons) == SUPPORTED and comparisons[0].why.startswith("empty: RLOO, N=4 matches")


def test_c3_is_not_supported_where_small_n_is_worse_by_more():
    assert spoken(verdicts.accuracy_at_small_n(arms(otb_4=0.70, rloo_32=0.81, rloo_4=0.70))) == NOT_SUPPORTED


def test_nothing_is_decided_with_fewer_than_ten_seeds():
    made = [made_up(*arm, seed, 0.8) for arm in (("otb", 4), ("rloo", 32), ("rloo", 4)) for seed in range(9)]
    runs = verdicts.Runs(pd.DataFrame(made))
    for comparisons in (verdicts.accuracy_at_small_n(runs), verdicts.tokens_saved(runs)):
        assert spoken(comparisons) == UNDECIDED and "fewer than 10 seeds" in comparisons[0].why


def test_an_arm_with_two_runs_of_a_seed_is_refused():
    made = [made_up(rate=rate, seed=seed) for rate in (3e-4, 1e-4) for seed in SEEDS]
    with pytest.raises(RunError, match="OTB, N=4 has two rows of seed 0 on arithmetic"):
        verdicts.Runs(pd.DataFrame(made))


@pytest.mark.parametrize(
    ("large", "small", "verdict"),
    [
        ((0.6, 0.5, 0.7), (0.2, 0.1, 0.3), SUPPORTED),
        ((0.6, 0.5, 0.7), (0.05, -0.1, 0.2), UNDECIDED),
        ((0.6, 0.5, 0.7), (0.0, -0.1, 0.05), NOT_SUPPORTED),  # owed to N
        ((0.4, 0.3, 0.5), (0.2, 0.1, 0.3), NOT_SUPPORTED),  # less than is claimed
    ],
)
def test_c4_needs_the_claimed_saving_and_one_at_the_same_n(large, small, verdict):
    intervals = [verdicts.Interval(*ends, 10) for ends in (large, small)]
    assert verdicts.saving_verdict(*intervals) == verdict


def test_c4_reads_the_saving_off_the_tokens():
    made = [made_up("otb", 4, seed, 0.8) for seed in SEEDS] + [made_up("rloo", 4, seed, 0.8) for seed in SEEDS]
    made += [made_up("rloo", 32, seed, 0.8, tokens=8000.0) for seed in SEEDS]
    first, second, *_ = verdicts.tokens_saved(verdicts.Runs(pd.DataFrame(made)))
    assert first.effect.estimate == pytest.approx(7 / 8) and second.effect.estimate == pytest.approx(0)
    assert first.verdict == NOT_SUPPORTED and "RLOO, N=4 alone saves 0.875" in first.why


def test_c4_waits_for_every_arm_that_may_set_the_target_and_for_one_that_is_well_above_the_start():
    arms_of_c4 = {"otb_4": 0.8, "rloo_4": 0.8, "rloo_32": 0.8}
    waiting = [made_up("energy_probe", 4, 0, 0.9), *rows_of(**arms_of_c4)]
    first, *_ = verdicts.tokens_saved(verdicts.Runs(pd.DataFrame(waiting)))
    assert first.verdict == UNDECIDED and "energy probe, N=4: 1" in first.why
    first, *_ = verdicts.tokens_saved(arms(**dict.fromkeys(arms_of_c4, 0.48)))  # from .4: its target, .432, is near
    assert first.verdict == UNDECIDED and first.why.startswith("the start, 0.400, is too near to the target")


def test_a_run_that_breaks_early_speaks_against_its_arm_whatever_its_few_tokens():
    """Censored at its own tokens it would leave the comparison to the runs that did well."""
    made = [made_up("otb", 4, seed, 0.8) for seed in SEEDS] + [
        made_up("rloo", 4, seed, 0.8, tokens=2000.0) for seed in SEEDS
    ]
    whole = verdicts.saved(verdicts.Runs(pd.DataFrame(made)), ("otb", 4), ("rloo", 4), 0.7)
    assert whole.estimate == pytest.approx(1 / 2)
    for row in made[:4]:  # runs of OTB
        row |= {"evaluation_accuracy": "0.4 0.1 0", "evaluation_own_tokens_total": "0 10 20"}
        row |= {"accuracy": " ".join(["0.5"] * 5 + ["0"] * 15), "own_tokens_total": " ".join(map(str, range(20)))}
    broken = verdicts.saved(verdicts.Runs(pd.DataFrame(made)), ("otb", 4), ("rloo", 4), 0.7)
    assert broken.estimate == pytest.approx(
        1 - (6 * 1 + 4 * 2) / (10 * 2)
    )  # up to where RLOO arrives, with twice the tokens


def test_c4_says_where_a_comparison_is_cut_off():
    """No run of OTB gets to the target in its 8 evaluations; RLOO's get there long after the last of them."""
    made = [made_up("otb", 4, seed, 0.5) for seed in SEEDS]
    made += [made_up("rloo", 32, seed, 0.8, tokens=80000.0) for seed in SEEDS]
    runs = verdicts.Runs(pd.DataFrame(made))
    text = verdicts.censored_text((runs, ("otb", 4)), (runs, ("rloo", 32)), 0.72)
    assert text.startswith("10 of 10 runs of OTB, N=4 censored, cut off at ") and text.endswith("a lower bound")
    assert verdicts.censored_text((runs, ("otb", 4)), (runs, ("rloo", 4)), 0.72) == "RLOO, N=4 was not run"


def test_a_saving_is_called_a_lower_bound_where_no_run_of_the_rival_arrives_before_it_is_cut_off():
    """The rival's runs arrive never, or one of ten does with 10,000 tokens; OTB's last run ends with 20,000."""
    made = [made_up("otb", 4, seed, 0.8 if seed else 0.5) for seed in SEEDS]

    def text(arriving: int) -> str:
        rival = [made_up("rloo", 4, seed, 0.8 if seed < arriving else 0.5, tokens=500.0 + 200 * seed) for seed in SEEDS]
        runs = verdicts.Runs(pd.DataFrame(made + rival))
        return verdicts.censored_text((runs, ("otb", 4)), (runs, ("rloo", 4)), 0.72)

    censored = "1 of 10 runs of OTB, N=4 censored"
    assert text(0) == f"{censored}, 10 of 10 runs of RLOO, N=4 censored: a lower bound"
    assert text(1) == f"{censored}, 9 of 10 runs of RLOO, N=4 censored"


def test_ends_of_the_savings_that_are_judged_do_not_hang_on_the_seed_of_the_bootstrap():
    """On arithmetic, against RLOO at N = 4, with 2,000 resamples the lower end was .004 to .023."""
    runs = verdicts.Runs(rows.read(study.ROWS / "claim_c3_c4.csv").query("baseline in ['otb', 'rloo']"))
    best = verdicts.Runs(rows.read(study.ROWS / "claim_c3_c4_32.csv")).best_final
    ours, theirs = (runs.consumption((arm, 4), verdicts.TARGETS[0] * best) for arm in ("otb", "rloo"))
    found = [saving(ours, theirs, resamples=verdicts.RESAMPLES, seed=seed) for seed in range(4)]
    spoken = verdicts.saved(runs, ("otb", 4), ("rloo", 4), verdicts.TARGETS[0] * best)
    assert spoken == found[0]
    assert np.ptp([interval.low for interval in found]) < 0.003 > np.ptp([interval.high for interval in found])
    assert [interval.low for interval in found] == pytest.approx([0.0104] * 4, abs=0.0015)  # of all 92,378 draws


def test_c4_is_not_refuted_by_a_lower_bound():
    """Every run of OTB arrives with an eighth of the tokens but one, which ends before any of the rival's arrives."""
    made = [made_up("otb", 4, seed, 0.8 if seed else 0.5) for seed in SEEDS]
    made += [made_up("rloo", 4, seed, 0.8, tokens=3000.0) for seed in SEEDS]
    made += [made_up("rloo", 32, seed, 0.8, tokens=80000.0) for seed in SEEDS]
    first, *others = verdicts.tokens_saved(verdicts.Runs(pd.DataFrame(made)))
    assert first.effect.high < verdicts.CLAIMED_SAVING
    assert first.verdict == UNDECIDED and "a lower bound; by the rules' form before" in first.why
    (medians,) = (other for other in others if other.what.endswith("by medians"))
    assert medians.effect.estimate == pytest.approx(1 - 1 / 80) and not medians.verdict


@pytest.mark.parametrize(
    ("rival", "ours", "verdict"),
    [((1, 40), (0, 40), UNDECIDED), ((30, 40), (5, 40), SUPPORTED), ((30, 40), (32, 40), NOT_SUPPORTED)],
)
def test_c2_is_put_to_the_test_by_a_rival_that_collapses(rival, ours, verdict):
    assert verdicts.collapse_verdict(verdicts.share_difference(rival, ours), rival)[0] == verdict


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
    assert found.why.startswith(
        "2 of 30 settings, in 1 of them some runs collapse and others do not; by the rules' first form"
    )
    assert found.effect.seeds == 10
    few = pd.DataFrame(made).query("seed < 2")
    (found,) = verdicts.collapses(few)
    assert found.what == "RLOO (4 of 6) minus OTB (0 of 6)" and found.effect.seeds == 2
    assert found.verdict == UNDECIDED and found.why.startswith("3 of 30 settings") and "fewer than 10" in found.why
    (found,) = verdicts.collapses(few[few.baseline == "otb"])
    assert found.verdict == UNDECIDED and found.why == "no setting has both arms"


def test_c2_beside_its_grid_speaks_no_verdict_of_its_own():
    made = [made_up(arm, seed=seed, rate=1.6e-3) | {"varied": ""} for seed in SEEDS for arm in ("otb", "rloo")]
    for run in made[1::2]:
        run["accuracy"] = " ".join(["1"] * 10 + ["0"] * 10)
    found = verdicts.collapses_beside(pd.DataFrame(made), "rates between")
    assert found.what == "rates between: RLOO (10 of 10) minus OTB (0 of 10)"
    assert (found.verdict, found.why) == ("", f"by the same rule: {SUPPORTED}")
    made.append(made_up("otb", seed=0, rate=2e-3) | {"varied": ""})
    found = verdicts.collapses_beside(pd.DataFrame(made), "rates between")
    assert found.why == f"by the same rule: {SUPPORTED}; settings left out for want of seeds: 1"


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


def test_rollouts_of_a_step_are_divided_in_two_ways():
    wide = arms(otb_4=0.8, rloo_4=0.8)
    found = verdicts.rollouts_divided(wide, arms(rloo_32=0.7))
    assert [comparison.what.partition(":")[0] for comparison in found] == ["RLOO", "RLOO"]
    assert found[0].effect.estimate == pytest.approx(0.7 - 0.625)  # means of the last two evaluations
    assert found[1].why == "no run censored" and not found[1].verdict
    assert found[0].why.startswith("probability of improvement")


# ---- the page, and the command


def test_the_page_is_made_of_csv_files_alone(tmp_path):
    made = [made_up(*arm, seed, 0.8) for arm in (("otb", 4), ("rloo", 32), ("rloo", 4)) for seed in SEEDS]
    rows.add(made, tmp_path / "rows" / "claim_c3_c4.csv")
    rows.add([made_up(rate=3e-4, seed=100)], tmp_path / "rows" / "claim_rates.csv")
    (tmp_path / "comments.md").write_text("# By hand\n\n## C3 on arithmetic\n\nOf C3.\n\n## In short\n\nOf all.\n")
    assert main(["report", "--folder", str(tmp_path)]) == 0
    page = (tmp_path / "README.md").read_text()
    assert "| C3 | `arithmetic` | supported |" in page and "empty: RLOO, N=4 matches" in page
    assert "| RLOO, N=32 | 0.001 | 0.7 [0.7, 0.7] | 20 | 20 [20, 20] | 20,000 |" in page  # where the runs of an arm end
    assert page.index("Of all.") < page.index("## Verdicts") < page.index("Of C3.")
    assert "- `claim_c3_c4`: 30 of 80 runs" in page and "- `claim_c2`: 0 of 120 runs" in page
    table = pd.read_csv(tmp_path / "verdicts.csv")
    assert set(table.verdict.dropna()) == {SUPPORTED, NOT_SUPPORTED}
    assert (tmp_path / "figures" / "c3_arithmetic.png").stat().st_size > 5000


def test_the_committed_pages_are_what_the_committed_rows_say(tmp_path):
    """The page of the study and the table of verdicts on the front page."""
    made_from = [*study.ROWS.glob("*.csv"), ROOT / "benchmarks" / "results.csv", ROOT / "README.md"]
    made_from.append(study.ROWS.parent / "comments.md")
    for file in made_from:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    assert main(["report", "--folder", str(tmp_path / "docs" / "study")]) == 0
    for name in ("README.md", "study/README.md", "study/verdicts.csv"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), "run make report-study"


def test_c5_is_read_off_the_benchmark(tmp_path):
    def spoken_at(value: float) -> str:
        rows = [{"name": verdicts.OVERHEAD, "unit": "ratio", "value": value, "low": value - 0.02, "high": value + 0.02}]
        rows.append({"name": verdicts.LEAN_STEP, "unit": "ratio", "value": 1.0, "low": 0.9, "high": 1.1})
        pd.DataFrame(rows).assign(pairs=40).to_csv(tmp_path / "results.csv", index=False)
        return spoken(verdicts.cost(tmp_path / "results.csv"))

    assert [spoken_at(value) for value in (0.3, 0.49, 0.7)] == [SUPPORTED, UNDECIDED, NOT_SUPPORTED]
    assert verdicts.cost(tmp_path / "none.csv") == []


def test_the_rules_name_the_numbers_that_the_verdicts_use():
    text = " ".join((study.ROWS.parent / "rules.md").read_text().split())
    assert f"not worse by {verdicts.MATCHES:g}".replace("0.", ".") in text
    assert f"reaches {verdicts.CLAIMED_SAVING:g}".replace("0.", ".") in text
    assert f"Fewer than {verdicts.SEEDS} seeds" in text
    assert f"to {rates.TIE:g}".replace("0.", ".") in text
    assert f"of {verdicts.RESAMPLES:,} resamples" in text and f"those of C1 of {kept_noise.RESAMPLES:,}" in text
    assert f"of {verdicts.RESAMPLES:,} resamples (C1: {kept_noise.RESAMPLES:,})" in report.HEAD


def test_the_page_of_the_long_task_quotes_what_a_step_takes_in_its_rows():
    page = " ".join((study.ROWS.parent / "arithmetic_long.md").read_text().split())
    small, large = (rows.read(study.ROWS / f"claim_c3_c4_long{end}.csv").seconds_step for end in ("", "_32"))
    assert (len(small), len(large)) == (50, 10)
    said = f"takes {small.median():.1f} s (median over the fifty runs of *C3* of each one's median; "
    assert f"{said}{small.min():.1f} to {small.max():.1f})" in page
    assert f"at N = 32 {large.median():.0f} s ({large.min():.0f} to {large.max():.0f}; ten runs)" in page


def test_the_command_runs_what_has_no_row_seed_by_seed_and_skips_the_rest(tmp_path, monkeypatch, capsys):
    started: list = []

    class Sweep:
        def __init__(self, folder, jobs, *args, **kwargs):
            started.extend(jobs)

        def run(self):
            pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "LocalSweep", Sweep)
    keys = study.keys_of("claim_rates", seeds=1)
    known = {"key": list(keys)[0], **{name: value for name, value in made_up().items() if name != "key"}}
    rows.add([known], tmp_path / "rows" / "claim_rates.csv")
    study.study({"claim_rates": 1}, parallel=None, made=None, folder=tmp_path / "rows")
    assert len(started) == len(keys) - 1 == 23
    assert f"claim_rates: {len(keys)} runs, 1 of them have a row" in capsys.readouterr().out
    assert all("seed=100" in job.overrides for job in started)


def test_a_recipe_whose_rates_were_not_searched_for_is_refused_with_the_search_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(rates.tuned_rate, "__defaults__", (tmp_path / "none.yaml",))
    with pytest.raises(
        RunError, match="no learning rate for task=arithmetic baseline=none group_size=4. Run its search"
    ):
        study.keys_of("claim_c3_c4", seeds=1)


def test_the_quick_form_runs_the_arms_that_verdicts_compare_with_the_seeds_that_an_interval_takes():
    assert study.QUICK_ARMS == (verdicts.OURS, verdicts.RIVAL)
    keys = {recipe: study.keys_of(recipe, seeds, study.QUICK_ARMS) for recipe, seeds in study.QUICK.items()}
    asked = {recipe: list(runs.values()) for recipe, runs in keys.items()}
    assert [len(runs) for runs in asked.values()] == [6, 3, 1, 36]
    for recipe in ("claim_c3_c4", "claim_c3_c4_32", "claim_c2"):
        assert {run[-1] for run in asked[recipe]} == {"seed=0", "seed=1", "seed=2"}


def test_the_quick_form_speaks_every_verdict_that_runs_speak(capsys):
    assert {*report.OTHERS.values(), report.MAIN} - {"claim_fixed_rollouts", "claim_c2_updates"} <= study.QUICK.keys()
    assert study.QUICK.keys() <= set(study.RECIPES)
    with pytest.raises(SystemExit) as end:
        study.command_line(["claim_c2", "--quick"])
    assert end.value.code == 2 and "--quick chooses" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["claim_c2", "--seeds", "-1"], "--seeds -1 must be at least 1"),
        (["--quick", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["claim_c2", "--collect", "/nowhere"], "--collect /nowhere is no folder"),
        (["claim_c1", "--collect", "."], "--collect has no rows of claim_c1"),
        (["claim_c9"], "claim_c9 is no recipe of the study"),
    ],
)
def test_what_the_command_cannot_do_as_typed_is_refused(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        study.command_line(arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_every_recipe_of_the_study_is_one_that_the_command_knows():
    files = (path.stem for path in (CONF / "experiment").glob("*.yaml"))
    assert sorted(name for name in files if name.startswith(("claim_", "neighbours_"))) == sorted(
        name for name in study.RECIPES if name != study.MEASURED_REAL
    )
    if rates.RATES.exists():
        assert yaml.safe_load(rates.RATES.read_text())


# ---- methods beside the baseline


def with_method(varied: str, final: float, **given) -> list[dict]:
    return [made_up(seed=seed, final=final + 0.01 * (seed % 3 - 1), **given) | {"varied": varied} for seed in range(5)]


def test_methods_are_compared_with_off_seed_by_seed():
    made = [*with_method("improvement=none", 0.8), *with_method("improvement=pipo", 0.85)]
    found = methods.comparison(pd.DataFrame(made), "improvement=none").set_index("variant")
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
    off, pipo = methods.comparison(pd.DataFrame(made), "improvement=none").sort_values("variant").to_dict("records")
    # 16 (1 + 49) / 2 x norm^2; of the seeds' norms .5 to 2.5 the middle three are averaged, by their logarithms
    assert off["noise"] == pytest.approx(400 * (1.0 * 1.5 * 2.0) ** (2 / 3))
    assert [pipo[f"noise_ratio{end}"] for end in ("", "_low", "_high")] == pytest.approx([9, 9, 9])
    assert np.isnan(off["noise_ratio"])


def test_the_page_of_methods_has_a_table_and_a_figure_per_recipe_that_has_rows(tmp_path):
    made = [*with_method("improvement=none", 0.8), *with_method("improvement=pipo", 0.85)]
    rows_of = {"neighbours_improvement": pd.DataFrame(made)}
    methods.write_methods(rows_of, tmp_path)
    page = (tmp_path / "comparison.md").read_text()
    assert "Improvement updates" in page and "Token weights" not in page and "`improvement=pipo`" in page
    assert (tmp_path / "figures" / "neighbours_improvement.png").stat().st_size > 5000
    assert methods.write_methods({}, tmp_path / "none") == [] and not (tmp_path / "none").exists()


def test_a_question_that_several_recipes_answer_is_one_table(tmp_path):
    off, decayed, cosine = ("schedule.floor=1.0", "schedule.floor=0.1", "trainer.lr_scheduler_type=cosine")
    rows_of = {
        "neighbours_schedule": pd.DataFrame([*with_method(off, 0.1), *with_method(decayed, 0.1)]),
        "neighbours_schedule_cosine": pd.DataFrame(with_method(cosine, 0.3)),
    }
    methods.write_methods(rows_of, tmp_path)
    page = (tmp_path / "comparison.md").read_text()
    assert page.count("\n## ") == 1 and "study.py neighbours_schedule neighbours_schedule_cosine`" in page
    (found,) = pd.read_csv(tmp_path / "comparison.csv").query("variant == @cosine").to_dict("records")
    assert found["difference"] == pytest.approx(0.15)  # of the last two of three evaluations, half of .2 and .2


def test_a_figure_of_methods_has_a_row_for_each_learning_rate():
    made = [
        run
        for rate in (2e-4, 2e-3)
        for varied in ("schedule.floor=1.0", "schedule.floor=0.1")
        for run in with_method(varied, 0.8, rate=rate)
    ]
    ((ax,),) = methods.drawing(
        methods.comparison(pd.DataFrame(made), "schedule.floor=1.0"), "title", "schedule.floor=1.0"
    )
    named = [text.get_text() for text in ax.get_yticklabels()]
    assert [name.rpartition(", ")[2] for name in named] == ["learning rate 0.002", "learning rate 0.0002"]
    plt.close(ax.figure)


def test_what_a_recipe_varies_beside_the_usual_columns_is_kept_with_its_runs():
    run = [
        "experiment=neighbours_improvement",
        "runs_dir=runs",
        "task=arithmetic",
        "baseline=otb",
        "improvement=pipo",
        "seed=0",
    ]
    assert study.varied_by(run) == "improvement=pipo"
    for recipe, question in methods.QUESTIONS.items():
        with study.composing(recipe) as (_, sweep):
            assert question.off in {study.varied_by(run) for run in study.runs_of(sweep, recipe, 1)}
