"""Helps the trainer tests: a minimal real training, and advantages from naive loops over full logits."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from otb import OTBConfig, OTBTrainer
from otb.baselines.otb import otb
from otb.methods import Method, Step

PROMPTS = [[{"role": "user", "content": f"what is {i} + {i * 7 % 10} ?"}] for i in range(16)]


def byte_reward(completions, **columns):
    """Returns a cheap reward that varies: 1 if the sum of the response's characters is odd, else 0."""
    return [float(sum(map(ord, c[-1]["content"])) % 2) for c in completions]


def config(output_dir, **options) -> OTBConfig:
    defaults = dict(
        output_dir=str(output_dir),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        loss_type="dr_grpo",
        num_generations=4,
        per_device_train_batch_size=16,
        max_completion_length=12,
        max_steps=2,
        seed=7,
        lean_steps=False,  # passes as TRL makes them, to be counted and compared; the others: test_lean_steps.py
    )
    return OTBConfig(**(defaults | options))


def dataset() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS})


class KeptSteps(Method):
    """Keeps every Step once its advantages are known."""

    def __init__(self):
        self.steps: list[Step] = []

    def finish(self, step):
        self.steps.append(step)


def method_of(trainer, kind):
    """Returns the trainer's method of a class."""
    return next(method for method in trainer.methods if isinstance(method, kind))


class RecordingTrainer(OTBTrainer):
    """Keeps every generation's batch for the loss, with naive advantages computed at that moment."""

    def __init__(self, *args, **kwargs):
        self.batches = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.batches.append((output, naive_otb_advantages(self, output)))
        return output


def group_gradients(trainer, output) -> torch.Tensor:
    """Returns each prompt group's gradient of -sum_t A_t log pi_t / (group size x longest), (P, n), on this process."""
    model, mask = trainer.accelerator.unwrap_model(trainer.model), output["completion_mask"]
    log_probs = log_probs_of(model, output, trainer.temperature)
    advantages = output["advantages"] if output["advantages"].dim() == 2 else output["advantages"].unsqueeze(1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses = -(advantages * log_probs * mask).view(-1, trainer.num_generations, mask.shape[1]).mean(1).sum(-1)
    found = [
        torch.autograd.grad(loss / trainer.max_completion_length, parameters, retain_graph=True) for loss in losses
    ]
    return torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in found])


def naive_otb_advantages(trainer, output) -> torch.Tensor:
    """Returns otb with tail='zero' from loops over the full logits, (B, C). One process, groups contiguous."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    mask = output["completion_mask"].bool()
    if "tool_mask" in output:
        mask = mask & output["tool_mask"].bool()
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=attention).logits[:, :-1] / trainer.temperature
    logits = logits[:, -mask.shape[1] :].double()
    probs = logits.softmax(-1)
    sampled = probs.gather(-1, output["completion_ids"].unsqueeze(-1)).squeeze(-1)
    w = 1 - 2 * sampled + probs.square().sum(-1)
    if "importance_sampling_ratio" in output:
        w = w * output["importance_sampling_ratio"].double().square()
    rewards = trainer._rewards_per_function[:, 0].double()
    result = torch.zeros_like(w)
    group_size = trainer.num_generations
    for start in range(0, len(mask), group_size):
        rows = range(start, start + group_size)
        positions = {row: mask[row].nonzero().flatten().tolist() for row in rows if not rewards[row].isnan()}
        for t in range(max(map(len, positions.values()), default=0)):
            alive = [row for row in positions if t < len(positions[row])]
            energy = {row: sum(w[row, c] for c in positions[row][: t + 1]) for row in alive}
            baseline = sum(energy[row] * rewards[row] for row in alive) / (sum(energy.values()) + 1e-8)
            if len(alive) == 1:
                baseline = 0
            for row in alive:
                result[row, positions[row][t]] = rewards[row] - baseline
    return result


def trained(
    kind, folder, model, tokenizer, *, baseline=otb, reward=byte_reward, resume=None, given=None, before=None, **options
):
    """Trains a trainer of a class and returns it.

    given: further arguments by name. before: attributes to set before the training. options: of `config`.
    """
    trainer = kind(
        model,
        reward,
        config(folder, **options),
        dataset(),
        processing_class=tokenizer,
        baseline=baseline,
        **(given or {}),
    )
    vars(trainer).update(before or {})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def recorded(tmp_path, model, tokenizer, *, peft_config=None, **options):
    return trained(RecordingTrainer, tmp_path, model, tokenizer, given={"peft_config": peft_config}, **options)


def log_probs_of(model, batch, temperature) -> torch.Tensor:
    """Returns log pi (b, C) of the responses from one plain forward, in float32."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float() / temperature
    logits = logits[:, -batch["completion_ids"].shape[1] :]
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def with_adapter(model):
    """Returns the model with LoRA on all linear layers. B is random; with B = 0, half of the score would be 0."""
    wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
    return wrapped.eval()
