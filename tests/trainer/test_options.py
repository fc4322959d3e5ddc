"""The batches of a step, the options that are refused, and the words of whoever is refused."""

import ast
import inspect
import re
from functools import partial

import pytest
from omegaconf import OmegaConf
from trl import GRPOTrainer

from experiments.running.fields import trainer_fields
from experiments.running.grpo_options import DERIVED, RunOptions
from otb.baselines.grpo import grpo
from otb.baselines.otb import otb
from otb.refusals import Options
from otb.training.options import Batches, batches, refuse, refuse_other_sampling
from otb.training.trainer import OTBConfig, OTBTrainer
from otb.values import refuse_arguments
from tests.support.commands import ROOT
from tests.support.recipes import composed


@pytest.mark.parametrize(
    ("prompts", "group_size", "processes", "rollouts_per_forward", "expected"),
    [
        (16, 4, 1, None, Batches(local=64, forward=64, accumulation=1)),
        (16, 4, 1, 8, Batches(local=64, forward=8, accumulation=8)),
        (16, 4, 8, 8, Batches(local=8, forward=8, accumulation=1)),
        (16, 4, 8, 32, Batches(local=8, forward=8, accumulation=1)),  # more than a process has
        (3, 1, 3, 1, Batches(local=1, forward=1, accumulation=1)),
    ],
)
def test_a_step_is_divided_into_processes_and_forwards(prompts, group_size, processes, rollouts_per_forward, expected):
    assert batches(prompts, group_size, processes, rollouts_per_forward) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((3, 1, 2, None), "3 x group_size=1 = 3 rollouts do not divide over 2 processes. Try prompts_per_step=2."),
        ((1, 2, 8, None), "1 x group_size=2 = 2 rollouts do not divide over 8 processes. Try prompts_per_step=4."),
        ((16, 4, 1, 5), "rollouts_per_forward=5 must divide the 64 rollouts of a process. Try model.rollouts_per_fo"),
        ((16, 4, 1, 0), "rollouts_per_forward=0 must divide the 64 rollouts of a process. Try model.rollouts_per_fo"),
        ((16, 4, 1, 2.0), "rollouts_per_forward=2.0 must divide the 64 rollouts"),
        ((16, 4, 1, True), "rollouts_per_forward=True must divide the 64 rollouts"),
    ],
)
def test_a_division_with_a_rest_is_refused_with_one_that_has_none(arguments, said):
    with pytest.raises(ValueError) as refused:
        batches(*arguments)
    assert said in str(refused.value)


def noisy(forward, accumulation, processes=1, kind=Options):
    """Options of a measurement of gradient noise in groups of 4."""
    return kind(
        measure_gradient_noise=True,
        num_generations=4,
        per_device_train_batch_size=forward,
        gradient_accumulation_steps=accumulation,
        world_size=processes,
        baseline=otb,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            noisy(64, 1, kind=RunOptions),
            "a step has 1 of 64 rollouts in groups of 4. Use model.rollouts_per_forward=32.",
        ),
        (
            noisy(2, 32, kind=RunOptions),
            "a step has 32 of 2 rollouts in groups of 4. Use model.rollouts_per_forward=32.",
        ),
        (noisy(4, 1, kind=RunOptions), "a step has 1 of 4 rollouts in groups of 4. Use prompts_per_step=4."),
        (noisy(64, 1), "Use per_device_train_batch_size=32 and gradient_accumulation_steps=2."),
        (noisy(2, 32), "Use per_device_train_batch_size=32 and gradient_accumulation_steps=2."),
        (noisy(4, 1), "Use per_device_train_batch_size=4 and gradient_accumulation_steps=2."),
    ],
)
def test_micro_batches_that_break_prompt_groups_are_refused_with_ones_that_do_not(options, said):
    with pytest.raises(ValueError, match="compares micro-batches of whole prompt groups") as refused:
        refuse(options)
    assert said in str(refused.value)


def test_two_micro_batches_of_whole_groups_pass_on_one_process_or_on_two():
    refuse(noisy(32, 2))
    refuse(noisy(4, 2))
    refuse(noisy(64, 1, processes=2))


# ---- options under which tokens are not drawn from the softmax


def sampling(generation_kwargs=None, **options) -> Options:
    return Options(generation_kwargs=generation_kwargs, baseline=otb, **options)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (sampling({"presence_penalty": 0.5}), "presence_penalty=0.5 in generation_kwargs"),
        (sampling({"frequency_penalty": -0.5}), "frequency_penalty=-0.5 in generation_kwargs"),
        (sampling({"logit_bias": {7: 2.0}}), "logit_bias={7: 2.0} in generation_kwargs"),
        (sampling({"min_tokens": 8}), "min_tokens=8 in generation_kwargs"),
        (sampling({"allowed_token_ids": [1]}), "allowed_token_ids=[1] in generation_kwargs"),
        (sampling({"bad_words": ["no"]}), "bad_words=['no'] in generation_kwargs"),
        (sampling({"structured_outputs": {"regex": "a"}}), "structured_outputs={'regex': 'a'} in generation_kwargs"),
        (sampling(vllm_structured_outputs_regex="a+"), "vllm_structured_outputs_regex='a+': the score norms"),
        (sampling(top_k=-1), "top_k=-1: the score norms"),  # transformers knows no such number
        (sampling(min_p=0.1), "min_p=0.1: the score norms"),
    ],
)
def test_what_changes_the_distribution_that_is_sampled_from_is_refused(args, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_other_sampling(args)


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (partial(otb, tail="cary"), "tail=cary is not one of zero, own, carry. Try tail=zero."),
        (partial(otb, tails="own"), "tails=own is no argument of otb. It has: tail, eps."),
        (partial(partial(otb, tails="own"), tail="own"), "tails=own is no argument of otb."),
        (partial(grpo, epz=1e-6), "epz=1e-06 is no argument of grpo. It has: "),
    ],
)
def test_arguments_that_a_baseline_does_not_take_are_refused_before_the_model_loads(baseline, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse(Options(baseline=baseline))


class Scaled:
    """A baseline that is an object."""

    def __call__(self, rollouts, by="reward"):
        return rollouts


Scaled.__call__.__annotations__["by"] = "Literal['reward'] | NameOfItsModule"


@pytest.mark.parametrize(
    "baseline", [otb, Scaled(), partial(Scaled(), by="reward"), partial(max, key=None), partial(partial(otb), eps=1e-6)]
)
def test_whatever_may_be_called_like_a_baseline_is_taken(baseline):
    refuse_arguments(baseline)
    with pytest.raises(ValueError, match="bye=1 is no argument of Scaled. It has: by."):
        refuse_arguments(partial(Scaled(), bye=1))


@pytest.mark.parametrize(
    "args",
    [
        sampling(min_p=0.0),
        sampling(min_p=None),
        sampling(top_k=-1, use_vllm=True),
        sampling({"top_k": -1}, use_vllm=True),
        sampling({"presence_penalty": 0.0, "min_tokens": 0, "logit_bias": None, "stop_token_ids": [2]}),
    ],
)
def test_values_that_change_nothing_are_taken(args):
    refuse_other_sampling(args)


# ---- the words of whoever is refused

OF_THE_TRAINER = {"baseline", "lr_schedule", "token_weights", "improvement", "auxiliary", "peft_config", "optimizers"}


def options_read() -> set[str]:
    """The names that refusals ask `options` for, and those that they write into messages."""
    names = set()
    for file in (ROOT / "otb" / "training" / "options.py", *(ROOT / "otb" / "methods").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "options":
                names.add(node.attr)
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr
            if called in ("says", "refusal", "key") and isinstance(node.args[0], ast.Constant):
                names.add(node.args[0].value.split(".")[0])
    return names - {"says", "refusal", "key", "but", "batch", "refuse_sharding"}


def test_refusals_ask_for_options_that_there_are():
    """A misspelt name would be None, and nothing would be refused."""
    there_are = {*OTBConfig.__dataclass_fields__, *OF_THE_TRAINER, "world_size", "sharded"}
    assert options_read() - there_are == set() and len(options_read()) > 20
    assert {*inspect.signature(OTBTrainer).parameters, *inspect.signature(GRPOTrainer).parameters} >= OF_THE_TRAINER


def test_a_run_is_told_of_keys_that_its_command_line_has():
    cfg, fields = composed(), trainer_fields()
    for name in options_read() - {"optimizers"}:  # which no run has
        key = RunOptions().key(name)
        below = key.removeprefix("trainer.")
        there_is = (
            OmegaConf.select(cfg, key) is not None
            or key.split(".")[-1] in OmegaConf.select(cfg, key.rpartition(".")[0])
            if "." in key
            else key in cfg
        )
        assert there_is or (below in fields and below not in DERIVED), f"{name} -> {key}"
