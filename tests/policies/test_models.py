"""Tests a run's record of its model, and configurations that cannot be read."""

import hashlib
import json
import shutil

import pytest
from huggingface_hub import constants

from otb.errors import RunError
from otb.policies.models import describe_policy, load_model, model_facts

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_hub_model_is_recorded_with_the_commit_of_the_cached_files(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--someone--model"
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    (cached / "snapshots" / COMMIT / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    assert model_facts("someone/model", None) == {"model": "someone/model", "model_revision": COMMIT}
    assert model_facts("someone/model", COMMIT)["model_revision"] == COMMIT
    assert model_facts("someone/other", "v1")["model_revision"] == "v1"  # not cached: the revision asked for


def test_folder_is_recorded_with_hashes_of_its_weights(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    digest = hashlib.sha256(b"weights").hexdigest()
    assert model_facts(str(tmp_path), None) == {"model": str(tmp_path), "model_sha256": {"model.safetensors": digest}}


def test_policy_is_loaded_with_the_attention_that_was_asked_for(policy):
    assert load_model(str(policy), None, "float32", "eager").config._attn_implementation == "eager"
    assert load_model(str(policy), None, "float32").config._attn_implementation == "sdpa"  # transformers' own choice


def test_configuration_that_contradicts_itself_is_refused(policy, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(policy, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"num_hidden_layers": 9}))
    with pytest.raises(RunError, match=r"cannot be read as a transformers model: .*`num_hidden_layers` \(9\) must"):
        describe_policy(str(folder), None)
