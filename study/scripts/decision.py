r"""Measures which way estimators push a decision of the policy, such as whether it checks its sum or answers at once.

python study/scripts/decision.py arithmetic_long "check " "\boxed{" --policy runs/.../checkpoints/step-00000060
A rollout decides at its first token that is one of the two. Take the log-odds of the first one at all these places as
a parameter of its own: the push of an estimator is its gradient for it, the mean over rollouts of A (c - p). There c
is 1 if the rollout took the first and else 0, p is the policy's probability of the first among the two, A the
advantage of that token; a rollout that never decides counts as 0. RLOO's push is the true gradient on average.
Several policies are pooled, each with prompts of its own. Intervals are over prompts. Of the tiny policy.
"""

from __future__ import annotations

import argparse
import sys

from analysis.report.markdown import markdown_table
from experiments.running.command_line import exit_codes


def command_line(arguments: list[str]) -> None:
    """Runs `python study/scripts/decision.py ARGUMENTS`; the process ends with an exit code of otb/errors.py."""
    parser = argparse.ArgumentParser(
        prog="python study/scripts/decision.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("task", help="of conf/task, such as arithmetic_long")
    parser.add_argument("first", help="text of one token, such as 'check '")
    parser.add_argument("second", help="text of the other")
    parser.add_argument("--policy", nargs="+", default=[None], help="folders of checkpoints; else the warm-started one")
    parser.add_argument("--prompts", type=int, default=64, help="of the training set, for each policy")
    parser.add_argument("--rollouts", type=int, default=32, help="of each prompt")
    parser.add_argument("--group-size", type=int, default=4)
    options = parser.parse_args(arguments)
    with exit_codes(after_stop="begins anew"):
        from study.scripts.decision_push import tables  # torch, transformers and trl: seconds, so only now

        for table in tables(options):
            print(f"\n{markdown_table(table)}")


if __name__ == "__main__":
    command_line(sys.argv[1:])
