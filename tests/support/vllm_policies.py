"""Makes tiny policies that vLLM can run on a CPU: their heads have size 32; the tiny policy's 24 has no kernel."""

from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from otb.policies.tiny_policy import model_config

CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(5)"}}</tool_call><|im_end|>'
ANSWER = "\\boxed{7}<|im_end|>"
TURN = "assistant\n"
CERTAINTY = 9.0  # logit of a token that is meant to follow, where the others are near 0


def save_untrained(tokenizer, folder: Path) -> Path:
    """Saves the policy of the fixture `policy` for vLLM: every tenth token ends a response."""
    return _save(_model(tokenizer), tokenizer, folder, ends=[tokenizer.eos_token_id, *range(0, len(tokenizer), 10)])


def save_caller(tokenizer, folder: Path, turns: tuple[str, ...] = (CALL, ANSWER)) -> Path:
    """Saves a policy whose every turn is one of `turns`, with about equal probability.

    It is a bigram model: its layers add nothing, and its head responds to the previous token's embedding.
    """
    model = _model(tokenizer, tie_word_embeddings=False)
    embeddings = model.get_input_embeddings().weight.data
    directions = embeddings / embeddings.norm(dim=1, keepdim=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head = model.get_output_embeddings().weight.zero_()
        for text in turns:
            ids = tokenizer(TURN + text)["input_ids"]
            for before, after in zip(ids[:-1], ids[1:], strict=True):
                head[after] += directions[before] * CERTAINTY / embeddings.size(1) ** 0.5  # behind an RMS norm
    return _save(model, tokenizer, folder, ends=[tokenizer.eos_token_id])


def _model(tokenizer, **changed) -> Qwen3ForCausalLM:
    config = model_config(tokenizer)
    config.update({"head_dim": 32, **changed})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).float()


def _save(model, tokenizer, folder: Path, ends: list[int]) -> Path:
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
