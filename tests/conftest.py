"""Shared fixtures, and the order in which the files are run (docs/tests.md)."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest

# The longest first, so that at the end no worker waits for one of them: SLURM's mostly waits, the others compute.
FIRST = (
    "test_slurm",
    "test_vllm",
    "test_run",
    "test_resume",
    "test_run_states",
    "test_sharded_runs",
    "test_distributed",
    "test_local_sweep",
    "test_analysis_report",
)
# Files whose tests need no costly fixture of their module: each test may go to whichever worker is free.
DIVISIBLE = ("test_resume", "test_grading")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    skip_without_a_gpu(items)


def pytest_xdist_make_scheduler(config, log):
    """A file stays on one worker, as its fixtures do, unless it is DIVISIBLE."""
    from xdist.scheduler import LoadScopeScheduling

    class FileOrTest(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return nodeid if Path(file).stem in DIVISIBLE else file

    config.option.loadscopereorder = False  # keeps the order above
    return FileOrTest(config, log)


def pytest_collection_finish():
    """All test files are imported now, and with them the libraries."""
    from tests.support.economy import economize

    economize()


def skip_without_a_gpu(items) -> None:
    """Tests marked gpu are skipped with a reason where there is no CUDA device; they never pass unseen."""
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> None:
    """Warm-started policies are kept for the session, so that all workers together train one; see `warm_start`."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which the workers share
    os.environ.setdefault("OTB_CACHE", str(folder / "cache"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with reference vectors and real datasets; it is not part of the project."""
    if "OTB_SHARED" not in os.environ:
        pytest.skip("OTB_SHARED names no folder with reference vectors and datasets")
    return Path(os.environ["OTB_SHARED"])


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Python of an environment with vLLM for CPUs and DeepSpeed, which tests/vllm_environment.sh makes."""
    if "OTB_VLLM_ENV" not in os.environ:
        pytest.skip("OTB_VLLM_ENV names no environment with vLLM and DeepSpeed; tests/vllm_environment.sh makes one")
    python = Path(os.environ["OTB_VLLM_ENV"]) / "bin" / "python"
    assert python.exists(), f"{python} is missing: run tests/vllm_environment.sh"
    return str(python.absolute())


@pytest.fixture(scope="session")
def tokenizer():
    from otb.policies.tiny_policy import build_tokenizer

    return build_tokenizer()


@pytest.fixture(scope="session")
def policy(tokenizer, tmp_path_factory) -> Path:
    """Folder of an untrained tiny policy with its tokenizer, for runs of the real command (model.name=FOLDER).

    Every tenth token ends a response: responses have different lengths without any training.
    """
    from otb.policies.tiny_policy import build_model

    folder = tmp_path_factory.mktemp("models") / "policy"
    model = build_model(tokenizer, seed=0)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, len(tokenizer), 10)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def untrained(policy):
    """A fresh copy of `policy`, the same weights in every test."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    """A real Chromium for the tests of a module (tests/support/browser.py); they skip, or fail in CI, without one."""
    from tests.support.browser import chromium

    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
