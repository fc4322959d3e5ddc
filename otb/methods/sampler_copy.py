"""Samples with a copy of the policy in another precision, which gives a sampler mismatch without vLLM.

A float32 policy that samples with transformers' generate has no mismatch, so corrections for a mismatch could not be
tested on a CPU. `OTBConfig(sampler_dtype="bfloat16")` replaces TRL's `VLLMGeneration` with a `SamplerCopy`. It has the
three names that TRL and the tool loop use, so TRL computes importance ratios, their clipping and their metrics as with
vLLM.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor

from otb.methods import Method


class CopySampling(Method):
    """Replaces TRL's vLLM engine with a SamplerCopy; TRL then corrects for the mismatch as it does for vLLM."""

    def __init__(self, dtype: str):
        self.dtype = dtype

    def attach(self, trainer) -> None:
        super().attach(trainer)
        trainer.vllm_generation = SamplerCopy(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.causal_model(),
            getattr(torch, self.dtype),
            trainer.generation_config,
            trainer.eos_token_ids,
            getattr(trainer.args, "rows_per_generation", None),
        )
        trainer.use_vllm, trainer.vllm_mode = True, "server"  # in this mode TRL reads the context length from the model
        trainer._last_loaded_step = -1


class SamplerCopy:
    """Samples with a copy of `policy` whose parameters have another precision.

    Args:
        policy: The trained model, whole on this process, including LoRA's adapters.
        causal: The transformers model with the LM head inside `policy`; TRL has replaced its `forward`.
        dtype: Precision of the copy.
        generation_config: How to sample: from the softmax at its temperature, without any other processing.
        end_tokens: Tokens that end a response.
        rows: Responses sampled at once; None: all of them.
    """

    def __init__(
        self,
        policy: nn.Module,
        causal: nn.Module,
        dtype: torch.dtype,
        generation_config: GenerationConfig,
        end_tokens: list[int],
        rows: int | None,
    ):
        # TRL's fused forward is bound to the original model: a copied one would run the original, not the copy.
        forward = causal.__dict__.pop("forward", None)
        self.policy = policy
        self.copy: Any = copy.deepcopy(policy)  # torch's stubs do not know generate
        if forward is not None:
            causal.forward = forward
        self.copy.eval().requires_grad_(False)
        for parameter in self.copy.parameters():  # buffers, such as rotary frequencies, stay float32, as vLLM's do
            parameter.data = parameter.data.to(dtype)
        self.generation_config, self.end_tokens, self.rows = generation_config, end_tokens, rows
        self.max_completion_length = generation_config.max_new_tokens

    def sync_weights(self) -> None:
        """Copies the trained policy's weights, rounded to the copy's precision."""
        with torch.no_grad():
            for mine, trained in zip(self.copy.parameters(), self.policy.parameters(), strict=True):
                mine.copy_(trained)

    def generate(self, prompts: list[list[int]], images=None, **_) -> tuple[None, list, list, None]:
        """Samples a response to each row of prompt ids.

        -> (None, response ids, their log-probs as [row][token][0], None), as VLLMGeneration returns them. Raises
        ValueError for prompts with images.
        """
        if images is not None:
            raise ValueError("The prompts have images, but sampler_dtype= samples only from token ids. Use None.")
        ids, log_probs = [], []
        for first in range(0, len(prompts), self.rows or len(prompts)):
            chunk = prompts[first : first + (self.rows or len(prompts))]
            for response, of_tokens in zip(*self._sampled(chunk), strict=True):
                length = self._length(response)
                ids.append(response[:length].tolist())
                log_probs.append([[value] for value in of_tokens[:length].tolist()])
        return None, ids, log_probs, None

    def _sampled(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Returns ids and log-probs (B, C) of responses. Positions after a response's end are undefined."""
        device, width = next(self.copy.parameters()).device, max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.generation_config.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
        kept = SampledLogProbs(self.generation_config.temperature)
        config = copy.copy(self.generation_config)
        config.max_new_tokens = self.max_completion_length
        with torch.no_grad():
            sampled = self.copy.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                logits_processor=[kept],
            )
        responses = sampled[:, width:]
        return responses.cpu(), kept.of(responses).cpu()

    def _length(self, response: Tensor) -> int:
        """Returns the number of tokens of a response (C,), including its end token."""
        ends = torch.isin(response, torch.tensor(self.end_tokens)).nonzero()
        return int(ends[0]) + 1 if len(ends) else len(response)


class SampledLogProbs(LogitsProcessor):
    """Records the log-probability of every token that generate draws. It does not change the logits.

    generate calls it before each token with the tokens so far. Keeping all logits would take (B, T, V) numbers.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self._columns: list[Tensor] = []  # (B, 1) each
        self._latest: Tensor | None = None  # (B, V), for the next token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids[:, -1:])
        self._latest = (scores / self.temperature).log_softmax(-1)
        return scores

    def _take(self, tokens: Tensor) -> None:
        if self._latest is not None:
            self._columns.append(self._latest.gather(-1, tokens))

    def of(self, responses: Tensor) -> Tensor:
        """Returns the log-probs (B, C) of the responses that generate returned."""
        if len(self._columns) < responses.size(1):
            self._take(responses[:, -1:])
        return torch.cat(self._columns, dim=1)[:, : responses.size(1)]
