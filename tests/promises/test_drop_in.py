"""`from otb import OTBConfig, OTBTrainer` in a plain TRL script, without what only the runs of this project need."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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

SCRIPT = """
import sys

from datasets import Dataset
from otb import OTBConfig, OTBTrainer

def reward(completions, **columns):
    return [float(len(completion[-1]["content"]) % 2) for completion in completions]

policy, folder = sys.argv[1:]
trainer = OTBTrainer(
    model=policy,
    reward_funcs=reward,
    args=OTBConfig(
        output_dir=folder, num_generations=4, per_device_train_batch_size=8, max_completion_length=8, max_steps=2,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1,
    ),
    train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{n} + 1 ?"}] for n in range(8)]}),
)
trainer.train()
"""

REPORT = """
print(json.dumps({
    "steps": trainer.state.global_step,
    "own_tokens": [row["own_tokens"] for row in trainer.state.log_history if "loss" in row],
    "pandas": sorted(name for name in importers if name.partition(".")[0] == "otb"),
    "absent": sorted({name.partition(".")[0] for name in sys.modules} & set(ABSENT)),
    "project": sorted(name for name in sys.modules if name.partition(".")[0] in ("experiments", "analysis", "slurm")),
}))
"""


def test_plain_trl_script_trains_without_what_only_runs_and_reports_need(policy, tmp_path):
    code = f"ABSENT = {ABSENT!r}" + PREPARE + SCRIPT + REPORT
    command = [sys.executable, "-c", code, str(policy), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["steps"] == 2 and len(told["own_tokens"]) == 2 and min(told["own_tokens"]) > 0
    assert told["pandas"] == [] and told["absent"] == [] and told["project"] == []
