"""Runs jobs in the laboratory's processes. Each process loads the policy once; a job writes a file or returns rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from peft import PeftModel

from otb.exact_norms import trainable
from otb.files import whole
from otb.laboratory.estimators import Prompt, rollout_advantages, rollout_gradients
from otb.laboratory.moments import moments, partitions
from otb.laboratory.oracle import oracle
from otb.laboratory.scores import Measured, Rollout, Sketch, measure
from otb.policies.models import load_model
from otb.rollouts import joined

_policy: dict = {}  # model, sketch and temperature of this process


def load_policy(base: str, revision: str | None, adapter: str | None):
    """Returns the policy in float32 and evaluation mode. adapter: a folder with a LoRA adapter, or None."""
    model = load_model(base, revision, "float32")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model.eval()


def start(load: Callable, sketch: int, temperature: float) -> None:
    """Prepares a process of the pool. load: returns the policy. sketch: size of the sketches."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()  # the laboratory shows its own
    model = load()
    _policy.update(model=model, sketch=Sketch(trainable(model), sketch), temperature=temperature)


def whole_file(write: Callable, file: Path) -> None:
    """Calls `write` with a temporary path that is then renamed to `file`, so `file` is never incomplete."""
    with whole(file) as aside:
        write(file=aside)


def measure_prompt(rollouts: list[Rollout], with_scores: bool, file: Path) -> None:
    """Measures one prompt's rollouts and writes the measurements to a file."""
    sketch = _policy["sketch"] if with_scores else None
    measure(_policy["model"], rollouts, _policy["temperature"], sketch).save(file)


def bound_prompt(
    tokenizer, task, row: dict, rollouts: list[Rollout], continuations: int, seed: int, file: Path
) -> None:
    """Writes the oracle's two estimates for each rollout, (rollouts, 2, T), 0 past the last own token."""
    torch.manual_seed(seed)
    estimates = [
        oracle(_policy["model"], tokenizer, task, row, rollout, continuations, _policy["temperature"])
        for rollout in rollouts
    ]
    torch.save(joined([estimate.unsqueeze(0) for estimate in estimates], dim=2), file)


def prompt_moments(
    index: int,
    file: Path,
    estimators: dict[tuple[str, int], Callable],
    reference: Callable,
    count: int,
    bound: Path | None,
) -> list[dict]:
    """Returns a row of moments per (name, group size) in `estimators`, plus energies if there is an oracle.

    index, file: the prompt's number and its measurements. reference: a baseline with unbiased gradients that are
    independent between rollouts. count: partitions into groups. bound: the file of `bound_prompt`, or None.
    """
    prompt = Prompt(Measured.load(file))
    alone = torch.arange(len(prompt.rewards)).view(1, -1, 1)
    truth = rollout_gradients(prompt, rollout_advantages(reference, prompt, alone))[0]
    oracles = None if bound is None else torch.load(bound)
    rows = []
    for size in sorted({size for _, size in estimators}):
        members = partitions(len(prompt.rewards), size, count, torch.Generator().manual_seed(index))
        for name in [name for name, of_size in estimators if of_size == size]:
            advantage = rollout_advantages(estimators[name, size], prompt, members)
            row = {"prompt": index, "estimator": name, "group_size": size}
            row |= moments(rollout_gradients(prompt, advantage), truth, members)
            if oracles is not None:
                row |= energies(prompt, advantage, members, oracles)
            rows.append(row)
    return rows


def energies(prompt: Prompt, advantage, members, oracles) -> dict[str, float]:
    """Returns the token-diagonal energy sum_t w_t A_t^2 per rollout, for the estimator and for the oracle.

    advantage (K, M, T or 1), members (K, n, N) int, oracles (rollouts, 2, T). Both use only the oracle's rollouts.
    """
    rollouts = len(oracles)
    scored = ~prompt.rewards[:rollouts].isnan()
    drawn = scored * torch.zeros(len(members), len(prompt.rewards)).scatter_(1, members.flatten(1), 1)[:, :rollouts]
    w = prompt.score_norms[:rollouts]
    energy = (w * advantage[:, :rollouts].square()).sum(-1)  # (K, rollouts)
    width = min(w.shape[1], oracles.shape[-1])
    gap = prompt.rewards[:rollouts].view(-1, 1, 1) - oracles[..., :width]
    bound = (w[:, :width] * gap[:, 0] * gap[:, 1]).sum(-1)
    return {"energy": (energy.sum() / drawn.sum()).item(), "oracle_energy": bound[scored].mean().item()}
