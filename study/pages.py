"""Writes study/README.md and its figures from the csv files alone. `python -m study report`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.arms import by_arm, label
from analysis.claims.rules import RESAMPLES, Comparison
from analysis.group_size import final_accuracy
from analysis.intervals import bootstrap, iqm
from analysis.report.markdown import markdown_table
from otb.errors import RunError
from study import verdicts
from study.collapses import cells, cells_section, room_section
from study.collected import BESIDE_C2, FIXED, MAIN, OTHERS, REAL, numbers, of_kind, read, steps_table
from study.figures import figures
from study.moments import relative_noise
from study.neighbours import write_methods
from study.rates import SEARCH, chosen, scores
from study.recipes import recipes
from study.verdicts import runs_of

HEAD = """\
# The study: a verdict per claim

Written by `python -m study report` (`make report-study`) from the rows in `rows/`, by the rules in
[rules.md](rules.md), which were committed before the runs; what was changed later, and when, stands at their end. Every
finished run has a row (a commit with + had uncommitted changes); `make study` runs what has none. What arms are called:
[baselines](../baselines.md). All of it is from the tiny policy (0.35 M parameters) on a CPU, but for rows that name
another model. What stands below the tables is written by hand ([comments](comments.md)). Why there is a long task:
[arithmetic_long](arithmetic_long.md).

Intervals are 95 % ([analysis.md](../analysis.md)), of 100,000 resamples (C1: 20,000). Estimates are, for C1, ratios
of sums over the prompts of three policies, with intervals over prompts that say nothing of a fourth policy; for C2,
differences of shares of runs (Newcombe); for C3, interquartile means of the differences of final accuracies, paired
by seed (not the differences of the arms' own means in the tables of arms), and the probability of improvement,
unpaired; for C4, one minus the ratio of the mean tokens to the target, paired by seed. All runs of C2 to C4 start
from one policy and are evaluated on the same held-out prompts (128; tools: 64), on which rates were chosen too, so
that intervals say nothing of other policies or prompts. Comparisons that speak no verdict are not corrected for their
number.
"""
COMMANDS = {  # {0}: what the names of a task's recipes end with
    "C1": "python -m study claim_c1{0}",
    "C2": "python -m study claim_c2{0}",
    "C3": "python -m study claim_c3_c4{0} claim_c3_c4{0}_32",
    "C4": "python -m study claim_c3_c4{0} claim_c3_c4{0}_32",
    "C5": "make bench",
}
CLAIMS = {
    "C1": "OTB lowers the gradient variance",
    "C2": "group baselines collapse, OTB does not",
    "C3": "OTB at N = 4 matches group baselines at N = 32",
    "C4": "62 to 66 % fewer tokens to the same accuracy",
    "C5": "no extra backward pass",
}
FRONT_BEGIN, FRONT_END = "<!-- verdicts: make report-study -->", "<!-- end of verdicts -->"
RECIPE_ENDS = {"arithmetic": "", "arithmetic_tools": "_tools", "arithmetic_long": "_long", REAL: "_real"}
BIASED = ("grpo", "otb", "otb_carry", "otb_exact", "sequence_energy")  # estimators whose mean is not the true gradient
BIAS_TEXT = "Squared sine of the angle between an estimator's mean and the true gradient, which noise leaves out:"
ARMS_TEXT = "Final accuracy: interquartile mean. Lengths: own tokens of held-out samples, means over seeds."
SAMPLES = "seeds (C1: policies, C5: pairs of steps)"


def write(folder: Path) -> list[Path]:
    """Writes README.md, verdicts.csv and the figures into the folder of the study and returns them.

    Raises RunError where it holds no rows.
    """
    rows = {file.stem: read(file) for file in sorted((folder / "rows").glob("*.csv"))}
    if not rows:
        raise RunError(f"{folder}/rows holds no csv file. Run python -m study first.")
    root = folder.parent
    noise = noise_by_task(rows)
    spoken = [*all_comparisons(rows, noise), *verdicts.cost(root / "benchmarks" / "results.csv")]
    drawn = figures(rows, noise, folder / "figures")
    comments = comments_in(folder / "comments.md")
    text = [
        HEAD,
        *in_short(comments),
        *summary(spoken),
        *sections(spoken, noise, rows, drawn, comments),
        *search_section(rows),
        *not_run(rows, comments),
    ]
    (folder / "README.md").write_text("\n".join(text), encoding="utf8")
    table(spoken).to_csv(folder / "verdicts.csv", index=False, float_format="%.6g")
    written = [folder / "README.md", folder / "verdicts.csv", *drawn.values()]
    written += write_methods(rows, root / "docs" / "neighbours")
    if (page := root / "README.md").exists():
        write_front_page(page, spoken)
        written.append(page)
    return written


def all_comparisons(rows: dict[str, pd.DataFrame], noise: dict[str, pd.DataFrame]) -> list[Comparison]:
    """Returns the comparisons of every claim and task that has rows. noise: as `noise_by_task` returns it."""
    found: list[Comparison] = []
    for results in noise.values():
        found += verdicts.gradient_noise(results)
    for _, part in of_kind(rows, MAIN).groupby("task"):
        runs = runs_of(part)
        found += verdicts.accuracy_at_small_n(runs) + verdicts.tokens_saved(runs)
        if not (deep := of_kind(rows, OTHERS[FIXED]).query("task == @runs.task")).empty:
            found += verdicts.rollouts_divided(runs, runs_of(deep))
    grid = {name: part for name, part in rows.items() if name not in BESIDE_C2}
    for _, part in of_kind(grid, OTHERS["C2"]).groupby("task"):
        found += verdicts.collapses(part)
    for recipe, words in BESIDE_C2.items():
        if recipe in rows:
            found += [verdicts.collapses_beside(part, words) for _, part in rows[recipe].groupby("task")]
    return found


def noise_by_task(rows: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Returns task -> noise of its estimators, from the measurements of claim C1."""
    moments = of_kind(rows, OTHERS["C1"])
    return {} if moments.empty else {str(task): part for task, part in relative_noise(moments).groupby("task")}


def table(spoken: list[Comparison]) -> pd.DataFrame:
    """Returns a row per comparison."""
    facts = ({"claim": c.claim, "task": c.task, "comparison": c.what, **c.effect._asdict()} for c in spoken)
    ends = ({"verdict": c.verdict, "why": c.why} for c in spoken)
    return pd.DataFrame([fact | end for fact, end in zip(facts, ends, strict=True)])


def decisive(spoken: list[Comparison]) -> list[Comparison]:
    """Returns the comparisons that speak a verdict, by claim and task."""
    return sorted((c for c in spoken if c.verdict), key=lambda c: (c.claim, c.task))


def summary(spoken: list[Comparison]) -> list[str]:
    """Returns the table of verdicts: claim, task, verdict, effect, seeds, command."""
    rows = [
        {
            "claim": c.claim,
            "task": f"`{c.task}`",
            "verdict": c.verdict,
            "effect": effect_text(c),
            SAMPLES: c.effect.seeds,
            "compared": c.what,
            "why": c.why,
            "command": f"`{command_of(c)}`",
        }
        for c in decisive(spoken)
    ]
    return ["## Verdicts", "", markdown_table(pd.DataFrame(rows)), ""]


def command_of(comparison: Comparison) -> str:
    """Returns the command that makes the rows of a comparison."""
    command = COMMANDS[comparison.claim].format(RECIPE_ENDS[comparison.task])
    return command.replace(" claim_c3_c4_real_32", "")  # there the real model was not trained


def effect_text(comparison: Comparison) -> str:
    """Returns an effect with its interval."""
    return "not measured" if np.isnan(comparison.effect.estimate) else str(comparison.effect)


def sections(
    spoken: list[Comparison],
    noise: dict[str, pd.DataFrame],
    rows: dict[str, pd.DataFrame],
    drawn: dict[tuple[str, str], Path],
    comments: dict[str, str],
) -> list[str]:
    """Returns a section per claim and task: its comparisons, its figure and what was written of it by hand."""
    lines = []
    for claim, task in dict.fromkeys((c.claim, c.task) for c in sorted(spoken, key=lambda c: (c.claim, c.task))):
        of_both = [c for c in spoken if (c.claim, c.task) == (claim, task)]
        tables = noise_section(of_both[0], noise[task]) if claim == "C1" else comparison_section(of_both)
        if claim == "C2":
            found = cells(of_kind(rows, OTHERS["C2"]).query("task == @task"))
            tables += ["", cells_section(found), "", *room_section(found)]
        if claim == "C3":
            tables += ["", ARMS_TEXT, "", arms_table(of_kind(rows, MAIN).query("task == @task"))]
        lines += [f"## {claim} on `{task}`", "", *tables, ""]
        if (claim, task) in drawn:
            file = drawn[claim, task]
            lines += [f"![{claim} on {task}](figures/{file.name})", ""]
        if comment := comments.get(f"{claim} on {task}"):
            lines += [comment, ""]
    return lines


def in_short(comments: dict[str, str]) -> list[str]:
    """Returns the section that sums up all claims, as written by hand; nothing where there is none."""
    return ["## In short", "", comments["In short"], ""] if "In short" in comments else []


def comments_in(file: Path) -> dict[str, str]:
    """Returns heading -> what stands below it in a page; nothing where there is none."""
    if not file.exists():
        return {}
    _, *parts = file.read_text(encoding="utf8").split("\n## ")
    return {name: text.strip() for name, _, text in (part.partition("\n") for part in parts)}


def comparison_section(comparisons: list[Comparison]) -> list[str]:
    """Returns a table with a row per comparison."""
    rows = [
        {"compared": c.what, "effect": effect_text(c), "seeds": c.effect.seeds, "verdict": c.verdict, "": c.why}
        for c in comparisons
    ]
    return [markdown_table(pd.DataFrame(rows))]


def arms_table(rows: pd.DataFrame) -> str:
    """Returns a table with a row per arm: its rate, where its runs end, how long responses are then, what a run costs.

    rows: of one task.
    """
    finals = final_accuracy(steps_table(rows)).set_index("run").final
    shown, mean = [], partial(np.mean, axis=0)
    for baseline, size, _, part in by_arm(rows):
        lengths = np.array([numbers(cell)[[0, -1]] for cell in part.evaluation_response_length_mean])
        arm = {"arm": label(baseline, size), "learning rate": ", ".join(f"{x:g}" for x in part.learning_rate.unique())}
        arm["final accuracy"] = str(bootstrap([finals[part.key]], iqm, resamples=RESAMPLES, bounds=(0, 1)))
        arm["mean response length, start"] = f"{lengths[:, 0].mean():.3g}"
        arm["mean response length, end"] = str(bootstrap([lengths[:, 1]], mean, resamples=RESAMPLES))
        arm["own tokens of a run"] = f"{np.mean([numbers(cell)[-1] for cell in part.own_tokens_total]):,.0f}"
        shown.append(arm)
    return markdown_table(pd.DataFrame(shown))


def noise_section(decided: Comparison, results: pd.DataFrame) -> list[str]:
    """Returns the decision on C1, OTB's noise by policy, and tables of noise and bias at the two sizes that speak."""
    sizes = verdicts.sizes_of(results)
    judged = results[results.group_size.isin(sizes)]
    judged = judged.assign(stage=pd.Categorical(judged.stage, verdicts.STAGES)).sort_values(["group_size", "stage"])
    ours = judged[judged.estimator == verdicts.OURS]
    places = zip(ours.stage, ours.group_size, ours.by_policy, strict=True)
    by_policy = (f"{stage}, N={size}: {listed(values)}" for stage, size, values in places)
    lines = [f"{decided.what}: {effect_text(decided)}, {decided.verdict}. Other group sizes: verdicts.csv."]
    if results.policies.max() > 1:
        lines += ["", f"{label(verdicts.OURS)}'s of each policy by itself: {'; '.join(by_policy)}."]
    others = judged[judged.estimator != verdicts.RIVAL]
    lines += ["", stages_table(others, "relative_noise", "noise / RLOO")]
    biased = others[others.estimator.isin(BIASED)]
    return [*lines, "", BIAS_TEXT, "", stages_table(biased, "direction_bias", "bias of the direction")]


def listed(values: tuple[float, ...]) -> str:
    """Returns numbers in words."""
    return ", ".join(f"{value:.2g}" for value in values)


def stages_table(results: pd.DataFrame, statistic: str, name: str) -> str:
    """Returns a table with a row per estimator and a column per group size and stage, of a statistic with its interval.

    results: in the order of the columns. name: of the statistic.
    """
    texts = [str(effect) for effect in verdicts.noise_effects(results, statistic)]
    columns = [f"{stage}, N={size}" for stage, size in zip(results.stage, results.group_size, strict=True)]
    shown = pd.DataFrame({name: results.estimator.map(label), "column": columns, "cell": texts})
    wide = shown.pivot(index=name, columns="column", values="cell")[list(dict.fromkeys(columns))].fillna("")
    return markdown_table(wide.sort_index(key=lambda arms: arms.str.lower()).reset_index())


def front_table(spoken: list[Comparison]) -> str:
    """Returns the table of the front page: a row per claim and task."""
    rows = [
        {
            "claim of the paper": f"{c.claim}: {CLAIMS[c.claim]}",
            "task": f"`{c.task}`",
            "verdict": f"**{c.verdict}**",
            "effect": f"{c.what}: {effect_text(c)}",
            SAMPLES: c.effect.seeds,
            "what it hangs on": c.why,
            "command": f"`{command_of(c)}`",
        }
        for c in decisive(spoken)
    ]
    return markdown_table(pd.DataFrame(rows))


def write_front_page(page: Path, spoken: list[Comparison]) -> None:
    """Puts the table of verdicts between the marks of the front page."""
    before, begin, rest = page.read_text(encoding="utf8").partition(FRONT_BEGIN)
    _, end, after = rest.partition(FRONT_END)
    page.write_text(f"{before}{begin}\n{front_table(spoken)}\n{end}{after}", encoding="utf8")


def search_section(rows: dict[str, pd.DataFrame]) -> list[str]:
    """Returns the table of the learning-rate search."""
    searched = of_kind(rows, SEARCH)
    if searched.empty:
        return []
    tried = scores(searched)
    best = chosen(tried)[["task", "baseline", "group_size", "learning_rate", "edge"]]
    wide = tried.pivot(index=["task", "baseline", "group_size"], columns="learning_rate", values="score").reset_index()
    wide = wide.merge(best.rename(columns={"learning_rate": "chosen", "edge": "end of the list"}), how="left")
    wide["chosen"] = wide.chosen.astype(object).where(wide.chosen.notna(), "none yet")
    wide.columns = [str(column) for column in wide.columns]
    about = (
        "Mean held-out accuracy over all evaluations after the start, by learning rate; seeds 100 and 101. An arm has "
        "no rate yet where a seed is missing, or the best of three is an end of the list and the next was not tried."
    )
    return ["## Learning rates", "", about, "", markdown_table(wide), ""]


def not_run(rows: dict[str, pd.DataFrame], comments: dict[str, str]) -> list[str]:
    """Returns which recipes have no row, or fewer than they have runs, and what was written of that by hand."""
    missing = []
    for recipe in recipes().values():
        have = len(rows.get(recipe.name, ()))
        if have < recipe.count:
            missing.append(f"- `{recipe.name}`: {have} of {recipe.count} runs")
    parts = ["\n".join(missing), comments.get("Not run yet", "")]
    return ["## Not run yet", "", *(f"{part}\n" for part in parts if part)] if any(parts) else []
