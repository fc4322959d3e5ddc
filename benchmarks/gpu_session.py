"""The parts of benchmarks/gpu_session.sh, each a command in a process of its own, and what they measured in one file.

After every part session.json is written again, so that a machine that is taken away costs one part. A part that fails
says so there, and the others go on. `--cpu` goes through the same parts with sizes of minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 900  # of a command
PACKAGES = ("torch", "transformers", "trl", "accelerate", "triton", "vllm", "otb")
POLICY = {True: "tiny", False: "HuggingFaceTB/SmolLM2-135M"}  # its architecture; the weights are random at first


class Session:
    """What a session has measured so far, and where its files lie."""

    def __init__(self, out: Path, cpu: bool, vectors: Path | None):
        self.out, self.cpu, self.vectors = out, cpu, vectors
        self.file = out / "session.json"
        self.results = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, name: str, *command: str | Path, **environment: str) -> str:
        """Runs `python COMMAND` and returns what it printed; the whole of it goes into NAME.log.

        Raises RuntimeError with its last lines where it fails or takes too long.
        """
        log = self.out / f"{name}.log"
        with open(log, "w", encoding="utf8") as output:
            try:
                done = subprocess.run(
                    [sys.executable, *map(str, command)],
                    cwd=ROOT,
                    env=os.environ | environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT_SECONDS,
                )
            except subprocess.TimeoutExpired as error:
                raise RuntimeError(f"not done in {LIMIT_SECONDS} s, see {log.name}") from error
        printed = log.read_text(encoding="utf8", errors="replace")
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {' / '.join(printed.strip().splitlines()[-4:])}")
        return printed

    def figures(self, name: str, script: str, *arguments: str | Path) -> dict | list:
        """Runs a benchmark that takes --json and returns what it wrote."""
        file = self.out / f"{name}.json"
        self.run(name, ROOT / "benchmarks" / f"{script}.py", *arguments, "--json", file)
        return json.loads(file.read_text(encoding="utf8"))

    def policy(self, name: str) -> Path:
        """Returns the folder of an untrained policy of an architecture, with the tokenizer of the tiny policy."""
        folder = self.out / f"untrained-{name.split('/')[-1]}"
        if not folder.exists():
            from benchmarks.memory_model import random_policy
            from otb.policies.tiny_policy import build_model, build_tokenizer

            tokenizer = build_tokenizer()
            model = build_model(tokenizer, seed=0) if name == "tiny" else random_policy(name, tokenizer)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder


# ---- the parts, in their order


def machine(session: Session) -> dict:
    """Returns what the numbers were measured on."""
    import importlib.metadata

    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    gpu = None
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    return {"gpu": gpu, "cores": cores, "python": platform.python_version(), "versions": versions, "commit": commit}


def conformance(session: Session) -> str:
    """Returns the last line of the comparison with vectors of the reference implementation, where a file is given."""
    if session.vectors is None:
        return "no --vectors FILE"
    return session.run("conformance", "-m", "otb.conformance", session.vectors).strip().splitlines()[-1]


def tests(session: Session) -> str:
    """Returns pytest's count of the tests marked gpu; without a GPU they are skipped."""
    given = ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "tests/trainer/test_gpu.py", "-rN"]
    summary = session.run("tests", *given, "-o", "addopts=").strip().splitlines()[-1]
    return summary.strip("= ")


def step(session: Session) -> dict | list:
    """Returns the time of OTBTrainer's step over GRPOTrainer's, in pairs, at a real vocabulary where there is a GPU."""
    policy = session.policy("tiny" if session.cpu else "Qwen/Qwen2.5-0.5B")
    cases = ["otb / GRPOTrainer, N=4", "otb without lean steps / GRPOTrainer, N=4", "rloo / GRPOTrainer, N=4"]
    size = ["--steps", "2" if session.cpu else "40", "--cases", *cases]
    return session.figures("step", "step_time", "--policy", policy, *size)


def memory(session: Session) -> dict | list:
    """Returns the peaks of a step beside those that the planner predicts, of each model that fits the GPU."""
    tiny = ["--case", "tiny, 64 rollouts in one forward", "tiny, in four forwards"]
    return session.figures("memory", "memory_model", *(tiny if session.cpu else ["--gpu"]))


def training(session: Session) -> dict:
    """Warm-starts a policy on arithmetic and trains it with OTB and RLOO; returns what each run's files say."""
    warm, runs = session.out / "warm", session.out / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    many = ["demonstrations=20480", "demonstrations_per_step=64", "steps=1200", "learning_rate=3e-4"]
    few = ["demonstrations=64", "demonstrations_per_step=32", "steps=4"]
    common = ["task=arithmetic", "model=hub"]
    started = time.time()
    untrained = session.policy(POLICY[session.cpu])
    on_cpu = ["model.dtype=float32", "threads=1"] if session.cpu else []
    made = [f"model.name={untrained}", f"output={warm}", "model.rollouts_per_forward=32"]
    session.run("warm_start", "experiments/warm_start.py", *common, *made, *(few if session.cpu else many), *on_cpu)
    result = {"policy": POLICY[session.cpu], "warm_start_seconds": time.time() - started, "runs": {}}
    size = ["steps=2", "prompts_per_step=2", "task.eval_prompts=4", "evaluation.samples=1"]
    if not session.cpu:
        size = ["steps=80", "prompts_per_step=32", "group_size=8", "learning_rate=2e-5", "evaluation.samples=8"]
    for baseline in ("otb", "rloo"):
        given = [*common, f"model.name={warm}", f"baseline={baseline}", *size, f"runs_dir={runs}", *on_cpu]
        session.run(f"train_{baseline}", "experiments/run.py", *given)
        (metrics,) = runs.glob(f"*/{baseline}-*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        evaluations = [json.loads(line) for line in (metrics.parent / "evaluations.jsonl").read_text().splitlines()]
        seconds = {key: sum(row[key] for row in rows) for key in rows[0] if key.startswith("seconds")}
        result["runs"][baseline] = {
            "accuracy": {row["step"]: row["accuracy"] for row in evaluations},
            "steps": len(rows),
            "own_tokens": rows[-1]["own_tokens_total"],
            "peak_memory_bytes": max(row.get("peak_memory_bytes", 0) for row in rows),
            "seconds": seconds,
        }
    return result


PARTS: dict[str, Callable[[Session], object]] = {
    "machine": machine,
    "conformance": conformance,
    "tests": tests,
    "step": step,
    "memory": memory,
    "training": training,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_session.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="small sizes, for a machine without a GPU")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_session"))
    parser.add_argument("--vectors", type=Path, help="outputs of the reference implementation (docs/reference.md)")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    session = Session(out, arguments.cpu, arguments.vectors and arguments.vectors.absolute())
    failed = 0
    for name in arguments.parts:
        started = time.time()
        try:
            found: object = PARTS[name](session)
        except Exception as error:  # whatever one part meets, the machine is there for the others
            found, failed = {"failed": f"{type(error).__name__}: {error}"}, failed + 1
        session.results[name] = {"seconds": round(time.time() - started, 1), "found": found}
        session.file.write_text(json.dumps(session.results, indent=1), encoding="utf8")
        print(f"{name}: {time.time() - started:.0f} s: {json.dumps(found)[:300]}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
