"""What the processes of the laboratory do. Each loads the policy once; a task writes a file or returns rows."""

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

_policy: dict = {}  # of this process


def load_policy(base: str, revision: str | None, adapter: str | None):
    """The policy in float32 with the adapter in the folder `adapter`, None = without one; in evaluation mode."""
    model = load_model(base, revision, "float32")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model.eval()


def start(load: Callable, sketch: int, temperature: float) -> None:
    """Initializer of the pool: `load()` gives the policy."""
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()  # of loading the policy; the laboratory has its own
    model = load()
    _policy.update(model=model, sketch=Sketch(trainable(model), sketch), temperature=temperature)


def whole_file(write: Callable, file: Path) -> None:
    """Calls `write(file=...)` for a name beside the final one, so that what bears the final name is whole."""
    with whole(file) as aside:
        write(file=aside)


def measure_prompt(rollouts: list[Rollout], with_scores: bool, file: Path) -> None:
    sketch = _policy["sketch"] if with_scores else None
    measure(_policy["model"], rollouts, _policy["temperature"], sketch).save(file)


def bound_prompt(
    tokenizer, task, row: dict, rollouts: list[Rollout], continuations: int, seed: int, file: Path
) -> None:
    """The oracle's two estimates for each rollout, (rollouts, 2, T), 0 past the last own token."""
    torch.manual_seed(seed)
    found = [
        oracle(_policy["model"], tokenizer, task, row, rollout, continuations, _policy["temperature"])
        for rollout in rollouts
    ]
    width = max(estimate.shape[1] for estimate in found)
    padded = [torch.nn.functional.pad(estimate, (0, width - estimate.shape[1])) for estimate in found]
    torch.save(torch.stack(padded), file)


def judge_prompt(
    index: int,
    file: Path,
    estimators: dict[tuple[str, int], Callable],
    reference: Callable,
    count: int,
    bound: Path | None,
) -> list[dict]:
    """Moments of every (name, group size), and where there is an oracle the energies of its rollouts."""
    prompt = Prompt(Measured.load(file))
    alone = torch.arange(len(prompt.rewards)).view(1, -1, 1)
    truth = rollout_gradients(prompt, rollout_advantages(reference, prompt, alone))[0]
    oracles = None if bound is None else torch.load(bound)
    rows = []
    for size in sorted({size for _, size in estimators}):
        members = partitions(len(prompt.rewards), size, count, torch.Generator().manual_seed(index))
        for name in [name for name, of_size in estimators if of_size == size]:
            advantage = rollout_advantages(estimators[name, size], prompt, members)
            found = moments(rollout_gradients(prompt, advantage), truth, members)
            if oracles is not None:
                found |= energies(prompt, advantage, members, oracles)
            rows.append({"prompt": index, "estimator": name, "group_size": size, **found})
    return rows


def energies(prompt: Prompt, advantage, members, oracles) -> dict[str, float]:
    """Token-diagonal energy sum_t w_t A_t^2 per rollout, of the estimator and of the oracle on the same rollouts."""
    rollouts = len(oracles)
    scored = ~prompt.rewards[:rollouts].isnan()
    drawn = scored * torch.zeros(len(members), len(prompt.rewards)).scatter_(1, members.flatten(1), 1)[:, :rollouts]
    w = prompt.score_norms[:rollouts]
    energy = (w * advantage[:, :rollouts].square()).sum(-1)  # (K, rollouts)
    width = min(w.shape[1], oracles.shape[-1])
    gap = prompt.rewards[:rollouts].view(-1, 1, 1) - oracles[..., :width]
    bound = (w[:, :width] * gap[:, 0] * gap[:, 1]).sum(-1)
    return {"energy": (energy.sum() / drawn.sum()).item(), "oracle_energy": bound[scored].mean().item()}
