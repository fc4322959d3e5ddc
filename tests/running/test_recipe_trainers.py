"""Recipes for GPUs, built: the trainer's options by the trainer's own class, the model on the meta device.

The options are those of the first of as many processes as the recipe has GPUs, in a process group without the others.
"""

import json
import os
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from omegaconf import OmegaConf
from peft import get_peft_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.planning.architectures import FOLDER
from experiments.running import devices
from experiments.running.policy import lora_config
from experiments.running.train import trainer_config
from otb.records import RunDirectory
from tests.support.commands import ROOT
from tests.support.recipes import RECIPES, composed, run_of, runs_of

CARDS = OmegaConf.load(ROOT / "conf" / "plan.yaml").cards
FOR_GPUS = sorted(name for name in RECIPES if name.startswith(("paper_", "small_")))


class Expected(NamedTuple):
    """What a recipe's runs have, worked out by hand."""

    parameters: int  # of its model, all of them trained
    processes: int
    rollouts: dict[int, int]  # N -> of a step, prompts x N
    forward: int  # rollouts of a forward pass
    share: float  # of a GPU, for vLLM: what weights, optimizer and copies and a free tenth leave, in twentieths
    steps: int
    tokens: int
    turns: int | None = None


QWEN3_8B, QWEN_7B, QWEN_1_5B, QWEN_0_5B = 8_190_735_360, 7_615_616_512, 1_543_714_304, 494_032_768
EXPECTED = {
    # (4.1 + 8.2 + 2.5 of copies) / 80 GB = .185 -> .70
    "paper_single_turn": Expected(QWEN3_8B, 8, {n: 64 * n for n in (4, 8, 16, 32)}, 8, 0.7, 500, 8192),
    # (3.8 + 7.6 + 2.2) / 80 GB = .17 -> .70
    "paper_tool_use": Expected(QWEN_7B, 8, {16: 2048}, 8, 0.7, 500, 8192, turns=5),
    "paper_tool_use_group_size": Expected(QWEN_7B, 8, {n: 128 * n for n in (4, 8, 16, 32)}, 8, 0.7, 500, 8192, turns=5),
    "small_8x80gb": Expected(QWEN_7B, 8, {4: 256, 16: 1024}, 8, 0.7, 200, 4096, turns=5),
    # (2.0 + 4.0 + 0.5) / 24 GB = .27 -> .60, and (6.2 + 12.3 + 0.9) / 80 GB = .24 -> .65
    "small_24gb": Expected(QWEN_0_5B, 1, {4: 128, 16: 512}, 16, 0.6, 200, 1024),
    "small_80gb": Expected(QWEN_1_5B, 1, {4: 128, 16: 512}, 8, 0.65, 300, 2048),
}
FSDP = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
    "cpu_ram_efficient_loading": True,
    "state_dict_type": "SHARDED_STATE_DICT",
}


@pytest.fixture
def built(monkeypatch, tmp_path):
    """A function from a recipe to N -> OTBConfig of the first process of its runs."""

    def build(recipe):
        swept = composed(f"experiment={recipe}")
        gpus, memory = swept.gpus or 1, CARDS[swept.card].memory_gb * 1e9
        monkeypatch.setattr(devices, "visible_gpus", lambda: [str(number) for number in range(gpus)])
        monkeypatch.setattr(devices, "gpu_memory", lambda: memory)
        sizes = {next((axis for axis in run if axis.startswith("group_size=")), None) for run in runs_of(swept)}
        settings = [composed(f"experiment={recipe}", *filter(None, [size])) for size in sizes]
        return {cfg.group_size: options_of(cfg, gpus, tmp_path) for cfg in settings}

    return build


def options_of(cfg, processes, folder):
    ranks = {"WORLD_SIZE": processes, "RANK": 0, "LOCAL_WORLD_SIZE": processes, "LOCAL_RANK": 0, "MASTER_ADDR": "none"}
    environment = {name: str(value) for name, value in ranks.items()} if processes > 1 else {}
    with mock.patch.dict(os.environ, environment):  # and what transformers sets there of its own is forgotten
        try:
            if processes > 1:
                torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
            return trainer_config(run_of(cfg, processes), RunDirectory(folder / "run"))
        finally:
            if processes > 1:
                torch.distributed.destroy_process_group()
            AcceleratorState._reset_state(reset_partial_state=True)


def test_every_recipe_for_gpus_has_its_values_here():
    assert set(EXPECTED) == set(FOR_GPUS)


@pytest.mark.parametrize("recipe", FOR_GPUS)
def test_trainer_of_a_recipe_has_its_batches_sharding_and_sampler(recipe, built):
    expected = EXPECTED[recipe]
    found = built(recipe)
    assert {n: options.generation_batch_size for n, options in found.items()} == expected.rollouts  # of all processes
    for n, options in found.items():
        assert options.num_generations == n
        forwards = expected.rollouts[n] // expected.processes // expected.forward
        assert options.per_device_train_batch_size == expected.forward
        assert options.gradient_accumulation_steps == options.steps_per_generation == forwards
        assert (options.max_steps, options.max_completion_length) == (expected.steps, expected.tokens)
        # the last turn has no call
        assert options.max_tool_calling_iterations == (None if expected.turns is None else expected.turns - 1)
        assert (options.use_vllm, options.vllm_mode, options.vllm_tensor_parallel_size) == (True, "colocate", 1)
        assert (options.vllm_gpu_memory_utilization, options.vllm_enable_sleep_mode) == (expected.share, True)
        assert options.vllm_importance_sampling_correction
        assert options.vllm_importance_sampling_mode == "token_truncate"
        assert options.vllm_importance_sampling_clip_max == 2.0
        sync = options.accelerator_config.gradient_accumulation_kwargs
        if expected.processes > 1:
            assert options.fsdp is True and options.fsdp_config.items() >= FSDP.items()
            assert sync == {"sync_each_batch": True}
        else:
            assert not options.fsdp and not options.fsdp_config and sync is None


@pytest.mark.parametrize("recipe", FOR_GPUS)
def test_trainer_of_a_recipe_has_the_papers_learning_rate_and_no_kl(recipe, built):
    for options in built(recipe).values():
        assert (options.learning_rate, options.lr_scheduler_type, options.weight_decay) == (1e-6, "constant", 0.0)
        assert (options.beta, options.num_iterations, options.loss_type) == (0.0, 1, "dr_grpo")
        assert (options.temperature, options.top_p, options.max_grad_norm) == (1.0, 1.0, 1.0)
        assert (options.bf16, options.fp16) == (True, False)


def model_of(cfg):
    """The policy of a configuration, adapters and all, without memory."""
    file = next(file for file in FOLDER.glob("*.json") if cfg.model.name in json.loads(file.read_text())["models"])
    lora = lora_config(cfg)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(file.read_text())))
        return model if lora is None else get_peft_model(model, lora)


def counts(model):
    """Parameters of a model: (all, trained)."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


@pytest.mark.parametrize("recipe", FOR_GPUS)
def test_model_of_a_recipe_has_the_parameters_that_it_should(recipe):
    total = EXPECTED[recipe].parameters
    assert counts(model_of(composed(f"experiment={recipe}"))) == (total, total)


def test_recipe_with_lora_typed_behind_it_trains_the_adapters_alone():
    """Rank 32 on a layer's q, k, v, o (3584 and 512 wide) and gate, up, down (18944): 32 x (in + out) each."""
    layer = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    adapters = 28 * 32 * layer
    found = counts(model_of(composed("experiment=small_8x80gb", "++model.lora.r=32")))
    assert found == (QWEN_7B + adapters, adapters) == (7_696_356_864, 80_740_352)
