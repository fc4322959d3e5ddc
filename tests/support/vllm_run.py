"""Runs `experiments/run.py` or `evaluate.py` with vLLM on a CPU, where two optimisations would break weight syncs.

    python -m tests.support.vllm_run [evaluate] KEY=VALUE ...

vLLM's CPU linear layers pack their weights and drop the parameter, so TRL's `sync_weights` finds none; a tied LM head
would silently keep its old packed copy. A GPU does not need this file. It also skips compiling the model, which takes
longer than a short run, and prints from where vLLM loads and in which precision it samples. A run with a
geometric_ratio_band saves the sampler's log-probs of each step in its directory, for the test to compare.
"""

import os
import sys

import torch

from experiments import evaluate, run  # first: they quiet vLLM, which reads that when it is imported
from experiments.checks import machine
from tests.support import sharding

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it would bind the threads of all processes to one core

from vllm import LLM
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory
from vllm.model_executor.layers import utils

from otb.methods.mismatch import SamplerMismatch

vllms_own, begin, vllms_name = LLM.__init__, SamplerMismatch.begin, SharedMemory.make_group_name


def keep_linear_weights(layer, remove_weight=False) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def init(self, *args, **options) -> None:
    vllms_own(self, *args, **(options | {"enforce_eager": True}))
    print(f"vLLM loads {options['model']} and samples in {self.llm_engine.vllm_config.model_config.dtype}", flush=True)


def own_name(group) -> str:
    return f"/{os.environ['MASTER_PORT']}{vllms_name(group).lstrip('/')}"


def keep_and_begin(self, output) -> None:
    trainer = self.trainer
    if trainer.args.geometric_ratio_band is not None:
        sampled = f"{trainer.args.output_dir}/sampled-{trainer.state.global_step + 1}.pt"
        torch.save(output["sampling_per_token_logps"], sampled)
    begin(self, output)


machine.refuse_vllm_without_gpu = lambda cfg, gpus: None  # what it refuses is mended here
utils.dispatch_cpu_unquantized_gemm = keep_linear_weights
LLM.__init__ = init
# Processes that share a copy of the policy name their memory alike in every run, and leave it behind.
SharedMemory.make_group_name = staticmethod(own_name)
SamplerMismatch.begin = keep_and_begin

if __name__ == "__main__":
    sharding.install()
    if sys.argv[1] == "evaluate":
        evaluate.command_line(sys.argv[2:])
    else:
        run.command_line(sys.argv[1:])
