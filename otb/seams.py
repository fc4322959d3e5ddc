"""Lists the internals of other libraries that this project relies on, and checks them: `python -m otb.seams`.

All other use goes through documented interfaces. Read this list before pyproject.toml allows another version of a
library. tests/trainer/test_seams.py checks the installed libraries, and that the project uses no private name that is
missing here. Importing this file imports none of the libraries.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType

GRPO = "trl:GRPOTrainer"  # including everything it inherits from transformers.Trainer
VLLM = "trl.generation.vllm_generation:VLLMGeneration"
TEMPLATES = "trl.chat_template_utils"


# owner -> name -> what the project does with it.
# Owner: "module" or "module:Class".
# Name: `method(a, *, b)` for a function with parameter a in this position and a parameter b; `attribute` for one that
# the owner has or assigns to `self`; `"text"` for a string in the owner's source, such as a key.
SEAMS: dict[str, dict[str, str]] = {
    GRPO: {
        "__init__(model, reward_funcs, args)": "extended: refuses options before the model is loaded",
        "create_accelerator_and_postprocess()": "extended: sets FSDP2's precision before TRL wraps a reference model",
        "training_step()": "extended: methods run after the gradient of each micro-batch",
        "_prepare_inputs(generation_batch)": (
            "extended: methods run on new micro-batches, and before each micro-batch's forward"
        ),
        "_buffered_inputs": "the micro-batches of the last generation, which methods may replace",
        "_step": "counts micro-batches; gives the position of the next one",
        "_generate_and_score_completions(inputs)": (
            "extended: its output gets the baseline's advantages; called for evaluations"
        ),
        "_generate(prompts)": "extended: its second and third return values are ids and tool mask",
        "_generate_single_turn(prompt_ids, images)": (
            "extended: samples some rows at a time, inside the token budget; returns ids, and log-probs only from vLLM"
        ),
        ("_get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, *, compute_entropy)"): (
            "extended and called: its first return values are log-probs and entropies (B, logits_to_keep)"
        ),
        "_get_grad_norm()": "extended: called once before each optimizer step",
        "_metrics": "metrics of the step: mode -> name -> list",
        "_logs": "rows of TRL's table of completions: we replace its advantages; evaluations must not fill it",
        "_save_optimizer_and_scheduler(output_dir)": "extended: also saves the state of baseline and methods",
        "_load_optimizer_and_scheduler(checkpoint)": "extended: also restores this state",
        "_compute_loss(model, inputs)": "extended: methods wrap it",
        "create_optimizer(model)": "extended: adds an auxiliary head's parameters",
        "create_scheduler(num_training_steps, optimizer)": "extended: uses a method's schedule",
        "_created_lr_scheduler": "makes a second train() start with a new schedule",
        "use_vllm": "set for a SamplerCopy, so TRL gets rollouts from vllm_generation and corrects for the mismatch",
        "vllm_mode": '"colocate": the engine is in these processes; "server": TRL reads the model\'s context length',
        "vllm_generation": "vLLM's engine, or a SamplerCopy",
        "_last_loaded_step": "the step whose weights the sampler has; -1 makes TRL send them again",
        "eos_token_ids": "the tokens that end a response",
        "generation_config": "how generate samples",
        "_tag_names": "tags of a model card",
        "_name": "the trainer's name in a model card",
        "_calculate_rewards()": "extended: returns (P * G, reward functions) of all processes",
        "_entropy_bonus_enabled": "an entropy bonus has a gradient even if the advantage is 0",
        "aux_loss_enabled": "a router's loss has a gradient even if the advantage is 0",
        "beta": "weight of the KL term, which has a gradient even if the advantage is 0; 0 for an improvement update",
        "compute_loss(model, inputs)": "called: the clipped loss of a kept micro-batch",
        "compute_loss_context_manager()": "the context in which transformers computes a loss",
        "current_gradient_accumulation_steps": (
            "the number of micro-batches by which a loss is divided; set for an improvement update"
        ),
        "model_wrapped": "the policy with its wrapper for several processes",
        "epsilon_low": "lower clipping of the policy's ratio, used for the head's too",
        "epsilon_high": "upper clipping of the policy's ratio, used for the head's too",
        "_get_tool_suffix_ids(tool_messages)": "extended: makes a reply harmless and short enough",
        "_tool_call_loop()": "asks for replies one rollout after another, and continues the rollouts in this order",
        "_tokenizer": "decodes turns, replies and samples",
        "_env_tools": "the tools of the single environment, under the key None; replaced with their schemas",
        "environments": "the environments of the current generation, in the order of the prompts",
        "environment_factories": "empty without tools",
        "_maybe_log_save_evaluate()": "extended: samples, evaluation and checkpoint of the step follow it",
        "_globalstep_last_logged": "tells whether it has already run for this step",
        "log(logs, start_time)": "extended: writes the metrics row; evaluations call transformers' log, not TRL's",
        "_get_train_sampler(dataset)": "replaced: seed and epoch determine the order of the prompts",
        "_save_checkpoint(model, trial)": "writes checkpoint-STEP into args.output_dir",
        "create_model_card()": "replaced: writes nothing",
        "_environment_pool": "name -> the environments that TRL has made",
        '"completion_mask"': "key of the batch for the loss: False for padding",
        '"tool_mask"': "key of the batch if there are tools: False for tool tokens",
        '"num_items_in_batch"': "key of the batch: the number of tokens that count, by which dapo divides",
        '"pixel_values"': "key of the batch if prompts have images, which extra passes do not see",
        '"advantages"': "key of the batch: (B,), and the loss accepts (B, C)",
        '"old_per_token_logps"': "key of the batch if TRL made a pass: the same tensor that the pass returned",
        '"sampling_per_token_logps"': "key of the batch if vLLM or a SamplerCopy sampled",
        '"prompt_ids"': "key of the batch",
        '"prompt_mask"': "key of the batch",
        '"completion_ids"': "key of the batch",
        '"importance_sampling_ratio"': "key of the batch if TRL corrects for the sampler",
        '"clip_ratio/region_mean"': "key of _metrics: the share of clipped tokens of a micro-batch",
    },
    "accelerate.utils:FullyShardedDataParallelPlugin": {
        "mixed_precision_policy": "replaced under FSDP2: the model must return log-probs in float32",
    },
    "trl.trainer.utils": {
        "add_fused_lm_head(model, *, temperature, cast_lm_head_to_fp32, outputs)": (
            "replaces model.forward for one pass; its result then also has log_sum_sq_probs"
        ),
    },
    "trl.trainer.utils:FusedCausalLMOutput": {
        "log_sum_sq_probs": "log sum pi^2 of that pass",
    },
    "trl.models.utils": {
        "disable_gradient_checkpointing(model, gradient_checkpointing_kwargs)": (
            "used around passes without gradient, as in TRL"
        ),
    },
    "transformers:GenerationMixin": {
        "_supports_default_dynamic_cache()": "called: without such a cache no rows can be removed",
        "generate(*, custom_generate)": "called with our decoding loop",
        "prepare_inputs_for_generation(input_ids, *, next_sequence_length, is_first_iteration)": (
            "called: returns the model's inputs for the next token"
        ),
        "_update_model_kwargs_for_generation(outputs, model_kwargs)": "called: extends the inputs by one token",
    },
    "transformers:DynamicCache": {
        "batch_select_indices(indices)": "removes the rows that have ended",
        "batch_repeat_interleave(repeats)": "copies a prompt's row for each rollout of its group",
    },
    "trl.kernels:ChunkedLogProbFunction": {
        (
            "forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, "
            "logit_scale, outputs)"
        ): ("computes the head's log-probs without holding all logits at once"),
    },
    "transformers:PreTrainedConfig": {
        '"_commit_hash"': "the revision of a hub model, from which its shipped head is read",
    },
    VLLM: {
        "sync_weights()": "called before the first turn: wakes the engine's weights and replaces them",
        "generate(prompts, images)": "its second and third return values are ids and log-probs",
        "max_completion_length": "the longest response; set before each turn",
        "enable_sleep_mode": "False during the turns of a generation, because generate() would sleep after each turn",
        "_llm_weights_sleeping": "set when the engine sleeps again, because generate() then reloads the weights",
        "llm": "vLLM's engine",
        '"kv_cache"': "the part that generate() wakes besides the weights",
    },
    TEMPLATES: {
        "parse_response(tokenizer, ids, *, prefix, tools)": "reads the calls of a turn",
        "supports_tool_calling(processing_class)": "checked before a run starts",
        "is_chat_template_prefix_preserving(processing_class)": "checked before a run starts",
        "get_training_chat_template(processing_class)": "checked before a run starts",
        "add_response_schema(processing_class)": "checked before a run starts",
    },
    "datasets.load:CachedDatasetModuleFactory": {
        '"___"': "separates owner and name in the folder of a prepared hub data set",
    },
    "peft.tuners.tuners_utils": {
        "check_target_module_exists(config, key)": "tells whether a LoRA target names a module",
    },
    "sys": {
        "_base_executable": "the Python outside any virtual environment, which the sandbox makes visible to programs",
    },
    "atexit": {
        "_clear()": "drops the runner's exit functions",
        "_run_exitfuncs()": "runs the program's exit functions, as Python would at its end",
    },
    "threading": {
        "_shutdown()": "waits for threads before a fork exits without unloading the libraries",
    },
    "hydra._internal.callbacks": {
        "Callbacks": "the study starts a launcher, which takes a context, which takes callbacks",
    },
    "hydra._internal.utils": {
        "get_args_parser()": "separates overrides from Hydra's options",
    },
    "trl.trainer.grpo_config": {
        "GRPOConfig": "we read its fields from the source, without importing torch",
    },
    "trl.trainer.base_config": {
        "_BaseConfig": "we read its fields from the source",
    },
    "transformers.training_args": {
        "TrainingArguments": "we read its fields from the source",
    },
    "hydra._internal.config_loader_impl:ConfigLoaderImpl": {
        "_apply_overrides_to_config(overrides, cfg)": (
            "the last part of load_sweep_config; called alone, it composes 200 runs quickly"
        ),
    },
    "hydra._internal.core_plugins.basic_sweeper:BasicSweeper": {
        "validate_batch_is_legal(batch)": "skipped",
    },
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher:SlurmLauncher": {
        "params": "the launcher's options, as a dictionary",
    },
    "submitit:SlurmExecutor": {
        "_convert_parameters(params)": "turns submitit's option names into sbatch's",
        "_submit_command(command)": "submits one command as a job array; returns a job with its id",
        '"map_count"': "the parameter that makes it an array",
    },
    "fontTools.subset:Options": {
        "_drop_tables_default": "extended: names tables that matplotlib omits from a PDF's fonts",
    },
}


def broken() -> Iterator[str]:
    """Yields a line for each listed name that the installed libraries lack or define differently."""
    for owner, names in SEAMS.items():
        for name, why in names.items():
            if problem := problem_of(owner, name):
                yield f"{name} of {owner} ({why}): {problem}"


def problem_of(owner_name: str, listed: str) -> str:
    """Returns what is wrong with one name of SEAMS; '' if nothing is."""
    module, _, class_name = owner_name.partition(":")
    try:
        owner = importlib.import_module(module)
        owner = getattr(owner, class_name) if class_name else owner
    except (ImportError, AttributeError) as error:
        return f"it cannot be imported: {error}"
    if listed.startswith('"'):
        return "" if listed.strip('"') in strings_of(owner) else "its source has no such string"
    name, _, parameters = listed.rstrip(")").partition("(")
    if not hasattr(owner, name):
        return "" if name in assigned_by(owner) else "it has no such name"
    if "(" not in listed:
        return ""
    if not callable(getattr(owner, name)):
        return "it is not a function"
    return parameter_problem(getattr(owner, name), parameters)


def parameter_problem(function, listed: str) -> str:
    """Returns how a function's parameters differ from the listed ones, such as 'a, *, b'; '' if they do not."""
    in_place, _, by_name = listed.partition("*")
    leading = [name for name in in_place.replace(",", " ").split()]
    named = by_name.replace(",", " ").split()
    if not leading + named:
        return ""  # built-in functions have no signature
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    if known[: len(leading)] != leading or not set(named) <= set(known):
        return f"its parameters are {', '.join(known)}"
    return ""


@cache
def strings_of(owner: type | ModuleType) -> set[str]:
    """Returns the string constants in the source of a module, or of a class and its base classes."""
    return {
        node.value
        for tree in trees_of(owner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@cache
def assigned_by(owner: type | ModuleType) -> set[str]:
    """Returns the attributes that a module, or a class and its base classes, assign to `self` or another object."""
    return {
        node.attr
        for tree in trees_of(owner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def trees_of(owner: type | ModuleType) -> Iterator[ast.AST]:
    """Yields the syntax trees of a module, or of a class and its base classes."""
    parts = [part for part in inspect.getmro(owner) if part is not object] if isinstance(owner, type) else [owner]
    for part in parts:
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError):  # built in, no source
            continue


def main() -> int:
    """Prints what is broken. Returns the exit status: 1 if anything is."""
    lines = list(broken())
    print("\n".join(lines) if lines else f"all {sum(map(len, SEAMS.values()))} names are where they are expected")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
