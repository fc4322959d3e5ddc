"""EngineState: gives the processes that share a copy of the policy in vLLM one random state."""

from __future__ import annotations

import torch

from otb.methods import Method
from otb.random_state import isolated_random_state


class EngineState(Method):
    """Makes the processes of one tensor-parallel engine sample the same tokens.

    Each of them draws all tokens of all of them; if they drew different ones they would wait for each other forever.
    The state follows from the first process's, which is in the checkpoints.
    """

    def around_generation(self, make, prompts):
        trainer = self.trainer
        in_process = trainer.use_vllm and trainer.vllm_mode == "colocate"
        if not in_process or (together := trainer.vllm_tensor_parallel_size) == 1:
            return make(prompts)
        drawn = trainer.accelerator.gather(torch.randint(2**62, (1,), device=trainer.accelerator.device)).tolist()
        rank = trainer.accelerator.process_index
        with isolated_random_state(seed=drawn[rank - rank % together]):
            return make(prompts)
