"""python notebooks/prompt_group.py: samples the prompt group of 01_walkthrough_otb.ipynb from the warm-started policy.

Writes what a trainer sees of one prompt group: tokens, log-probabilities, log sum pi^2 per own token, rewards. Takes
the first training prompt whose rewards differ and are neither rare nor common. Trains the tiny policy where no cache
holds it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from otb.policies.tiny_warm_start import WarmStart, warm_start
from otb.score_norms import log_sum_squared_probs
from otb.tasks.arithmetic import Arithmetic

GROUP_SIZE = 6
FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "prompt_group.json"


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Arithmetic, row: dict) -> dict:
    """One prompt group as lists, a list per rollout."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    prompts = prompt.repeat(GROUP_SIZE, 1)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": task.max_completion_length}
    with torch.no_grad():
        whole = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        logits = model(whole).logits[:, prompts.shape[1] - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, whole[:, prompts.shape[1] :, None]).squeeze(-1)
    sums = log_sum_squared_probs(logits)
    group = {"prompt": tokenizer.decode(prompt[0]), "tokens": [], "log_probs": [], "log_sum_squared_probs": []}
    for ids, own, squared in zip(whole[:, prompts.shape[1] :], log_probs, sums, strict=True):
        ended = (ids == tokenizer.eos_token_id).nonzero()
        length = int(ended[0]) + 1 if len(ended) else len(ids)
        group["tokens"].append([tokenizer.decode(token) for token in ids[:length]])
        group["log_probs"].append([round(value, 6) for value in own[:length].tolist()])
        group["log_sum_squared_probs"].append([round(value, 6) for value in squared[:length].tolist()])
    texts = [[{"role": "assistant", "content": "".join(tokens)}] for tokens in group["tokens"]]
    return group | {"rewards": task.reward(texts, answer=[row["answer"]] * GROUP_SIZE)}


def main() -> None:
    task = Arithmetic()
    folder = warm_start(task, WarmStart())
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    for row in task.train_dataset():
        group = sample(model, tokenizer, task, row)
        if 2 <= sum(group["rewards"]) <= GROUP_SIZE - 2:
            FILE.write_text(json.dumps(group, indent=1) + "\n", encoding="utf8")
            print(f"{FILE.name}: rewards {group['rewards']}")
            return


if __name__ == "__main__":
    main()
