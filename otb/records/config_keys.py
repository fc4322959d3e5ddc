"""Says which keys of a configuration make no other run: where and how it is made, and those that came later.

Run directories, measurements, evaluations and the rows of the study are told apart by the other keys.
"""

from __future__ import annotations

# Configuration keys that say only where and how a run is made, not what is computed; `steps` because more of them
# continue a run. They name no other run directory (experiments/) and make no other setting (analysis/).
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
# Keys that run directories of earlier versions lack, with what those runs did. Neither their absence nor this value
# makes another run or another setting.
ADDED_LATER = {
    "auxiliary._target_": None,
    "evaluation.data_dir": None,
    "evaluation.max_rows": None,
    "evaluation.tasks": None,
    "geometric_ratio_band": None,
    "improvement._target_": None,
    "lean_steps": True,  # which draws other random numbers than runs from before it, of the same distribution
    "model.attn_implementation": None,
    "model.chat_template": None,
    "model.gguf_file": None,
    "rollouts_by.name": "hf",
    "schedule._target_": None,
    "task.instruction": None,
    "token_weights._target_": None,
    "task.files": "simplelr_qwen_level3to5/train.parquet",  # of math_lvl3to5, which was read from a local folder alone
    "trainer.vllm_importance_sampling_clip_max": 2.0,  # read by vLLM alone, which those runs did not use
    "trainer.vllm_importance_sampling_mode": "token_truncate",
}

# Classes that have moved since runs named them: a run is the same run under either name, so both are read as the first.
FIRST_NAMES = {
    "otb.methods.auxiliary.MultiTokenPrediction": "otb.auxiliary.MultiTokenPrediction",
    "otb.methods.improvement.PolicyImprovement": "otb.improvement.PolicyImprovement",
    "otb.methods.schedules.LengthTriggeredDecay": "otb.schedules.LengthTriggeredDecay",
    "otb.methods.token_weights.TokenWeights": "otb.token_weights.TokenWeights",
}


def is_one_of(key: str, names: tuple[str, ...]) -> bool:
    """Tells whether a dotted configuration key is one of `names`, or lies below one of them."""
    return any(key == name or key.startswith(name + ".") for name in names)


def is_as_before(key: str, value: object) -> bool:
    """Tells whether a key of ADDED_LATER has the value with which runs from before it were made."""
    return key in ADDED_LATER and value == ADDED_LATER[key]


def flatten(config: dict, prefix: str = "") -> dict:
    """Returns a configuration with dotted keys, {"a": {"b": 1}} -> {"a.b": 1}; an empty mapping stays a value.

    A class that has moved is given the name that the first runs recorded, whichever of the two it has here.
    """
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = FIRST_NAMES.get(value, value) if key == "_target_" else value
    return flat
