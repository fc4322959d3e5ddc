"""Makes the report: `python -m analysis.report RUNS` writes the claims with verdicts, tables, figures and one page."""
