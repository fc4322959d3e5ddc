"""Pages of the study: made from csv files alone, and committed as they are made."""

import pandas as pd

from analysis.claims.rules import NOT_SUPPORTED, RESAMPLES, RULES, SUPPORTED
from study import collected as rows
from study import moments, pages, rates
from study.__main__ import command_line
from study.run import ROWS
from tests.support.commands import ROOT
from tests.support.study_rows import SEEDS, made_up

# ---- the page, and the command


def test_the_page_is_made_of_csv_files_alone(tmp_path):
    made = [made_up(*arm, seed, 0.8) for arm in (("otb", 4), ("rloo", 32), ("rloo", 4)) for seed in SEEDS]
    rows.add(made, tmp_path / "rows" / "claim_c3_c4.csv")
    rows.add([made_up(rate=3e-4, seed=100)], tmp_path / "rows" / "claim_rates.csv")
    (tmp_path / "comments.md").write_text("# By hand\n\n## C3 on arithmetic\n\nOf C3.\n\n## In short\n\nOf all.\n")
    command_line(["report", "--folder", str(tmp_path)])
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
    made_from = [*ROWS.glob("*.csv"), ROOT / "benchmarks" / "results.csv", ROOT / "README.md"]
    made_from.append(ROWS.parent / "comments.md")
    for file in made_from:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    command_line(["report", "--folder", str(tmp_path / "study")])
    for name in ("README.md", "study/README.md", "study/verdicts.csv"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), "run make report-study"


def test_the_rules_name_the_numbers_that_the_verdicts_use():
    text = " ".join((ROWS.parent / "rules.md").read_text().split())
    assert f"not worse by {RULES['C3']['matches']:g}".replace("0.", ".") in text
    assert f"reaches {RULES['C4']['claimed']:g}".replace("0.", ".") in text
    assert f"Fewer than {RULES['seeds']} seeds" in text
    assert f"to {rates.TIE:g}".replace("0.", ".") in text
    assert f"of {RESAMPLES:,} resamples" in text and f"those of C1 of {moments.RESAMPLES:,}" in text
    assert f"of {RESAMPLES:,} resamples (C1: {moments.RESAMPLES:,})" in pages.HEAD


def test_the_page_of_the_long_task_quotes_what_a_step_takes_in_its_rows():
    page = " ".join((ROWS.parent / "arithmetic_long.md").read_text().split())
    small, large = (rows.read(ROWS / f"claim_c3_c4_long{end}.csv").seconds_step for end in ("", "_32"))
    assert (len(small), len(large)) == (50, 10)
    said = f"takes {small.median():.1f} s (median over the fifty runs of *C3* of each one's median; "
    assert f"{said}{small.min():.1f} to {small.max():.1f})" in page
    assert f"at N = 32 {large.median():.0f} s ({large.min():.0f} to {large.max():.0f}; ten runs)" in page
