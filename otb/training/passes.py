"""Makes the forwards before the loss, and measures in them what the baseline and the token weights need.

Score norms need a forward over the rollouts in which the LM head also returns log sum pi^2. If TRL makes a forward for
its loss, that one serves; otherwise `extra` makes one, and the loss reuses it if it can (lean_loss.py). Hidden states
and the signals of token weights always need the extra pass. Exact norms need separate backward passes
(otb/exact_norms.py). OTBTrainer calls `measure`; `Passes` is also in its list of methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import add_fused_lm_head

from otb import adapters, baselines, exact_norms
from otb.advantages import advantages as advantages_of
from otb.baselines import StatefulBaseline
from otb.loss_inputs import prompts_with_responses, response_mask
from otb.methods import Method, Step
from otb.methods.token_weights import OF_THE_BASE, TokenWeights, residuals, weighted_norms
from otb.random_state import isolated_random_state
from otb.rollouts import OwnTokens, RolloutGroups, TokenStates, joined
from otb.score_norms import logit_gradient_proxy
from otb.training.lean_loss import chunks, in_order
from otb.training.options import CHUNKS


class Passes(Method):
    """Makes the passes before the loss, and measures what the baseline and the token weights need.

    Args:
        baseline: a function or object of the contract in `otb.baselines`.
        token_weights: what multiplies the advantages, or None.
        needs_score_norms: whether the baseline or a metric reads score norms.
    """

    def __init__(self, baseline: Any, token_weights: TokenWeights | None, needs_score_norms: bool):
        self.baseline, self.token_weights, self.needs_score_norms = baseline, token_weights, needs_score_norms
        self.needs = baselines.needs_of(baseline)
        # Whether the extra pass is made even if TRL makes one; `while_sampling` says why.
        self.always_extra = "hidden_states" in self.needs or bool(self._watched_for_weights)
        self._scoring = False  # whether passes also return log sum pi^2
        self._passes: list[tuple[Tensor, Tensor]] = []  # (log_probs, log_sum_sq_probs) of those passes
        self._watched = torch.zeros(0)  # (B, C): the values from which the signal of the token weights is computed

    def attach(self, trainer) -> None:
        super().attach(trainer)
        weights = self.token_weights
        if weights is not None and weights.reads_base:
            adapters.refuse_trained_base(weights.signal, trainer.accelerator.unwrap_model(trainer.model))
            with self._hidden_states(weights.states):  # refuses a backbone without a final norm
                pass
        if self.needs & baselines.EXACT_NORMS:
            exact_norms.trainable(trainer.model)  # too many parameters are refused before the first rollout

    # ---- what the baseline needs

    def measure(self, step: Step) -> dict:
        """Measures what the baseline needs on this process's rollouts, and sets log_probs, signals and factors of step.

        Returns norms under their names in RolloutGroups, packed (B, T) or (B,); also "reduced" and "totals" as the
        baseline's `reduce` returned them, empty if it has none.
        """
        output, own = step.output, step.own
        measured: dict = {"reduced": {}, "totals": {}}
        if "hidden_states" in self.needs:
            parts: list[tuple[Tensor, dict, dict]] = []
            probabilities = self.extra(step, parts, keep=True)
            measured["reduced"] = joined_rows([(rows, kept) for rows, kept, _ in parts])
            measured["totals"] = {name: sum(totals[name] for *_, totals in parts) for name in parts[0][2]}
        elif self.needs_score_norms or self.always_extra:
            probabilities = self._probabilities(step)
        passed = self.always_extra or self.needs_score_norms
        step.log_probs = probabilities[0] if passed else output.get("old_per_token_logps")
        step.signals, step.factors = self._signals_and_factors(own, self._watched)
        if self.needs_score_norms:
            measured["score_norms"] = weighted_norms(own.pack(proxy(output, *probabilities)), step.factors)
        for name in sorted(self.needs & baselines.EXACT_NORMS):
            measured[name] = self._exact_norms(step, getattr(exact_norms, name))
        return measured

    def _exact_norms(self, step: Step, norms: Callable) -> Tensor:
        """Returns exact norms of this process's rollouts, with each score s replaced by rho f s.

        rho is TRL's importance ratio, 1 if TRL does not correct for the sampler. f is the token's factor, 1 without
        token weights. norms: `sequence_norms` or `prefix_norms` of otb.exact_norms.
        """
        output, own_mask = step.output, response_mask(step.output)
        ids, attention_mask = prompts_with_responses(output)
        on_prompt = torch.zeros_like(output["prompt_mask"])
        rho = output.get("importance_sampling_ratio")
        if step.factors is not None:
            own = OwnTokens(own_mask)
            factors = own.unpack(step.factors * own.own)
            rho = factors if rho is None else rho * factors
        if rho is not None:
            rho = torch.cat([on_prompt.to(rho), rho.expand(own_mask.shape)], dim=1)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        checkpointing_off = disable_gradient_checkpointing(
            self.trainer.model, self.trainer.args.gradient_checkpointing_kwargs
        )
        with checkpointing_off, without_dropout(model), self.trainer.accelerator.autocast():
            return norms(
                model, ids, attention_mask, torch.cat([on_prompt.bool(), own_mask], 1), self.trainer.temperature, rho
            )

    def _probabilities(self, step: Step) -> tuple[Tensor, Tensor]:
        """Returns log pi and log sum pi^2 (B, C) of the policy that sampled, from TRL's pass if it made one."""
        for log_probs, log_sum_sq_probs in self._passes:
            # Under LoRA the reference model's pass uses the same model, so only identity shows which pass this was.
            if log_probs is step.output.get("old_per_token_logps"):
                return log_probs, log_sum_sq_probs
        return self.extra(step, keep=True)

    # ---- the extra pass

    def extra(self, step: Step, reduced: list | None = None, keep: bool = False) -> tuple[Tensor, Tensor]:
        """Makes one forward over the rollouts, in chunks of similar length.

        If lengths differ, most of a padded batch is padding; sorting saves a third of this pass or more.
        reduced: gets (rows of the batch, kept, totals) per chunk; kept and totals are what the baseline's `reduce`
        returned. keep: let the loss reuse this pass, if it can. -> log pi and log sum pi^2 (B, C), without gradient.
        """
        output = step.output
        ids, attention_mask = prompts_with_responses(output)
        prompt_width, width_of_all = output["prompt_ids"].size(1), output["completion_ids"].size(1)
        lengths = output["completion_mask"].sum(-1)  # (B,), tool tokens included
        started = time.perf_counter()
        keep = (
            keep
            and not self._watched_for_weights
            and not self.needs & baselines.EXACT_NORMS
            and self.trainer.lean.can_keep(output)
        )
        learns = torch.zeros_like(lengths, dtype=torch.bool)
        if keep:
            learns = self._may_learn(OwnTokens(response_mask(output)))
        at_once = min(self.trainer.args.per_device_train_batch_size, -(-len(ids) // CHUNKS))
        parts: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._watched = torch.zeros(output["completion_ids"].shape, device=ids.device)
        with self._recording(True), nullcontext() if keep else self._as_measurement():
            for rows, with_gradient in chunks(lengths, learns, torch.ones_like(learns), at_once):
                width = max(1, int(lengths[rows[-1]]))
                chunk = slice(prompt_width + width)
                part = (ids[rows, chunk], attention_mask[rows, chunk], width)
                states = "post_norm" if reduced is not None else None
                with torch.set_grad_enabled(with_gradient), self._hidden_states(states) as hidden_states:
                    passed, watched = self._watched_pass(*part, compute_entropy=keep)
                parts.append((rows, passed))
                if watched is not None:
                    self._watched[rows, :width] = watched
                if reduced is not None:
                    probabilities = [values.detach() for values in passed[:2]]
                    predicting = hidden_states.pop()[:, -width - 1 : -1].detach()
                    with torch.no_grad():
                        token_states = self._token_states(output, rows, predicting, *probabilities)
                        reduced.append((rows, *cast(StatefulBaseline, self.baseline).reduce(token_states)))
        log_probs, log_sum_sq_probs, *entropies = in_order(parts, width_of_all)
        if keep:
            self.trainer.lean.keep(output, log_probs, entropies[0], learns)
            # Subtracted: this pass replaces the loss's forward, so its time is booked under loss.
            self.trainer.add_seconds("advantages", started - time.perf_counter())
        return log_probs.detach(), log_sum_sq_probs.detach()

    def _may_learn(self, own: OwnTokens) -> Tensor:
        """Guesses which rollouts will have an advantage other than 0, -> (B,) bool. Only for a single process.

        The norms are not known yet, so the baseline is computed with all norms set to 1. Where the rewards of a group
        are equal, this does not change whether the advantage is 0. A missed rollout costs a second forward; a false
        alarm costs an unused graph.
        """
        if baselines.carries_state(self.baseline) or "hidden_states" in self.needs:  # its inputs are not known yet
            return torch.ones(len(own.mask), dtype=torch.bool, device=own.mask.device)
        ones = self.trainer.in_groups(own.own.float())
        rollouts = RolloutGroups(
            self.trainer.in_groups(self.trainer.summed_rewards()),
            self.trainer.in_groups(own.lengths),
            score_norms=ones,
            sequence_norms=ones.sum(-1),
            prefix_norms=ones.cumsum(-1),
        )
        with isolated_random_state():
            advantages = advantages_of(rollouts, self.baseline(rollouts))
        return advantages.ne(0).any(-1).flatten()

    @contextmanager
    def _as_measurement(self) -> Iterator[None]:
        """Makes passes inside the block draw no dropout and keep no graph."""
        checkpointing_off = disable_gradient_checkpointing(
            self.trainer.model, self.trainer.args.gradient_checkpointing_kwargs
        )
        with torch.no_grad(), checkpointing_off, without_dropout(self.trainer.model):
            yield

    @property
    def _watched_for_weights(self) -> str:
        """The quantity that token weights need, `TokenWeights.measure`; "" for none."""
        return self.token_weights.measure if self.token_weights else ""

    def _watched_pass(self, ids: Tensor, attention_mask: Tensor, width: int, compute_entropy: bool):
        """Makes the forward of one chunk, and one of the base if token weights compare the policy with it.

        -> (log pi, log sum pi^2 and, if asked for, entropies), and the values for the signal of the token weights or
        None. All tensors are (b, width).
        """
        measure = self._watched_for_weights
        states = self.token_weights.states if self.token_weights and measure == "residuals" else None
        part = (ids, attention_mask)
        with self._hidden_states(states) as of_policy:
            _, entropies, _ = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model, *part, width, compute_entropy=compute_entropy or measure == "entropies"
            )
        log_probs, log_sum_sq_probs = self._passes.pop()
        passed = (log_probs, log_sum_sq_probs, *([entropies] if compute_entropy else []))
        if measure not in OF_THE_BASE:
            return passed, {"log_probs": log_probs, "entropies": entropies}.get(measure)
        without_adapter = adapters.disabled(self.trainer.accelerator.unwrap_model(self.trainer.model))
        with without_adapter, self._hidden_states(states) as of_base:
            scored = width if states is None else 1  # if hidden states are compared, the LM head's output is not read
            of_base_log_probs, *_ = self.trainer.passed(self.trainer.model, *part, scored, below=self)
        if states is None:
            return passed, log_probs - of_base_log_probs
        predicting = slice(-width - 1, -1)
        return passed, residuals(of_policy.pop()[:, predicting], of_base.pop()[:, predicting])

    def _signals_and_factors(self, own: OwnTokens, watched: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns signals (B, T) and factors (B, T or 1) of the token weights, each None if not used.

        watched: (B, C), as `_watched_pass` returns it.
        """
        if self.token_weights is None:
            return None, None
        signals = self.token_weights.signals(own.pack(watched), own.own) if self._watched_for_weights else None
        return signals, self.token_weights.factors(signals, own.own)

    def _token_states(self, output: dict, rows: Tensor, hidden_states: Tensor, log_probs, log_sum_sq_probs):
        """Returns the TokenStates of rows (b,) of the batch.

        hidden_states (b, width, d), log_probs and log_sum_sq_probs (b, width) belong to the first positions of the
        response.
        """
        width = hidden_states.size(1)
        own = OwnTokens(response_mask(output)[rows, :width])
        ratio = {name: output[name][rows] for name in ("importance_sampling_ratio",) if name in output}
        w = own.pack(proxy(ratio, log_probs, log_sum_sq_probs)) if self.needs_score_norms else None
        _, factors = self._signals_and_factors(own, self._watched[rows, :width])
        first = self.trainer.accelerator.process_index * len(output["completion_ids"])
        return TokenStates(
            own=own.own,
            hidden_states=own.pack(hidden_states if hidden_states.dtype == torch.float64 else hidden_states.float()),
            log_probs=own.pack(log_probs),
            log_sum_sq_probs=own.pack(log_sum_sq_probs),
            score_norms=None if w is None else weighted_norms(w, factors),
            scored=~self.trainer.summed_rewards()[first + rows].isnan(),
        )

    @contextmanager
    def _hidden_states(self, states: str | None) -> Iterator[list[Tensor]]:
        """Collects the final hidden states (B, L, d) of each forward inside the block.

        states: as in `adapters.collected_states`; None collects nothing.
        """
        if states is None:
            yield []
            return
        backbone: Any = self.trainer.causal_model().base_model  # a module, although torch's stubs allow a tensor
        with adapters.collected_states(backbone, states) as collected:
            yield collected

    # ---- every pass is TRL's, and also returns log sum pi^2 on request

    @contextmanager
    def while_sampling(self) -> Iterator[None]:
        """Makes TRL's passes without gradient also return log sum pi^2, if these passes suffice for the score norms.

        They do not suffice for `reduce`, which needs tool masks and rewards, nor for token weights, which must not see
        the dropout of training. Both need an extra pass.
        """
        self._passes = []
        with self._recording(self.needs_score_norms and not self.always_extra):
            yield

    @contextmanager
    def _recording(self, scoring: bool) -> Iterator[None]:
        self._scoring, before = scoring, self._scoring
        try:
            yield
        finally:
            self._scoring = before

    def finish(self, step: Step) -> None:
        self._passes = []

    def around_pass(self, make, model, ids, mask, width, *args, **kwargs):
        part = (model, ids, mask, width)
        if not self._scoring or model is not self.trainer.model:
            return make(*part, *args, **kwargs)
        with self._log_sum_sq_probs_head(kwargs.get("compute_entropy", False)) as of_chunks:
            result = make(*part, *args, **kwargs)
        self._passes.append((result[0], torch.cat([chunk[:, -width:] for chunk in of_chunks])))
        return result

    @contextmanager
    def _log_sum_sq_probs_head(self, with_entropy: bool) -> Iterator[list[Tensor]]:
        """Makes TRL's fused LM head also return log sum pi^2 during one pass, without (B, C, V) logits.

        Yields a list that collects it per chunk of TRL's pass. Keeping a second head installed would slow every step.
        """
        model = self.trainer.causal_model()
        trl_forward, collected = model.forward, []
        add_fused_lm_head(
            model,
            temperature=self.trainer.temperature,
            cast_lm_head_to_fp32=self.trainer.args.cast_lm_head_to_fp32,
            outputs=("log_probs", "log_sum_sq_probs", *(["entropy"] if with_entropy else [])),
        )
        fused_forward = model.forward

        def forward(*args, **kwargs):
            result = fused_forward(*args, **kwargs)
            collected.append(result.log_sum_sq_probs)
            return result

        model.forward = forward
        try:
            yield collected
        finally:
            model.forward = trl_forward


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Puts the model into evaluation mode inside the block, so a measurement uses no random numbers of training."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def proxy(output: dict, log_probs: Tensor, log_sum_sq_probs: Tensor) -> Tensor:
    """Returns the proxy w (B, C) of every position, times rho^2 if `output` has TRL's correction for the sampler."""
    w = logit_gradient_proxy(log_probs, log_sum_sq_probs)
    rho = output.get("importance_sampling_ratio")  # (B, C) or (B, 1)
    return w if rho is None else w * rho[:, : w.size(1)].square()


def joined_rows(parts: list[tuple[Tensor, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Puts the rows of chunks back into the order of the batch.

    parts: (rows (b,), name -> tensor (b, ...)) of each chunk. If second dimensions differ, they are padded with 0.
    -> name -> tensor (B, ...).
    """
    place = torch.cat([rows for rows, _ in parts]).argsort()
    return {name: joined([kept[name] for _, kept in parts], dim=1)[place] for name in parts[0][1]}
