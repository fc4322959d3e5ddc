"""Estimates by Monte Carlo the lowest token-diagonal variance that a baseline of the prefix can reach.

Among all functions B_t of the prefix before token t, B_t = E[w_t R | prefix] / E[w_t | prefix] minimises
E[sum_t w_t (R - B_t)^2]; the expectation is over token t and everything after it. Continuations of every prefix of a
rollout estimate it. Each half of them gives an independent estimate, B' and B''. The mean of w (R - B')(R - B'') is the
optimum's energy, up to the squared bias of a ratio estimate, whereas w (R - B')^2 would add the noise of B'. It only
works for tasks without tools.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otb.laboratory.scores import Rollout
from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy

SEQUENCES_AT_ONCE = 768


@torch.no_grad()
def oracle(model, tokenizer, task, row: dict, rollout: Rollout, continuations: int, temperature: float) -> Tensor:
    """Returns two estimates of the optimal baseline at each own token, from half of the continuations each. -> (2, T).

    continuations: an even number per prefix. rollout: single-turn, so all tokens after the prompt are own tokens. row:
    the prompt's row of the dataset, for `task.reward`. An estimate is 0 where every continuation had w = 0.
    """
    start = int(rollout.own.nonzero()[0])
    own_tokens = len(rollout.ids) - start
    weights, rewards = [], []
    per_batch = max(1, SEQUENCES_AT_ONCE // continuations)
    for first in range(0, own_tokens, per_batch):
        prefixes = [rollout.ids[: start + t] for t in range(first, min(own_tokens, first + per_batch))]
        w, r = continued(model, tokenizer, task, row, prefixes, start, continuations, temperature)
        weights.append(w)
        rewards.append(r)
    w, r = torch.cat(weights), torch.cat(rewards)  # (T, continuations)
    w, r = w.where(~r.isnan(), 0.0), r.nan_to_num()  # an unscored continuation counts for nothing
    halves = [half.unflatten(1, (2, -1)).sum(-1) for half in (w * r, w)]
    return (halves[0] / halves[1].clamp(min=1e-12)).T


def continued(model, tokenizer, task, row, prefixes, start: int, count: int, temperature: float):
    """Samples `count` continuations of each prefix.

    Returns w of the next token and the final reward, (len(prefixes), count) each.
    """
    width = max(map(len, prefixes))
    ids = torch.full((len(prefixes), width), tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(ids)
    for i, prefix in enumerate(prefixes):
        ids[i, width - len(prefix) :], attention_mask[i, width - len(prefix) :] = prefix, 1
    ids, attention_mask = ids.repeat_interleave(count, 0), attention_mask.repeat_interleave(count, 0)
    output = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=task.max_completion_length - (min(map(len, prefixes)) - start),
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = output.sequences[:, width:].cpu()
    logits = output.logits[0].float().cpu() / temperature
    log_probs = logits.log_softmax(-1).gather(-1, new[:, :1]).squeeze(-1)
    w = logit_gradient_proxy(log_probs, log_sum_squared_probs(logits))
    texts = []
    for i, tokens in enumerate(new):
        response = torch.cat([prefixes[i // count][start:], tokens])[: task.max_completion_length]
        ended = (response == tokenizer.eos_token_id).nonzero()
        texts.append(response[: int(ended[0])] if len(ended) else response)
    messages = [
        [{"role": "assistant", "content": text}] for text in tokenizer.batch_decode(texts, skip_special_tokens=True)
    ]
    rewards = task.reward(
        messages, **{name: [value] * len(messages) for name, value in row.items() if name != "prompt"}
    )
    shape = (len(prefixes), count)
    scored = [float("nan") if reward is None else float(reward) for reward in rewards]
    return w.view(shape), torch.tensor(scored).view(shape)
