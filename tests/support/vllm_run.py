"""`experiments/run.py` with vLLM on a CPU, where two of its optimisations for CPUs break the sync of weights.

vLLM's CPU linear layers pack their weights and throw the parameter away, so that TRL's `sync_weights` finds none; a
tied LM head would silently keep its old packed copy. A GPU needs none of this.
"""

import sys

import torch
from vllm.model_executor.layers import utils


def keep_linear_weights(layer, remove_weight=False) -> None:
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = keep_linear_weights

if __name__ == "__main__":
    from experiments.run import command_line

    command_line(sys.argv[1:])
