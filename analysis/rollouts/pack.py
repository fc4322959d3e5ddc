"""Packs prompt groups for the page: rounded, sorted by bytes and compressed, so that a hundred large groups fit.

A group is one blob of 4-byte values in byte planes (all first bytes, then all second bytes, ...), which gzip takes much
further: first a token number each, `TOOL` added for tool tokens, then one array of floats per name of `VALUES` that the
group has. data.js unpacks it.
"""

from __future__ import annotations

import base64
import gzip
import math

import numpy as np
from numpy.typing import NDArray

from analysis.rollouts.read import Group

VALUES = ("advantage", "baseline", "score norm", "log_prob")  # in the order of a blob
TOOL = 1 << 31
DROPPED_BITS = 12  # of 23 in the fraction of a float: what stays is right to 1 in 4,096

MAX_TOKENS = 4_000_000  # of a page: a hundred groups of 32 rollouts of 1,000 tokens, and some more
MAX_GROUPS = 5_000  # of a page
MAX_ROLLOUTS = 128  # of a group
MAX_ROLLOUT_TOKENS = 8_192
MAX_PROMPT_CHARACTERS = 20_000


def bounded(group: Group) -> tuple[Group, list[str]]:
    """Cuts a group to what a page takes. Returns it and what was cut, in words."""
    cuts = []
    if (more := len(group.rollouts) - MAX_ROLLOUTS) > 0:
        cuts.append(f"{more} more rollouts of this group are not on this page, which takes {MAX_ROLLOUTS}")
    if (more := len(group.text) - MAX_PROMPT_CHARACTERS) > 0:
        cuts.append(f"the prompt has {more:,} more characters")
    rows = range(min(len(group.rollouts), MAX_ROLLOUTS))
    longer = sum(len(group.tokens[i]) > MAX_ROLLOUT_TOKENS for i in rows)
    if longer:
        cuts.append(f"{longer} rollouts are cut after {MAX_ROLLOUT_TOKENS:,} tokens")
    own = [group.own[i][:MAX_ROLLOUT_TOKENS] for i in rows]
    return Group(
        prompt=group.prompt,
        text=group.text[:MAX_PROMPT_CHARACTERS],
        rollouts=group.rollouts[:MAX_ROLLOUTS],
        rewards=group.rewards[:MAX_ROLLOUTS],
        endings=group.endings and group.endings[:MAX_ROLLOUTS],
        tokens=[group.tokens[i][:MAX_ROLLOUT_TOKENS] for i in rows],
        own=own,
        values=[{name: values[: own[i].sum()] for name, values in group.values[i].items()} for i in rows],
    ), cuts


def token_count(group: Group) -> int:
    """Returns how many tokens a group has on the page, tool tokens included."""
    return sum(min(len(tokens), MAX_ROLLOUT_TOKENS) for tokens in group.tokens[:MAX_ROLLOUTS])


def facts(group: Group, full: Group) -> dict:
    """Returns what the page knows of a group before it is unpacked, as JSON takes it.

    full: the group before it was cut, which says how long its rollouts are.
    """
    rows = range(len(group.rollouts))
    return {
        "prompt": group.prompt,
        "text": group.text,
        "rollouts": group.rollouts,
        "rewards": [None if math.isnan(reward) else finite(reward) for reward in group.rewards],
        "endings": group.endings,
        "lengths": [int(full.own[i].sum()) for i in rows],
        "tools": [int((~full.own[i]).sum()) for i in rows],
        "shown": [len(group.tokens[i]) for i in rows],  # own and tool tokens in the blob
        "own": [int(group.own[i].sum()) for i in rows],  # own tokens in the blob
        "values": [name for name in VALUES if name in with_score_norms(group.values[0])],
    }


def finite(value: float) -> float | str:
    """Returns a number as JSON takes it: infinity, which it does not have, as the text that JavaScript reads."""
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def with_score_norms(values: dict[str, NDArray]) -> dict[str, NDArray]:
    """Replaces the realized energies of a rollout by what each token adds: rounded, sums keep what steps would lose."""
    if "energy" not in values:
        return values
    rest = {name: value for name, value in values.items() if name != "energy"}
    return rest | {"score norm": np.diff(values["energy"], prepend=0.0)}


def blob(group: Group) -> str:
    """Returns the numbers of a group, compressed, as base64."""
    values = [with_score_norms(rollout) for rollout in group.values]
    numbers = np.concatenate([np.empty(0, np.uint32), *group.tokens])
    tool = ~np.concatenate([np.empty(0, bool), *group.own])
    arrays = [numbers.astype(np.uint32) | np.where(tool, np.uint32(TOOL), np.uint32(0))]
    for name in VALUES:
        if name in values[0]:
            arrays.append(rounded(np.concatenate([rollout[name] for rollout in values])))
    planes = b"".join(array.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes() for array in arrays)
    return base64.b64encode(gzip.compress(planes, compresslevel=6, mtime=0)).decode()


def rounded(values: NDArray) -> NDArray[np.uint32]:
    """Returns the bits of float32 values without the last DROPPED_BITS, rounded to nearest; inf and nan stay."""
    single = np.ascontiguousarray(values, np.float32)
    bits = single.view(np.uint32)
    shorter = (bits + np.uint32(1 << (DROPPED_BITS - 1))) & np.uint32(0xFFFFFFFF << DROPPED_BITS & 0xFFFFFFFF)
    return np.where(np.isfinite(single), shorter, bits)
