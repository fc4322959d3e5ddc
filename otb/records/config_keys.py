"""Lists the configuration keys that do not distinguish runs: where and how a run is made, and keys added later.

The other keys distinguish run directories, measurements, evaluations and rows of the study.
"""

from __future__ import annotations

# Keys that say only where and how a run is made, not what it computes; `steps` is one, because more steps continue a
# run. They change neither the name of the run directory (experiments/) nor the setting (analysis/).
WHERE_AND_HOW = (
    "runs_dir",
    "overwrite",
    "steps",
    "checkpoint_every",
    "rollouts",
    "max_prompt_length",
    "sandbox.workers",
    "gpus",
    "card",
    "threads",
    "parallel",
    "rollouts_by.rows",
    "rollouts_by.tensor_parallel",
    "rollouts_by.memory_share",
    "rollouts_by.sleep",
    "rollouts_by.url",
    "rollouts_by.timeout_s",
    "trainer.report_to",
    "trainer.run_name",
    "trainer.use_cpu",
)
# Keys that run directories of earlier versions lack, with the value that those runs used. A run without the key and a
# run with this value are the same run and the same setting.
ADDED_LATER = {
    "auxiliary._target_": None,
    "evaluation.data_dir": None,
    "evaluation.max_rows": None,
    "evaluation.tasks": None,
    "geometric_ratio_band": None,
    "improvement._target_": None,
    "lean_steps": True,  # draws other random numbers than earlier runs, from the same distribution
    "model.attn_implementation": None,
    "model.chat_template": None,
    "model.gguf_file": None,
    "rollouts_by.name": "hf",
    "schedule._target_": None,
    "task.instruction": None,
    "token_weights._target_": None,
    "task.files": "simplelr_qwen_level3to5/train.parquet",  # of math_lvl3to5, once only a local folder
    "trainer.vllm_importance_sampling_clip_max": 2.0,  # only for vLLM, which those runs did not use
    "trainer.vllm_importance_sampling_mode": "token_truncate",
}

# Classes that have moved: a run is the same run under either name, so both are read as the first.
FIRST_NAMES = {
    "otb.methods.auxiliary.MultiTokenPrediction": "otb.auxiliary.MultiTokenPrediction",
    "otb.methods.improvement.PolicyImprovement": "otb.improvement.PolicyImprovement",
    "otb.methods.schedules.LengthTriggeredDecay": "otb.schedules.LengthTriggeredDecay",
    "otb.methods.token_weights.TokenWeights": "otb.token_weights.TokenWeights",
}


def is_one_of(key: str, names: tuple[str, ...]) -> bool:
    """Returns whether a dotted configuration key is one of `names` or is below one of them."""
    return any(key == name or key.startswith(name + ".") for name in names)


def is_as_before(key: str, value: object) -> bool:
    """Returns whether a key of ADDED_LATER has the value that earlier runs used."""
    return key in ADDED_LATER and value == ADDED_LATER[key]


def flatten(config: dict, prefix: str = "") -> dict:
    """Returns a configuration with dotted keys, {"a": {"b": 1}} -> {"a.b": 1}; an empty mapping stays a value.

    A class that has moved gets the name that the first runs recorded.
    """
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = FIRST_NAMES.get(value, value) if key == "_target_" else value
    return flat
