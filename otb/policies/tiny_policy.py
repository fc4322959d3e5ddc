"""Builds the tiny policy in code, without a download: a Qwen3 of 0.35 M parameters, its tokenizer and chat template.

tiny_warm_start.py trains it and saves it in the ordinary transformers format: the saved folder loads with
AutoModelForCausalLM and AutoTokenizer like any model of the hub.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_TAGS = ("<tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Each piece is one token; all other text is split into bytes. The order is part of the tokenizer.
CHAT_PIECES = ("user\n", "assistant\n", "system\n", "\\boxed{")
PYTHON_PIECES = (
    '{"name": "python", "arguments": {"code": "', '{"name": "', '", "arguments": {', '"}}', "print(",
    '": "', '", "', "\\n", "import ", "from ", "return ", "def ", "for ", "range(", "int(", "sympy", "**",
    "//", "==", " = ", " + ", " - ", " * ", " / ", "Error", "Traceback", "result",
)  # fmt: skip
ARITHMETIC_PIECES = (
    "first ", "then ", "so ", "hmm ", "wait ", "maybe ", "or ", "no ", "again ", "not sure ", "is it ",
    "let me see ", "check ", "total ", "answer ", "redo ", "I get ", "that is ", "use python ", ", ", ". ",
)  # fmt: skip
ENGLISH = """\
the a an of to and in is he she it they has have had for on at each many how much if more than with that was are be
his her their by as from will does did do can all one two three four five six ten half twice times there this per
day days week month year hour hours minutes money dollars cost costs price sold buy buys bought number total left
first second then after before every other same some only also what when which who would were him them its out up
over not but so into less last next new old school people students children friends sister brother mother father
house car book books apples eggs water food miles feet pounds cents percent average times find let value function
such where positive integer real equation points expressed form answer sum product"""
ENGLISH_PIECES = tuple(" " + word for word in ENGLISH.split())
ENDINGS = "ing ed er es tion ly 's th st an in on re al or en ar it"
PIECES = (*CHAT_PIECES, *PYTHON_PIECES, *ARITHMETIC_PIECES, *ENGLISH_PIECES, *ENDINGS.split())

# ChatML like Qwen3's; a turn's text never depends on later turns, as TRL's tool loop requires. `<tools>` replaces the
# tools' JSON schemas, which would be many times longer than an arithmetic prompt.
CHAT_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Lets TRL parse a response into a chat message: TRL recognises only published templates, by their exact text.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Builds a lossless tokenizer of about 520 tokens: 256 bytes, `PIECES`, tool tags and special tokens.

    It splits text into the fewest tokens. Digits are single tokens. Padding is on the left, eos is `<|im_end|>`.
    """
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [to_bytes.pre_tokenize_str(piece)[0][0] for piece in dict.fromkeys(PIECES)]
    # Equal scores: the likeliest segmentation is the one with the fewest tokens.
    vocabulary = [(token, -1.0) for token in [*sorted(pre_tokenizers.ByteLevel.alphabet()), *spelled]]
    tokenizer = Tokenizer(models.Unigram(vocabulary))
    tokenizer.pre_tokenizer, tokenizer.decoder = to_bytes, decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TOOL_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
    )


def model_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """Returns the architecture of the tiny policy: 3 layers of width 96, tied embeddings, 0.35 M parameters."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen3ForCausalLM:
    """Builds the untrained float32 model. Its weights depend only on the seed; the global random state is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(model_config(tokenizer)).float()
