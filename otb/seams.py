"""Lists what this project relies on inside other libraries, and checks it: `python -m otb.seams`.

Everything else goes through documented interfaces. Before pyproject.toml allows another version of a library, this list
says what to look at. tests/trainer/test_seams.py checks the installed libraries, and that the project uses no private
name that is not listed. Importing this file imports none of the libraries.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType

GRPO = "trl:GRPOTrainer"  # with what it inherits from transformers.Trainer
VLLM = "trl.generation.vllm_generation:VLLMGeneration"
TEMPLATES = "trl.chat_template_utils"


# owner -> name -> what the project does with it. Owner: "module" or "module:Class". Name: `method(a, *, b)`, a function
# that has the parameters a, in this place, and b; `attribute`, which the owner has or assigns to `self`; or `"text"`, a
# string in the owner's source, such as a key.
SEAMS: dict[str, dict[str, str]] = {
    GRPO: {
        "__init__(model, reward_funcs, args)": "extended: options are refused before the model is loaded",
        "create_accelerator_and_postprocess()": "extended: FSDP2's precision is set before TRL wraps a reference model",
        "training_step()": "extended: it ends with the gradient of one micro-batch",
        "_prepare_inputs(generation_batch)": "extended: methods see new micro-batches, and each one before its forward",
        "_buffered_inputs": "the micro-batches of the last generation, which methods may replace",
        "_step": "which of these micro-batches is next",
        "_generate_and_score_completions(inputs)": (
            "extended: its output gets the baseline's advantages; called for evaluations"
        ),
        "_generate(prompts)": "extended: of what it returns, the second and third are ids and tool mask",
        "_generate_single_turn(prompt_ids, images)": (
            "extended: a few rows at a time, inside the token budget; returns ids and, from vLLM alone, log-probs"
        ),
        ("_get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, *, compute_entropy)"): (
            "extended and called: returns log-probs and entropies (B, logits_to_keep) first"
        ),
        "_get_grad_norm()": "extended: asked once per optimizer step, before it",
        "_metrics": "metrics of the step, by mode, as lists",
        "_logs": "rows of TRL's table of completions: its advantages are replaced, and evaluations must not fill it",
        "_save_optimizer_and_scheduler(output_dir)": "extended: the state of what learns is saved beside it",
        "_load_optimizer_and_scheduler(checkpoint)": "extended: and read from there",
        "_compute_loss(model, inputs)": "extended: methods surround it",
        "create_optimizer(model)": "extended: an auxiliary head's parameters are added",
        "create_scheduler(num_training_steps, optimizer)": "extended: a schedule of our own",
        "_created_lr_scheduler": "makes a second train() begin with its own schedule",
        "use_vllm": "set for a SamplerCopy, so that TRL asks vllm_generation for rollouts and weighs what differs",
        "vllm_mode": '"colocate" where the engine is in these processes; "server" has the context of the model',
        "vllm_generation": "vLLM's engine, or a SamplerCopy",
        "_last_loaded_step": "the step whose weights the sampler has; -1 makes it take them again",
        "eos_token_ids": "the tokens that end a response",
        "generation_config": "how generate samples",
        "_tag_names": "tags of a model card",
        "_name": "the trainer's name in a model card",
        "_calculate_rewards()": "extended: (P * G, reward functions) of all processes",
        "_entropy_bonus_enabled": "an entropy bonus has a gradient where the advantage is 0",
        "aux_loss_enabled": "and so has the loss of a router",
        "beta": "weight of the KL term, which has a gradient where the advantage is 0; 0 for an improvement update",
        "compute_loss(model, inputs)": "called: the clipped loss of a kept micro-batch",
        "compute_loss_context_manager()": "the context in which transformers computes a loss",
        "current_gradient_accumulation_steps": (
            "the micro-batches that a loss is divided by; set for an improvement update"
        ),
        "model_wrapped": "the policy as several processes train it",
        "epsilon_low": "where the head's ratio is clipped, as the policy's",
        "epsilon_high": "and above",
        "_get_tool_suffix_ids(tool_messages)": "extended: makes a reply harmless and short enough",
        "_tool_call_loop()": "asks for replies one rollout after another, and continues them in this order",
        "_tokenizer": "decodes turns, replies and samples",
        "_env_tools": "the tools of the one environment, under None; their schemas are put there",
        "environments": "the environments of the generation under way, in the order of the prompts",
        "environment_factories": "empty where there are no tools",
        "_maybe_log_save_evaluate()": "extended: the step's samples, evaluation and checkpoint follow",
        "_globalstep_last_logged": "whether this step has been through it before",
        "log(logs, start_time)": "extended: writes the metrics row; called past TRL's for evaluations",
        "_get_train_sampler(dataset)": "replaced: the order of the prompts follows from seed and epoch",
        "_save_checkpoint(model, trial)": "writes checkpoint-STEP below args.output_dir",
        "create_model_card()": "replaced by nothing",
        "_environment_pool": "the environments that TRL has made, by their name",
        '"completion_mask"': "in what TRL hands from scoring to the loss: False for padding",
        '"tool_mask"': "in that where there are tools: False for tool tokens",
        '"num_items_in_batch"': "in that: the tokens that count, which dapo divides by",
        '"pixel_values"': "in that where prompts have images, which extra passes do not see",
        '"advantages"': "in that: (B,), and (B, C) is accepted by the loss",
        '"old_per_token_logps"': "in that where TRL made a pass: the tensor that it returned",
        '"sampling_per_token_logps"': "in that where vLLM sampled",
        '"prompt_ids"': "in that",
        '"prompt_mask"': "in that",
        '"completion_ids"': "in that",
        '"importance_sampling_ratio"': "in that where TRL corrects for the sampler",
        '"clip_ratio/region_mean"': "in them: the share of clipped tokens of a micro-batch",
    },
    "accelerate.utils:FullyShardedDataParallelPlugin": {
        "mixed_precision_policy": "replaced under FSDP2, so that log-probabilities leave the model in float32",
    },
    "trl.trainer.utils": {
        "add_fused_lm_head(model, *, temperature, cast_lm_head_to_fp32, outputs)": (
            "replaces model.forward for one pass, whose result also has log_sum_sq_probs"
        ),
    },
    "trl.trainer.utils:FusedCausalLMOutput": {
        "log_sum_sq_probs": "log sum pi^2 of that pass",
    },
    "trl.models.utils": {
        "disable_gradient_checkpointing(model, gradient_checkpointing_kwargs)": (
            "as TRL does around passes without gradient"
        ),
    },
    "transformers:GenerationMixin": {
        "_supports_default_dynamic_cache()": "asked: without such a cache no rows can be taken out",
        "generate(*, custom_generate)": "called with a decoding loop of our own",
        "prepare_inputs_for_generation(input_ids, *, next_sequence_length, is_first_iteration)": (
            "called: what the model wants for the next token"
        ),
        "_update_model_kwargs_for_generation(outputs, model_kwargs)": "called: the same inputs with one token more",
    },
    "transformers:DynamicCache": {
        "batch_select_indices(indices)": "takes the rows that have ended out",
        "batch_repeat_interleave(repeats)": "makes a group's rows of its prompt",
    },
    "trl.kernels:ChunkedLogProbFunction": {
        (
            "forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, "
            "logit_scale, outputs)"
        ): ("log-probs of the head, without all logits at a time"),
    },
    "transformers:PreTrainedConfig": {
        '"_commit_hash"': "of the hub model, whose own head is read from there",
    },
    VLLM: {
        "sync_weights()": "called before the first turn: wakes the engine's weights and replaces them",
        "generate(prompts, images)": "returns ids and log-probs in the second and third place",
        "max_completion_length": "the longest response, which the trainers set",
        "enable_sleep_mode": "False over the turns: else generate() sends it to sleep after each",
        "_llm_weights_sleeping": "set where it sleeps again: generate() sends the weights if it is",
        "llm": "vLLM's engine itself",
        '"kv_cache"': "what generate() wakes of it beside the weights",
    },
    TEMPLATES: {
        "parse_response(tokenizer, ids, *, prefix, tools)": "reads the calls of a turn",
        "supports_tool_calling(processing_class)": "checked before a run starts",
        "is_chat_template_prefix_preserving(processing_class)": "checked before a run starts",
        "get_training_chat_template(processing_class)": "checked before a run starts",
        "add_response_schema(processing_class)": "checked before a run starts",
    },
    "datasets.load:CachedDatasetModuleFactory": {
        '"___"': "in the folder of a hub id that it has prepared",
    },
    "peft.tuners.tuners_utils": {
        "check_target_module_exists(config, key)": "tells whether a LoRA target names a module",
    },
    "sys": {
        "_base_executable": "the Python outside any virtual environment, which the sandbox shows",
    },
    "atexit": {
        "_clear()": "forgets the runner's own exit functions",
        "_run_exitfuncs()": "runs those of the program, as the end of Python would",
    },
    "threading": {
        "_shutdown()": "called before a fork ends without taking the libraries apart",
    },
    "hydra._internal.utils": {
        "get_args_parser()": "tells overrides from Hydra's own options",
    },
    "trl.trainer.grpo_config": {
        "GRPOConfig": "its fields are read from the source, without importing torch",
    },
    "trl.trainer.base_config": {
        "_BaseConfig": "its fields are read from the source",
    },
    "transformers.training_args": {
        "TrainingArguments": "its fields are read from the source",
    },
    "hydra._internal.config_loader_impl:ConfigLoaderImpl": {
        "_apply_overrides_to_config(overrides, cfg)": (
            "the last thing that load_sweep_config does; called alone, it composes 200 runs in no time"
        ),
    },
    "hydra._internal.core_plugins.basic_sweeper:BasicSweeper": {
        "validate_batch_is_legal(batch)": "left out",
    },
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher:SlurmLauncher": {
        "params": "the launcher's options, as a dictionary",
    },
    "submitit:SlurmExecutor": {
        "_convert_parameters(params)": "options by submitit's names -> by sbatch's",
        "_submit_command(command)": "one command as a job array -> a job with its id",
        '"map_count"': "the parameter that makes it an array",
    },
    "fontTools.subset:Options": {
        "_drop_tables_default": "extended: tables that matplotlib leaves out of the fonts of a PDF",
    },
}


def broken() -> Iterator[str]:
    """Yields a line for each name that the installed libraries do not have as it is listed."""
    for owner, names in SEAMS.items():
        for name, why in names.items():
            if problem := problem_of(owner, name):
                yield f"{name} of {owner} ({why}): {problem}"


def problem_of(owner_name: str, listed: str) -> str:
    """Returns what is wrong with one name of SEAMS, '' where nothing is."""
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
        return "it is no function"
    return parameter_problem(getattr(owner, name), parameters)


def parameter_problem(function, listed: str) -> str:
    """Returns how the parameters of a function differ from the listed ones, 'a, *, b'."""
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
    """Returns the string constants in the source of a module, or of a class and what it inherits."""
    return {
        node.value
        for tree in trees_of(owner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@cache
def assigned_by(owner: type | ModuleType) -> set[str]:
    """Returns the attributes that a class, or one that it inherits from, assigns to `self` or to an object."""
    return {
        node.attr
        for tree in trees_of(owner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def trees_of(owner: type | ModuleType) -> Iterator[ast.AST]:
    """Yields the syntax trees of a module, or of a class and what it inherits."""
    parts = [part for part in inspect.getmro(owner) if part is not object] if isinstance(owner, type) else [owner]
    for part in parts:
        try:
            yield ast.parse(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError):  # built in
            continue


def main() -> int:
    """Prints what is broken. Returns the exit status, 1 where something is."""
    lines = list(broken())
    print("\n".join(lines) if lines else f"all {sum(map(len, SEAMS.values()))} names are where they are expected")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
