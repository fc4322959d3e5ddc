"""Pages of the study: made from csv files alone, committed as they are made, and their prose quotes the rows."""

import re

import numpy as np
import pandas as pd
import pytest

from analysis.claims.rules import CLAIMS, NOT_SUPPORTED, RESAMPLES, RULES, SUPPORTED
from analysis.claims.runs import differing
from study import collected as rows
from study import moments, rates
from study.__main__ import command_line
from study.pages import fill
from study.recipes import recipes
from study.run import ROWS
from study.verdicts import runs_of
from tests.support.commands import ROOT
from tests.support.study_rows import SEEDS, made_up

PAGES = ["README.md", *(f"{claim.lower()}.md" for claim in CLAIMS), "rates.md"]
BLOCK = re.compile(r"<!-- (.+?): make report-study -->.*?<!-- end of \1 -->", re.DOTALL)
INTERVAL = re.compile(r"(-?\d+\.?\d*) \[(-?\d+\.?\d*), (-?\d+\.?\d*)\]")
# Intervals in the prose that no committed command gives again: of estimators paired by prompt or without a policy (C1),
# of each arm at its own best rate (C2), of arms without a seed, of two runs' tables of a decision and of crossings read
# off training accuracy (C4).
MEASURED_ONCE = {
    "c1.md": 17,
    "c2.md": 1,
    "c4.md": 8,
}


def test_the_pages_are_made_of_csv_files_alone(tmp_path):
    made = [made_up(*arm, seed, 0.8) for arm in (("otb", 4), ("rloo", 32), ("rloo", 4)) for seed in SEEDS]
    rows.add(made, tmp_path / "rows" / "claim_c3_c4.csv")
    rows.add([made_up(rate=3e-4, seed=100)], tmp_path / "rows" / "claim_rates.csv")
    command_line(["report", "--folder", str(tmp_path)])
    front, page = ((tmp_path / name).read_text() for name in ("README.md", "c3.md"))
    assert "| [C3](c3.md) | arithmetic | supported |" in front and "empty: RLOO, N=4 matches" in page
    assert "| RLOO, N=32 | 0.001 | 0.70 [0.70, 0.70] | 20 | 20 [20, 20] | 20,000 |" in page  # where its runs end
    assert "- `claim_c3_c4`: 30 of 80 runs" in front and "- `claim_c2`: 0 of 120 runs" in front
    table = pd.read_csv(tmp_path / "verdicts.csv")
    assert set(table.verdict.dropna()) == {SUPPORTED, NOT_SUPPORTED}
    assert (tmp_path / "figures" / "c3_arithmetic.png").stat().st_size > 5000


def test_what_is_written_by_hand_stays_between_the_blocks(tmp_path):
    page = tmp_path / "page.md"
    fill(page, "Title", {"one": "1", "two": "2"})
    page.write_text(page.read_text().replace("<!-- end of one -->\n", "<!-- end of one -->\n\nBy hand.\n"))
    before = page.read_text()
    fill(page, "Another title", {"one": "11", "two": "2", "three": "3"})
    after = page.read_text()
    assert after.startswith("# Title") and "By hand." in after and after.index("11") < after.index("By hand.")
    assert after.endswith("<!-- three: make report-study -->\n3\n<!-- end of three -->\n")
    fill(page, "Title", {"one": "1"})
    assert page.read_text().startswith(before)


@pytest.fixture(scope="module")
def made_again(tmp_path_factory):
    """The folder of a copy of the committed pages and rows, in which the command has written the pages again."""
    root = tmp_path_factory.mktemp("root")
    made_from = [*ROWS.glob("*.csv"), ROOT / "benchmarks" / "results.csv", ROOT / "README.md"]
    made_from += [ROWS.parent / name for name in PAGES]
    for file in made_from:
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    command_line(["report", "--folder", str(root / "study")])
    return root


def test_the_committed_pages_are_what_the_committed_rows_say(made_again):
    """The pages of the study, its verdicts, and the grid of the front page."""
    for name in ("README.md", "study/verdicts.csv", "docs/neighbours/comparison.md", *(f"study/{p}" for p in PAGES)):
        assert (made_again / name).read_text() == (ROOT / name).read_text(), "run make report-study"


def test_the_front_page_has_the_grid_of_the_study():
    (front,), (ours,) = (
        [block[0] for block in BLOCK.finditer((ROOT / name).read_text()) if block[1] == "answer"]
        for name in ("README.md", "study/README.md")
    )
    assert front == ours and front.count("**yes**") == 5 and front.count("**no**") == 3


def by_hand(page: str) -> str:
    """The prose of a page, without its blocks and tables, as one line."""
    text = BLOCK.sub("", (ROWS.parent / page).read_text())
    return " ".join(" ".join(line for line in text.split("\n") if not line.startswith("|")).split())


def test_intervals_in_the_prose_are_those_of_the_rows():
    known = pd.read_csv(ROWS.parent / "verdicts.csv")[["estimate", "low", "high"]].dropna().to_numpy().tolist()
    for task in ("", "_tools", "_long"):  # every pair of arms at N = 4
        runs = runs_of(rows.read(ROWS / f"claim_c3_c4{task}.csv"))
        for ours in [("otb", 4), ("sequence_energy", 4), ("energy_probe", 4)]:
            known += [list(differing(runs, ours, theirs)[:3]) for theirs in [("grpo", 4), ("otb", 4)] if theirs != ours]
    counted = {}
    for page in PAGES:
        quoted = [match.groups() for match in INTERVAL.finditer(by_hand(page))]
        unknown = [ends for ends in quoted if not any(is_rounded(ends, found) for found in known)]
        counted |= {page: len(unknown)} if unknown else {}
    assert counted == MEASURED_ONCE


def is_rounded(quoted: tuple[str, ...], found: list[float]) -> bool:
    """Whether each number is quoted to its last decimal."""
    return all(
        abs(value - float(text)) <= 0.5 * 10 ** -len(text.partition(".")[2]) + 1e-4
        for text, value in zip(quoted, found, strict=True)
    )


def test_the_summary_quotes_counts_and_savings_of_the_rows():
    found = pd.read_csv(ROWS.parent / "verdicts.csv").fillna("")
    page = by_hand("README.md")
    (sgd,) = found[found.comparison.str.startswith("plain SGD, rates 1 to 8")].comparison
    assert "RLOO (14 of 60) minus OTB (1 of 60)" in sgd and "1 of 60 OTB runs collapses and 14 of 60 RLOO" in page
    saved = sorted(round(100 * value) for value in found.query("claim == 'C4' and verdict == 'supported'").estimate)
    assert f"{saved[0]} to {saved[1]} % fewer tokens" in page
    of_long = found[(found.claim == "C3") & (found.task == "arithmetic_long")].set_index("comparison")
    above = of_long.estimate["OTB, N=4 minus RLOO, N=4"]
    assert f"{above:.2f} above it on the long one" in page


def test_the_rules_name_the_numbers_that_the_verdicts_use():
    text = " ".join((ROWS.parent / "rules.md").read_text().split())
    assert f"not worse by {RULES['C3']['matches']:g}".replace("0.", ".") in text
    assert f"reaches {RULES['C4']['claimed']:g}".replace("0.", ".") in text
    assert f"Fewer than {RULES['seeds']} seeds" in text
    assert f"to {rates.TIE:g}".replace("0.", ".") in text
    assert f"of {RESAMPLES:,} resamples" in text and f"those of C1 of {moments.RESAMPLES:,}" in text


def test_the_page_of_the_long_task_quotes_what_a_step_takes_in_its_rows():
    page = " ".join((ROWS.parent / "arithmetic_long.md").read_text().split())
    small, large = (rows.read(ROWS / f"claim_c3_c4_long{end}.csv").seconds_step for end in ("", "_32"))
    assert (len(small), len(large)) == (recipes()["claim_c3_c4_long"].count, recipes()["claim_c3_c4_long_32"].count)
    assert f"a step takes {np.median(small):.1f} s at N = 4 ({small.min():.1f} to {small.max():.1f})" in page
    assert f"and {large.median():.0f} s at N = 32 ({large.min():.0f} to {large.max():.0f})" in page
