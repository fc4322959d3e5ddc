"""Shared fixtures: an untrained tiny policy, a dataset of a few prompts, the folder of shared vectors and data."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped with a reason where there is no CUDA device; they never pass unseen."""
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with reference vectors and real datasets; it is not part of the project."""
    if "OTB_SHARED" not in os.environ:
        pytest.skip("OTB_SHARED names no folder with reference vectors and datasets")
    return Path(os.environ["OTB_SHARED"])


@pytest.fixture(scope="session")
def tokenizer():
    from otb.policies.tiny_policy import build_tokenizer

    return build_tokenizer()


@pytest.fixture
def untrained(tokenizer, tmp_path):
    """A fresh untrained tiny policy loaded from a folder, the same weights in every test.

    Every tenth token ends a response, so that responses have different lengths without any training.
    """
    from transformers import AutoModelForCausalLM

    from otb.policies.tiny_policy import build_model

    model = build_model(tokenizer, seed=0)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, len(tokenizer), 10)]
    model.save_pretrained(tmp_path / "policy")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "policy")


@pytest.fixture(scope="session")
def policy(tokenizer, tmp_path_factory) -> Path:
    """Folder of an untrained tiny policy with its tokenizer, for runs of the real command (model.name=FOLDER).

    Every tenth token ends a response, as in `untrained`.
    """
    from otb.policies.tiny_policy import build_model

    folder = tmp_path_factory.mktemp("models") / "policy"
    model = build_model(tokenizer, seed=0)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(0, len(tokenizer), 10)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
