"""Makes the tables of the study's pages."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from analysis.arms import by_arm, label
from analysis.claims.rules import RESAMPLES, RIVAL, Comparison
from analysis.group_size import final_accuracy
from analysis.intervals import bootstrap, iqm
from analysis.report.markdown import markdown_table
from study import verdicts
from study.answer import effect_text
from study.collected import numbers, of_kind, steps_table
from study.rates import SEARCH, chosen, scores
from study.recipes import recipes

BIASED = ("grpo", "otb", "otb_carry", "otb_exact", "sequence_energy")  # estimators whose mean is not the true gradient
BIAS_TEXT = "Bias, the squared sine of the angle between an estimator's mean and the true gradient:"
ARMS_TEXT = "Final accuracy: interquartile mean. Lengths: own tokens of held-out samples, means over seeds."
SAMPLES = {"C1": "policy", "C5": "pairs of steps"}  # the units of an interval; of the other claims: seeds
COMMANDS = {  # {0}: the end of the names of a task's recipes
    "C1": "python -m study claim_c1{0}",
    "C2": "python -m study claim_c2{0}",
    "C3": "python -m study claim_c3_c4{0} claim_c3_c4{0}_32",
    "C4": "python -m study claim_c3_c4{0} claim_c3_c4{0}_32",
    "C5": "make bench",
}
REAL_ONLY = " claim_c3_c4_real_32"  # is no recipe: the real model was trained at N = 4 alone


def evidence_table(found: list[Comparison], ends: dict[str, str]) -> str:
    """Returns the table of the deciding comparisons, with the command that makes their rows.

    ends: task -> end of the names of its recipes.
    """
    deciding = sorted((c for c in found if c.verdict), key=lambda c: (c.claim, c.task))
    rows = [
        {
            "claim": f"[{c.claim}]({c.claim.lower()}.md)",
            "task": c.task,
            "verdict": c.verdict,
            "compared": c.what,
            "effect": effect_text(c.effect),
            "units": f"{c.effect.seeds} {SAMPLES.get(c.claim, 'seeds')}".replace("3 policy", "3 policies"),
            "command": f"`{COMMANDS[c.claim].format(ends[c.task]).replace(REAL_ONLY, '')}`",
        }
        for c in deciding
    ]
    return markdown_table(pd.DataFrame(rows))


def comparison_table(comparisons: list[Comparison]) -> list[str]:
    """Returns a table with a row per comparison, and footnotes with the verdicts under the original rule."""
    notes: list[str] = []
    rows = []
    for c in comparisons:
        mark = ""
        if c.original:
            notes.append(f"({len(notes) + 1}) Under the original rule: {c.original}.")
            mark = f" ({len(notes)})"
        row = {
            "compared": c.what,
            "effect": effect_text(c.effect),
            "seeds": c.effect.seeds,
            "verdict": c.verdict + mark,
        }
        rows.append(row | {"remarks": c.why})
    return [markdown_table(pd.DataFrame(rows)), *(line for note in notes for line in ("", note))]


def noise_tables(decided: Comparison, results: pd.DataFrame) -> list[str]:
    """Returns the decision on C1, OTB's noise by policy, and tables of noise and bias at the two N that decide."""
    sizes = verdicts.sizes_of(results)
    judged = results[results.group_size.isin(sizes)]
    judged = judged.assign(stage=pd.Categorical(judged.stage, verdicts.STAGES)).sort_values(["group_size", "stage"])
    lines = comparison_table([decided])
    if results.policies.max() > 1:
        ours = judged[judged.estimator == verdicts.OURS]
        places = zip(ours.stage, ours.group_size, ours.by_policy, strict=True)
        listed = (
            f"{stage}, N={size}: {', '.join(f'{value:.2g}' for value in values)}" for stage, size, values in places
        )
        lines += ["", f"{label(verdicts.OURS)} with each policy by itself: {'; '.join(listed)}."]
    others = judged[judged.estimator != RIVAL]
    lines += ["", stages_table(others, "relative_noise", "noise / RLOO")]
    biased = others[others.estimator.isin(BIASED)]
    return [*lines, "", BIAS_TEXT, "", stages_table(biased, "direction_bias", "bias")]


def stages_table(results: pd.DataFrame, statistic: str, name: str) -> str:
    """Returns a table with a row per estimator and a column per group size and stage, of a statistic with its interval.

    results: in the order of the columns. name: of the statistic.
    """
    texts = [effect_text(effect) for effect in verdicts.noise_effects(results, statistic)]
    columns = [f"{stage}, N={size}" for stage, size in zip(results.stage, results.group_size, strict=True)]
    table = pd.DataFrame({name: results.estimator.map(label), "column": columns, "cell": texts})
    wide = table.pivot(index=name, columns="column", values="cell")[list(dict.fromkeys(columns))].fillna("")
    return markdown_table(wide.sort_index(key=lambda arms: arms.str.lower()).reset_index())


def arms_table(rows: pd.DataFrame) -> str:
    """Returns a table with a row per arm: its rate, where its runs end, how long responses are then, what a run costs.

    rows: of one task.
    """
    finals = final_accuracy(steps_table(rows)).set_index("run").final
    table, mean = [], partial(np.mean, axis=0)
    for baseline, size, _, part in by_arm(rows):
        lengths = np.array([numbers(cell)[[0, -1]] for cell in part.evaluation_response_length_mean])
        arm = {"arm": label(baseline, size), "learning rate": ", ".join(f"{x:g}" for x in part.learning_rate.unique())}
        arm["final accuracy"] = effect_text(bootstrap([finals[part.key]], iqm, resamples=RESAMPLES, bounds=(0, 1)))
        arm["mean response length, start"] = f"{lengths[:, 0].mean():.3g}"
        arm["mean response length, end"] = str(bootstrap([lengths[:, 1]], mean, resamples=RESAMPLES))
        arm["own tokens of a run"] = f"{np.mean([numbers(cell)[-1] for cell in part.own_tokens_total]):,.0f}"
        table.append(arm)
    return markdown_table(pd.DataFrame(table))


def search_table(rows: dict[str, pd.DataFrame]) -> str:
    """Returns the table of the learning-rate search, "" where it has no rows."""
    searched = of_kind(rows, SEARCH)
    if searched.empty:
        return ""
    tried = scores(searched)
    best = chosen(tried)[["task", "baseline", "group_size", "learning_rate", "edge"]]
    wide = tried.pivot(index=["task", "baseline", "group_size"], columns="learning_rate", values="score").reset_index()
    wide = wide.merge(best.rename(columns={"learning_rate": "chosen", "edge": "end of the list"}), how="left")
    wide["chosen"] = wide.chosen.astype(object).where(wide.chosen.notna(), "none yet")
    wide.columns = [str(column) for column in wide.columns]
    return markdown_table(wide)


def not_run(rows: dict[str, pd.DataFrame]) -> str:
    """Returns a line for each recipe that has fewer rows than runs."""
    have = [(one, len(rows.get(one.name, ()))) for one in recipes().values()]
    lines = [f"- `{one.name}`: {count} of {one.count} runs." for one, count in have if count < one.count]
    return "\n".join(lines)
