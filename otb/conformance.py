"""`python -m otb.conformance FILE.npz` compares the formula and the trainer's code with a file of reference vectors.

The file holds float64 outputs of the reference implementation (verl, `optimal_token_baseline` and
`tir_optimal_token_baseline`); docs/reference.md describes the format. Exit status 1 if a case disagrees.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from otb.advantages import advantages
from otb.baselines.otb import otb
from otb.rollouts import OwnTokens, RolloutGroups
from otb.score_norms import logit_gradient_proxy

FORMULA_TOLERANCE = 1e-10  # absolute, float64 against float64
TRAINER_TOLERANCE = 1e-5  # float32, relative to the spread of the returns


@dataclass(frozen=True)
class Case:
    """One reference case, with its groups scattered over the batch as in a real batch. Shapes (B, C)."""

    name: str
    rewards: Tensor
    response_mask: Tensor
    group: Tensor  # (B,) int
    log_probs: Tensor
    sum_pi_squared: Tensor
    rho: Tensor  # importance weights, 1 where the case has none
    advantages: Tensor
    own_token_aligned: bool  # the reference's multi-turn form; False = aligned by position
    tail: str


def load_cases(path: str) -> Iterator[Case]:
    """Yields the cases of a reference file. Raises ValueError if the file has another format."""
    with np.load(path) as arrays:
        if "meta" not in arrays:
            raise ValueError(f"{path} has no key 'meta', only {sorted(arrays)[:5]}; see docs/reference.md.")
        for index, meta in enumerate(json.loads(str(arrays["meta"]))):
            prefix = f"{index:02d}/"
            case = {key.removeprefix(prefix): arrays[key] for key in arrays if key.startswith(prefix)}
            tensors = {key: torch.from_numpy(value) for key, value in case.items()}
            yield Case(
                name=f"{index:02d} N={meta['group_size']}" + (" multi-turn" if meta["multi_turn"] else ""),
                rewards=tensors["rewards"],
                response_mask=tensors["response_mask"].bool(),
                group=tensors["group"],
                log_probs=tensors["log_probs"],
                sum_pi_squared=tensors["sum_pi_squared"],
                rho=tensors.get("is_weights", torch.ones_like(tensors["log_probs"])),
                advantages=tensors["advantages"],
                own_token_aligned=meta["multi_turn"],
                tail="zero" if meta["zero_tail"] else "own",
            )


def returns_to_go(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Returns G_t = sum of the own tokens' rewards from t on. rewards, response_mask (B, C) -> (B, C)."""
    return (rewards * response_mask).flip(-1).cumsum(-1).flip(-1)


def literal_advantages(case: Case, eps: float = 1e-8) -> Tensor:
    """Returns the advantages of the paper's formula, computed token by token in the precision of the case -> (B, C)."""
    w = (1 - 2 * case.log_probs.exp() + case.sum_pi_squared) * case.rho.square() * case.response_mask
    returns = returns_to_go(case.rewards, case.response_mask)
    result = torch.zeros_like(returns)
    for group in case.group.unique():
        rows = (case.group == group).nonzero().flatten().tolist()
        if case.own_token_aligned:
            positions = [case.response_mask[row].nonzero().flatten() for row in rows]
        else:
            positions = [torch.arange(w.shape[1])[: int(case.response_mask[row].sum())] for row in rows]
        energies = [w[row, where].cumsum(0) for row, where in zip(rows, positions, strict=True)]
        for t in range(max(map(len, positions))):
            alive = [i for i in range(len(rows)) if t < len(positions[i])]
            g = torch.stack([returns[rows[i], positions[i][t]] for i in alive])
            energy = torch.stack([energies[i][t] for i in alive])
            baseline = (g * energy).sum() / (energy.sum() + eps)
            if len(rows) == 1 or (case.tail == "zero" and len(alive) == 1):
                baseline = torch.zeros_like(baseline)
            for i, value in zip(alive, g - baseline, strict=True):
                result[rows[i], positions[i][t]] = value
    return result


def trainer_advantages(case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the advantages of the code that trains: packed, vectorised, non-negative w, in `dtype` -> (B, C)."""
    rows = case.group.argsort(stable=True)  # whole groups, contiguous
    sizes = case.group.unique(return_counts=True)[1]
    own = OwnTokens(case.response_mask[rows])
    w = logit_gradient_proxy(case.log_probs[rows].to(dtype), case.sum_pi_squared[rows].log().to(dtype))
    returns = returns_to_go(case.rewards[rows], case.response_mask[rows]).to(dtype)

    def grouped(values: Tensor) -> Tensor:
        return values.view(len(sizes), int(sizes[0]), *values.shape[1:])

    rollouts = RolloutGroups(
        rewards=grouped(returns[:, 0]),
        lengths=grouped(own.lengths),
        score_norms=grouped(own.pack(w * case.rho[rows].to(dtype).square())),
        token_returns=grouped(own.pack(returns)),
    )
    packed = advantages(rollouts, otb(rollouts, tail=case.tail)).flatten(0, 1)
    result = torch.zeros_like(case.advantages)
    result[rows] = own.unpack(packed).to(result.dtype)
    return result


def main(argv: list[str] | None = None) -> int:
    """Prints the largest errors of every case.

    Returns the exit status: 1 if a case disagrees, 2 if the file holds no reference vectors.
    """
    parser = argparse.ArgumentParser(prog="python -m otb.conformance", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("file", help="an .npz file of reference vectors")
    path = parser.parse_args(argv).file
    try:
        cases = list(load_cases(path))
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        print(f"error: {path} is not a file of reference vectors: {error}. See docs/reference.md.", file=sys.stderr)
        return 2
    columns = f"{'case':<22}{'formula, float64':>18}{'trainer, float32':>18}"
    print(f"{columns}   largest error; the trainer's is divided by the spread of the returns")
    agrees = bool(cases)  # a file without cases proves nothing
    for case in cases:
        formula = float((literal_advantages(case) - case.advantages).abs().max())
        returns = returns_to_go(case.rewards, case.response_mask)[case.response_mask]
        spread = float(returns.max() - returns.min()) or 1.0
        trainer = float((trainer_advantages(case) - case.advantages).abs().max()) / spread
        case_agrees = formula <= FORMULA_TOLERANCE and trainer <= TRAINER_TOLERANCE
        agrees &= case_agrees
        print(f"{case.name:<22}{formula:>18.1e}{trainer:>18.1e}   {'ok' if case_agrees else 'DISAGREES'}")
    return 0 if agrees else 1


if __name__ == "__main__":
    raise SystemExit(main())
