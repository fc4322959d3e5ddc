"""Tests lean steps: they save rows, padding and a forward, and keep gradients, metrics and the distribution."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from trl import GRPOTrainer

from otb import OTBTrainer
from otb.baselines import declare
from otb.baselines.energy_probe import EnergyProbe
from otb.baselines.none import none
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.methods import Method
from otb.methods.token_weights import TokenWeights
from otb.tasks.arithmetic import Arithmetic
from otb.training.lean_loss import chunks, in_order, is_noisy, learning_rows
from otb.training.lean_sampling import chosen, generate, lean_sampling, sample
from tests.support.trainers import recorded, trained

MOVING = ("step_time", "seconds", "runtime", "per_second", "total_flos")


def logged(trainer) -> list[dict]:
    """Returns the log of each step without times."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [{name: value for name, value in row.items() if not any(part in name for part in MOVING)} for row in rows]


@pytest.fixture
def rows_read(monkeypatch) -> dict[bool, int]:
    """Counts the rollouts in forwards of scoring and loss, separately with and without gradient."""
    rows, original = {True: 0, False: 0}, GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self, model, input_ids, *args, **kwargs):
        rows[torch.is_grad_enabled()] += len(input_ids)
        return original(self, model, input_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
    return rows


@pytest.fixture
def same_rollouts(monkeypatch) -> None:
    monkeypatch.setattr("otb.training.lean_sampling.lean_sampling", lambda model: nullcontext())


own_tail = partial(otb, tail="own")  # without it the last tokens of a group's longest rollout always have an advantage
CASES = {
    "otb": (otb, {}),
    "otb, own tail": (own_tail, {}),
    "rloo": (rloo, {}),
    "none": (none, {}),
    "one that learns": (EnergyProbe(), {}),
    "otb, token mean": (otb, {"loss_type": "dapo"}),
    "rloo, mean of rollouts": (rloo, {"loss_type": "grpo"}),
    "otb in micro-batches": (otb, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}),
    "rloo, two updates": (rloo, {"num_iterations": 2, "max_steps": 4}),
    "otb, two updates": (own_tail, {"num_iterations": 2, "max_steps": 4}),
    "otb, truncated ones masked": (otb, {"mask_truncated_completions": True}),
    "otb, tokens of high entropy": (otb, {"top_entropy_quantile": 0.5}),
    "otb, lora": (otb, {"peft_config": LoraConfig(target_modules="all-linear", r=4, lora_alpha=8)}),
    "otb, lora with dropout": (
        own_tail,
        {"peft_config": LoraConfig(target_modules="all-linear", r=4, lora_dropout=0.1)},
    ),
}


@pytest.mark.parametrize("case", [name for name in CASES if "dropout" not in name])
def test_a_lean_step_has_the_gradient_and_the_metrics_of_a_plain_one(
    tmp_path, untrained, tokenizer, same_rollouts, case
):
    """SGD trains here, because its steps are as exact as gradients; Adam turns mere rounding into a full step."""
    baseline, options = CASES[case]
    options = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1} | options
    lean, plain = (
        recorded(tmp_path / str(on), copy.deepcopy(untrained), tokenizer, baseline=baseline, lean_steps=on, **options)
        for on in (True, False)
    )
    assert len(logged(plain)) == options["max_steps"]
    for mine, theirs in zip(logged(lean), logged(plain), strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for mine, theirs in zip(lean.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("baseline", [otb, EnergyProbe()], ids=["otb", "one that learns"])
def test_uniform_token_weights_change_no_bit_and_cost_no_forward(tmp_path, untrained, tokenizer, rows_read, baseline):
    runs, read = [], []
    for weights in (None, TokenWeights("uniform")):
        rows_read.update({True: 0, False: 0})
        options = {"baseline": baseline, "given": {"token_weights": weights}, "lean_steps": True, "max_steps": 3}
        runs.append(trained(OTBTrainer, tmp_path / str(len(runs)), copy.deepcopy(untrained), tokenizer, **options))
        read.append(dict(rows_read))
    plain, uniform = runs
    assert read[0] == read[1]
    for mine, theirs in zip(logged(uniform), logged(plain), strict=True):
        assert {name: value for name, value in mine.items() if not name.startswith("token_")} == theirs
    assert all(map(torch.equal, uniform.model.parameters(), plain.model.parameters()))


def constant_first_groups(completions, **columns) -> list[float]:
    """Gives half of the groups of 4 the reward 1 for every rollout, so these groups teach nothing."""
    return [1.0 if (row // 4) % 2 else float(row % 2) for row in range(len(completions))]


@pytest.mark.parametrize(
    ("case", "with_gradient", "without"),
    [
        ("otb, own tail", 8, 8),  # of 16 rollouts, each read once: for its score norms and for the loss
        ("rloo", 8, 8),
        ("none", 12, 4),  # only a reward of 0 has no advantage
        ("one that learns", 16, 0),
        ("otb, lora with dropout", 8, 8 + 16),  # score norms are measured without dropout: a forward of their own
        ("otb, two updates", 16, 16 + 16),  # TRL's pass, then two losses of which the second has other weights
    ],
)
def test_each_rollout_is_read_once_and_with_gradient_only_where_it_has_one(
    tmp_path, untrained, tokenizer, rows_read, case, with_gradient, without
):
    baseline, options = CASES[case]
    options = {"max_steps": options.get("num_iterations", 1)} | {k: v for k, v in options.items() if k != "max_steps"}
    options |= {"baseline": baseline, "reward": constant_first_groups, "lean_steps": True}
    recorded(tmp_path, untrained, tokenizer, **options)
    assert rows_read == {True: with_gradient, False: without}


def test_without_anything_to_learn_a_step_has_no_gradient_and_does_not_fail(tmp_path, untrained, tokenizer):
    options = {"baseline": own_tail, "reward": lambda completions, **_: [1.0] * len(completions), "lean_steps": True}
    trainer = recorded(tmp_path, untrained, tokenizer, **options)
    assert [row["grad_norm"] for row in logged(trainer)] == [0.0, 0.0]


def test_what_the_loss_reads_beside_advantages_keeps_every_row(tmp_path, untrained, tokenizer, rows_read):
    """A KL term has a gradient even at advantage 0: loss, reference and score norms each read 16 rows."""
    recorded(tmp_path, untrained, tokenizer, reward=constant_first_groups, max_steps=1, beta=0.1, lean_steps=True)
    assert rows_read == {True: 16, False: 32}


def test_chunks_hold_every_wanted_rollout_once_by_length_and_apart_by_gradient():
    lengths = torch.tensor([5, 1, 9, 3, 7, 2, 8, 4])
    learns = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1]).bool()
    wanted = torch.tensor([1, 1, 1, 1, 1, 0, 1, 1]).bool()
    found = [(rows.tolist(), with_gradient) for rows, with_gradient in chunks(lengths, learns, wanted, at_once=2)]
    assert found == [([3, 7], True), ([0, 6], True), ([2], True), ([1, 4], False)]


def test_rows_come_back_in_order_with_zeros_behind_their_own_width_and_with_gradients():
    first, second = torch.ones(2, 3, requires_grad=True), torch.full((1, 2), 2.0)
    parts = [(torch.tensor([2, 0]), (first * torch.tensor([[1.0], [3.0]]),)), (torch.tensor([1]), (second,))]
    (values,) = in_order(parts, 4)
    assert values.tolist() == [[3, 3, 3, 0], [2, 2, 0, 0], [1, 1, 1, 0]]
    values.sum().backward()
    assert first.grad.tolist() == [[1, 1, 1], [3, 3, 3]]


def test_an_advantage_of_nan_learns_and_one_on_padding_does_not():
    batch = {
        "completion_mask": torch.tensor([[1, 1], [1, 0], [1, 1]]),
        "advantages": torch.tensor([[0.0, torch.nan], [0.0, 5.0], [0.0, 0.0]]),
    }
    assert learning_rows(batch).tolist() == [True, False, False]
    assert learning_rows(batch | {"advantages": torch.zeros(3)}).tolist() == [False, True, False]  # the shortest


# ---- sampling


ENDS = list(range(0, 480, 16))  # tokens that end a response: of random weights it is one in 16


@pytest.fixture
def chaotic(untrained, tokenizer):
    """Returns a policy that is far from uniform and does not repeat itself, so responses end at all lengths."""
    with torch.no_grad():
        for parameter in untrained.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return untrained.eval(), tokenizer


def prompts_of(tokenizer, count: int, copies: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and attention mask (count * copies, L) of problems, `copies` times each, padded on the left."""
    ids = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        for row in Arithmetic().train_dataset().select(range(count))
        for _ in range(copies)
    ]
    width = max(map(len, ids))
    padded = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    return padded, mask


def configuration(tokenizer, **options) -> GenerationConfig:
    defaults = dict(max_new_tokens=48, pad_token_id=tokenizer.pad_token_id, eos_token_id=ENDS)
    return GenerationConfig(**(defaults | options))


@pytest.fixture
def rows_of_forwards(chaotic, monkeypatch) -> list[tuple[int, int]]:
    """Collects (rows, tokens) of each forward of the policy."""
    model, _ = chaotic
    shapes, forward = [], model.model.forward

    def counting(input_ids=None, **kwargs):
        shapes.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model.model, "forward", counting)
    return shapes


@pytest.mark.parametrize("copies", [1, 4, 32])
@torch.no_grad()
def test_the_loop_gives_the_responses_of_generates_own(chaotic, rows_of_forwards, copies):
    """The most likely responses need no random number; 32 copies of a prompt are read as one."""
    model, tokenizer = chaotic
    ids, mask = prompts_of(tokenizer, 96 // copies, copies)
    options = dict(input_ids=ids, attention_mask=mask, generation_config=configuration(tokenizer, do_sample=False))
    whole = model.generate(**options)
    plain = sum(rows * tokens for rows, tokens in rows_of_forwards)
    rows_of_forwards.clear()
    assert torch.equal(generate(model, model.generate, **options), whole)
    assert sum(rows * tokens for rows, tokens in rows_of_forwards) < 0.6 * plain
    assert rows_of_forwards[0] == (len(ids) // copies, ids.size(1))


@torch.no_grad()
def test_tokens_are_drawn_from_the_policy_also_after_rows_have_left(chaotic):
    """For a token drawn from pi, log pi + entropy is 0 on average at every position."""
    model, tokenizer = chaotic
    ids, mask = prompts_of(tokenizer, 64, copies=8)
    config = configuration(tokenizer, do_sample=True, top_k=0, top_p=1.0, temperature=1.0)
    torch.manual_seed(0)
    sampled = generate(model, model.generate, input_ids=ids, attention_mask=mask, generation_config=config)
    responses = sampled[:, ids.size(1) :]
    ended = torch.isin(responses, torch.tensor(ENDS)).int()
    own = (ended.cumsum(1) - ended) == 0
    positions = (torch.cat([mask, own.long()], 1).cumsum(1) - 1).clamp(min=0)
    logits = model(sampled, attention_mask=torch.cat([mask, own.long()], 1), position_ids=positions).logits
    log_pi = logits[:, ids.size(1) - 1 : -1].log_softmax(-1)
    surprise = log_pi.gather(-1, responses.unsqueeze(-1)).squeeze(-1) - (log_pi.exp() * log_pi).sum(-1)
    assert 0.1 < own[:, 24:].any(1).float().mean() < 0.7  # many have left, and many go on
    for late in (surprise[own], surprise[:, 24:][own[:, 24:]]):
        assert abs(late.mean()) < 4 * late.std() / len(late) ** 0.5
    assert (responses[~own] == tokenizer.pad_token_id).all()


def test_tokens_are_drawn_with_their_probabilities_and_never_where_these_are_zero():
    """Checks frequencies of 200,000 draws; the first and last tokens of the vocabulary have probability 0."""
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.19, 0.0099, 0.0001, 0.0])
    torch.manual_seed(0)
    tokens = chosen(probabilities.log().expand(200_000, -1), do_sample=True)
    counts = torch.bincount(tokens, minlength=8)
    spread = (200_000 * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - 200_000 * probabilities).abs() <= 4 * spread).all()


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53], ids=["least", "most"])
def test_the_ends_of_the_random_numbers_range_draw_tokens_that_can_be_drawn(monkeypatch, number):
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.full(size, number, dtype=options["dtype"]))
    scores = torch.full((1, 1000), -torch.inf)
    scores[:, 10:990] = torch.randn(1, 980)
    assert chosen(scores, do_sample=True).item() == (989 if number == 0 else 10)


COUNTING = [  # of a row's own tokens, from the start of its response
    {"min_new_tokens": 6},
    {"begin_suppress_tokens": list(range(0, 480, 3))},
    {"exponential_decay_length_penalty": (2, 1.5)},
]


@pytest.mark.parametrize("option", COUNTING, ids=lambda option: next(iter(option)))
@torch.no_grad()
def test_options_that_count_tokens_count_those_of_a_row(chaotic, option):
    model, tokenizer = chaotic
    ids, mask = prompts_of(tokenizer, 24, copies=2)
    config = configuration(tokenizer, do_sample=False, **option)
    given = dict(input_ids=ids, attention_mask=mask, generation_config=config)
    whole, plain = model.generate(**given), configuration(tokenizer, do_sample=False)
    assert not torch.equal(whole, model.generate(input_ids=ids, attention_mask=mask, generation_config=plain))
    assert torch.equal(generate(model, model.generate, **given), whole)


OWN_LOOP = [  # each looks at the batch or at time, or has no cache that rows can be taken out of
    {"stop_strings": ["3"]},
    {"num_beams": 2},
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"guidance_scale": 1.5},
    {"repetition_penalty": 1.3},
    {"max_time": 1.0},
]


@pytest.mark.parametrize("of_model", [False, True], ids=["asked for", "the model's own"])
@pytest.mark.parametrize("option", OWN_LOOP, ids=lambda option: next(iter(option)))
def test_what_looks_at_other_rows_is_left_to_generates_own_loop(chaotic, option, of_model):
    model, tokenizer = chaotic
    config, seen = configuration(tokenizer), []
    (model.generation_config if of_model else config).update(**option)
    given = dict(input_ids=torch.zeros(2, 3), attention_mask=torch.ones(2, 3), generation_config=config)
    generate(model, lambda **options: seen.append(options), **given)
    assert seen == [given]


BASE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ARCHITECTURES = {
    "mistral": (BASE | {"sliding_window": 16}, True),
    "gpt2": (dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256), True),
    "lfm2": (BASE | {"layer_types": ["conv", "full_attention"]}, False),
    "falcon_h1": (BASE | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}, False),
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.no_grad()
def test_models_whose_cache_has_no_rows_keep_generates_own_loop_and_others_sample_equally(kind):
    options, cut = ARCHITECTURES[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(6)
    ids = torch.randint(3, 64, (8, 45)).repeat_interleave(8, 0)
    config = GenerationConfig(max_new_tokens=32, pad_token_id=0, eos_token_id=[2, 16, 30, 44, 58], do_sample=False)
    given = dict(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    whole, loops = model.generate(**given), []

    def own(custom_generate=None, **options):
        loops.append(custom_generate)
        return model.generate(custom_generate=custom_generate, **options)

    assert torch.equal(generate(model, own, **given), whole)
    assert loops == [sample if cut else None]


def test_a_generate_of_the_models_own_is_used_and_put_back(chaotic):
    model, tokenizer = chaotic
    seen = []
    model.generate = own = lambda **options: seen.append(options)
    with lean_sampling(model):
        model.generate(
            input_ids=torch.zeros(2, 3),
            attention_mask=torch.ones(2, 3),
            generation_config=configuration(tokenizer, num_beams=2),
        )
    assert len(seen) == 1 and model.generate is own


# ---- what a kept pass must not do


def scored(trainer, rows: int = 16) -> dict:
    """Returns a generation of the trainer as its loss gets it."""
    trainer.model.train()
    batch = [trainer.train_dataset[number // 4] for number in range(rows)]
    return trainer._generate_and_score_completions(batch)


def gradient(trainer, batch: dict) -> torch.Tensor:
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_a_kept_pass_serves_its_own_batch_alone(tmp_path, untrained, tokenizer):
    trainer = recorded(tmp_path, untrained, tokenizer, max_steps=1, lean_steps=True)
    first, second = scored(trainer), scored(trainer)
    trainer.args.lean_steps = False
    expected = gradient(trainer, first)
    trainer.args.lean_steps = True
    torch.testing.assert_close(gradient(trainer, first), expected, rtol=1e-4, atol=1e-7)
    third = scored(trainer)
    assert trainer.lean._kept_pass is not None
    del third["kept_row"]
    gradient(trainer, third)
    assert trainer.lean._kept_pass is None and second is not None


def wrong_guess(rollouts):
    """Gives advantage 1 to groups with varying rewards in the guess (norms of 1), later to groups with equal ones."""
    is_guess = bool((rollouts.score_norms[rollouts.own] == 1).all())
    varies = rollouts.rewards.ne(rollouts.rewards[:, :1]).any(1).view(-1, 1, 1)
    returns = rollouts.rewards.unsqueeze(-1)
    return torch.where(varies == is_guess, returns - 1, returns)


def test_a_wrong_guess_of_what_will_learn_costs_forwards_and_changes_nothing(
    tmp_path, untrained, tokenizer, same_rollouts
):
    baseline = declare(needs={"score_norms"})(wrong_guess)
    options = {"baseline": baseline, "reward": constant_first_groups, "optim": "sgd", "learning_rate": 0.1}
    lean, plain = (
        recorded(tmp_path / str(on), copy.deepcopy(untrained), tokenizer, lean_steps=on, **options)
        for on in (True, False)
    )
    assert any(row["grad_norm"] for row in logged(plain))
    for mine, theirs in zip(lean.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_baseline_that_draws_leaves_the_random_state_of_training_alone(tmp_path, untrained, tokenizer, same_rollouts):
    def draws(rollouts):
        return torch.rand_like(rollouts.score_norms).mean((1, 2), keepdim=True)

    options = {"baseline": declare(needs={"score_norms"})(draws), "max_steps": 2}
    tokens = [
        [
            row["num_tokens"]
            for row in logged(
                recorded(tmp_path / str(on), copy.deepcopy(untrained), tokenizer, lean_steps=on, **options)
            )
        ]
        for on in (True, False)
    ]
    assert tokens[0] == tokens[1]


def test_a_baseline_that_reads_hidden_states_and_learns_nothing_trains(tmp_path, untrained, tokenizer):
    @declare(needs={"hidden_states"})
    class Frozen:
        """Is a baseline that reads hidden states but does not learn."""

        def reduce(self, tokens):
            return {"value": tokens.hidden_states[:, 0, 0]}, {}

        def __call__(self, rollouts):
            return rollouts.reduced["value"].unsqueeze(-1)

    trainer = recorded(tmp_path, untrained, tokenizer, baseline=Frozen(), max_steps=1, lean_steps=True)
    assert logged(trainer)[0]["grad_norm"] > 0


def test_a_method_that_reads_every_rollout_turns_lean_steps_off(tmp_path, untrained, tokenizer, rows_read):
    class ReadsEveryRollout(Method):
        def allows_lean(self, batch):
            return False

    options = {"baseline": rloo, "reward": constant_first_groups, "max_steps": 1, "lean_steps": True}
    trained(OTBTrainer, tmp_path, untrained, tokenizer, given={"methods": [ReadsEveryRollout()]}, **options)
    assert rows_read == {True: 16, False: 0}  # those without an advantage, too


def test_reduce_sees_no_gradient(tmp_path, untrained, tokenizer):
    class Watching(EnergyProbe):
        seen: ClassVar[list] = []

        def reduce(self, tokens):
            self.seen.append(torch.is_grad_enabled() or tokens.hidden_states.requires_grad)
            return super().reduce(tokens)

    recorded(tmp_path, untrained, tokenizer, baseline=Watching(), max_steps=1, lean_steps=True)
    assert Watching.seen and not any(Watching.seen)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gemma3_text", {"attention_dropout": 0.2}), ("mixtral", {"router_jitter_noise": 0.1, "num_local_experts": 4})],
)
def test_noise_of_training_is_found_in_options(kind, options):
    for given, noisy in ((BASE, False), (BASE | options, True)):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
        assert is_noisy(model) == noisy


@pytest.mark.parametrize("noise", [{"lora_dropout": 0.1}, {}], ids=["dropout", "none"])
def test_noise_of_training_is_found_in_adapters(untrained, noise):
    assert is_noisy(get_peft_model(untrained, LoraConfig(target_modules="all-linear", r=2, **noise))) == bool(noise)
