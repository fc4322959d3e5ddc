"""Tests the supervised warm start: what enters the loss, what is learned, and the command that writes a policy."""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trl
from peft import LoraConfig
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema

from experiments import warm_start as command
from experiments.running import make_policy
from experiments.running.build import build
from otb.errors import RunError
from otb.policies.supervised import Supervision, ordered, sft_trainer, supervised
from otb.policies.tiny_policy import END, TOOL_TAGS, build_model
from otb.policies.tiny_warm_start import encode
from otb.tasks.arithmetic import Arithmetic
from otb.tasks.arithmetic_tools import ArithmeticTools
from otb.tasks.maths import Maths, worked_solution
from otb.tasks.python_tool import PythonTool
from tests.support import commands, recipes

CHATS = Arithmetic(instruction="Add up.").demonstrations(seed=0, n=8)
HOW = Supervision(steps=2, forward=4, forwards=2, learning_rate=1e-3, seed=0, bf16=False, use_cpu=True)


@pytest.fixture
def model(tokenizer):
    return build_model(tokenizer, seed=0)


# ---- the loss


@pytest.mark.parametrize("kind", ["the tiny tokenizer", "end token pads", "begins every text"])
def test_only_the_solution_and_its_end_enter_the_loss(tmp_path, tokenizer, model, kind):
    """The masks equal those of the tiny policy's own warm start, but TRL adds the line break after a turn."""
    changed = copy.deepcopy(tokenizer)
    if kind == "end token pads":
        changed.pad_token = changed.eos_token
    if kind == "begins every text":
        changed.bos_token = TOOL_TAGS[0]
        changed.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{changed.bos_token} $A", special_tokens=[(changed.bos_token, changed.bos_token_id)]
        )
    (first, *_) = sft_trainer(model, changed, CHATS, HOW, None, str(tmp_path)).get_train_dataloader()
    chats = ordered(CHATS, HOW)[:4]
    expected = encode(chats, tokenizer)["labels"]
    breaks = tokenizer("\n")["input_ids"]
    for ids, labels, learned, chat in zip(first["input_ids"], first["labels"], expected, chats, strict=True):
        assert labels[labels >= 0].tolist() == learned[learned >= 0].tolist() + breaks
        assert tokenizer.decode(labels[labels >= 0]) == chat[-1]["content"] + END + "\n"
        assert changed.bos_token_id is None or changed.bos_token_id not in ids.tolist()
    padded = ~first["attention_mask"].bool()
    assert padded.any() and (first["input_ids"][padded] == changed.pad_token_id).all()
    assert (first["labels"][padded] == -100).all()


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TOOLS = [get_json_schema(PythonTool(None).python)]


def with_tools(n: int) -> list[list[dict]]:
    chats = ArithmeticTools(instruction="Add up.").demonstrations(seed=0, n=n)
    return [chat[1:] for chat in chats]  # without the tiny policy's system message about tools


@pytest.mark.parametrize("template", [None, "qwen2_5", "qwen3"])
def test_of_a_chat_with_tools_every_call_and_answer_is_learned_and_no_reply(tmp_path, tokenizer, model, template):
    changed = copy.deepcopy(tokenizer)
    if template is not None:
        changed.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    chats = with_tools(32)
    how = replace(HOW, forward=32, forwards=1)
    (first, *_) = sft_trainer(model, changed, chats, how, None, str(tmp_path), TOOLS).get_train_dataloader()
    in_order = ordered(chats, how)[:32]
    assert sum("tool_calls" in message for chat in in_order for message in chat) >= 5
    for ids, labels, chat in zip(first["input_ids"], first["labels"], in_order, strict=True):
        learned = tokenizer.decode(labels[labels >= 0])
        said = [message for message in chat if message["role"] == "assistant"]
        assert learned.count(END) == len(said)
        for message, turn in zip(said, learned.split(END), strict=False):
            code = message["tool_calls"][0]["function"]["arguments"]["code"] if "tool_calls" in message else None
            assert (message["content"] or "") in turn and ("tool_call" in turn) == (code is not None)
            assert code is None or json.dumps(code)[1:-1] in turn
        assert "tool_response" not in learned and "Add up." not in learned
        whole = tokenizer.decode(ids)
        assert all(message["content"] in whole for message in chat if message["role"] == "tool")


def test_a_template_that_does_not_tell_turns_apart_is_refused(tokenizer, model):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="chat template"):
        supervised(model, changed, with_tools(8), HOW, tools=TOOLS)


def test_the_loss_of_a_step_is_the_mean_over_its_learned_tokens(tokenizer, model):
    batch = encode([[*chat[:-1], chat[-1]] for chat in CHATS], tokenizer)
    labels = batch.pop("labels")
    after = (labels == tokenizer.eos_token_id).nonzero()  # TRL also learns the line break after the turn
    for row, column in after.tolist():
        labels[row, column + 1] = batch["input_ids"][row, column + 1]
    with torch.no_grad():
        log_probs = model(**batch).logits[:, :-1].log_softmax(-1)
    learned = labels[:, 1:] >= 0
    losses = -log_probs.gather(-1, labels[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)[learned]
    seen = []
    _, measured = supervised(model, tokenizer, CHATS, HOW, progress=lambda *step: seen.append(step))
    assert measured[0] == pytest.approx(losses.mean().item(), abs=1e-4)  # all 8 chats are the first step's
    assert [step[:2] for step in seen] == [(1, 2), (2, 2)] and [step[2] for step in seen] == measured


def test_it_learns_and_leaves_the_same_weights_every_time(tokenizer, model):
    how = Supervision(steps=12, forward=4, forwards=2, learning_rate=3e-3, seed=0, bf16=False, use_cpu=True)
    again = copy.deepcopy(model)
    trained, losses = supervised(model, tokenizer, CHATS, how)
    assert losses[-1] < losses[0] - 1
    torch.manual_seed(7)
    other, _ = supervised(again, tokenizer, CHATS, how)
    weights = trained.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in other.state_dict().items())


def test_adapters_are_merged_into_the_weights(tokenizer, model):
    before = copy.deepcopy(model.state_dict())
    lora = LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    trained, _ = supervised(model, tokenizer, CHATS, HOW, lora)
    changed = {name for name, weight in trained.state_dict().items() if not torch.equal(weight, before[name])}
    assert before.keys() == trained.state_dict().keys()
    assert changed == {name for name in before if "q_proj" in name}


def test_passes_go_through_all_chats_and_steps_hold_them_by_length():
    how = Supervision(steps=3, forward=2, forwards=2, learning_rate=1e-3, seed=0, bf16=False, use_cpu=True)
    drawn = ordered(CHATS, how)
    assert sorted(map(str, drawn[:8])) == sorted(map(str, CHATS)) and len(drawn) == 12  # one pass and a half
    for start in (0, 4, 8):
        lengths = [len(str(chat)) for chat in drawn[start : start + 4]]
        assert lengths == sorted(lengths)


# ---- solutions of maths tasks

GSM8K = "Half of 48 is 48/2 = <<48/2=24>>24.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"


def test_a_worked_solution_is_a_response_that_is_graded_as_right():
    text = worked_solution(GSM8K, "72", "####")
    assert text == "Half of 48 is 48/2 = 24.\nTogether 48+24 = 72.\n\\boxed{72}"
    assert worked_solution("So $x=\\boxed{3}$.", "3", None) == "So $x=\\boxed{3}$."
    assert worked_solution(None, "3", None) == worked_solution("#### 3", "3", "####") == ""


@pytest.fixture
def maths(tmp_path):
    rows = [{"question": f"{i} + 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(6)]
    rows.append({"question": "no solution?", "answer": "#### 1"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"question_column": "question", "answer_column": "answer", "answer_after": "####"}

    def build(**more):
        return Maths("m", str(tmp_path), max_completion_length=32, train_split="train", **columns, **more)

    return build


def test_solutions_are_drawn_by_the_seed_and_more_of_them_only_add(maths):
    task = maths(solution_column="answer")
    chats = task.solutions(seed=0, n=6)
    assert chats[:3] == task.solutions(seed=0, n=3) and chats != task.solutions(seed=1, n=6)
    assert len({str(chat) for chat in chats}) == 6
    by_prompt = {str(row["prompt"]): row["answer"] for row in task.train_dataset()}
    answers = [by_prompt[str(chat[:-1])] for chat in chats]
    assert [grade.reward for grade in task.grades([chat[-1:] for chat in chats], answers)] == [1.0] * 6
    with pytest.raises(ValueError, match="has 6 solved problems, fewer than 7"):
        task.solutions(seed=0, n=7)
    with pytest.raises(ValueError, match="Try task.solution_column=answer"):
        maths().solutions(seed=0, n=1)


# ---- the command


composed = partial(recipes.composed, command="warm_start")
GIVEN = ["model.dtype=float32", "demonstrations=16", "demonstrations_per_step=8", "learning_rate=1e-3"]


def test_the_command_writes_a_policy_with_a_record_and_does_nothing_the_second_time(policy, tmp_path):
    given = [*GIVEN, f"model.name={policy}", f"output={tmp_path / 'warm'}"]
    code, printed = commands.run(given, tmp_path / "log", script="warm_start")
    assert code == 0 and "2 steps" in printed, printed
    record = json.loads((tmp_path / "warm" / "made_from.json").read_text())
    assert record["model"] == str(policy) and record["task"] == "arithmetic" and len(record["losses"]) == 2
    assert record["recipe"]["task.instruction"].endswith("put the total into \\boxed{}.")
    weights = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (policy, tmp_path / "warm")]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (policy, tmp_path / "warm")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.cpu_seconds", "warm"]

    cfg = composed(*given)
    assert command.is_there(tmp_path / "warm", command.recipe(cfg))
    assert command.is_there(tmp_path / "warm", command.recipe(composed(*given, "threads=2", "use_cpu=true")))
    with pytest.raises(RunError, match=r"made with other settings \(there -> here\):\n  noise: 1.0 -> 0.5"):
        command.is_there(tmp_path / "warm", command.recipe(composed(*given, "noise=0.5")))


def test_the_command_warm_starts_on_a_task_with_tools(policy, tmp_path):
    given = [*GIVEN, "task=arithmetic_tools", f"model.name={policy}", f"output={tmp_path / 'warm'}"]
    code, printed = commands.run(given, tmp_path / "log", script="warm_start")
    assert code == 0 and "2 steps" in printed, printed
    assert json.loads((tmp_path / "warm" / "made_from.json").read_text())["task"] == "arithmetic_tools"


def test_another_folder_is_never_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunError, match="exists already and is not overwritten"):
        command.is_there(tmp_path / "mine", {})


def test_demonstrations_of_a_maths_task_are_its_solutions(maths, tmp_path):
    given = [f"task.path={tmp_path}", "task=gsm8k", "++task.solution_column=answer", "demonstrations=2"]
    cfg = composed(*given, "model.name=x/y", f"output={tmp_path / 'o'}")
    assert command.check(composed(*given, "demonstrations_per_step=2", "model.name=x/y", f"output={tmp_path / 'o'}"))
    task = maths(solution_column="answer")
    assert make_policy.demonstrations(cfg, task) == task.solutions(0, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["model=tiny"], "Leave model=tiny out"),
        (
            ["model.name=x/y", "task=gsm8k_tools", "++task.solution_column=answer"],
            "gsm8k_tools has a tool, but its column of solutions shows no call",
        ),
        (["model.name=x/y", "task=math500"], r"no solutions to learn from.*Try task=arithmetic, or task.solution_c"),
        (["model.name=x/y", "demonstrations_per_step=12"], "per_forward=8 must divide the 12 demonstrations of a step"),
        (["model.name=x/y", "steps=0"], "steps=0 must be a whole number >= 1"),
        (["model.name=x/y", "noise=2"], "noise=2 must be a number from 0 to 1"),
        (["model.name=x/y", "learning_rate=0"], "learning_rate=0 must be a positive number"),
        ([], "model.name is not set"),
    ],
)
def test_what_cannot_be_made_is_refused(given, said, tmp_path):
    with pytest.raises(RunError, match=said):
        command.check(composed(*given, f"output={tmp_path / 'o'}"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["task=gsm8k", "task.path=/nowhere"], "path='/nowhere' does not exist"),
        (["task=arithmetic"], "model.name=x/y is not a folder.* not in the cache"),
    ],
)
def test_rows_and_model_must_be_there(given, said, tmp_path):
    solutions = ["++task.solution_column=answer"] if "task=gsm8k" in given else []
    with pytest.raises(RunError, match=said):
        cfg = composed(*given, *solutions, "model.name=x/y", f"output={tmp_path / 'o'}")
        command.check_files(cfg, build(cfg, "task"))


def test_output_must_be_named():
    with pytest.raises(RunError, match="Add output=FOLDER"):
        command.check(composed("model.name=x/y"))
