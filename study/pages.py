"""Writes the pages of the study and its figures from the csv files alone. `python -m study report`.

A page is written by hand around blocks that this file fills: <!-- NAME: make report-study --> to <!-- end of NAME -->.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.claims.rules import CLAIMS, RESAMPLES, RULES, Comparison
from otb.errors import RunError
from study import moments, tables, verdicts
from study.answer import answer
from study.collapses import cells, cells_section, room_section
from study.collected import BESIDE_C2, FIXED, MAIN, OTHERS, REAL, of_kind, read
from study.figures import figures
from study.neighbours import write_methods
from study.verdicts import runs_of

RECIPE_ENDS = {"arithmetic": "", "arithmetic_tools": "_tools", "arithmetic_long": "_long", REAL: "_real"}
ESTIMATES = {
    "C1": "The estimate is a ratio of sums over the prompts of three policies. Its interval is over prompts and "
    "does not cover a fourth policy.",
    "C2": "The estimate is a difference of pooled shares with a Newcombe interval. All runs start from one policy.",
    "C3": "The estimate is the interquartile mean of the differences of final accuracies, paired by seed; the "
    "probability of improvement is unpaired. All runs start from one policy.",
    "C4": "The estimate is one minus the ratio of mean tokens to the target, paired by seed; a run that misses the "
    "target is censored. All runs start from one policy.",
    "C5": "The estimate is a median over pairs of steps.",
}
INTERVALS = (
    f"Intervals are 95 %, from {RESAMPLES:,} resamples of the seeds; C1: {moments.RESAMPLES:,} of the prompts. "
    "`make study` makes the rows of all recipes."
)


def write(folder: Path) -> list[Path]:
    """Writes the pages, verdicts.csv and the figures into the folder of the study and returns them.

    Raises RunError where it holds no rows.
    """
    rows = {file.stem: read(file) for file in sorted((folder / "rows").glob("*.csv"))}
    if not rows:
        raise RunError(f"{folder}/rows holds no csv file. Run python -m study first.")
    root = folder.parent
    noise = noise_by_task(rows)
    found = [*all_comparisons(rows, noise), *verdicts.cost(root / "benchmarks" / "results.csv")]
    drawn = figures(rows, noise, folder / "figures")
    grid = answer(found)
    evidence = f"{tables.evidence_table(found, RECIPE_ENDS)}\n\n{INTERVALS}"
    front = {"answer": grid, "evidence": evidence, "not run": tables.not_run(rows)}
    written = [fill(folder / "README.md", "The study", front)]
    for claim in CLAIMS:
        title = f"{claim}: {RULES[claim]['says']}"
        written.append(fill(folder / f"{claim.lower()}.md", title, blocks_of(claim, found, noise, rows, drawn)))
    written.append(fill(folder / "rates.md", "Learning rates", {"rates": tables.search_table(rows)}))
    table(found).to_csv(folder / "verdicts.csv", index=False, float_format="%.6g")
    written += [folder / "verdicts.csv", *drawn.values(), *write_methods(rows, root / "docs" / "neighbours")]
    if (page := root / "README.md").exists() and mark("answer") in page.read_text(encoding="utf8"):
        written.append(fill(page, "", {"answer": grid}))
    return written


def mark(name: str) -> str:
    """Returns the line that begins a block."""
    return f"<!-- {name}: make report-study -->"


def fill(page: Path, title: str, blocks: dict[str, str]) -> Path:
    """Puts texts between the marks of a page and returns it. What the page lacks is added at its end.

    title: of a page that is not there yet.
    """
    text = page.read_text(encoding="utf8") if page.exists() else f"# {title}\n"
    for name, body in blocks.items():
        end = f"<!-- end of {name} -->"
        if mark(name) not in text:
            text += f"\n{mark(name)}\n{end}\n"
        before, _, rest = text.partition(mark(name))
        text = f"{before}{mark(name)}\n{body}\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf8")
    return page


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
    measured = of_kind(rows, OTHERS["C1"])
    if measured.empty:
        return {}
    return {str(task): part for task, part in moments.relative_noise(measured).groupby("task")}


def table(found: list[Comparison]) -> pd.DataFrame:
    """Returns a row per comparison."""
    facts = ({"claim": c.claim, "task": c.task, "comparison": c.what, **c.effect._asdict()} for c in found)
    ends = ({"verdict": c.verdict, "why": c.why, "under the original rule": c.original} for c in found)
    return pd.DataFrame([fact | end for fact, end in zip(facts, ends, strict=True)])


def blocks_of(
    claim: str,
    found: list[Comparison],
    noise: dict[str, pd.DataFrame],
    rows: dict[str, pd.DataFrame],
    drawn: dict[tuple[str, str], Path],
) -> dict[str, str]:
    """Returns the blocks of a claim's page: what is measured, then for each task its comparisons and its figure."""
    what = RULES[claim]["measured"]
    measured = f"{what[0].upper()}{what[1:]}. {ESTIMATES[claim]} The [rules](rules.md) came before the runs."
    blocks = {"measured": measured}
    of_claim = [c for c in found if c.claim.partition(",")[0] == claim]
    for kind, task in sorted({(c.claim, c.task) for c in of_claim}):
        comparisons = [c for c in of_claim if (c.claim, c.task) == (kind, task)]
        is_noise = claim == "C1"
        lines = tables.noise_tables(comparisons[0], noise[task]) if is_noise else tables.comparison_table(comparisons)
        if claim == "C2":
            settings = cells(of_kind(rows, OTHERS["C2"]).query("task == @task"))
            lines += ["", cells_section(settings), "", *room_section(settings)]
        if claim == "C3":
            lines += ["", tables.ARMS_TEXT, "", tables.arms_table(of_kind(rows, MAIN).query("task == @task"))]
        if (kind, task) in drawn:
            lines += ["", f"![{claim} on {task}](figures/{drawn[kind, task].name})"]
        name = f"{kind} on {task}"
        blocks[name] = "\n".join([f"## {name}", "", *lines])
    return blocks
