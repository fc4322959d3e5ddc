"""How long the rows of DAPO-Math-17k take to be ready: `python benchmarks/rows.py [FOLDER]`, a minute, 2.5 GB of disk.

It writes a file of that size and format (1,791,700 rows, 17,917 problems with made-up texts) and reads it twice through
conf/task/dapo_math.yaml: at first `datasets` makes its caches, then it has them.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hydra import compose, initialize_config_dir

from experiments.running.build import build
from experiments.running.command_line import CONF
from otb.policies.models import check_prompt_lengths, describe_policy

PROBLEMS, COPIES = 17_917, 100
WORDS = 60  # of a problem, at most


def write(file: Path) -> None:
    """Writes every problem COPIES times, each time all of them in another order."""
    draw, order = random.Random(0), np.random.default_rng(0)
    words = ["".join(draw.choices("abcdefghij \\${}^_0123456789", k=7)) for _ in range(5000)]
    questions = pa.array([" ".join(draw.choices(words, k=draw.randint(15, WORDS))) + f" {i}" for i in range(PROBLEMS)])
    answers = pa.array([str(draw.randint(0, 999)) for _ in range(PROBLEMS)])
    role, style = pa.array(["user"] * PROBLEMS), pa.array(["rule"] * PROBLEMS)
    offsets = pa.array(np.arange(PROBLEMS + 1, dtype=np.int32))
    writer = None
    for copy in range(COPIES):
        rows = pa.array(order.permutation(PROBLEMS))
        messages = pa.StructArray.from_arrays([questions.take(rows), role], ["content", "role"])
        model = pa.StructArray.from_arrays([answers.take(rows), style], ["ground_truth", "style"])
        index = pa.StructArray.from_arrays([pa.array([f"{copy}-{row}" for row in rows.to_pylist()])], ["index"])
        prompt = pa.ListArray.from_arrays(offsets, messages)
        table = pa.table({"prompt": prompt, "reward_model": model, "extra_info": index})
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)
    writer.close()


def timed(what: str, work):
    """Prints the seconds that `work` takes, and returns what it returns."""
    started = time.perf_counter()
    result = work()
    print(f"  {what}: {time.perf_counter() - started:.1f} s")
    return result


def main(folder: Path) -> None:
    file = folder / "data" / "dapo-math-17k.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        timed("writing the file", lambda: write(file))
    (folder / "aime24.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    tokenizer, config = describe_policy("tiny", None)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        paths = [f"task.path='{folder}'", f"task.evaluation.path='{folder}/aime24.jsonl'"]
        cfg = compose("evaluate", overrides=["task=dapo_math", *paths])
    for start in ("without caches", "with them"):
        print(start)
        task = build(cfg, "task")
        rows = timed("rows", task.train_dataset)
        timed("hashes", task.provenance)
        timed("prompt lengths", lambda rows=rows: check_prompt_lengths(rows["prompt"], tokenizer, config, 10_000, 1))
        print(f"  {len(rows):,} rows")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary).absolute())
