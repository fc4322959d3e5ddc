"""Lists what this project relies on inside other libraries, file by file, and checks it: `python -m otb.seams`.

Everything else goes through documented interfaces. Before pyproject.toml allows another version of a library, this list
says what to look at. tests/trainer/test_seams.py checks the installed libraries, and that no file of
the project uses a private name that is not listed here. Importing this file imports none of the libraries.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import NamedTuple

GRPO = "trl:GRPOTrainer"  # with what it inherits from transformers.Trainer
VLLM = "trl.generation.vllm_generation:VLLMGeneration"
TEMPLATES = "trl.chat_template_utils"


class Seam(NamedTuple):
    """One name that a file relies on.

    Args:
        owner: "module" or "module:Class".
        name: `method(a, *, b)`: a function that has the parameters a, in this place, and b. `attribute`: something that
            the owner has, or assigns to `self`. `"text"`: a string that the owner's source holds, such as a key.
        why: what the file does with it.
    """

    owner: str
    name: str
    why: str


SEAMS: dict[str, tuple[Seam, ...]] = {
    "otb/training/trainer.py": (
        Seam(GRPO, "__init__(model, reward_funcs, args)", "extended: options are refused before the model is loaded"),
        Seam(
            GRPO,
            "create_accelerator_and_postprocess()",
            "extended: FSDP2's precision is set before TRL wraps a reference model",
        ),
        Seam(GRPO, "training_step()", "extended: it ends with the gradient of one micro-batch"),
        Seam(GRPO, "_prepare_inputs(generation_batch)", "extended: TRL's shuffle is undone for gradient noise"),
        Seam(GRPO, "_buffered_inputs", "the micro-batches of the last generation, put back in their order"),
        Seam(GRPO, "_step", "which of these micro-batches is next"),
        Seam(GRPO, "_generate_and_score_completions(inputs)", "extended: its output gets the baseline's advantages"),
        Seam(GRPO, '"completion_mask"', "in that output"),
        Seam(GRPO, '"tool_mask"', "in that output where there are tools: False for tool tokens"),
        Seam(GRPO, '"num_items_in_batch"', "in that output: the tokens that count, which dapo divides by"),
        Seam(GRPO, '"pixel_values"', "in that output where prompts have images, which an extra pass does not see"),
        Seam(GRPO, '"advantages"', "in that output: (B,), and (B, C) is accepted by the loss"),
        Seam(
            GRPO,
            '"old_per_token_logps"',
            "in that output where TRL made a pass: the tensor that it returned",
        ),
        Seam(GRPO, '"sampling_per_token_logps"', "in that output where vLLM sampled"),
        Seam(GRPO, "_generate(prompts)", "extended: of what it returns, the second and third are ids and tool mask"),
        Seam(
            GRPO,
            "_generate_single_turn(prompt_ids, images)",
            "extended: a few rows at a time; it returns ids and, of vLLM alone, log-probs",
        ),
        Seam(
            GRPO,
            "_get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep)",
            "extended: an auxiliary head reads the same forward",
        ),
        Seam(GRPO, "_get_grad_norm()", "extended: asked once per optimizer step, before it"),
        Seam(GRPO, "_metrics", "metrics of the step, by mode, as lists"),
        Seam(GRPO, "_logs", "rows of TRL's table of completions; its advantages are replaced"),
        Seam(GRPO, "_save_optimizer_and_scheduler(output_dir)", "extended: the baseline's state is saved beside it"),
        Seam(GRPO, "_load_optimizer_and_scheduler(checkpoint)", "extended: and read from there"),
        Seam(GRPO, "_compute_loss(model, inputs)", "extended: the loss of an auxiliary head is added"),
        Seam(GRPO, "create_optimizer(model)", "extended: the head's parameters are added"),
        Seam(GRPO, "create_scheduler(num_training_steps, optimizer)", "extended: lr_schedule in a LambdaLR"),
        Seam(GRPO, "_created_lr_scheduler", "makes a second train() begin with a schedule of its own"),
        Seam(GRPO, "use_vllm", "set, so that TRL asks vllm_generation for rollouts and weighs what differs"),
        Seam(GRPO, "vllm_mode", 'set to "server": another one makes the tool loop look into an engine for its context'),
        Seam(GRPO, "vllm_generation", "set to a SamplerCopy"),
        Seam(GRPO, "_last_loaded_step", "the step whose weights the sampler has"),
        Seam(GRPO, "eos_token_ids", "the tokens that end a response"),
        Seam(GRPO, "generation_config", "how generate samples"),
        Seam(GRPO, "_tag_names", "tags of a model card"),
        Seam(GRPO, "_name", "the trainer's name in a model card"),
        Seam(
            "accelerate.utils:FullyShardedDataParallelPlugin",
            "mixed_precision_policy",
            "replaced under FSDP2, so that log-probabilities leave the model in float32",
        ),
    ),
    "otb/measuring_trainer.py": (
        Seam(GRPO, '"prompt_ids"', "in what TRL hands from scoring to the loss"),
        Seam(GRPO, '"prompt_mask"', "in that"),
        Seam(GRPO, '"completion_ids"', "in that"),
        Seam(GRPO, '"completion_mask"', "in that: how long responses are, tool tokens included"),
        Seam(GRPO, '"old_per_token_logps"', "in that where TRL made a pass: the tensor that it returned"),
        Seam(GRPO, '"importance_sampling_ratio"', "in that where TRL corrects for the sampler"),
        Seam(GRPO, "_calculate_rewards()", "extended: (P * G, reward functions) of all processes"),
        Seam(
            GRPO,
            "_get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep, *, compute_entropy)",
            "extended and called: it returns log-probabilities and entropies (B, logits_to_keep) first",
        ),
        Seam(
            "trl.trainer.utils",
            "add_fused_lm_head(model, *, temperature, cast_lm_head_to_fp32, outputs)",
            "replaces model.forward for one pass, whose result also has log_sum_sq_probs",
        ),
        Seam("trl.trainer.utils:FusedCausalLMOutput", "log_sum_sq_probs", "log sum pi^2 of that pass"),
        Seam(
            "trl.models.utils",
            "disable_gradient_checkpointing(model, gradient_checkpointing_kwargs)",
            "as TRL does around passes without gradient",
        ),
    ),
    "otb/training/lean_sampling.py": (
        Seam(
            "transformers:GenerationMixin",
            "_supports_default_dynamic_cache()",
            "asked: without such a cache no rows can be taken out",
        ),
        Seam("transformers:GenerationMixin", "generate(*, custom_generate)", "called with a decoding loop of our own"),
        Seam(
            "transformers:GenerationMixin",
            "prepare_inputs_for_generation(input_ids, *, next_sequence_length, is_first_iteration)",
            "called: what the model wants for the next token",
        ),
        Seam(
            "transformers:GenerationMixin",
            "_update_model_kwargs_for_generation(outputs, model_kwargs)",
            "called: the same inputs with one token more",
        ),
        Seam("transformers:DynamicCache", "batch_select_indices(indices)", "takes the rows that have ended out"),
        Seam("transformers:DynamicCache", "batch_repeat_interleave(repeats)", "makes a group's rows of its prompt"),
    ),
    "otb/lean_trainer.py": (
        Seam(
            GRPO,
            "_generate_and_score_completions(inputs)",
            "extended: a kept pass is dropped where its loss never came",
        ),
        Seam(
            GRPO, "_compute_loss(model, inputs)", "extended: inside it, the pass below leaves out what has no gradient"
        ),
        Seam(
            GRPO,
            "_get_per_token_logps_and_entropies(model, input_ids, attention_mask, logits_to_keep)",
            "extended: called for chunks of rows; nothing else reads the rows before the loss's sums",
        ),
        Seam(GRPO, "_entropy_bonus_enabled", "an entropy bonus has a gradient where the advantage is 0"),
        Seam(GRPO, "aux_loss_enabled", "and so has the loss of a router"),
        Seam(GRPO, "beta", "and the KL term"),
        Seam(GRPO, '"completion_mask"', "in a micro-batch: how long its responses are"),
    ),
    "otb/improving_trainer.py": (
        Seam(GRPO, "_prepare_inputs(generation_batch)", "extended: new rollouts come before the improvement update"),
        Seam(GRPO, "_buffered_inputs", "the micro-batches of the last generation"),
        Seam(GRPO, "_step", "which of these micro-batches is next"),
        Seam(
            GRPO,
            "_get_per_token_logps_and_entropies()",
            "extended: the log-probabilities of the improvement update, for its mean ratio",
        ),
        Seam(GRPO, "compute_loss(model, inputs)", "called: the clipped loss of a kept micro-batch"),
        Seam(GRPO, "compute_loss_context_manager()", "the context in which transformers computes a loss"),
        Seam(GRPO, "current_gradient_accumulation_steps", "set: micro-batches that the loss is divided by"),
        Seam(GRPO, "beta", "set to 0: the improvement update has no KL term"),
        Seam(GRPO, "_entropy_bonus_enabled", "set to False: nor an entropy bonus"),
        Seam(GRPO, "aux_loss_enabled", "set to False: nor the loss of a router"),
        Seam(GRPO, "model_wrapped", "the policy as several processes train it"),
        Seam(GRPO, "_metrics", "metrics of the step, from which those of the improvement update are kept apart"),
        Seam(GRPO, '"clip_ratio/region_mean"', "in them: the share of clipped tokens of a micro-batch"),
        Seam(GRPO, '"advantages"', "in a micro-batch: multiplied by the weight"),
        Seam(GRPO, '"old_per_token_logps"', "in a micro-batch: what the ratio is taken to; absent, it is exactly 1"),
        Seam(GRPO, "_save_optimizer_and_scheduler(output_dir)", "extended: window and kept batch are saved beside it"),
        Seam(GRPO, "_load_optimizer_and_scheduler(checkpoint)", "extended: and read from there"),
    ),
    "otb/loss_inputs.py": (
        Seam(GRPO, '"prompt_ids"', "in what TRL hands from scoring to the loss"),
        Seam(GRPO, '"prompt_mask"', "in that"),
        Seam(GRPO, '"completion_ids"', "in that"),
        Seam(GRPO, '"completion_mask"', "in that"),
        Seam(GRPO, '"tool_mask"', "in that where there are tools: False for tool tokens"),
        Seam(GRPO, '"pixel_values"', "in that where prompts have images, which extra passes do not see"),
    ),
    "otb/methods/mtp.py": (
        Seam(
            "trl.kernels:ChunkedLogProbFunction",
            "forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, "
            "logit_scale, outputs)",
            "log-probs of the head, without all logits at a time",
        ),
    ),
    "otb/mtp_training.py": (
        Seam(GRPO, "current_gradient_accumulation_steps", "the forwards that the loss of one is divided by"),
        Seam(GRPO, "epsilon_low", "where the head's ratio is clipped, as the policy's"),
        Seam(GRPO, "epsilon_high", "and above"),
        Seam(GRPO, '"num_items_in_batch"', "in a batch: the tokens of the generation, which dapo divides by"),
        Seam("transformers:PreTrainedConfig", '"_commit_hash"', "of the hub model, whose own head is read from there"),
    ),
    "otb/methods/sampler_copy.py": (
        Seam(VLLM, "sync_weights()", "what TRL calls where the policy has changed"),
        Seam(VLLM, "generate(prompts, images)", "returns ids and log-probs in the second and third place"),
        Seam(VLLM, "max_completion_length", "the longest response, which the trainers set"),
    ),
    "otb/methods/tool_rollouts.py": (
        Seam(GRPO, "_generate(prompts)", "extended: follows every rollout from its prompt to its end"),
        Seam(GRPO, "_generate_single_turn(prompt_ids)", "extended: keeps a turn in the budget, runs its programs"),
        Seam(GRPO, "_get_tool_suffix_ids(tool_messages)", "extended: makes a reply harmless and short enough"),
        Seam(GRPO, "_tool_call_loop()", "asks for replies one rollout after another, and continues them in this order"),
        Seam(GRPO, "_tokenizer", "decodes turns and replies"),
        Seam(GRPO, "_env_tools", "the tools of the one environment, under None; their schemas are put there"),
        Seam(GRPO, "environments", "the environments of the generation under way, in the order of the prompts"),
        Seam(GRPO, "environment_factories", "empty where there are no tools"),
        Seam(GRPO, "_metrics", "tool metrics are added"),
        Seam(GRPO, "vllm_generation", "the engine in these processes, kept awake over the turns"),
        Seam(GRPO, "vllm_mode", '"colocate" where there is one'),
        Seam(GRPO, "_last_loaded_step", "the step whose weights it has: they are not to be sent again"),
        Seam(VLLM, "sync_weights()", "called before the first turn: wakes the engine's weights and replaces them"),
        Seam(VLLM, "enable_sleep_mode", "False over the turns: else generate() sends it to sleep after each"),
        Seam(VLLM, "_llm_weights_sleeping", "set where it sleeps again: generate() sends the weights if it is"),
        Seam(VLLM, "llm", "vLLM's engine itself"),
        Seam(VLLM, '"kv_cache"', "what generate() wakes of it beside the weights"),
    ),
    "otb/methods/tool_calls.py": (
        Seam(
            "trl.chat_template_utils", "parse_response(tokenizer, ids, *, prefix, tools)", "reads the calls of a turn"
        ),
        Seam(TEMPLATES, "supports_tool_calling(processing_class)", "checked before a run starts"),
        Seam(
            "trl.chat_template_utils",
            "is_chat_template_prefix_preserving(processing_class)",
            "checked before a run starts",
        ),
        Seam(TEMPLATES, "get_training_chat_template(processing_class)", "checked before a run starts"),
        Seam(TEMPLATES, "add_response_schema(processing_class)", "checked before a run starts"),
    ),
    "otb/laboratory/sampling.py": (
        Seam(GRPO, "_generate_and_score_completions(inputs)", "called in evaluation mode, for rollouts alone"),
    ),
    "otb/tasks/loading.py": (
        Seam("datasets.load:CachedDatasetModuleFactory", '"___"', "in the folder of a hub id that it has prepared"),
    ),
    "otb/policies/models.py": (
        Seam(
            "peft.tuners.tuners_utils",
            "check_target_module_exists(config, key)",
            "tells whether a LoRA target names a module",
        ),
    ),
    "otb/sandbox/runtime.py": (
        Seam("sys", "_base_executable", "the Python outside any virtual environment, which the sandbox shows"),
    ),
    "otb/sandbox/runner.py": (
        Seam("atexit", "_clear()", "forgets the runner's own exit functions"),
        Seam("atexit", "_run_exitfuncs()", "runs those of the program, as the end of Python would"),
        Seam("threading", "_shutdown()", "waits for the program's threads, as the end of Python would"),
    ),
    "experiments/running/evaluating_trainer.py": (
        Seam(GRPO, "_logs", "rows of TRL's table of completions, which evaluations must not fill"),
        Seam(GRPO, "_generate_and_score_completions(inputs)", "called for rollouts of an evaluation"),
        Seam(GRPO, "_metrics", "metrics of the evaluation, which nothing reads"),
    ),
    "experiments/running/run_trainer.py": (
        Seam(GRPO, "training_step()", "extended: keeps the loss of the micro-batch"),
        Seam(GRPO, "_get_grad_norm()", "extended: the last thing asked before the optimizer steps"),
        Seam(GRPO, "_maybe_log_save_evaluate()", "extended: the step's samples, evaluation and checkpoint follow"),
        Seam(GRPO, "_globalstep_last_logged", "whether this step has been through it before"),
        Seam(GRPO, "log(logs, start_time)", "extended: writes the metrics row; called past TRL's for evaluations"),
        Seam(GRPO, "_metrics", "metrics of the step, by mode, as lists"),
        Seam(GRPO, "_get_train_sampler(dataset)", "replaced: the order of the prompts follows from seed and epoch"),
        Seam(GRPO, "_save_checkpoint(model, trial)", "writes checkpoint-STEP below args.output_dir"),
        Seam(GRPO, "create_model_card()", "replaced by nothing"),
        Seam(GRPO, "_tokenizer", "decodes the samples that are kept"),
    ),
    "experiments/evaluation/sampling.py": (
        Seam(GRPO, "_generate_and_score_completions(inputs)", "called in evaluation mode, for responses alone"),
        Seam(GRPO, "_generate(prompts)", "extended: keeps the responses"),
        Seam(GRPO, "_last_loaded_step", "the step whose weights vLLM has; -1 makes it take them again"),
        Seam(GRPO, "_metrics", "metrics of the batch, which nothing logs"),
    ),
    "experiments/running/command_line.py": (
        Seam("hydra._internal.utils", "get_args_parser()", "tells overrides from Hydra's own options"),
    ),
    "experiments/running/fields.py": (
        Seam("trl.trainer.grpo_config", "GRPOConfig", "its fields are read from the source, without importing torch"),
        Seam("trl.trainer.base_config", "_BaseConfig", "its fields are read from the source"),
        Seam("transformers.training_args", "TrainingArguments", "its fields are read from the source"),
    ),
    "experiments/sweeps/runs_of.py": (
        Seam(
            "hydra._internal.config_loader_impl:ConfigLoaderImpl",
            "_apply_overrides_to_config(overrides, cfg)",
            "the last thing that load_sweep_config does; called alone, it composes 200 runs in no time",
        ),
    ),
    "hydra_plugins/otb_launchers.py": (
        Seam("hydra._internal.core_plugins.basic_sweeper:BasicSweeper", "validate_batch_is_legal(batch)", "left out"),
        Seam(
            "hydra_plugins.hydra_submitit_launcher.submitit_launcher:SlurmLauncher",
            "params",
            "the launcher's options, as a dictionary",
        ),
    ),
    "slurm/submit.py": (
        Seam("submitit:SlurmExecutor", "_convert_parameters(params)", "options by submitit's names -> by sbatch's"),
        Seam("submitit:SlurmExecutor", "_submit_command(command)", "one command as a job array -> a job with its id"),
        Seam("submitit:SlurmExecutor", '"map_count"', "the parameter that makes it an array"),
    ),
    "analysis/style.py": (
        Seam(
            "fontTools.subset:Options",
            "_drop_tables_default",
            "extended: tables that matplotlib leaves out of the fonts of a PDF",
        ),
    ),
    "experiments/sweeps/preloaded.py": (
        Seam("threading", "_shutdown()", "called before a fork ends without taking the libraries apart"),
        Seam("atexit", "_run_exitfuncs", "called after it"),
    ),
}


def broken() -> Iterator[str]:
    """Yields a line for each name that the installed libraries do not have as it is listed."""
    for file, seams in SEAMS.items():
        for seam in seams:
            if problem := problem_of(seam):
                yield f"{file} relies on {seam.name} of {seam.owner} ({seam.why}): {problem}"


def problem_of(seam: Seam) -> str:
    """Returns what is wrong with one seam, '' where nothing is."""
    module, _, class_name = seam.owner.partition(":")
    try:
        owner = importlib.import_module(module)
        owner = getattr(owner, class_name) if class_name else owner
    except (ImportError, AttributeError) as error:
        return f"it cannot be imported: {error}"
    if seam.name.startswith('"'):
        return "" if seam.name.strip('"') in strings_of(owner) else "its source has no such string"
    name, _, parameters = seam.name.rstrip(")").partition("(")
    if not hasattr(owner, name):
        return "" if name in assigned_by(owner) else "it has no such name"
    if "(" not in seam.name:
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
