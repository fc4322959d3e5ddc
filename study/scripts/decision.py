"""Measures which way estimators push the check of a sum on `arithmetic_long`, and prints the tables.

python study/scripts/decision.py                     # the warm-started policy, 64 prompts
python study/scripts/decision.py CHECKPOINT ...      # folders RUN/checkpoints/step-XXXXXXXX, 32 prompts each
"""

from __future__ import annotations

import sys

from analysis.report.markdown import markdown_table
from study.scripts.decision_push import tables

if __name__ == "__main__":
    policies = sys.argv[1:]
    for table in tables(policies or [None], 32 if policies else 64):
        print(f"\n{markdown_table(table)}")
