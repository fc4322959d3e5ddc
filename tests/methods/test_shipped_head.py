"""Tests that MiMo loads without code from the hub, and that its head is read from the policy's files."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from otb import OTBTrainer
from otb.errors import RunError
from otb.loss_inputs import prompts_with_responses, response_mask
from otb.methods.auxiliary import MultiTokenPrediction
from otb.methods.auxiliary_head import AuxiliaryHead
from otb.methods.mtp import MTPHead
from otb.policies.mimo import HEAD, shipped_head
from otb.policies.models import check_shipped_head, describe_policy
from tests.support.trainers import byte_reward, config, dataset, method_of

DIMENSIONS = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


class Head(nn.Module):
    """Copies the layout of MiMo's head: the parts of the layer and the parts that mix the inputs are in one module."""

    def __init__(self, configuration):
        super().__init__()
        width, eps = configuration.hidden_size, configuration.rms_norm_eps
        layer = Qwen2DecoderLayer(configuration, 0)
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.token_layernorm, self.hidden_layernorm = Qwen2RMSNorm(width, eps), Qwen2RMSNorm(width, eps)
        self.final_layernorm = Qwen2RMSNorm(width, eps)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.rotary = Qwen2RotaryEmbedding(configuration)  # without weights

    def forward(self, states, embedded):
        """Predicts from h_t and Emb(y_{t+1}), (B, L, d) each, without padding."""
        length = states.size(1)
        x = self.input_proj(torch.cat([self.hidden_layernorm(states), self.token_layernorm(embedded)], dim=-1))
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        rotary = self.rotary(x, torch.arange(length)[None])
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings=rotary, attention_mask=causal)[0]
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))


@pytest.fixture
def mimo(tokenizer, tmp_path):
    """Writes a small MiMo as on the hub, with its model_type, remote code and head. -> folder, head."""
    folder = tmp_path / "mimo"
    torch.manual_seed(0)
    trunk = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, tie_word_embeddings=False, **DIMENSIONS)
    )
    nn.init.normal_(trunk.model.norm.weight, 0.5, 0.2)  # with weight 1, a second norm would change nothing
    trunk.config._attn_implementation = "eager"
    head = Head(trunk.config)
    for parameter in head.parameters():
        nn.init.normal_(parameter, 0.5, 0.2)
    trunk.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {f"{HEAD}{name}": tensor for name, tensor in head.state_dict().items()}
    save_file(load_file(folder / "model.safetensors") | weights, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    described["auto_map"] = {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(described))
    return folder, head


def in_two_files(folder):
    """Splits the weights into two files, as large models do; the second holds the head and other weights."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights, key=lambda name: (name.startswith(HEAD), name))
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file, {"format": "pt"})
    placed = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "model.safetensors").unlink()


def test_it_loads_without_remote_code_and_computes_what_qwen2_does(mimo, tokenizer):
    folder, _ = mimo
    assert describe_policy(str(folder), None)[1].model_type == "mimo"
    model = AutoModelForCausalLM.from_pretrained(folder)
    plain = copy.deepcopy(model.config.to_dict()) | {"model_type": "qwen2"}
    same = Qwen2ForCausalLM(Qwen2Config(**{name: plain[name] for name in Qwen2Config().to_dict() if name in plain}))
    same.load_state_dict(model.state_dict())
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, same(ids).logits)


@pytest.mark.parametrize("files", [1, 2])
def test_a_shipped_head_computes_what_mimo_s_own_does(mimo, files):
    folder, theirs = mimo
    if files == 2:
        in_two_files(folder)
    ours = MTPHead(AutoModelForCausalLM.from_pretrained(folder), seed=0)
    ours.load_state_dict(shipped_head(str(folder)))
    torch.manual_seed(1)
    states, embedded = torch.randn(2, 3, 9, 32).unbind()
    found = ours(states, embedded, torch.ones(3, 9, dtype=torch.long))
    assert torch.allclose(found, theirs(states, embedded), atol=1e-5) and found.std() > 0.1


def cross_entropy(model, head, output) -> float:
    """Returns -log pi of MiMo's head per own token, row by row without padding, from the last layer's output."""
    kept: list = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    ids, attention_mask = prompts_with_responses(output)
    sums, count = 0.0, 0
    with torch.no_grad():
        for row, mask, own in zip(ids, attention_mask.bool(), response_mask(output), strict=True):
            tokens, responses = row[mask][None], int(own.sum())
            model(tokens)
            states = head(kept.pop()[:, :-2], model.get_input_embeddings()(tokens[:, 1:-1]))
            log_probs = model.lm_head(states).log_softmax(-1).gather(-1, tokens[:, 2:, None])[0, -responses:, 0]
            sums, count = sums - float(log_probs.sum()), count + responses
    hook.remove()
    return sums / count


class Kept(OTBTrainer):
    """Keeps the cross-entropy of MiMo's head on the first batch, before the weights change."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.expected = self.expected or cross_entropy(self.plain, self.theirs, output)
        return output


def test_a_trainer_begins_with_the_shipped_head_and_trains_it(mimo, tokenizer, tmp_path):
    """The head reads the states before the policy's final norm, as MiMo's does."""
    folder, theirs = mimo
    args = config(tmp_path, max_steps=2, num_iterations=2)
    auxiliary = MultiTokenPrediction("occ", weights="shipped")
    trainer = Kept(
        AutoModelForCausalLM.from_pretrained(folder), byte_reward, args, dataset(), processing_class=tokenizer,
        auxiliary=auxiliary,
    )  # fmt: skip
    trainer.plain, trainer.theirs, trainer.expected = AutoModelForCausalLM.from_pretrained(folder), theirs, None
    projection = method_of(trainer, AuxiliaryHead).head.projection.weight
    assert projection.dtype == torch.float32 and torch.equal(projection, theirs.input_proj.weight)
    trainer.train()
    assert trainer.state.log_history[0]["mtp_cross_entropy"] == pytest.approx(trainer.expected, rel=1e-4)
    assert not torch.equal(projection, theirs.input_proj.weight)
    assert trainer.state.log_history[1]["mtp_lambda"] != 0


def test_a_model_without_a_head_is_refused(mimo, policy, tmp_path):
    for folder in (policy, tmp_path):
        with pytest.raises(RunError, match=f"auxiliary.weights=shipped needs .* {re.escape(str(folder))} has none"):
            check_shipped_head(str(folder), None)
    check_shipped_head(str(mimo[0]), None)
