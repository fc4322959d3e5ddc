"""Measures the comparisons behind the paper's claims C1-C5 on one setting. Rules and verdicts: claims.py."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.arms import arm_override, label
from analysis.cost import cost_table
from analysis.group_size import by_seed, final_accuracy
from analysis.intervals import Interval, bootstrap, difference, iqm, share_difference, two_arms
from analysis.noise import is_measured, noise_to_signal_per_run, power_per_run
from analysis.report.claims import NOT_SUPPORTED, NOTHING, SUPPORTED, UNDECIDED, Finding, decide, rules
from analysis.stability import stability_table
from analysis.token_consumption import Consumption, consumption, is_lower_bound, saving
from otb.errors import RunError

Arm = tuple[str, int]


class Claims:
    """The comparisons of one setting, a method per claim. table: rows of `load(...).used`; target: accuracy for C4."""

    def __init__(self, table: pd.DataFrame, target: float, rule: dict | None = None):
        self.table, self.target, self.rule = table, target, rule or rules()
        self.arms = {(base, int(size)) for base, size in {*zip(table.baseline, table.group_size, strict=True)}}
        self.sizes = sorted({size for _, size in self.arms})
        self.ours = self.rule["ours"]
        present = [rival for rival in self.rule["rivals"] if any(base == rival for base, _ in self.arms)]
        self.rivals = present or self.rule["rivals"][:1]

    def findings(self) -> list[Finding]:
        """Returns every row of every claim. A claim whose metrics are missing has one row that says which."""
        findings = []
        for claim, rows in (("C1", self.c1), ("C2", self.c2), ("C3", self.c3), ("C4", self.c4), ("C5", self.c5)):
            try:
                findings += rows()
            except RunError as error:
                findings.append(Finding(claim, "", NOTHING, UNDECIDED, str(error)))
        return findings

    def lacking(self, claim: str, *arms: Arm) -> Finding | None:
        """Returns the row that says which arms of a comparison are not in the sweep, and the command for them."""
        missing = [arm for arm in arms if arm not in self.arms]
        if not missing:
            return None
        names = ", ".join(label(*arm) for arm in missing)
        commands = "; ".join(f"{arm_override(base)} group_size={size} seed=0,1,2" for base, size in missing)
        why = f"no finished run of {names}. Run: python experiments/run.py -m {commands}"
        return Finding(claim, " against ".join(label(*arm) for arm in arms), NOTHING, UNDECIDED, why)

    def pairs(self) -> list[tuple[Arm, Arm]]:
        """Returns ours and each rival at every N that both have, else at the smallest N, for `lacking` to say so."""
        both = [
            ((self.ours, size), (rival, size))
            for rival in self.rivals
            for size in self.sizes
            if {(self.ours, size), (rival, size)} <= self.arms
        ]
        return both or [((self.ours, size), (self.rivals[0], size)) for size in self.sizes[:1]]

    def runs_of(self, frame: pd.DataFrame, arm: Arm) -> pd.DataFrame:
        """Returns the rows of one arm."""
        return frame[(frame.baseline == arm[0]) & (frame.group_size == arm[1])]

    def c1(self) -> list[Finding]:
        """Compares measured noise / signal where it was recorded, else the proxy.

        The ratio does not depend on an advantage's scale, the proxy does: the group mean's advantage is (N - 1) / N
        times RLOO's.
        """
        measured = is_measured(self.table)
        power = noise_to_signal_per_run(self.table) if measured else power_per_run(self.table)
        runs = self.table.drop_duplicates("run")[["run", "baseline", "group_size", "seed"]]
        runs = runs.assign(power=runs.run.astype(str).map(power)).dropna(subset="power")
        rows = []
        for ours, rival in self.pairs():
            if (lack := self.lacking("C1", ours, rival)) is not None:
                rows.append(lack)
                continue
            name = f"{label(*ours)} against {label(*rival)}"
            values = [by_seed(self.runs_of(runs, arm), "power") for arm in (ours, rival)]
            if rival[0] == "grpo" and not measured:
                rows.append(Finding("C1", name, NOTHING, UNDECIDED, "GRPO's advantages are in units of a spread"))
                continue
            if not all(values):
                why = "no energy metrics in one of the arms; log_energy=true records them"
                if measured:
                    why = "one arm has no measured noise, or a signal that drowned in it: measure_gradient_noise=true, "
                    why += "more steps or more prompts_per_step"
                rows.append(Finding("C1", name, NOTHING, UNDECIDED, why))
                continue
            scale = ((rival[1] - 1) / rival[1]) ** 2 if rival[0] == "rloo" and not measured else 1.0
            logs = two_arms(values[0], values[1], lambda a, b, s=scale: iqm(np.log(a)) - iqm(np.log(s * b)))
            effect = Interval(1 - np.exp(logs.estimate), 1 - np.exp(logs.high), 1 - np.exp(logs.low), logs.seeds)
            verdict, why = decide(effect, self.rule["C1"])
            if not measured and verdict != UNDECIDED:
                leans = "lower" if verdict == SUPPORTED else "higher"
                verdict, why = UNDECIDED, f"the proxy is {leans}, yet it is no variance: measure it with variance.py"
            rows.append(Finding("C1", name + ("" if measured else " (proxy)"), effect, verdict, why))
        return rows

    def c2(self) -> list[Finding]:
        """Compares the shares of seeds that collapsed; a rival of which none did tests nothing."""
        runs = stability_table(self.table)
        rows = []
        for ours, rival in self.pairs():
            if (lack := self.lacking("C2", ours, rival)) is not None:
                rows.append(lack)
                continue
            a, b = (self.runs_of(runs, arm).collapsed for arm in (rival, ours))
            effect = share_difference((int(a.sum()), len(a)), (int(b.sum()), len(b)))
            verdict, why = decide(effect, self.rule["C2"])
            name = f"{label(*ours)} ({b.sum()} of {len(b)} collapsed) against {label(*rival)} ({a.sum()} of {len(a)})"
            if not a.any() and verdict == UNDECIDED:
                why = "no run of the rival collapsed, so the claim was not put to the test; try a higher learning_rate"
            rows.append(Finding("C2", name, effect, verdict, why))
        tested = [row for row in rows if "not put to the test" not in row.why]
        return tested or rows

    def c3(self) -> list[Finding]:
        """Compares final accuracies, with the control that the rival itself loses something by the smaller N."""
        runs, rows = final_accuracy(self.table), []
        for rival in self.rivals:
            ours, theirs, control = (self.ours, self.small), (rival, self.large), (rival, self.small)
            if (lack := self.lacking("C3", ours, theirs)) is not None:
                rows.append(lack)
                continue
            values = {arm: by_seed(self.runs_of(runs, arm), "final") for arm in (ours, theirs, control)}
            effect = difference(values[ours], values[theirs])
            verdict, why = decide(effect, self.rule["C3"])
            if verdict == SUPPORTED and values[control]:
                loss = difference(values[control], values[theirs])
                if decide(loss, self.rule["C3"])[0] == SUPPORTED:
                    verdict = UNDECIDED
                    why = f"{label(*control)} matches its own N={self.large} as well ({loss}): N separates nothing here"
            rows.append(Finding("C3", f"{label(*ours)} minus {label(*theirs)}", effect, verdict, why))
        return rows

    def c4(self) -> list[Finding]:
        """Compares tokens to the target with the rival's at its large N and, by a weaker rule, at the same N."""
        rows, same_size = [], {**self.rule["C4"], "refuted_below": 0}
        same_size.pop("claimed")
        for rival in self.rivals:
            ours = (self.ours, self.small)
            for theirs, rule in (((rival, self.large), self.rule["C4"]), ((rival, self.small), same_size)):
                if (lack := self.lacking("C4", ours, theirs)) is not None:
                    rows.append(lack)
                    continue
                both = [self.consumption(arm) for arm in (ours, theirs)]
                effect = saving(*both)
                verdict, why = decide(effect, rule)
                if np.isnan(effect.estimate):
                    why = f"no run of either arm reaches the target {self.target:g}"
                elif verdict == NOT_SUPPORTED and is_lower_bound(*both):
                    verdict, why = UNDECIDED, f"a lower bound, cut off before any run of {label(*theirs)} gets there"
                elif verdict == NOT_SUPPORTED and effect.low > 0:
                    why = f"saves tokens, but less than the claimed {rule['claimed']:.0%}: {effect}"
                censored = [f"{(~arm.reached).sum()} of {len(arm.reached)}" for arm in both]
                name = f"{label(*ours)} ({censored[0]} censored) against {label(*theirs)} ({censored[1]})"
                rows.append(Finding("C4", name, effect, verdict, why))
        return rows

    def c5(self) -> list[Finding]:
        """Measures the time of the advantages: the effect is its share of a step, the verdict its ratio to the loss."""
        runs, rows = cost_table(self.table), []
        for size in self.sizes:
            values = self.runs_of(runs, (self.ours, size)).advantage_share.dropna().to_numpy()
            if len(values):
                effect = bootstrap([values], iqm, bounds=(0, 1))
                arm = self.runs_of(runs, (self.ours, size))
                ratio = bootstrap([arm.advantage_ratio.to_numpy()], iqm)
                verdict, why = decide(ratio, self.rule["C5"])
                why = why or f"{ratio} of the time of the loss's forward and backward"
                rows.append(Finding("C5", label(self.ours, size), effect, verdict, why))
        return rows or [self.lacking("C5", (self.ours, self.small)) or Finding("C5", "", NOTHING, UNDECIDED, "")]

    def consumption(self, arm: Arm) -> Consumption:
        """Returns the tokens of one arm to the target."""
        return consumption(self.runs_of(self.table, arm), self.target)

    @property
    def small(self) -> int:
        return self.rule["small"]

    @property
    def large(self) -> int:
        return self.rule["large"]
