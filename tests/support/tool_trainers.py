"""Helps the tests of tool rollouts: a sandbox that runs nothing, and a trainer whose policy follows a script."""

import json
from functools import partial

from datasets import Dataset
from trl import GRPOTrainer

from otb import OTBTrainer
from otb.baselines.otb import otb
from otb.sandbox import Result, Sandbox
from otb.tasks.arithmetic import boxed_integer
from otb.tasks.python_tool import PythonTool
from tests.support.trainers import config, naive_otb_advantages

END = "<|im_end|>"


def call(*codes: str) -> str:
    """Returns a complete turn that calls Python once per program."""
    calls = [json.dumps({"name": "python", "arguments": {"code": code}}) for code in codes]
    return "".join(f"<tool_call>{text}</tool_call>" for text in calls) + END


def answer(value: int) -> str:
    return f"\\boxed{{{value}}}{END}"


def boxed_reward(completions, **columns):
    """Returns 1 if the last own message contains a box with 7, else 0."""
    return [float(boxed_integer(completion) == 7) for completion in completions]


class FakeSandbox(Sandbox):
    """Answers programs from `results`, and others with their own text; `batches` keeps the programs of each call."""

    def __init__(self, results: dict[str, Result] | None = None):
        super().__init__(workers=1)
        self.results, self.batches = results or {}, []

    def _attempt(self, codes, limits):
        self.batches.append(list(codes))
        return [self.results.get(code, Result("ok", code, "", 0.25)) for code in codes]

    def check(self):
        pass


class ScriptedTrainer(OTBTrainer):
    """Replaces the policy: rollout i of every batch says `script[i][turn]`. All rollouts have one prompt.

    outputs: each generation's batch for the loss; expected: its advantages from naive loops, if naive=True;
    most_new_tokens: the limit of tokens of each turn.
    """

    def __init__(
        self,
        script,
        tmp_path,
        model,
        tokenizer,
        sandbox,
        *,
        naive=False,
        baseline=otb,
        token_weights=None,
        auxiliary=None,
        methods=(),
        **options,
    ):
        self.script, self.naive, self.outputs, self.expected, self.most_new_tokens = script, naive, [], [], []
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        usual = dict(max_steps=1, max_completion_length=120, max_tool_calling_iterations=4, num_generations=2)
        super().__init__(
            model,
            boxed_reward,
            config(tmp_path, per_device_train_batch_size=len(script), **(usual | options)),
            Dataset.from_dict({"prompt": [[{"role": "user", "content": "3+4"}]] * len(script)}),
            processing_class=tokenizer,
            environment_factory=partial(PythonTool, sandbox),
            baseline=baseline,
            token_weights=token_weights,
            auxiliary=auxiliary,
            methods=methods,
        )

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.outputs.append(output)
        if self.naive:
            self.expected.append(naive_otb_advantages(self, output))
        return output

    def say(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Returns the next turn of the rollouts of these rows."""
        self.most_new_tokens.append(self.generation_config.max_new_tokens)
        said, taken = [], set()
        for row in prompt_ids:
            i = next(i for i, known in enumerate(self.tool_rollouts.rollouts) if i not in taken and known.ids == row)
            taken.add(i)
            text = self.script[i][self.tool_rollouts.rollouts[i].turns]
            said.append(self._tokenizer(text)["input_ids"])
        return said

    def texts(self) -> list[str]:
        """Returns the responses of the last batch as text, with own and tool tokens."""
        output = self.outputs[-1]
        rows = zip(output["completion_ids"], output["completion_mask"].bool(), strict=True)
        return [self._tokenizer.decode(ids[mask]) for ids, mask in rows]

    def row(self) -> dict:
        return self.state.log_history[0]


def scripted(monkeypatch, script, tmp_path, model, tokenizer, sandbox, **options) -> ScriptedTrainer:
    """Returns a trainer after training on the script."""
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", lambda self, ids, *a, **k: (self.say(ids), None))
    trainer = ScriptedTrainer(script, tmp_path, model, tokenizer, sandbox, **options)
    trainer.train()
    return trainer
