"""Adds to TRL's tool loop what rollouts that call Python need. `ToolRollouts` is in OTBTrainer's list of methods.

TRL's `_tool_call_loop` samples a turn of all unfinished rollouts, runs their calls one after another, appends the
replies, and repeats. `ToolRollouts` follows every rollout from its prompt to its end. It keeps vLLM awake until then,
keeps each turn inside the token budget, runs the programs of a turn in parallel, and makes each reply harmless and
short enough. docs/tools.md lists each guard and what TRL does without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers.utils import get_json_schema

from otb.methods import Method
from otb.methods.tool_calls import every_call_readable, read_codes
from otb.sandbox import neutralise
from otb.tasks.python_tool import MALFORMED, PythonTool, Refusal

CALLS_PER_TURN = 5  # run per rollout: all rollouts wait for the slowest program, which may use its whole time limit
KEPT_FOR_AN_ANSWER = 8  # a reply leaves at least 1 / 8 of the token budget to the policy
SHORTENED = " [...]"  # ends a reply that was cut
ENDINGS = ("end", "length", "turns")  # how a rollout ends: with the policy's end token, or at one of two limits
PAST_THE_LAST_TURN = Refusal("refused: this was the last turn")
NO_ROOM = Refusal("refused: the response has no room for a reply")
TOO_MANY = Refusal(f"refused: at most {CALLS_PER_TURN} calls are run in one turn")


@dataclass
class ToolRollout:
    """Holds an unfinished rollout. ids: tokens of the prompt and the response so far; prompt: the prompt's length."""

    ids: list[int]
    prompt: int
    environment: PythonTool
    turns: int = 0
    cut: str = ""  # the limit that ended it, "turns" or "length"


class ToolRollouts(Method):
    """Lets rollouts call the `python` of a `PythonTool` in TRL's tool loop, with guards that TRL lacks.

    Without an `environment_factory`, or with one that makes another environment, TRL's loop runs unchanged.

    Raises:
        SandboxFailure: The sandbox itself failed during training. A program's own errors go to the policy as a reply.
    """

    def __init__(self):
        self.is_on = False
        self.rollouts: list[ToolRollout] = []  # of the current generation, in TRL's order
        self._waiting: list[ToolRollout] = []  # rollouts whose last turn has calls, until their next turn
        self._unanswered: Iterator[ToolRollout] = iter(())  # the waiting rollouts that have no reply yet
        self._replies: dict[tuple[str, ...], list[int]] = {}  # of the current generation: contents -> tokens

    def attach(self, trainer) -> None:
        super().attach(trainer)
        pool = trainer._environment_pool if trainer.environment_factories else {}
        self.is_on = list(pool) == [None] and isinstance(pool[None][0], PythonTool)
        self._tokenizer = trainer._tokenizer
        self._control_tokens = tuple(token for token in self._tokenizer.get_added_vocab() if token.strip())
        if self.is_on:  # otherwise templates and parsers would derive the schema of each function at every call
            trainer._env_tools[None][:] = map(get_json_schema, trainer._env_tools[None])

    def around_generation(self, make, prompts):
        if not self.is_on:
            return make(prompts)
        self.rollouts, self._waiting = [], []
        self._replies.clear()
        with every_call_readable(self._tokenizer, self.trainer.end_tokens), self._awake():
            generated = make(prompts)
        self._end(self._waiting)
        self.trainer.endings = [rollout.cut or "end" for rollout in self.rollouts]
        _, completion_ids, tool_mask, _, log_probs, *_ = generated
        self._count_as_truncated(completion_ids, tool_mask, log_probs)
        self._log_tool_use()
        return generated

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Wakes the sleeping vLLM engine in this process once for all turns of a generation.

        TRL puts it to sleep after each turn and sends it the weights before the next. With sharded weights, sending is
        a collective operation, and processes whose rollouts take fewer turns would never join it.
        """
        trainer = self.trainer
        engine: Any = trainer.vllm_generation if trainer.use_vllm and trainer.vllm_mode == "colocate" else None
        if engine is None or not engine.enable_sleep_mode:
            yield
            return
        engine.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step
        engine.llm.wake_up(tags=["kv_cache"])
        engine.enable_sleep_mode = False
        try:
            yield
        finally:
            engine.enable_sleep_mode = True
            engine.llm.sleep(level=2)  # this discards the weights
            engine._llm_weights_sleeping = True

    # ---- one turn

    def around_turn(self, make, prompt_ids, *args, **kwargs):
        if not self.is_on:
            return make(prompt_ids, *args, **kwargs)
        rollouts = self._continued(prompt_ids) if self.rollouts else self._begun(prompt_ids)
        room = [self._room(rollout) for rollout in rollouts]
        with self._at_most_new_tokens(max(1, *room)):
            turn_ids, log_probs = make(prompt_ids, *args, **kwargs)
        turn_ids = [ids[:most] for ids, most in zip(turn_ids, room, strict=True)]
        if log_probs is not None:
            log_probs = [row[:most] for row, most in zip(log_probs, room, strict=True)]
        self._take_turn(rollouts, turn_ids)
        return turn_ids, log_probs

    def _begun(self, prompt_ids: list[list[int]]) -> list[ToolRollout]:
        """Starts a rollout for each prompt, and returns them all."""
        self.rollouts = [
            ToolRollout(list(ids), len(ids), environment)
            for ids, environment in zip(prompt_ids, self.trainer.environments, strict=True)
        ]
        return self.rollouts

    def _continued(self, prompt_ids: list[list[int]]) -> list[ToolRollout]:
        """Returns the rollouts of these rows. TRL keeps the order, and drops rollouts whose reply did not fit."""
        rows, continued, dropped = iter(prompt_ids), [], []
        row = next(rows, None)
        for rollout in self._waiting:
            if rollout.ids == row:
                continued.append(rollout)
                row = next(rows, None)
            else:
                dropped.append(rollout)
        if row is not None:
            raise RuntimeError(
                f"TRL continues {len(prompt_ids)} rollouts, but only {len(continued)} of them are known here: its tool "
                "loop differs from the tested version. Install a version that pyproject.toml allows; `python -m "
                "otb.seams` checks the installed one."
            )
        self._end(dropped)
        return continued

    def _end(self, rollouts: list[ToolRollout]) -> None:
        """Ends rollouts that called a tool but get no reply, because of the limit on turns or on length."""
        for rollout in rollouts:
            rollout.cut = "turns" if self._is_last_turn(rollout) else "length"

    def _is_last_turn(self, rollout: ToolRollout) -> bool:
        return rollout.turns > self.trainer.max_tool_calling_iterations

    def _room(self, rollout: ToolRollout) -> int:
        """Returns how many more tokens the response may have."""
        return max(0, self.trainer.max_completion_length - (len(rollout.ids) - rollout.prompt))

    @contextmanager
    def _at_most_new_tokens(self, count: int) -> Iterator[None]:
        """Limits the next turn to `count` tokens.

        TRL would allow `max_completion_length` tokens in every turn, and cut whatever exceeds the budget.
        """
        if self.trainer.use_vllm:
            holder, name = self.trainer.vllm_generation, "max_completion_length"
        else:
            holder, name = self.trainer.generation_config, "max_new_tokens"
        usual = getattr(holder, name)
        setattr(holder, name, count)
        try:
            yield
        finally:
            setattr(holder, name, usual)

    def _take_turn(self, rollouts: list[ToolRollout], turn_ids: list[list[int]]) -> None:
        """Adds a turn to its rollouts, and runs all its programs in parallel.

        Equal programs run once and share the result, because rollouts of a prompt often write the same program.
        """
        self._waiting = []
        calls: list[tuple[PythonTool, str | Refusal]] = []
        for rollout, ids in zip(rollouts, turn_ids, strict=True):
            codes = read_codes(self._tokenizer, ids, rollout.ids, self.trainer._env_tools[None])
            rollout.ids, rollout.turns = rollout.ids + ids, rollout.turns + bool(ids)
            if codes:
                self._waiting.append(rollout)
                calls += [(rollout.environment, self._vetted(rollout, n, code)) for n, code in enumerate(codes)]
            elif not ids or ids[-1] not in self.trainer.end_tokens:
                rollout.cut = "length"
        self._unanswered = iter(self._waiting)
        programs = list(dict.fromkeys(call for _, call in calls if isinstance(call, str)))
        outcomes = calls[0][0].sandbox.run_many(programs) if programs else []
        results = dict(zip(programs, outcomes, strict=True))
        for environment, call in calls:
            if call is PAST_THE_LAST_TURN:
                environment.use.count(call)  # TRL will not ask for this call's reply
            else:
                environment.outcomes.append(results[call] if isinstance(call, str) else call)

    def _vetted(self, rollout: ToolRollout, position: int, code: str | None) -> str | Refusal:
        """Returns the program, or the reason not to run it. position: among the calls of the turn, from 0."""
        if self._is_last_turn(rollout):
            return PAST_THE_LAST_TURN
        if code is None:
            return MALFORMED
        if self._room(rollout) <= self._smallest_reply:
            return NO_ROOM
        return code if position < CALLS_PER_TURN else TOO_MANY

    # ---- replies

    def around_reply(self, make, tool_messages):
        """Returns the tokens between the call and the next turn. TRL calls it once per waiting rollout, in order."""
        if not self.is_on:
            return make(tool_messages)
        rollout = next(self._unanswered)
        for message in tool_messages:
            message["content"] = neutralise(message["content"], self._control_tokens)
        reply = self._rendered(tool_messages)
        most = self._room(rollout) - self.trainer.max_completion_length // KEPT_FOR_AN_ANSWER
        while len(reply) > most and self._shorten(tool_messages, len(reply) - most):
            reply = self._rendered(tool_messages)
        rollout.ids = rollout.ids + reply
        return reply

    def _rendered(self, tool_messages: list[dict]) -> list[int]:
        """Returns the tokens of replies. Equal replies, for example to equal programs, are rendered once."""
        contents = tuple(message["content"] for message in tool_messages)
        if contents not in self._replies:
            self._replies[contents] = self.trainer.rendered(tool_messages)
        return self._replies[contents]

    def _shorten(self, tool_messages: list[dict], excess: int) -> bool:
        """Cuts about `excess` tokens from the end of the longest message. Returns False if it cannot get shorter."""
        message = max(tool_messages, key=lambda message: len(message["content"]))
        text = message["content"].removesuffix(SHORTENED)
        ids, marker = (self._tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, SHORTENED))
        kept = self._tokenizer.decode(ids[: max(0, len(ids) - excess - len(marker))])
        kept = kept.rstrip("\N{REPLACEMENT CHARACTER}")  # the cut may split a character
        if len(kept) + len(SHORTENED) >= len(message["content"]):
            return False
        message["content"] = kept + SHORTENED
        return True

    @cached_property
    def _smallest_reply(self) -> int:
        """The number of tokens of a reply that is cut to SHORTENED alone."""
        return len(self.trainer.rendered([{"role": "tool", "name": "python", "content": SHORTENED}]))

    # ---- metrics

    def _count_as_truncated(self, completion_ids: list, tool_mask: list, log_probs: list | None) -> None:
        """Counts a rollout without room for its last reply as truncated. TRL does not: it saw an end token."""
        cut = [
            i for i, rollout in enumerate(self.rollouts)
            if rollout.cut == "length" and completion_ids[i][-1] in self.trainer.end_tokens
        ]  # fmt: skip
        dropped, rollouts = self._summed([len(cut), len(self.rollouts)])
        self.trainer._metrics[self._mode]["completions/clipped_ratio"][-1] += dropped / rollouts
        if self.trainer.mask_truncated_completions:  # TRL masks rollouts without an end token
            for rows in filter(None, (completion_ids, tool_mask, log_probs)):
                for i in cut:
                    del rows[i][-1]

    def _log_tool_use(self) -> None:
        """Logs the metrics of tool use over all processes; shares of calls only if there were calls."""
        uses = [rollout.environment.use for rollout in self.rollouts]
        columns: dict[str, list[float]] = {
            "rollouts": [1 for _ in uses],
            "turns_mean": [rollout.turns for rollout in self.rollouts],
            "cut_by_turns": [rollout.cut == "turns" for rollout in self.rollouts],
            "cut_by_length": [rollout.cut == "length" for rollout in self.rollouts],
            "never_called": [use.calls == 0 for use in uses],
            "tool_calls": [use.calls for use in uses],
            "tool_failed": [use.failed for use in uses],
            "tool_timed_out": [use.limited for use in uses],
            "tool_refused": [use.refused for use in uses],
            "tool_seconds": [use.seconds for use in uses],
        }
        sums = dict(zip(columns, self._summed([sum(column) for column in columns.values()]), strict=True))
        rollouts, calls = sums.pop("rollouts"), round(sums.pop("tool_calls"))
        for name in ("turns_mean", "cut_by_turns", "cut_by_length", "never_called"):
            sums[name] /= rollouts
        for name in ("tool_failed", "tool_timed_out", "tool_refused"):
            number = sums.pop(name)
            if calls:
                sums[name] = number / calls
        self.trainer.record(sums | {"tool_calls": calls}, self._mode)

    def _summed(self, values: list[float]) -> list[float]:
        """Returns each of the values summed over all processes."""
        local = torch.tensor([values], dtype=torch.float32, device=self.trainer.accelerator.device)
        return self.trainer.accelerator.gather(local).sum(0).tolist()

    @property
    def _mode(self) -> str:
        return "train" if self.trainer.model.training else "eval"
