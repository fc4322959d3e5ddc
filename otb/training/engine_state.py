"""Gives processes that share one copy of the policy in vLLM the same random state.

`EngineState` is in OTBTrainer's list of methods.
"""

from __future__ import annotations

import torch

from otb.methods import Method
from otb.random_state import isolated_random_state


class EngineState(Method):
    """Makes all processes of one tensor-parallel engine sample the same tokens.

    Every process draws the tokens of the whole engine; if two drew different tokens, they would wait for each other
    forever. The seed comes from the random state of the engine's first process, which checkpoints save.
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
