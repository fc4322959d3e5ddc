"""Tests an auxiliary head inside real TRL training against naive losses over plain forwards."""

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from experiments.running.run_trainer import RESUME_FILES
from otb import OTBTrainer
from otb.baselines.otb import otb
from otb.baselines.rloo import rloo
from otb.loss_inputs import prompts_with_responses, response_mask
from otb.methods.auxiliary import MultiTokenPrediction
from otb.methods.auxiliary_head import AuxiliaryHead
from otb.methods.mtp import predicted
from tests.support import trainers
from tests.support.tool_trainers import FakeSandbox, answer, call, scripted
from tests.support.trainers import byte_reward, config, dataset, method_of

TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time"}
TWICE = dict(num_iterations=2, max_steps=4)
MICRO_BATCHES = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2)


def trained(kind, tmp_path, model, tokenizer, auxiliary, **options):
    given = {"auxiliary": auxiliary}
    return trainers.trained(kind, tmp_path, copy.deepcopy(model), tokenizer, given=given, **options)


def flat(module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def logged(trainer) -> list[dict]:
    """Returns the log without times and without the metrics of a head."""
    return [
        {name: value for name, value in row.items() if name not in TIMES and not name.startswith("mtp_")}
        for row in trainer.state.log_history
    ]


def test_a_detached_head_changes_no_bit_of_the_policy_and_learns(tmp_path, untrained, tokenizer):
    """The log does not change either: clipping, noise and the sum of losses leave the head out."""
    options = dict(max_grad_norm=0.05, measure_gradient_noise=True, max_steps=6, num_iterations=2) | MICRO_BATCHES
    plain = trained(OTBTrainer, tmp_path, untrained, tokenizer, None, **options)
    detached = trained(OTBTrainer, tmp_path, untrained, tokenizer, MultiTokenPrediction("detach"), **options)
    assert torch.equal(flat(detached.model), flat(plain.model)) and logged(detached) == logged(plain)
    losses = [row["mtp_cross_entropy"] for row in detached.state.log_history if "mtp_cross_entropy" in row]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert all("mtp_lambda" not in row for row in detached.state.log_history)


def test_every_mode_is_detach_while_the_head_warms_up(tmp_path, untrained, tokenizer):
    plain = trained(OTBTrainer, tmp_path, untrained, tokenizer, None, **TWICE)
    for mode in ("ce", "occ"):
        auxiliary = MultiTokenPrediction(mode, warmup=3)
        warmed = trained(OTBTrainer, tmp_path, untrained, tokenizer, auxiliary, **TWICE)
        assert logged(warmed)[:3] == logged(plain)[:3]
        assert not torch.equal(flat(warmed.model), flat(plain.model))


# ---- against naive losses over plain forwards


class Checking(OTBTrainer):
    """Keeps each update's gradients, and the gradients of naive losses over the whole batch and full logits."""

    def __init__(self, *args, **kwargs):
        self.old, self.checked, self.part = {}, [], []
        super().__init__(*args, **kwargs)

    def naive_log_probs(self, batch):
        """Returns the log-probs of the policy and of its head, (B, C) each."""
        ids, mask = prompts_with_responses(batch)
        model, width = self.accelerator.unwrap_model(self.model), batch["completion_ids"].shape[1]
        states = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        head = method_of(self, AuxiliaryHead).head(
            states[:, :-2], model.get_input_embeddings()(ids[:, 1:-1]), mask[:, :-2]
        )

        def of(states, targets):
            log_probs = (model.get_output_embeddings()(states) / self.temperature).log_softmax(-1)
            return log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[:, -width:]

        return of(states[:, :-1], ids[:, 1:]), of(head, ids[:, 2:])

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        with torch.no_grad():
            self.old = dict(zip(("main", "head"), self.naive_log_probs(output), strict=True))
            self.ids = output["completion_ids"]
        return output

    def _compute_loss(self, model, inputs):
        self.part.append(inputs)
        return super()._compute_loss(model, inputs)

    def _get_grad_norm(self, *args, **kwargs):
        parameters = [
            *self.accelerator.unwrap_model(self.model).parameters(),
            *method_of(self, AuxiliaryHead).head.parameters(),
        ]
        kept = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().clone() for p in parameters])
        expected, facts = self.naive_gradient(parameters)
        self.checked.append((kept, expected, facts))
        self.part = []
        return super()._get_grad_norm(*args, **kwargs)

    def naive_gradient(self, parameters):
        options, total, facts = method_of(self, AuxiliaryHead).options, 0.0, {}
        for batch in self.part:  # shuffled rows of the batch: found again by their tokens
            rows = [int((self.ids == ids).all(1).nonzero()[0]) for ids in batch["completion_ids"]]
            old = {name: values[rows] for name, values in self.old.items()}
            own, advantages = response_mask(batch), batch["advantages"].reshape(len(rows), -1)
            main, head = self.naive_log_probs(batch)

            def policy_loss(log_probs, reference, own=own, advantages=advantages):
                ratio = (log_probs - reference).exp()
                taken = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                return -(taken * own).sum() / (len(own) * self.max_completion_length)

            d, d_head, gap = (main - old["main"]), (head - old["head"]), (head - old["main"])
            ratio = (d * d_head)[own].sum() / (d_head[own].square().sum() + options.eps)
            if options.mode == "occ_as_code":
                there = batch["completion_mask"].bool()  # for TRL the log-prob of padding is 0
                ratio = (d * gap / (gap.square() + options.eps))[there].sum() / there.numel()
            lam = options.lambda_plus * float(ratio.detach())
            facts = {"lambda": lam, "cross_entropy": float(-head.detach()[own].mean())}
            if self.state.global_step % 2 == 0:
                lam = 0.0
            reference = old["head"] if options.ratio_to == "head" else old["main"]
            auxiliary = {
                "ce": options.weight * -head[own].mean(),
                "policy": options.weight * policy_loss(head, reference),
            }.get(options.mode, lam * policy_loss(head, reference))
            total = total + (policy_loss(main, old["main"]) + auxiliary) / len(self.part)
        found = torch.autograd.grad(total, parameters, allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, found, strict=True)]
        ), facts


@pytest.mark.parametrize(
    ("auxiliary", "baseline", "options"),
    [
        (MultiTokenPrediction("occ"), otb, {}),
        (MultiTokenPrediction("occ", ratio_to="head", lambda_plus=3.0), rloo, dict(temperature=0.7)),
        (MultiTokenPrediction("occ_as_code"), otb, {}),
        (MultiTokenPrediction("policy", weight=0.5, ratio_to="head"), otb, MICRO_BATCHES),
        (MultiTokenPrediction("ce"), otb, {}),
    ],
    ids=["occ", "occ-head-rloo", "as_code", "policy-head-micro", "ce"],
)
def test_gradients_are_those_of_naive_losses_over_plain_forwards(
    tmp_path, untrained, tokenizer, auxiliary, baseline, options
):
    """Compares the gradients of the policy and of the head in both updates of two batches."""
    options = dict(max_grad_norm=0, learning_rate=3e-3) | TWICE | options
    trainer = trained(Checking, tmp_path, untrained, tokenizer, auxiliary, baseline=baseline, **options)
    assert len(trainer.checked) == 4
    rows = [row for row in trainer.state.log_history if "mtp_cross_entropy" in row]
    for step, (kept, expected, facts) in enumerate(trainer.checked):
        assert (kept - expected).norm() < 5e-3 * expected.norm()
        if auxiliary.has_lambda:
            assert rows[step]["mtp_lambda"] == pytest.approx(facts["lambda"] if step % 2 else 0.0, rel=5e-3)
        if "gradient_accumulation_steps" not in options:
            assert rows[step]["mtp_cross_entropy"] == pytest.approx(facts["cross_entropy"], rel=1e-4)
    if auxiliary.mode == "occ":
        assert rows[1]["mtp_lambda"] != 0 and "mtp_c" not in rows[0]
        assert 0 < abs(rows[1]["mtp_cosine"]) <= 1 and rows[1]["mtp_c"] * rows[1]["mtp_lambda"] > 0 < rows[1]["mtp_v2"]


class OwnLogProbs(OTBTrainer):
    """Gives the head the policy's log-probs, so its policy loss must equal TRL's."""

    def _compute_loss(self, model, inputs):
        loss = GRPOTrainer._compute_loss(self, model, inputs)
        log_probs = self._get_per_token_logps_and_entropies(
            model, *prompts_with_responses(inputs), inputs["completion_ids"].shape[1]
        )[0]
        method_of(self, AuxiliaryHead).seen = [(log_probs, log_probs)]
        of_head, _ = method_of(self, AuxiliaryHead).loss(inputs, response_mask(inputs))
        self.losses.append((float(of_head.detach()), float(loss.detach())))
        return loss

    losses: list = []


@pytest.mark.parametrize("loss_type", ["dr_grpo", "dapo", "grpo", "bnpo"])
def test_the_policy_loss_of_a_head_is_that_of_trl_where_its_log_probs_are_the_policys(
    tmp_path, untrained, tokenizer, loss_type
):
    options = dict(loss_type=loss_type, learning_rate=3e-2, mask_truncated_completions=True) | TWICE | MICRO_BATCHES
    OwnLogProbs.losses = []
    trained(OwnLogProbs, tmp_path, untrained, tokenizer, MultiTokenPrediction("policy", weight=1.0), **options)
    for of_head, loss in OwnLogProbs.losses:
        assert of_head == pytest.approx(loss, rel=1e-4, abs=1e-7)
    assert len(OwnLogProbs.losses) == 8 and max(abs(loss) for _, loss in OwnLogProbs.losses) > 1e-3


class KeepingGradients(OTBTrainer):
    """Keeps the gradients of the first update."""

    def _get_grad_norm(self, *args, **kwargs):
        if not self.state.global_step:
            self.first = [
                torch.cat([parameter.grad.flatten().clone() for parameter in module.parameters()])
                for module in (self.model, method_of(self, AuxiliaryHead).head)
            ]
        return super()._get_grad_norm(*args, **kwargs)


def test_with_an_entropy_bonus_the_loss_of_the_head_remains(tmp_path, untrained, tokenizer):
    """In the authors' code an entropy bonus removes the head's loss."""
    policy = MultiTokenPrediction("policy", weight=1.0)
    plain, bonus = (
        trained(
            KeepingGradients, tmp_path, untrained, tokenizer, policy, entropy_coef=coef, max_steps=1, max_grad_norm=0
        )
        for coef in (0.0, 0.1)
    )
    assert torch.equal(plain.first[1], bonus.first[1]) and plain.first[1].abs().max() > 0
    assert not torch.equal(plain.first[0], bonus.first[0])


def test_a_head_is_trained_beside_a_sampler_that_differs(tmp_path, untrained, tokenizer):
    """The sampler copy has no head, but its importance ratios also weigh the head's loss."""
    options = dict(sampler_dtype="bfloat16", vllm_importance_sampling_mode="token_truncate") | TWICE
    trainer = trained(OTBTrainer, tmp_path, untrained, tokenizer, MultiTokenPrediction("occ"), **options)
    rows = [row for row in trainer.state.log_history if "mtp_lambda" in row]
    assert [row["mtp_lambda"] != 0 for row in rows] == [False, True, False, True]


def test_tool_tokens_are_no_part_of_the_loss(monkeypatch, tmp_path, untrained, tokenizer):
    script = [[call("3+4"), answer(7)], [answer(8)], [call("5"), call("6"), answer(7)], [answer(7)]]
    trainer = scripted(
        monkeypatch, script, tmp_path, untrained, tokenizer, FakeSandbox(),
        baseline=rloo, auxiliary=MultiTokenPrediction("ce"), max_completion_length=200, learning_rate=0.0,
    )  # fmt: skip
    (output,) = trainer.outputs
    own = response_mask(output)
    assert (output["completion_mask"].bool() & ~own).any()
    ids, mask = prompts_with_responses(output)
    with torch.no_grad(), method_of(trainer, AuxiliaryHead).reading(ids, mask, own.shape[1]) as of_head:
        trainer.model(input_ids=ids, attention_mask=mask)
    reached = own & predicted(mask, own.shape[1])
    expected = float(-of_head[0][reached].mean())
    # with a learning rate of 0 the head is as it was
    assert trainer.state.log_history[0]["mtp_cross_entropy"] == pytest.approx(expected, rel=1e-4)


# ---- checkpoints


def test_a_checkpoint_holds_the_head_beside_a_policy_that_loads_without_it(tmp_path, untrained, tokenizer):
    saving = dict(save_strategy="steps", save_steps=2, save_total_limit=3) | TWICE
    occ = MultiTokenPrediction("occ")
    whole = trained(OTBTrainer, tmp_path / "run", untrained, tokenizer, occ, **saving)
    folder = tmp_path / "run" / "checkpoint-4"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, whole.model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert loaded.state_dict().keys() == untrained.state_dict().keys()
    head = torch.load(folder / "mtp_head.pt", weights_only=True)
    assert all(
        torch.equal(value, method_of(whole, AuxiliaryHead).head.state_dict()[name]) for name, value in head.items()
    )
    assert "mtp_head.pt" not in RESUME_FILES  # stays with the best policy
    resumed = trained(
        OTBTrainer, tmp_path / "run", untrained, tokenizer, occ, resume=str(tmp_path / "run" / "checkpoint-2"), **TWICE
    )
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert torch.equal(flat(method_of(resumed, AuxiliaryHead).head), flat(method_of(whole, AuxiliaryHead).head))
    (tmp_path / "run" / "checkpoint-2" / "mtp_head.pt").unlink()
    with pytest.raises(ValueError, match="checkpoint-2 has no mtp_head.pt, but MTPHead continues from"):
        trained(OTBTrainer, tmp_path, untrained, tokenizer, occ, resume=str(tmp_path / "run" / "checkpoint-2"), **TWICE)


class Broken(OTBTrainer):
    """Has a head with a finite loss, but a gradient that is not finite."""

    def _compute_loss(self, model, inputs):
        method_of(self, AuxiliaryHead).head.projection.weight.register_hook(lambda gradient: gradient * torch.inf)
        return super()._compute_loss(model, inputs)


def test_a_gradient_of_the_head_that_is_not_finite_is_the_norm_that_a_run_refuses(tmp_path, untrained, tokenizer):
    trainer = trained(Broken, tmp_path, untrained, tokenizer, MultiTokenPrediction("detach"), max_steps=1)
    assert not math.isfinite(trainer.state.log_history[0]["grad_norm"])


def test_models_and_options_that_do_not_fit_are_refused_by_the_trainer(tmp_path, untrained, tokenizer):
    def build(**options):
        return OTBTrainer(
            untrained, byte_reward, config(tmp_path), dataset(), processing_class=tokenizer,
            auxiliary=MultiTokenPrediction("detach"), **options,
        )  # fmt: skip

    untrained.config.model_type = "gpt2"
    with pytest.raises(ValueError, match="model_type=gpt2: an auxiliary head is one more layer"):
        build()
