"""Tests what a baseline, a sampler and each method refuse, in the words of a script and of a run.

The shared table hands the same options to `refuse` twice. OTBTrainer and the command line ask it before anything loads.
"""

import ast
import inspect
import re
from functools import partial
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from peft import LoraConfig, PromptTuningConfig
from trl import GRPOTrainer

from experiments.running.fields import trainer_fields
from experiments.running.grpo_options import DERIVED, FIXED, RunOptions
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.none import none
from otb.baselines.ob_exact import ob_exact
from otb.baselines.otb import otb
from otb.baselines.otb_exact import otb_exact
from otb.baselines.rloo import rloo
from otb.baselines.trajectory_cv import TrajectoryCV
from otb.methods.auxiliary import MultiTokenPrediction
from otb.methods.improvement import PolicyImprovement
from otb.methods.schedules import LengthTriggeredDecay
from otb.methods.token_weights import TokenWeights
from otb.refusals import Options
from otb.training.options import refuse, refuse_other_sampling
from otb.training.trainer import OTBConfig, OTBTrainer
from tests.support.commands import ROOT
from tests.support.recipes import composed
from tests.support.trainers import byte_reward, config, dataset

PIPO = dict(improvement=PolicyImprovement(), steps_per_generation=1, gradient_accumulation_steps=1)
HEADS = {mode: dict(auxiliary=MultiTokenPrediction(mode)) for mode in ("detach", "ce", "policy", "occ", "occ_as_code")}
ARCA, SURPRISAL = dict(token_weights=TokenWeights("arca")), dict(token_weights=TokenWeights("surprisal"))
DECAY = dict(lr_schedule=LengthTriggeredDecay())
COPY = dict(sampler_dtype="bfloat16")
PROMPTS = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
ORIGINS = ("pissa", "pissa_niter_4", "olora", "OLoRA")

# baseline, options beside it; the rule; what a script is told of value and fix; what a run is told
REFUSED = [
    (rloo, dict(num_generations=1),
     "needs at least 2", "num_generations=1|Use num_generations=2", "group_size=1|Use group_size=2"),
    (otb, dict(multi_objective_aggregation="normalize_then_sum"),
     "a baseline of its own", "='normalize_then_sum'|Use multi_obj",
     "trainer.multi_objective_aggregation=norm|Use trainer.multi"),
    (otb_exact, dict(sharded=True),
     "reads whole gradients", "FSDP or DeepSpeed|Use plain data",
     "parallel=fsdp2|Use parallel=ddp, or a baseline without exact"),
    (none, dict(sharded=True, measure_gradient_noise=True),
     "reads whole gradients", "FSDP or|measure_gradient_noise=False", "parallel=fsdp2|measure_gradient_noise=false"),
    # an advantage per token
    (otb, dict(loss_type="vespo"),
     "otb has one per token", "loss_type='vespo'|Use loss_type='dr_grpo'",
     "trainer.loss_type=vespo|trainer.loss_type=dapo"),
    (partial(otb, tail="carry"), dict(loss_type="vespo"),
     "otb has one per token", "loss_type='vespo'", "trainer.loss_type=vespo"),
    (otb, dict(off_policy_mask_threshold=0.1),
     "otb has one per token", "old=0.1|=None", "trainer.off_policy_mask_threshold=0.1|=null"),
    (rloo, SURPRISAL | dict(loss_type="vespo"),
     "token_weights has one per token", "loss_type='vespo'", "trainer.loss_type=vespo"),
    (rloo, SURPRISAL | dict(off_policy_mask_threshold=0.1),
     "token_weights has one per", "old=0.1", "trainer.off_policy_mask_thr"),
    # the softmax at the temperature
    (otb, dict(top_p=0.9),
     "not the distribution sampled from", "top_p=0.9|Use top_p=1.0",
     "trainer.top_p=0.9|Use trainer.top_p=1.0, or a baseline"),
    *(
        (baseline, dict(top_k=5), "the score norms", "top_k=5|Use top_k=0", "trainer.top_k=5|Use trainer.top_k=0")
        for baseline in (EnergyProbe(), TrajectoryCV(), ob_exact)
    ),
    (otb, dict(top_k=5), "the score norms", "top_k=5|Use top_k=0", "trainer.top_k=5|Use trainer.top_k=0"),
    (otb, dict(top_k=-1), "the score norms", "top_k=-1", "trainer.top_k=-1"),  # transformers knows no such number
    (otb, dict(min_p=0.1), "the score norms", "min_p=0.1", "trainer.min_p=0.1"),
    (otb, dict(repetition_penalty=1.2), "the score norms", "repetition_penalty=1.2", "trainer.repetition_penalty=1.2"),
    (otb, dict(vllm_structured_outputs_regex="a+"),
     "the score norms", "_regex='a+'|=None", "trainer.vllm_structured_outputs_regex=a+|=null"),
    (rloo, dict(top_p=0.9, log_energy=True), "the score norms", "top_p=0.9", "trainer.top_p=0.9"),
    (rloo, COPY | dict(top_p=0.9),
     "the sampler's log-probs", "top_p=0.9|or sampler_dtype=None", "trainer.top_p=0.9|or rollouts_by=hf"),
    *(
        (otb, dict(generation_kwargs={name: value}),
         "the score norms", f"{name}={value} in generation_kwargs|there",
         f"{name}={value} in trainer.generation_kwargs|there")
        for name, value in {
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {7: 2.0}, "min_tokens": 8,
            "allowed_token_ids": [1], "bad_words": ["no"], "structured_outputs": {"regex": "a"}, "typical_p": 0.2,
            "num_beams": 2,
        }.items()
    ),
    (otb, dict(generation_kwargs={"top_p": 0.5}), "the score norms", "top_p=0.5", "trainer.top_p=0.5"),
    *(
        (otb, dict(generation_kwargs=given),
         "behind the trainer's back", "generation_kwargs={|Use temperature=",
         "trainer.generation_kwargs=|Use temperature=")
        for given in ({"temperature": 0.1}, {"do_sample": False})
    ),
    # samplers
    (rloo, dict(sampler_dtype="float64"),
     "is not one of bfloat16", "sampler_dtype='float64'|Use sampler_dtype='bfloat16'",
     "rollouts_by=float64|rollouts_by=hf_bfloat16"),
    (rloo, COPY | dict(bf16=True),
     "a bfloat16 copy of a float32 policy", "bf16=True|Use bf16=False, or sampler_dtype=None",
     "model.dtype=bfloat16|Use model.dtype=float32, or rollouts_by=hf"),
    (rloo, COPY | dict(cast_lm_head_to_fp32=True),
     "a bfloat16 copy", "cast_lm_head_to_fp32=True", "trainer.cast_lm_head_to_fp32=true|=false"),
    (rloo, COPY | dict(sharded=True),
     "copies the whole policy on every process", "FSDP or|None", "parallel=fsdp2|rollouts_by=hf"),
    (none, COPY | dict(loss_type="vespo", vllm_importance_sampling_mode="sequence_mask"),
     "does so by itself", "='sequence_mask'|Use vllm_importance_sampling_mode='token_truncate'",
     "trainer.vllm_importance_sampling_mode=seq|=token_truncate"),
    (rloo, dict(geometric_ratio_band=(0.9, 1.1)),
     "samples with the policy itself", "use_vllm=False|Use use_vllm=True, or sampler_dtype='bfloat16'",
     "rollouts_by=hf|Use rollouts_by=vllm, or rollouts_by=hf_bfloat16"),
    (rloo, COPY | dict(geometric_ratio_band=(1.1, 1.2)),
     "must be two numbers", "band=(1.1, 1.2)|Use geometric_ratio_band=(0.99, 1.01)",
     "band='[1.1,1.2]'|Use geometric_ratio_band='[0.99,1.01]'"),
    (rloo, COPY | dict(geometric_ratio_band=(0.9, 1.1), vllm_importance_sampling_correction=False),
     "leaves out the policy's log-probs", "=False|=True, or geometric_ratio_band=None",
     "trainer.vllm_importance_sampling_correction=false|=true, or geometric_ratio_band=null"),
    # improvement updates
    (rloo, PIPO | dict(num_iterations=2),
     "makes several updates on a batch", "num_iterations=2|improvement=None",
     "trainer.num_iterations=2|improvement=none"),
    (rloo, PIPO | dict(steps_per_generation=4),
     "one step for each batch", "steps_per_generation=4 beside gradient_acc|Use steps_per_generation=1",
     "prompts_per_step=4"),
    (rloo, PIPO | dict(loss_type="sapo"),
     "no clipped ratio", "loss_type='sapo'|Use loss_type='grpo' (or bnpo, ",
     "trainer.loss_type=sapo|Use trainer.loss_type=grpo (or bnpo, "),
    (rloo, PIPO | dict(off_policy_mask_threshold=0.5),
     "keeps or drops rollouts by the sign", "old=0.5", "trainer.off_policy_mask_threshold=0.5"),
    (rloo, PIPO | dict(use_vllm=True),
     "has not been tried", "use_vllm=True|Use use_vllm=False",
     "rollouts_by=vllm|Use rollouts_by=hf, or improvement=none"),
    (rloo, PIPO | dict(use_vllm=True, vllm_mode="server"),
     "has not been tried", "use_vllm=True", "rollouts_by=vllm_server|Use rollouts_by=hf"),
    (rloo, PIPO | dict(sharded=True),
     "only been tried with whole ones", "FSDP or DeepSpeed|improvement=None",
     "parallel=fsdp2|Use parallel=ddp, or improvement=none"),
    # an auxiliary head
    (rloo, PIPO | HEADS["ce"],
     "has not been worked out", "Use improvement=None, or auxiliary=None", "Use improvement=none, or auxiliary=none"),
    (rloo, HEADS["detach"] | dict(use_liger_kernel=True),
     "plain torch modules", "use_liger_kernel=True|auxiliary=None", "trainer.use_liger_kernel=true|auxiliary=none"),
    (rloo, HEADS["ce"] | dict(cast_lm_head_to_fp32=True),
     "plain torch modules", "cast_lm_head_to_fp32=True", "trainer.cast_lm_head_to_fp32=true"),
    (rloo, HEADS["detach"] | dict(peft_config={"r": 4}),
     "an adapter of LoRA beside an auxiliary head", "peft_config={'r': 4}|Use no peft_config",
     "model.lora='{r:4}'|Use no model.lora, or auxiliary=none"),
    (rloo, HEADS["detach"] | dict(optimizers=(SimpleNamespace(), None)),
     "does not know the head's parameters", "optimizers=(SimpleNamespace, ...)|Use no optimizers", ""),
    (rloo, HEADS["ce"] | dict(sharded=True),
     "an auxiliary head reads whole weights", "FSDP or DeepSpeed", "parallel=fsdp2|Use parallel=ddp"),
    (rloo, HEADS["policy"] | dict(loss_type="vespo"),
     "does not clip the ratio", "loss_type='vespo'|auxiliary.mode='ce'",
     "trainer.loss_type=vespo|Use trainer.loss_type=dr_grpo (or dapo, grpo, bnpo), or auxiliary.mode=ce"),
    (rloo, HEADS["policy"] | dict(importance_sampling_level="sequence"),
     "changes tokens", "level='sequence'|='token'", "trainer.importance_sampling_level=sequence"),
    (rloo, HEADS["policy"] | dict(top_entropy_quantile=0.2),
     "changes tokens", "Use top_entropy_quantile=1.0", "Use trainer.top_entropy_quantile=1.0"),
    (rloo, HEADS["policy"] | dict(delta=4.0), "changes tokens", "Use delta=None", "Use trainer.delta=null"),
    (rloo, HEADS["occ"] | dict(num_iterations=1),
     "one update per batch, and mode=occ measures", "num_iterations=1|auxiliary.mode='policy'",
     "trainer.num_iterations=1|Use trainer.num_iterations=2, or auxiliary.mode=policy"),
    (rloo, HEADS["occ_as_code"], "mode=occ_as_code measures", "num_iterations=1", "trainer.num_iterations=1"),
    (rloo, HEADS["occ"] | dict(steps_per_generation=2, gradient_accumulation_steps=2),
     "one update per batch", "num_iterations=1", "trainer.num_iterations=1"),
    # token weights that compare with the base
    (rloo, ARCA,
     "there is no adapter", "token_weights='arca'|Use peft_config=LoraConfig(...)",
     "token_weights=arca|Use model.lora.r=16, or token_weights=surprisal"),
    (rloo, dict(token_weights=TokenWeights("divergence")), "there is no adapter", "token_weights='divergence'",
     "token_weights=divergence"),
    (rloo, ARCA | dict(peft_config={}), "there is no adapter", "token_weights='arca'", "token_weights=arca"),
    (rloo, ARCA | dict(peft_config={"r": 4, "bias": "all"}),
     "biases of the base itself", "peft_config.bias='all'|='none'", "model.lora.bias=all|Use model.lora.bias=none"),
    (rloo, ARCA | dict(peft_config=LoraConfig(bias="all")),
     "biases of the base itself", "peft_config.bias='all'", "model.lora.bias=all"),
    *(
        # peft subtracts that part: at the first step h would differ from the h of such a base by 13, and not by 0
        (rloo, ARCA | dict(peft_config=lora),
         "from the base", f"init_lora_weights='{start}'|=True", f"model.lora.init_lora_weights={start}|=true")
        for start in ORIGINS
        for lora in ({"r": 4, "init_lora_weights": start}, LoraConfig(init_lora_weights=start))
    ),
    (rloo, ARCA | dict(peft_config=PROMPTS), "puts positions of its own", "PromptTuningConfig|LoraConfig(...)", ""),
    # a schedule of its own
    (rloo, DECAY | dict(lr_scheduler_type="cosine"),
     "would both set the learning rate", "lr_scheduler_type='cosine'|='constant', or lr_schedule=None",
     "trainer.lr_scheduler_type=cosine|or schedule=constant"),
    (rloo, DECAY | dict(warmup_steps=5),
     "would both set", "warmup_steps=5|lr_schedule.warmup", "trainer.warmup_steps=5|schedule.warmup"),
    (rloo, DECAY | dict(optimizers=(None, SimpleNamespace())),
     "would both set", "optimizers=(..., SimpleNamespace)|lr_schedule=None", ""),
]  # fmt: skip


@pytest.mark.parametrize(("baseline", "options", "rule", "script", "run"), REFUSED)
def test_what_cannot_go_together_is_refused_in_the_words_of_whoever_asks(baseline, options, rule, script, run):
    options = options | {"baseline": baseline}
    for asked, said in ((Options(**options), script), (RunOptions(**options), run)):
        asked = asked.but(sharded="fsdp2") if isinstance(asked, RunOptions) and asked.sharded else asked
        with pytest.raises(ValueError) as refused:
            refuse(asked)
        for part in (rule, *said.split("|")):
            assert part in str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        dict(baseline=otb, num_generations=1, top_p=1.0, min_p=None, loss_type="dapo"),
        dict(baseline=otb, top_k=-1, use_vllm=True),
        dict(baseline=otb, generation_kwargs={"top_k": -1}, use_vllm=True),
        dict(baseline=otb, generation_kwargs={"presence_penalty": 0.0, "min_tokens": 0, "stop_token_ids": [2]}),
        dict(baseline=rloo, top_p=0.9, loss_type="vespo", off_policy_mask_threshold=0.5),
        dict(baseline=rloo, geometric_ratio_band=[0.9, 1.1], use_vllm=True),
        PIPO | dict(baseline=rloo, loss_type="dr_grpo", num_iterations=1, use_vllm=False),
        HEADS["occ"] | dict(baseline=rloo, num_iterations=2),
        HEADS["occ"] | dict(baseline=rloo, steps_per_generation=4, gradient_accumulation_steps=2),
        HEADS["ce"] | dict(baseline=rloo, loss_type="vespo", delta=4.0),
        DECAY | dict(baseline=rloo, lr_scheduler_type="constant", lr_scheduler_kwargs={}, warmup_steps=0),
        *(
            ARCA | dict(baseline=rloo, peft_config=LoraConfig(init_lora_weights=kept))
            for kept in (True, False, "gaussian", "orthogonal")
        ),
    ],
)
def test_what_goes_together_is_taken(options):
    refuse(Options(**options))
    refuse_other_sampling(RunOptions(**options))


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ({}, dict(top_p=0.9), "top_p=0.9: the score norms"),
        (ARCA, {}, "token_weights='arca' compares"),
        (ARCA | dict(peft_config=LoraConfig(bias="lora_only")), {}, "peft_config.bias='lora_only'"),
        (dict(auxiliary=MultiTokenPrediction("ce"), peft_config=LoraConfig()), {}, "peft_config=LoraConfig(...) is an"),
        (dict(improvement=PolicyImprovement(), baseline=rloo), dict(loss_type="sapo"), "loss_type='sapo'"),
        (DECAY, dict(lr_scheduler_type="cosine"), "lr_scheduler_type='cosine' and lr_schedule"),
        ({}, dict(measure_gradient_noise=True, gradient_accumulation_steps=1), "micro-batches of whole prompt groups"),
        (dict(baseline=otb_exact), dict(fsdp=True), "FSDP or DeepSpeed divides"),
    ],
)
def test_the_trainer_refuses_before_it_loads_a_model(arguments, options, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)):
        OTBTrainer("no/such-model", byte_reward, config(tmp_path, **options), dataset(), **arguments)


# ---- the words of whoever is refused

OF_THE_TRAINER = {"baseline", "lr_schedule", "token_weights", "improvement", "auxiliary", "peft_config", "optimizers"}
ASKED = re.compile(r"""(?:options\.(?!says|refus|key|but|batch)|(?:says|refusal|key|Taken)\(["'])(\w+)""")


def options_read() -> set[str]:
    """Returns the names that refusals read, and the names that they write into messages."""
    names = set()
    for file in (ROOT / "otb" / "training" / "options.py", *(ROOT / "otb" / "methods").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
            is_table = isinstance(node, ast.Assign) and "Taken(" in ast.unparse(node)
            if is_table or (isinstance(node, ast.FunctionDef) and "options: Options" in ast.unparse(node.args)):
                names |= set(ASKED.findall(ast.unparse(node)))
    return names


def test_refusals_ask_for_options_that_there_are():
    """A misspelt name would read as None, and nothing would be refused."""
    there_are = {*OTBConfig.__dataclass_fields__, *OF_THE_TRAINER, "world_size", "sharded"}
    assert options_read() <= there_are and len(options_read()) > 25
    assert {*inspect.signature(OTBTrainer).parameters, *inspect.signature(GRPOTrainer).parameters} >= OF_THE_TRAINER


def test_a_run_is_told_of_keys_that_its_command_line_has():
    cfg, options = composed(), trainer_fields().keys() - DERIVED.keys() - FIXED.keys()
    keys = {RunOptions().key(name) for name in options_read() - {"optimizers", "world_size"}}  # which no run has
    for key in keys - {f"trainer.{option}" for option in options}:
        group, _, last = key.rpartition(".")
        assert last in (OmegaConf.select(cfg, group) if group else cfg), key
    assert {"group_size", "model.rollouts_per_forward", "trainer.loss_type", "schedule", "rollouts_by"} <= keys
