"""Samples with a copy of the policy in another precision: numbers that differ from the trainer's, without vLLM.

A float32 policy on transformers' generate has no mismatch between sampler and trainer, so nothing that treats one can
be tried on a CPU. `OTBConfig(sampler_dtype="bfloat16")` puts a `SamplerCopy` in the place of TRL's `VLLMGeneration`: it
has the three names that the trainers use of one, so that importance ratios, their clipping and every metric of them
are TRL's own, as with vLLM.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor

from otb.methods import Method


class CopySampling(Method):
    """Puts a SamplerCopy where TRL keeps vLLM: from there on TRL weighs what differs as it does for vLLM."""

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
        trainer.use_vllm, trainer.vllm_mode = True, "server"  # a server's context is the model's
        trainer._last_loaded_step = -1


class SamplerCopy:
    """Samples with a copy of `policy` whose parameters have another precision.

    Args:
        policy: The model that is trained, whole on this process; LoRA's adapters are part of it.
        causal: The transformers model with the LM head within it, whose `forward` TRL has replaced.
        dtype: Precision of the copy.
        generation_config: How to sample: the softmax at its temperature, and nothing beside it.
        end_tokens: Tokens that end a response.
        rows: Responses sampled at a time; None: all of them.
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
        # TRL's fused forward holds the forward of the model that it was made for: a copy of it would run that one.
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
        """Takes over the weights of the policy that is trained, rounded."""
        with torch.no_grad():
            for mine, trained in zip(self.copy.parameters(), self.policy.parameters(), strict=True):
                mine.copy_(trained)

    def generate(self, prompts: list[list[int]], images=None, **_) -> tuple[None, list, list, None]:
        """Samples a response to each row of prompt ids.

        -> (None, response ids, their log-probs as [row][token][0], None), the places that VLLMGeneration returns them
        in. Raises ValueError for prompts with images.
        """
        if images is not None:
            raise ValueError("The prompts have images, and sampler_dtype samples from token ids alone. Use None.")
        ids, log_probs = [], []
        for first in range(0, len(prompts), self.rows or len(prompts)):
            chunk = prompts[first : first + (self.rows or len(prompts))]
            for response, of_tokens in zip(*self._sampled(chunk), strict=True):
                length = self._length(response)
                ids.append(response[:length].tolist())
                log_probs.append([[value] for value in of_tokens[:length].tolist()])
        return None, ids, log_probs, None

    def _sampled(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Returns ids and log-probs (B, C) of responses; after the end of one stands anything."""
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
        """Returns how many tokens of a row are its response, the one that ends it included."""
        ends = torch.isin(response, torch.tensor(self.end_tokens)).nonzero()
        return int(ends[0]) + 1 if len(ends) else len(response)


class SampledLogProbs(LogitsProcessor):
    """Keeps the log-probability of every token that generate draws, and changes nothing.

    generate asks it before each token, with the tokens so far; keeping all logits would need (B, T, V) numbers.
    """

    def __init__(self, temperature: float):
        self.temperature = temperature
        self._columns: list[Tensor] = []  # (B, 1) each
        self._latest: Tensor | None = None  # (B, V), of the token that is drawn next

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
