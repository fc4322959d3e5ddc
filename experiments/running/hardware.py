"""What a run is spread over: its processes, how they share the policy, and what samples for them. Imports no torch.

`parallel=` (ddp, fsdp2, zero3), `rollouts_by=` (hf, hf_bfloat16, vllm, vllm_server) and `gpus=` are checked here before
anything is loaded, turned into options of GRPOConfig, and `gpus=N` starts the processes of a run on this machine.
"""

from __future__ import annotations

import http.client
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.planning.fit import vllm_gpus, vllm_share
from experiments.planning.memory import SAMPLES_HERE
from experiments.prefetch import MODEL_FILES
from experiments.running.build import build, has_reference
from experiments.running.command_line import SAID
from experiments.running.threads import check_threads
from experiments.running.warning_signal import passes_on, received
from otb import baselines
from otb.errors import CRASHED, REFUSED, STOPPED_FROM_KEYBOARD, TRY_AGAIN, RunError, first_line
from otb.training.options import NEUTRAL_SAMPLING, refuse_sampler_dtype

LEAVES_SIGNALS = "--signals-to-handle"  # an option of torchrun: those that it handles, and no others
CPU_INFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # names in CPU_INFO: x86, Intel's matrix units, ARM


def check_processes(cfg: DictConfig, processes: int) -> None:
    """Raises RunError where the sharding or the sampler does not go with the processes or the baseline."""
    _check_parallel(cfg, processes)
    _check_rollouts_by(cfg, processes)


def check_gpus(cfg: DictConfig) -> None:
    """Raises RunError unless `gpus` is a number of processes or null."""
    if cfg.gpus is not None and (type(cfg.gpus) is not int or cfg.gpus < 1):
        raise RunError(f"gpus={cfg.gpus} must be a whole number >= 1, or null for one process. Try gpus=null.")


def check_gpus_of_launcher(cfg: DictConfig, processes: int) -> None:
    """Raises RunError where `gpus` is another number than the processes that SLURM's launcher starts for a run."""
    if cfg.gpus not in (None, processes):
        raise RunError(
            f"gpus={cfg.gpus} is not the {counted(processes)} that SLURM's launcher starts for a run, nodes x "
            f"tasks_per_node. Use gpus={processes} or gpus=null for those, or another launcher: "
            "hydra/launcher=slurm_8gpu starts 8, slurm_nodes 8 on each of hydra.launcher.nodes."
        )


def check_this_machine(cfg: DictConfig) -> None:
    """Raises RunError where this process cannot use the machine as the configuration wants. Loads nothing."""
    check_threads(cfg)
    gpus = [] if cfg.trainer.get("use_cpu") else visible_gpus()
    if cfg.parallel.name != "ddp" and not gpus:
        raise RunError(
            f"parallel={cfg.parallel.name} divides the policy over GPUs, and no GPU is to be used here; it would train "
            "as plain data parallelism instead. Use parallel=ddp, or a machine with GPUs."
        )
    refuse_vllm_without_gpu(cfg, gpus)
    if "WORLD_SIZE" not in os.environ and cfg.gpus is None and len(gpus) > 1:
        raise RunError(
            f"{len(gpus)} GPUs are visible to one process, among which torch would split its batches unasked. Use "
            f"gpus={len(gpus)} for all of them, or CUDA_VISIBLE_DEVICES=0 for one."
        )


def refuse_vllm_without_gpu(cfg: DictConfig, gpus: list[str]) -> None:
    """Raises RunError for vLLM in processes that use none of the GPUs."""
    if cfg.rollouts_by.name == "vllm" and not gpus:
        raise RunError(
            "rollouts_by=vllm samples on the GPUs that train, and none is to be used here: on a processor vLLM packs "
            "its weights, and those of the trainer never reach it. Use rollouts_by=hf, or a machine with GPUs."
        )


def wait_for_server(cfg: DictConfig) -> None:
    """Waits until the vLLM server of `rollouts_by` answers, before anything is loaded.

    Returns at once where no server samples. Raises RunError after `rollouts_by.timeout_s`.
    """
    node = cfg.rollouts_by
    if node.name != "vllm_server":
        return
    ends, told = time.monotonic() + node.timeout_s, False
    while True:
        try:
            with urllib.request.urlopen(f"{node.url.rstrip('/')}/health", timeout=5):
                return
        except (OSError, http.client.HTTPException) as error:
            why = first_line(error)
        if time.monotonic() >= ends:
            raise RunError(
                f"rollouts_by.url={node.url} gave no answer within rollouts_by.timeout_s={node.timeout_s}: {why}. "
                f"Start the server with: trl vllm-serve --model {cfg.model.name}"
            )
        if not told:
            print(f"waiting up to {node.timeout_s} s for the vLLM server at {node.url}", file=sys.stderr, flush=True)
            told = True
        time.sleep(min(1.0, node.timeout_s))


def _check_parallel(cfg: DictConfig, processes: int) -> None:
    kind = cfg.parallel.name
    if kind == "ddp":
        return
    if kind == "zero3" and importlib.util.find_spec("deepspeed") is None:
        raise RunError("parallel=zero3 needs the package deepspeed. Run: pip install -e '.[deepspeed]'")
    if processes < 2:
        raise RunError(
            f"parallel={kind} divides the policy over several processes, and this run has one. Add gpus=8, or use "
            "parallel=ddp."
        )
    needs = baselines.needs_of(build(cfg, "baseline")) & baselines.EXACT_NORMS
    what = f"baseline={cfg.baseline._target_.rsplit('.', 1)[-1]}" if needs else "measure_gradient_noise=true"
    if needs or cfg.measure_gradient_noise:
        raise RunError(
            f"{what} reads whole gradients on every process, and parallel={kind} divides them. Use parallel=ddp, or a "
            "baseline without exact norms and measure_gradient_noise=false."
        )


def _check_rollouts_by(cfg: DictConfig, processes: int) -> None:
    node, with_tools = cfg.rollouts_by, cfg.task.get("max_turns") is not None
    if node.name in SAMPLES_HERE:
        rows = node.rows
        if rows is not None and (type(rows) is not int or rows < 1):
            raise RunError(f"rollouts_by.rows={rows} must be a whole number >= 1, or null for all. Try 64.")
        if rows is not None and cfg.parallel.name != "ddp":
            raise RunError(
                f"rollouts_by.rows={rows} lets processes generate a different number of times, and "
                f"parallel={cfg.parallel.name} has them gather weights together. Use rollouts_by=vllm, or rows=null."
            )
        if with_tools and cfg.parallel.name != "ddp":
            raise RunError(
                f"rollouts_by={node.name} with tools: rollouts call Python a different number of times, and "
                f"parallel={cfg.parallel.name} has processes gather weights together for each token. Use "
                "rollouts_by=vllm, or parallel=ddp."
            )
        if node.name == "hf_bfloat16":
            _check_sampler_copy(cfg)
        return
    if importlib.util.find_spec("vllm") is None:
        raise RunError(f"rollouts_by={node.name} needs the package vllm. Run: pip install -e '.[vllm]'")
    if node.name == "vllm_server":
        if isinstance(node.timeout_s, bool) or not isinstance(node.timeout_s, int | float) or not node.timeout_s > 0:
            raise RunError(f"rollouts_by.timeout_s={node.timeout_s} must be a positive number of seconds. Try 240.")
        if not str(node.url).startswith(("http://", "https://")):
            raise RunError(
                f"rollouts_by.url={node.url} is no address of a server. Try rollouts_by.url=http://localhost:8000."
            )
        if with_tools and processes > 1:
            raise RunError(
                f"rollouts_by=vllm_server with tools on {processes} processes: rollouts call Python a different number "
                "of times, and what the server samples is dealt out as if every process had asked for as much. Use "
                "rollouts_by=vllm, or one process."
            )
        return
    tensor_parallel, share = node.tensor_parallel, node.memory_share
    divides = type(tensor_parallel) is int and tensor_parallel >= 1 and processes % tensor_parallel == 0
    if tensor_parallel is not None and not divides:
        raise RunError(
            f"rollouts_by.tensor_parallel={tensor_parallel} must be a whole number that divides the "
            f"{counted(processes)} of the run. Try rollouts_by.tensor_parallel=null for as few as hold the policy."
        )
    if tensor_parallel not in (None, 1) and with_tools:
        raise RunError(
            f"rollouts_by.tensor_parallel={tensor_parallel} with tools: processes that share a copy of the policy must "
            "ask it for the same number of turns, and rollouts call Python a different number of times. Use "
            "rollouts_by.tensor_parallel=1."
        )
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1):
        raise RunError(
            f"rollouts_by.memory_share={share} must lie between 0 and 1: vLLM shares a GPU with the policy itself. "
            "Try rollouts_by.memory_share=null for what the trainer leaves."
        )


def _check_sampler_copy(cfg: DictConfig) -> None:
    """Raises RunError where a bfloat16 copy of the policy cannot sample, or would not differ from it."""
    if cfg.parallel.name != "ddp":
        raise RunError(
            f"rollouts_by=hf_bfloat16 copies the whole policy on every process, and parallel={cfg.parallel.name} "
            "divides it. Use parallel=ddp, or rollouts_by=vllm."
        )
    if cfg.model.dtype != "float32":
        raise RunError(
            f"rollouts_by=hf_bfloat16 samples in another precision than model.dtype={cfg.model.dtype} computes in, and "
            "that is bfloat16 already. Use model.dtype=float32, or rollouts_by=hf."
        )
    usual = NEUTRAL_SAMPLING | {"generation_kwargs": None, "loss_type": "dr_grpo", "sampler_dtype": "bfloat16"}
    try:
        refuse_sampler_dtype(SimpleNamespace(**(usual | dict(cfg.trainer))))
    except ValueError as error:
        keys = {"sampler_dtype=None": "rollouts_by=hf", "sampler_dtype=bfloat16": "rollouts_by=hf_bfloat16"}
        text = str(error)
        for option, key in keys.items():
            text = text.replace(option, key)
        raise RunError(text) from error


def counted(processes: int) -> str:
    """Returns "1 process" or "8 processes", for a message."""
    return f"{processes} process" + ("" if processes == 1 else "es")


def visible_gpus() -> list[str]:
    """Returns the names by which CUDA_VISIBLE_DEVICES chooses each GPU that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [str(number) for number, line in enumerate(line for line in lines if line.startswith("GPU "))]


def source_of(cfg: DictConfig, name: str) -> str:
    """Returns what to load the policy `name` from so that all that TRL loads by that name alone is of one revision.

    A local copy of `model.revision` where vLLM samples in these processes or there is a reference model; else `name`.
    Raises RunError without one.
    """
    revision, by_name_alone = cfg.model.revision, cfg.rollouts_by.name == "vllm" or has_reference(cfg)
    if not by_name_alone or revision is None or Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, revision=revision, allow_patterns=MODEL_FILES)
    except (OSError, ValueError) as error:
        raise RunError(
            f"model.revision={revision} of {name} cannot be fetched into a folder, and vLLM or the reference model "
            f"would load another one: {first_line(error)}. With network, run: "
            f"python experiments/prefetch.py --model {name} --revision {revision}"
        ) from error


def gpu_memory() -> float | None:
    """Returns the bytes of the smallest GPU that nvidia-smi shows; None where this process uses none."""
    if not visible_gpus() or shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    mebibytes = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return min(map(float, mebibytes)) * 2**20 if mebibytes else None


def emulated_bfloat16(dtype: str, on_cpu: bool) -> str:
    """Returns a line for who computes in bfloat16 on a processor that has no instructions for it; else "".

    dtype: `model.dtype`. It stays what it is: the precision of a run must not depend on the machine that it lands on.
    """
    if dtype != "bfloat16" or not on_cpu or not CPU_INFO.exists():
        return ""
    words = set(CPU_INFO.read_text(encoding="utf8", errors="replace").split())
    if words & BFLOAT16_FLAGS:
        return ""
    return "this processor has no bfloat16 and emulates it; model.dtype=float32 is faster here, and another run"


def grpo_options(cfg: DictConfig) -> dict[str, Any]:
    """Returns the options of GRPOConfig that follow from `parallel` and `rollouts_by` alone."""
    options = OmegaConf.to_container(cfg.parallel.trainer, resolve=True)
    node = cfg.rollouts_by
    if node.name == "hf":
        return options
    if node.name == "hf_bfloat16":
        return options | {"sampler_dtype": "bfloat16"}
    options |= {"use_vllm": True}
    if node.name == "vllm_server":
        return options | {
            "vllm_mode": "server",
            "vllm_server_base_url": node.url,
            "vllm_server_timeout": float(node.timeout_s),
        }
    machine = gpu_memory(), int(os.environ.get("WORLD_SIZE", 1))
    return options | {
        "vllm_mode": "colocate",
        "vllm_tensor_parallel_size": vllm_gpus(cfg, *machine),
        "vllm_gpu_memory_utilization": vllm_share(cfg, *machine),
        "vllm_enable_sleep_mode": node.sleep and bool(visible_gpus()),  # vLLM has no sleep on a CPU
    }


def sampling_limits(cfg: DictConfig, longest_prompt: int, stop_token_ids: list[int]) -> dict[str, Any]:
    """Returns the options of GRPOConfig that tell vLLM what rows and tokenizer need; none where it does not sample.

    longest_prompt: tokens of the longest prompt of the run. stop_token_ids: the tokens that end a rollout; vLLM knows
    only those of the model's own files.
    """
    if cfg.rollouts_by.name in SAMPLES_HERE:
        return {}
    generation = OmegaConf.to_container(cfg.trainer, resolve=True).get("generation_kwargs") or {}
    limits: dict[str, Any] = {"generation_kwargs": {"stop_token_ids": stop_token_ids} | generation}
    if cfg.rollouts_by.name == "vllm":  # else it would be the model's whole context, whose cache does not fit
        limits["vllm_max_model_length"] = longest_prompt + cfg.task.max_completion_length
    return limits


def starts_processes(cfg: DictConfig) -> bool:
    """Tells whether `gpus=N` asks for several processes and this one is not yet among them."""
    return cfg.gpus is not None and cfg.gpus > 1 and "WORLD_SIZE" not in os.environ


def check_enough_gpus(cfg: DictConfig) -> None:
    """Raises RunError where `gpus=N` asks for several processes and there are fewer GPUs."""
    here = visible_gpus()
    if starts_processes(cfg) and not cfg.trainer.get("use_cpu") and len(here) < cfg.gpus:
        raise RunError(
            f"gpus={cfg.gpus} asks for more GPUs than are visible here ({len(here)}). Use gpus={max(1, len(here))}, or "
            "trainer.use_cpu=true to try several processes on the CPU."
        )


def start_processes(cfg: DictConfig, script: str, arguments: list[str]) -> None:
    """Ends this process as the processes end that `gpus=N` asks for; returns where there is nothing to start.

    script, arguments: the command as Hydra got it. Under SLURM, or under a torchrun of the user's own, the processes
    are there already. Raises RunError where there are fewer GPUs.
    """
    if not starts_processes(cfg):
        return
    check_enough_gpus(cfg)
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[SAID] = f"{folder}/said"
        sys.exit(torchrun(["--standalone", "--nproc-per-node", str(cfg.gpus), script, *arguments]))


def torchrun(words: list[str]) -> int:
    """Runs `torchrun WORDS` to its end and returns the exit code: that of the processes where they have said why.

    torchrun itself would end with 1 and a traceback of its own, whatever they end with.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)  # it tells every end
    if LEAVES_SIGNALS in run.get_args_parser().format_help():  # torch 2.9; else it ends the processes within 30 s
        words = [LEAVES_SIGNALS, f"{'SIGINT' if passes_on() else 'SIGTERM'},SIGHUP,SIGQUIT", *words]
    try:
        run.main(words)
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()} - {-signal.SIGTERM}  # those that it ended
        if passes_on() and received():  # one may not have listened yet, or not have been done when torchrun ended it
            codes = codes - {-signal.SIGUSR2, -signal.SIGKILL} or {TRY_AGAIN}
        if codes and codes <= {REFUSED, TRY_AGAIN, STOPPED_FROM_KEYBOARD}:
            return min(codes)
        print(error, file=sys.stderr)  # which process it was, and the signal that killed it
        return CRASHED
    return 0
