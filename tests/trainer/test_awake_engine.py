"""Tests vLLM's sleep mode in the tool loop: TRL's VLLMGeneration over a CPU engine that samples a script.

Sending sharded weights is a collective operation: all processes must do it equally often, even if their rollouts take
different numbers of turns.
"""

from functools import partial
from types import SimpleNamespace

import pytest
from datasets import Dataset
from trl.generation import vllm_generation

from otb import OTBTrainer
from otb.sandbox import SandboxFailure
from otb.tasks.python_tool import PythonTool
from tests.support.tool_trainers import FakeSandbox, answer, boxed_reward, call
from tests.support.trainers import config

ASLEEP_OVER_THE_STEP = ["wake weights", "load", "wake kv_cache", "generate", "sleep 2"]


class Engine:
    """Answers every prompt with `turns`, one after the other, and keeps the requests that it got."""

    def __init__(self, turns: list[list[int]]):
        self.turns, self.asked, self.answered = turns, [], 0
        self.llm_engine = self.model_executor = self.driver_worker = self.model_runner = self.model = self
        self.model_config = SimpleNamespace(max_model_len=10_000)

    def wake_up(self, tags):
        self.asked.append(f"wake {tags[0]}")

    def sleep(self, level):
        self.asked.append(f"sleep {level}")

    def load_weights(self, weights):
        if self.asked[-1:] != ["load"]:
            self.asked.append("load")

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, **_):
        self.asked.append("generate")
        ids = self.turns[self.answered % len(self.turns)]
        self.answered += 1
        log_probs = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in ids]
        output = SimpleNamespace(token_ids=ids, logprobs=log_probs)
        return [SimpleNamespace(prompt_token_ids=row["prompt_token_ids"], outputs=[output]) for row in prompts]


@pytest.fixture
def trained(monkeypatch, tmp_path, untrained, tokenizer):
    """Returns a function: turns, sandbox, options -> (engine, trainer) after two steps, or after the error `raises`."""

    def train(turns: list[str], sandbox=None, raises=None, **options):
        engine = Engine([tokenizer(turn)["input_ids"] for turn in turns])

        def begin(self):  # as VLLMGeneration._init_vllm without vLLM
            self.llm, self._llm_weights_sleeping = engine, self.enable_sleep_mode

        monkeypatch.setattr(vllm_generation.VLLMGeneration, "_init_vllm", begin)
        monkeypatch.setattr(vllm_generation, "SamplingParams", dict, raising=False)
        usual = dict(use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True, num_generations=2)
        usual |= dict(per_device_train_batch_size=2, max_completion_length=300, max_tool_calling_iterations=4)
        untrained.generation_config.eos_token_id = tokenizer.eos_token_id
        trainer = OTBTrainer(
            untrained,
            boxed_reward,
            config(tmp_path, **(usual | options)),
            Dataset.from_dict({"prompt": [[{"role": "user", "content": "3+4"}]] * 2}),
            processing_class=tokenizer,
            environment_factory=partial(PythonTool, sandbox or FakeSandbox()),
        )
        if raises is None:
            trainer.train()
        else:
            with pytest.raises(raises):
                trainer.train()
        return engine, trainer

    return train


@pytest.mark.parametrize("turns", [[answer(7)], [call("1"), answer(7)], [call("1"), call("2"), call("3"), answer(7)]])
def test_a_sleeping_engine_gets_the_weights_once_a_step_however_many_turns_there_are(trained, turns):
    engine, trainer = trained(turns)
    *before, generate, after = ASLEEP_OVER_THE_STEP
    assert engine.asked == [*before, *[generate] * len(turns), after] * 2
    assert trainer.vllm_generation.enable_sleep_mode and trainer.vllm_generation._llm_weights_sleeping
    assert trainer.state.log_history[0]["turns_mean"] == len(turns)


def test_an_engine_that_never_sleeps_is_neither_woken_nor_sent_to_sleep(trained):
    engine, _ = trained([call("1"), answer(7)], vllm_enable_sleep_mode=False)
    assert engine.asked == ["load", "generate", "generate"] * 2


def test_an_engine_sleeps_again_after_a_generation_that_failed(trained):
    class Broken(FakeSandbox):
        def _attempt(self, codes, limits):
            raise SandboxFailure("no room")

    engine, trainer = trained([call("1"), answer(7)], Broken(), raises=SandboxFailure)
    assert engine.asked == ASLEEP_OVER_THE_STEP and trainer.vllm_generation.enable_sleep_mode
