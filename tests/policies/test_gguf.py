"""Tests GGUF files: they are unpacked once, into an ordinary folder with the right weights, or refused with a fix."""

import json

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from experiments import checks
from otb.errors import RunError
from otb.policies.models import describe_policy, load_model, model_facts, policy_folder
from tests.support.recipes import composed

START, END, PAD = "<|im_start|>", "<|im_end|>", "<pad>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENS = [START, END, PAD, *sorted(pre_tokenizers.ByteLevel.alphabet()), "us", "er"]
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": len(TOKENS)}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def for_llama_cpp(name: str, weight: np.ndarray) -> np.ndarray:
    """Returns query and key weights with the halves of each head interleaved, as in llama.cpp."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def from_llama_cpp(name: str, weight: np.ndarray) -> np.ndarray:
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Returns a folder with an eight-bit Llama of two layers, and the weights that it encodes."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra gguf)")
    folder = tmp_path_factory.mktemp("gguf")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    writer = gguf.GGUFWriter(folder / "small.gguf", "llama")
    writer.add_name("small")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])  # control tokens, ordinary ones
    writer.add_token_merges(["u s", "e r"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    eight_bits, expected = gguf.GGMLQuantizationType.Q8_0, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        values = for_llama_cpp(name, weight.numpy())
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            blocks = gguf.quantize(values, eight_bits)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=eight_bits)
            values = gguf.dequantize(blocks, eight_bits)
        expected[name] = torch.tensor(from_llama_cpp(name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, expected


@pytest.fixture
def unpacked(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("OTB_CACHE", str(tmp_path / "cache"))
    return policy_folder(str(packed[0]), None, {}, gguf_file="small.gguf")


def test_a_gguf_file_is_unpacked_to_the_weights_that_it_holds(packed, unpacked):
    weights = load_model(unpacked, None, "float32").state_dict()
    assert {name: weight.dtype for name, weight in weights.items()} == dict.fromkeys(weights, torch.float32)
    assert torch.equal(weights.pop("lm_head.weight"), weights["model.embed_tokens.weight"])
    assert weights.keys() == packed[1].keys()
    for name, expected in packed[1].items():
        assert torch.equal(weights[name], expected), name


def test_tokenizer_and_template_come_from_the_file(packed, unpacked):
    tokenizer, config = describe_policy(str(packed[0]), None, None, "small.gguf")
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == (END, PAD, "left")
    assert (config.hidden_size, config.vocab_size, config.num_key_value_heads) == (32, len(TOKENS), 2)
    chat = [{"role": "user", "content": "1+2"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == f"{START}user\n1+2{END}\n{START}assistant\n"
    assert tokenizer.convert_ids_to_tokens(ids[:4]) == [START, "us", "er", "Ċ"]


def test_the_folder_is_ordinary_and_says_what_it_was_made_from(packed, unpacked, tmp_path):
    """Checkpoints are saved from this model, and transformers refuses to save a model marked as quantised."""
    model = AutoModelForCausalLM.from_pretrained(unpacked)
    model.save_pretrained(tmp_path / "checkpoint")
    assert "quantization_config" not in json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    made_from = model_facts(unpacked, None)["model_made_from"]
    assert (made_from["model"], made_from["gguf_file"]) == (str(packed[0]), "small.gguf")
    assert len(made_from["sha256"]) == 64


def test_the_second_time_the_cache_answers(packed, unpacked, monkeypatch):
    monkeypatch.setattr("otb.policies.gguf_files._load", None)
    assert policy_folder(str(packed[0]), None, {}, gguf_file="small.gguf") == unpacked


def test_a_file_that_is_none_is_refused_with_what_it_must_be(tmp_path, monkeypatch):
    pytest.importorskip("gguf", reason="needs the package gguf (extra gguf)")
    monkeypatch.setenv("OTB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, or not")
    with pytest.raises(RunError, match=r"model.gguf_file=broken.gguf of .* cannot be read: .* must be a GGUF file"):
        describe_policy(str(tmp_path), None, None, "broken.gguf")


@pytest.mark.parametrize(
    ("given", "installed", "said"),
    [
        (["model=hub", "model.gguf_file=a.gguf"], False, r"needs the package gguf. Run: pip install -e '.\[gguf\]'"),
        (["model=hub", "model.gguf_file=b.gguf"], True, r"gguf_file=b.gguf is not in .* Did you mean a.gguf\?"),
        (["++model.gguf_file=a.gguf"], True, "a.gguf of .* with the settings of model=tiny. Use model=hub model.name="),
        (["model=hub"], True, r"holds no config.json of transformers, but a.gguf. Add model.gguf_file=a.gguf"),
    ],
)
def test_gguf_files_are_refused_before_anything_is_loaded(tmp_path, monkeypatch, given, installed, said):
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True if installed else None)
    with pytest.raises(RunError, match=said):
        checks.check_model_and_task(composed(*given, f"model.name={tmp_path}"))
