"""One process of tests/test_sharding.py, started by torchrun: two steps of OTBTrainer, sharded or not.

Each process writes what its trainer handed to the loss and what was logged; the first also writes the final weights.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from otb import OTBTrainer
from tests.support.sharding import let_fsdp_run_on_cpus
from tests.support.trainers import byte_reward, config, dataset

FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


class KeepingTrainer(OTBTrainer):
    """Keeps the batches with their score norms, and how many parameters were sharded while it trained."""

    kept: list

    def _log_rollouts(self, rollouts, baseline, advantages, output):
        super()._log_rollouts(rollouts, baseline, advantages, output)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps")
        batch = {name: output[name].cpu() for name in names if name in output}
        sharded = sum(isinstance(p, DTensor) for p in self.model.parameters())
        self.kept.append(batch | {"rewards": rollouts.rewards, "score_norms": rollouts.score_norms, "sharded": sharded})


def train(policy: str, output: Path, name: str, options: dict) -> None:
    """Two steps; `options` are those of OTBConfig beside fsdp2, lora and weights (their dtype)."""
    AcceleratorState._reset_state(reset_partial_state=True)  # several trainings in one process: imports cost seconds
    sharding = FSDP2 if options.pop("fsdp2", False) else {}
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if options.pop("lora", False) else None
    trainer = KeepingTrainer(
        AutoModelForCausalLM.from_pretrained(policy, dtype=getattr(torch, options.pop("weights", "float32"))),
        byte_reward,
        config(output / name, per_device_train_batch_size=8, ddp_find_unused_parameters=False, **sharding, **options),
        dataset(),
        processing_class=AutoTokenizer.from_pretrained(policy),
        peft_config=lora,
    )
    trainer.kept = []
    trainer.train()
    full = trainer.accelerator.get_state_dict(trainer.model)  # a collective: every process takes part
    rank = trainer.accelerator.process_index
    torch.save({"batches": trainer.kept, "log": trainer.state.log_history}, output / f"{name}-rank{rank}.pt")
    if rank == 0:
        torch.save({name: value.float() for name, value in full.items()}, output / f"{name}-weights.pt")


if __name__ == "__main__":
    let_fsdp_run_on_cpus()
    for name, options in json.loads(sys.argv[3]).items():
        train(sys.argv[1], Path(sys.argv[2]), name, options)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # a C++ thread of a process group that nobody joined may abort the interpreter's own end
