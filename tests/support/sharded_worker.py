"""Runs one process of tests/trainer/test_sharding.py: two steps of OTBTrainer, sharded or not.

Each process writes its trainer's batches for the loss and its log; the first process also writes the final weights.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from accelerate.state import AcceleratorState
from omegaconf import OmegaConf
from peft import LoraConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from otb import OTBTrainer
from tests.support.sharding import let_sharding_run_on_cpus
from tests.support.trainers import byte_reward, config, dataset

ROOT = Path(__file__).resolve().parents[2]


class KeepingTrainer(OTBTrainer):
    """Keeps the batches with their score norms, the number of sharded parameters, and the first step's gradient."""

    kept: list
    trained: dict  # name -> (weight, gradient), whole, before the first optimizer step

    def _log_rollouts(self, step):
        super()._log_rollouts(step)
        rollouts, output = step.rollouts, step.output
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        names += ("old_per_token_logps", "ref_per_token_logps")
        batch = {name: output[name].cpu() for name in names if name in output}
        sharded = sum(isinstance(p, DTensor) or hasattr(p, "ds_tensor") for p in self.model.parameters())
        self.kept.append(batch | {"rewards": rollouts.rewards, "score_norms": rollouts.score_norms, "sharded": sharded})

    def training_step(self, *args, **kwargs):
        if self.trained:
            return super().training_step(*args, **kwargs)
        if self.deepspeed is None:
            loss = super().training_step(*args, **kwargs)
            self.keep_gradient()
            return loss
        step = self.deepspeed.step  # which DeepSpeed makes within the backward pass
        with mock.patch.object(self.deepspeed, "step", lambda: (self.keep_gradient(), step())):
            return super().training_step(*args, **kwargs)

    def keep_gradient(self) -> None:
        """Keeps every trained weight with its gradient, before clipping. It is a collective operation."""
        trained = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
        self.trained = {name: tuple(x.detach().clone() for x in whole(weight)) for name, weight in trained}


def whole(weight: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight and its gradient, gathered if they are sharded."""
    if isinstance(weight, DTensor):
        return weight.full_tensor(), weight.grad.full_tensor()
    if hasattr(weight, "ds_tensor"):
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        return safe_get_full_fp32_param(weight), safe_get_full_grad(weight)
    return weight, weight.grad


def lora() -> LoraConfig:
    """Returns the LoRA configuration of the trainings with adapters."""
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def train(policy: str, output: Path, name: str, options: dict) -> None:
    """Trains two steps. options: of OTBConfig, and parallel, lora, weights (their dtype), reduced_in_bfloat16."""
    AcceleratorState._reset_state(reset_partial_state=True)  # several trainings in one process: imports cost seconds
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # the trace of an earlier one
    parallel = OmegaConf.load(ROOT / "conf" / "parallel" / f"{options.pop('parallel', 'ddp')}.yaml")
    sharding = OmegaConf.to_container(parallel.trainer)
    adapter = lora() if options.pop("lora", False) else None
    dtype = getattr(torch, options.pop("weights", "float32"))
    shape = {"per_device_train_batch_size": 8, "ddp_find_unused_parameters": False}
    coarse = options.pop("reduced_in_bfloat16", False)  # the gradients, over the processes
    if coarse and "deepspeed" in sharding:
        sharding["deepspeed"]["communication_data_type"] = "bf16"
    arguments = config(output / name, **shape, **sharding, **options)  # before the weights, which it may divide
    trainer = KeepingTrainer(
        AutoModelForCausalLM.from_pretrained(policy, dtype=dtype),
        byte_reward,
        arguments,
        dataset(),
        processing_class=AutoTokenizer.from_pretrained(policy),
        peft_config=adapter,
    )
    trainer.kept, trainer.trained = [], {}
    if coarse and "deepspeed" not in sharding:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    trainer.train()
    sharded = trainer.deepspeed or trainer.model
    full = trainer.accelerator.get_state_dict(sharded)  # a collective: every process takes part
    rank = trainer.accelerator.process_index
    found = {"batches": trainer.kept, "log": trainer.state.log_history, "sums": dtypes_of_sums(trainer)}
    found["trained"] = trainer.trained if rank == 0 else {}
    torch.save(found, output / f"{name}-rank{rank}.pt")
    if rank == 0:
        torch.save({name: value.float() for name, value in full.items()}, output / f"{name}-weights.pt")


def dtypes_of_sums(trainer) -> set[torch.dtype]:
    """Returns the dtype in which gradients are summed, over processes and over the forwards of a step."""
    if trainer.deepspeed is not None:
        return {trainer.deepspeed.communication_data_type, trainer.deepspeed.optimizer.gradient_accumulation_dtype}
    held = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy if trainer.accelerator.is_fsdp2 else None
    return held | ({policy.reduce_dtype} if policy is not None else set())


if __name__ == "__main__":
    let_sharding_run_on_cpus(deepspeed="zero3" in sys.argv[3])
    for name, options in json.loads(sys.argv[3]).items():
        train(sys.argv[1], Path(sys.argv[2]), name, options)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # a C++ thread of a process group that nobody joined may abort the interpreter's own end
