"""The examples: plain TRL scripts with OTBTrainer, run without what only the runs of this project need."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from otb.rollouts import RolloutGroups

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ABSENT = ("hydra", "omegaconf", "submitit", "matplotlib", "rich", "math_verify", "pyseccomp")

# Makes packages unimportable, as if they were not installed, and notes who imports pandas.
PREPARE = """
import builtins, json, sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
importers = set()
plain_import = builtins.__import__

def noting_import(name, globals=None, *rest, **options):
    if name.partition(".")[0] == "pandas":
        importers.add((globals or {}).get("__name__", ""))
    return plain_import(name, globals, *rest, **options)

builtins.__import__ = noting_import
"""

# The examples as they stand, with fewer and shorter rollouts.
SCRIPT = """
import runpy
import otb

policy, folder, examples = sys.argv[1:]
small = {
    "output_dir": folder, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8,
    "max_steps": 2, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
    "save_strategy": "no", "logging_steps": 1,
}
full = otb.OTBConfig
otb.OTBConfig = lambda **options: full(**options | small)
sys.path.insert(0, examples)
sys.argv = ["example", policy]
trainers = [
    runpy.run_path(f"{examples}/{name}.py", run_name="__main__")["trainer"] for name in ("train", "own_baseline")
]
"""

REPORT = """
print(json.dumps({
    "baselines": [otb.baselines.name_of(trainer.baseline) for trainer in trainers],
    "own_tokens": [[row["own_tokens"] for row in t.state.log_history if "loss" in row] for t in trainers],
    "pandas": sorted(name for name in importers if name.partition(".")[0] == "otb"),
    "absent": sorted({name.partition(".")[0] for name in sys.modules} & set(ABSENT)),
    "project": sorted(name for name in sys.modules if name.partition(".")[0] in ("experiments", "analysis", "slurm")),
}))
"""


def test_examples_train_without_what_only_runs_and_reports_need(policy, tmp_path):
    code = f"ABSENT = {ABSENT!r}" + PREPARE + SCRIPT + REPORT
    command = [sys.executable, "-c", code, str(policy), str(tmp_path), str(EXAMPLES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["baselines"] == ["otb", "shrunken_mean"]
    assert [len(tokens) for tokens in told["own_tokens"]] == [2, 2] and min(map(min, told["own_tokens"])) > 0
    assert told["pandas"] == [] and told["absent"] == [] and told["project"] == []


def test_reward_of_the_example_is_1_for_the_number_alone_and_none_without_an_answer():
    reward = runpy.run_path(str(EXAMPLES / "train.py"))["reward"]
    says = [[{"role": "assistant", "content": text}] for text in (" 42\n", "41", "42")]
    assert reward(says, answer=["42", "42", ""]) == [1.0, 0.0, None]


def test_baseline_of_the_example_mixes_the_others_of_the_group_with_the_other_prompts(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    shrunken_mean = runpy.run_path(str(EXAMPLES / "own_baseline.py"))["shrunken_mean"]
    rollouts = RolloutGroups(torch.tensor([[1.0, 0.0, float("nan")], [1.0, 1.0, 0.0]]), torch.full((2, 3), 4))
    # The others of each group: (0, 1, (1 + 0) / 2) and ((1 + 0) / 2, 1/2, 1). The other prompt: 2/3, and 1/2.
    expected = [[0.75 * of + 0.25 * other for of in row] for row, other in (((0, 1, 0.5), 2 / 3), ((0.5, 0.5, 1), 0.5))]
    torch.testing.assert_close(shrunken_mean(rollouts, share=0.25), torch.tensor(expected).unsqueeze(-1))
