"""One rank of tests/test_distributed.py, started by torchrun: a training step whose groups span both ranks."""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy
from tests.trainers import RecordingTrainer, byte_reward, config, dataset


class RankTrainer(RecordingTrainer):
    """Writes this rank's own rows: w per own token from full logits, reward, and the advantages that OTB gave them."""

    def _generate_and_score_completions(self, inputs):
        output = super(RecordingTrainer, self)._generate_and_score_completions(inputs)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
        mask = output["completion_mask"].bool()
        with torch.no_grad():
            model = self.accelerator.unwrap_model(self.model)
            logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1][:, -mask.shape[1] :]
        log_probs = logits.log_softmax(-1).gather(-1, output["completion_ids"].unsqueeze(-1)).squeeze(-1)
        w = logit_gradient_proxy(log_probs, log_sum_squared_probs(logits))
        first = self.accelerator.process_index * len(mask)
        rows = [
            {
                "w": w[i][mask[i]].tolist(),
                "reward": float(self._rewards_per_function[first + i, 0]),
                "advantages": output["advantages"][i][mask[i]].tolist(),
            }
            for i in range(len(mask))
        ]
        Path(os.environ["OTB_TEST_OUT"], f"rank{self.accelerator.process_index}.json").write_text(json.dumps(rows))
        return output


def main(policy: str, output: str) -> None:
    # 6 rollouts a rank in groups of 4: the second group has two rollouts on either rank
    options = dict(max_steps=1, per_device_train_batch_size=6, num_generations=4, ddp_find_unused_parameters=False)
    RankTrainer(
        AutoModelForCausalLM.from_pretrained(policy),
        byte_reward,
        config(output, **options),
        dataset(),
        processing_class=AutoTokenizer.from_pretrained(policy),
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
