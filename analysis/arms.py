"""Arms: their names, taken from configurations, and what is the same in every figure: label, colour and marker.

An arm is named for its yaml in conf/baseline, followed by the arguments in which a run differs from that file, such as
`otb_carry` or `value epochs=20`. The files are read as data; no baseline is imported. An arm that the table below does
not list gets the words of its name as its label and a colour of its own, so that a new baseline needs no entry.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import yaml

from analysis.palette import SPARE_COLOURS
from analysis.runs.rows import flat_cells
from otb.errors import RunError

if TYPE_CHECKING:
    import pandas as pd

CONFIGURATIONS = Path(__file__).resolve().parents[1] / "conf" / "baseline"


class Arm(NamedTuple):
    """What figures need to know of an arm.

    unbiased: whether the expected gradient is exactly the true one, as the baseline declares; None where it says
    nothing. A constant factor counts as a bias.
    """

    label: str
    colour: str
    marker: str
    unbiased: bool | None


ARMS = {  # in the order of legends; arms that are not listed follow by name
    "otb": Arm("OTB", "#D55E00", "o", False),
    "otb_carry": Arm("OTB (carry)", "#E69F00", "s", False),
    "group_mean": Arm("group mean", "#000000", "^", False),
    "grpo": Arm("GRPO", "#0072B2", "v", False),
    "rloo": Arm("RLOO", "#009E73", "P", True),
    "opo": Arm("OPO", "#56B4E9", "*", False),
    "sequence_energy": Arm("sequence energy", "#CC79A7", "X", False),
    "none": Arm("no baseline", "#7F7F7F", "o", True),
    "energy_probe": Arm("energy probe", "#882255", "s", True),
    "value": Arm("value model", "#332288", "D", True),
    "damped_probe": Arm("damped probe", "#AA4499", "^", False),
    "ob_exact": Arm("optimal baseline (exact norms)", "#44AA99", "v", False),
    "otb_exact": Arm("OTB (exact norms)", "#8C510A", "P", False),
    "otb_loo": Arm("OTB (leave-one-out)", "#F4A582", "*", True),
    "otb_carry_loo": Arm("OTB (carry, leave-one-out)", "#B2A000", "X", True),
    "sequence_energy_loo": Arm("sequence energy (leave-one-out)", "#117733", "o", True),
    "trajectory_cv": Arm("trajectory CV", "#E7298A", "s", True),
}
SPARE_MARKERS = "Dos^vP*X"


# ---- names


def shipped_baselines(folder: Path | None = None) -> dict[str, dict]:
    """Reads conf/baseline/*.yaml.

    Returns:
        Name of the file -> its keys, flat. Empty where the folder is absent, as in an installed copy of the library.

    Raises:
        RunError: a file is no mapping with a `_target_`.
    """
    shipped = {}
    for file in sorted((CONFIGURATIONS if folder is None else folder).glob("*.yaml")):
        try:
            keys = yaml.safe_load(file.read_text(encoding="utf8"))
        except yaml.YAMLError:
            keys = None
        if not isinstance(keys, dict) or not isinstance(keys.get("_target_"), str):
            raise RunError(f"{file} is no baseline: it must be a yaml mapping with _target_: MODULE.FUNCTION. Mend it.")
        shipped[file.stem] = flat_cells(keys)
    return shipped


def arm_name(run: dict, shipped: dict[str, dict]) -> str:
    """Returns the name of a run's arm.

    It is the yaml whose target and arguments equal the run's; else the nearest yaml of that target and the arguments
    that differ; else, where no yaml has the target, the function's name and all arguments. An argument that the run
    does not have, as it is older than the argument, makes no difference.

    Args:
        run: flat configuration of the run, with its `kind` and `run`.
        shipped: of `shipped_baselines`.
    """
    if run["kind"] == "trl":
        return f"TRL: {run['run']}"
    target = run.get("baseline._target_")
    if not isinstance(target, str):
        return "unknown"
    prefix = "baseline."
    keys = {key.removeprefix(prefix): value for key, value in run.items() if key.startswith(prefix)}
    arguments = {key: value for key, value in sorted(keys.items()) if not key.startswith("_")}
    function = function_name(target)
    candidates = []
    for name, known in shipped.items():
        if known["_target_"] == target:
            differing = {key: value for key, value in arguments.items() if value != known.get(key)}
            absent = sum(key not in arguments and not key.startswith("_") for key in known)
            candidates.append((len(differing), absent, name != function, name, differing))
    if candidates:
        *_, function, arguments = min(candidates, key=lambda candidate: candidate[:4])
    return " ".join([function, *(f"{key}={'null' if value is None else value}" for key, value in arguments.items())])


def function_name(target: str) -> str:
    """Returns the last word of a target; of a class, which is what a baseline that learns is, its module's name."""
    module, _, name = target.rpartition(".")
    return module.rpartition(".")[2] if module and name[:1].isupper() else name


def arm_override(arm: str) -> str:
    """Returns the command line's words for an arm: `otb tail=own` -> baseline=otb baseline.tail=own."""
    name, *arguments = str(arm).split(" ")
    return " ".join([f"baseline={name}", *(f"baseline.{argument}" for argument in arguments)])


# ---- figures


def label(arm: str, group_size: float | None = None) -> str:
    """Returns what an arm is called in figures, with its group size where one is given."""
    name, *arguments = str(arm).split(" ")
    text = " ".join([ARMS[name].label if name in ARMS else name.replace("_", " "), *arguments])
    return text if group_size is None or math.isnan(group_size) else f"{text}, N={int(group_size)}"


def colour(arm: str) -> str:
    """Returns the colour of an arm, the same in every figure."""
    return ARMS[arm].colour if arm in ARMS else SPARE_COLOURS[sum(arm.encode()) % len(SPARE_COLOURS)]


def marker(arm: str) -> str:
    """Returns the marker of an arm, the same in every figure."""
    return ARMS[arm].marker if arm in ARMS else SPARE_MARKERS[sum(arm.encode()) % len(SPARE_MARKERS)]


def is_unbiased(arm: str) -> bool | None:
    """Returns whether an arm is unbiased; None where that is not known, as of an arm with other arguments."""
    return ARMS[arm].unbiased if arm in ARMS else None


def by_arm(table: pd.DataFrame) -> list[tuple[str, float, str, pd.DataFrame]]:
    """Splits a table into its arms, in the order of ARMS.

    Returns:
        (baseline, group size, label, rows) per arm. The label leaves the group size out where there is one only.
    """
    order = {name: place for place, name in enumerate(ARMS)}
    groups = table.groupby(["baseline", "group_size"], observed=True, dropna=False)
    cells = [(str(baseline), size, rows) for (baseline, size), rows in cast(Any, groups)]
    one_size = len({size for _, size, _ in cells}) == 1
    cells.sort(key=lambda cell: (order.get(cell[0], len(order)), cell[0], cell[1]))
    return [(name, size, label(name, None if one_size else size), rows) for name, size, rows in cells]
