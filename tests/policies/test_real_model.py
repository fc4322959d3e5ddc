"""Tests a real pre-trained model in the trainer, if OTB_REAL_MODEL=FOLDER names a folder of transformers files.

Any causal model with a chat template will do, if memory holds four times its weights in float32. docs/real_model.md
says where to get SmolLM2-135M, which takes about a minute on two cores.
"""

import os
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from otb.loss_inputs import prompts_with_responses
from otb.methods import Method
from otb.policies.models import describe_policy, load_model
from otb.tasks.arithmetic import Arithmetic
from tests.support.trainers import RecordingTrainer, byte_reward, config

SMALL = dict(per_device_train_batch_size=8, max_completion_length=24, learning_rate=1e-5, temperature=0.9)
pytestmark = pytest.mark.skipif(
    "OTB_REAL_MODEL" not in os.environ, reason="OTB_REAL_MODEL names no folder with a real model"
)


class Measuring(Method):
    """Keeps log pi and w of every generation, and the same values from full logits in float64."""

    def __init__(self):
        self.kept = []

    def measured(self, step):
        ids, attention_mask = prompts_with_responses(step.output)
        sampled, kept = step.output["completion_ids"], step.output["completion_mask"].bool()
        with torch.no_grad():
            logits = self.trainer.model(input_ids=ids, attention_mask=attention_mask).logits
        logits = logits[:, -sampled.shape[1] - 1 : -1].double() / self.trainer.temperature
        full = logits.log_softmax(-1)
        pi = full.gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        w = 1 - 2 * pi.exp() + full.exp().square().sum(-1)
        mine = step.own.unpack(step.rollouts.score_norms.flatten(0, 1))
        self.kept.append((step.log_probs[kept], pi[kept], mine[kept], w[kept]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = str(Path(os.environ["OTB_REAL_MODEL"]).expanduser())
    tokenizer, _ = describe_policy(folder, None)
    rows = Arithmetic(train_prompts=4, instruction="Add up.").train_dataset().select_columns("prompt")
    measuring = Measuring()
    trainer = RecordingTrainer(
        load_model(folder, None, "float32"),
        byte_reward,
        config(tmp_path_factory.mktemp("out"), **SMALL),
        Dataset.from_list(list(rows)),
        processing_class=tokenizer,
        methods=[measuring],
    )
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    return trainer, before, measuring.kept


def test_log_probs_and_score_norms_are_those_of_the_full_logits(trained):
    _, _, measured = trained
    assert len(measured) == 2
    for log_probs, expected_log_probs, w, expected_w in measured:
        assert len(w) > 8 and (w >= 0).all()
        torch.testing.assert_close(log_probs.double(), expected_log_probs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(w.double(), expected_w, atol=1e-4, rtol=1e-4)


def test_advantages_are_those_of_naive_loops_and_the_weights_move(trained):
    trainer, before, _ = trained
    for output, expected in trainer.batches:
        torch.testing.assert_close(output["advantages"].double(), expected, atol=1e-3, rtol=0)
    moved = [name for name, weight in trainer.model.state_dict().items() if not torch.equal(weight, before[name])]
    assert len(moved) > len(before) / 2
    assert all(torch.isfinite(weight).all() for weight in trainer.model.state_dict().values())


def test_rollouts_end_with_an_end_token_and_prompts_begin_at_most_once(trained):
    trainer, *_ = trained
    ends, begin = set(trainer.eos_token_ids), trainer.processing_class.bos_token_id
    for output, _ in trainer.batches:
        rows = zip(output["completion_ids"].tolist(), output["completion_mask"].sum(1).tolist(), strict=True)
        for ids, length in rows:
            assert not ends & set(ids[: length - 1]) and (length == len(ids) or ids[length - 1] in ends)
        text = trainer.processing_class.decode(output["prompt_ids"][0], skip_special_tokens=True)
        assert "Add up." in text
        template = trainer.processing_class.chat_template or ""
        if begin not in ends and "im_start" not in template:  # ChatML starts every turn with this token
            assert (output["prompt_ids"] == begin).sum(1).max() <= 1
