"""Two gloo processes: prompt groups that span ranks get the advantages of a single process."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def naive_otb(rows):
    """Advantages of one group by loops; rows with w and reward -> a list per row."""
    result = [[0.0] * len(row["w"]) for row in rows]
    for t in range(max(len(row["w"]) for row in rows)):
        alive = [i for i, row in enumerate(rows) if t < len(row["w"])]
        energy = {i: sum(rows[i]["w"][: t + 1]) for i in alive}
        baseline = sum(energy[i] * rows[i]["reward"] for i in alive) / (sum(energy.values()) + 1e-8)
        for i in alive:
            result[i][t] = rows[i]["reward"] - (0.0 if len(alive) == 1 else baseline)
    return result


def test_groups_that_span_ranks_get_the_same_advantages_as_naive_loops(tmp_path, untrained, tokenizer):
    tokenizer.save_pretrained(tmp_path / "policy")  # beside the weights that the fixture wrote
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.distributed_worker", str(tmp_path / "policy"), str(tmp_path)]
    environment = os.environ | {"OTB_TEST_OUT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for rank in (0, 1) for row in json.loads((tmp_path / f"rank{rank}.json").read_text())]
    assert len(rows) == 12
    for start in (0, 4, 8):
        group = rows[start : start + 4]
        for row, expected in zip(group, naive_otb(group), strict=True):
            assert max(abs(a - b) for a, b in zip(row["advantages"], expected, strict=True)) < 1e-4
