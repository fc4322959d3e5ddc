"""Repeats checks on a CUDA device, where TRL's fused head uses Triton kernels; skipped elsewhere, with a reason."""

import pytest
import torch

from otb.baselines import name_of
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.ob_exact import ob_exact
from otb.baselines.otb_exact import otb_exact
from otb.baselines.value import Value
from otb.score_norms import log_sum_squared_probs
from tests.support.trainers import recorded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [dict(), dict(num_iterations=2), dict(beta=0.1), dict(temperature=0.7)])
def test_gpu_advantages_equal_naive_loops_over_full_logits(tmp_path, untrained, tokenizer, options):
    trainer = recorded(tmp_path, untrained, tokenizer, use_cpu=False, **options)
    assert trainer.model.device.type == "cuda"
    for output, expected in trainer.batches:
        torch.testing.assert_close(output["advantages"].double(), expected, atol=1e-4, rtol=0)


def test_gpu_bf16_training_keeps_float32_score_norms(tmp_path, untrained, tokenizer):
    trainer = recorded(tmp_path, untrained, tokenizer, use_cpu=False, bf16=True)
    for output, expected in trainer.batches:
        assert output["advantages"].dtype == torch.float32
        # bf16 logits move w by a few per mille, the baseline by less
        torch.testing.assert_close(output["advantages"].double(), expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("baseline", [EnergyProbe(group_correction=True), Value(), ob_exact, otb_exact], ids=name_of)
def test_gpu_estimators_train(tmp_path, untrained, tokenizer, baseline, bf16):
    trainer = recorded(tmp_path, untrained, tokenizer, use_cpu=False, bf16=bf16, baseline=baseline, max_steps=3)
    for output, _ in trainer.batches:
        assert output["advantages"].isfinite().all() and output["advantages"].dtype == torch.float32


def test_gpu_score_norm_pass_never_holds_the_logits(tokenizer):
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    rows, length, vocabulary = 8, 2048, 131_072  # the logits alone would take 8 GiB in float32
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16)
    add_fused_lm_head(model, outputs=("log_probs", "log_sum_sq_probs"))
    ids = torch.randint(0, vocabulary, (rows, length), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        result = model(input_ids=ids, labels=ids, fused_lm_head=True)
        hidden = model.model(input_ids=ids[:1]).last_hidden_state[:, :-1]
        expected = log_sum_squared_probs(torch.nn.functional.linear(hidden[:, :64], model.lm_head.weight).float())
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30
    torch.testing.assert_close(result.log_sum_sq_probs[:1, :64], expected, atol=2e-2, rtol=2e-2)
