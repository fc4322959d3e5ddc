"""Recipes for GPUs, run: two steps of the tiny policy on two processes, with the task of the recipe and local rows."""

import json

import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from otb.records.config_keys import flatten
from tests.support.commands import ROOT, rows, run_two, the_run

RECIPES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml") if "card:" in path.read_text())
# What a CPU and a policy of this size ask for; everything else is the recipe's.
MINIATURE = {
    "model": "tiny",
    "parallel": "ddp",
    "rollouts_by": "hf",
    "gpus": "null",
    "card": "null",
    "trainer.use_cpu": "true",
    "sandbox": "unsafe_subprocess",
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "task.max_completion_length": 24,
    "evaluation.samples": 2,
    "rollouts.every": 1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Rows in the hubs' own formats: DAPO-Math, GSM8K, AIME."""
    folder = tmp_path_factory.mktemp("rows")
    questions = {f"What is {a} + {a + 1}?": str(2 * a + 1) for a in range(8)}
    written = {
        "dapo": [
            {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": answer, "style": "rule"}}
            for text, answer in questions.items()
        ],
        "gsm8k/train": [{"question": text, "answer": f"Add.\n#### {answer}"} for text, answer in questions.items()],
        "gsm8k/test": [{"question": "What is 20 + 21?", "answer": "Add.\n#### 41"}],
        "aime": [{"problem": "What is 30 + 31?", "answer": "61"}, {"problem": "What is 1 + 1?", "answer": "2"}],
        "sets/aime25/test": [{"problem": "What is 40 + 41?", "answer": "81"}],
        "sets/amc23/test": [{"question": "What is 50 + 51?", "answer": "101"}],
    }
    for name, lines in written.items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_there_are_recipes_for_gpus():
    paper = {"paper_single_turn", "paper_tool_use", "paper_tool_use_group_size"}
    assert paper | {"small_24gb", "small_80gb", "small_8x80gb"} <= set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_make_two_steps_of_a_recipe(recipe, policy, data, tmp_path):
    gsm8k = recipe == "small_24gb"
    sources = {"task.path": data / ("gsm8k" if gsm8k else "dapo.jsonl")}
    sources |= {} if gsm8k else {"task.evaluation.path": data / "aime.jsonl"}
    sources |= {"evaluation.data_dir": data / "sets"} if recipe.startswith("paper") else {}
    changed = MINIATURE | sources | {"model.name": policy, "runs_dir": tmp_path / "runs"}
    given = [f"experiment={recipe}", *(f"{key}={value}" for key, value in changed.items())]
    for code, output in run_two(given, tmp_path / "log"):
        assert code == 0, output
    run = the_run(tmp_path / "runs")
    first, second = rows(run / "metrics.jsonl")
    assert (first["step"], second["step"]) == (1, 2)
    # 2 prompts x 4 rollouts over both processes; a rollout has 1 to 24 own tokens
    assert 8 <= first["own_tokens_total"] < second["own_tokens_total"] <= 2 * 8 * 24
    evaluations = rows(run / "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [0, 2]
    assert {(row["samples"], row["prompts"]) for row in evaluations} == {(2, 1 if gsm8k else 2)}
    samples = pd.read_parquet(run / "evaluations" / "step-00000002.parquet")
    sampled = {"gsm8k": 2} if gsm8k else {"aime24": 4}
    sampled |= {"aime25": 2, "amc23": 2} if recipe.startswith("paper") else {}
    assert dict(samples.task.value_counts()) == sampled
    ran, recipes = (flatten(yaml.safe_load(text)) for text in ((run / "config.yaml").read_text(), composed(recipe)))
    kept = [
        key for key in recipes if key.startswith(("task.", "checkpoint_every", "evaluation.")) and key not in changed
    ]
    assert len(kept) > 10 and {key: ran[key] for key in kept} == {key: recipes[key] for key in kept}


def composed(recipe: str) -> str:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_yaml(compose("config", [f"experiment={recipe}"]), resolve=True)
