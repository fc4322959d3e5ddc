"""`experiments/run.py` with vLLM on a CPU, where two of its optimisations for CPUs break the sync of weights.

vLLM's CPU linear layers pack their weights and throw the parameter away, so that TRL's `sync_weights` finds none; a
tied LM head would silently keep its old packed copy. A GPU needs none of this. Compiling the model is left out, which
takes longer than a short run. Says on stdout from where vLLM loads, and in which precision it samples.
"""

import os
import sys

import torch

from experiments.run import command_line  # first: it quiets vLLM, which reads that when it is imported
from tests.support import sharding

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # it would bind the threads of all processes to one core

from vllm import LLM
from vllm.model_executor.layers import utils

vllms_own = LLM.__init__


def keep_linear_weights(layer, remove_weight=False) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def init(self, *args, **options) -> None:
    vllms_own(self, *args, **(options | {"enforce_eager": True}))
    print(f"vLLM loads {options['model']} and samples in {self.llm_engine.vllm_config.model_config.dtype}", flush=True)


utils.dispatch_cpu_unquantized_gemm = keep_linear_weights
LLM.__init__ = init

if __name__ == "__main__":
    sharding.install()
    command_line(sys.argv[1:])
