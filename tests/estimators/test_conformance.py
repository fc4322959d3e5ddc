"""Tests `python -m otb.conformance` on a small file made here, on damaged files and on the shared vectors."""

import json

import numpy as np
import torch

from otb import conformance


def reference_file(path, advantage_error=0.0):
    """Writes one group of two rollouts, computed by hand: w = 0.5 everywhere, lengths 2 and 1, rewards 1 and 0.

    t=1: W = 0.5 each, B = 0.5 / (1 + eps). t=2: only the first rollout is left: baseline 0, advantage 1.
    """
    first = 0.5 / (1 + 1e-8)  # the formula's eps
    arrays = {
        "rewards": [[0.0, 1.0], [0.0, 0.0]],
        "response_mask": [[1.0, 1.0], [1.0, 0.0]],
        "group": [0, 0],
        "log_probs": np.log([[0.5, 0.5], [0.5, 0.5]]),
        "sum_pi_squared": [[0.5, 0.5], [0.5, 0.5]],
        "advantages": [[1 - first + advantage_error, 1.0], [-first, 0.0]],
    }
    meta = [{"group_size": 2, "multi_turn": False, "zero_tail": True}]
    np.savez(path, meta=json.dumps(meta), **{f"00/{key}": np.asarray(value) for key, value in arrays.items()})
    return str(path)


def test_conformance_accepts_a_hand_computed_case(tmp_path, capsys):
    assert conformance.main([reference_file(tmp_path / "vectors.npz")]) == 0
    assert "00 N=2" in capsys.readouterr().out


def test_conformance_exits_1_where_a_case_disagrees(tmp_path, capsys):
    assert conformance.main([reference_file(tmp_path / "vectors.npz", advantage_error=1e-7)]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_conformance_exits_2_where_there_is_nothing_to_compare(tmp_path, capsys):
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    (tmp_path / "text.npz").write_text("no numbers")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:60])
    (tmp_path / "empty.npz").touch()
    with open(tmp_path / "array.npz", "wb") as file:
        np.save(file, np.zeros(2))
    said = {"other": "no key 'meta'", "none": "No such file"}
    said |= dict.fromkeys(("text", "cut", "empty", "array"), "is not a file of reference vectors")
    for name, text in said.items():
        assert conformance.main([str(tmp_path / f"{name}.npz")]) == 2
        assert text in capsys.readouterr().err


def test_every_reference_case_agrees_in_both_forms(shared, capsys):
    assert conformance.main([str(shared / "vectors" / "otb_reference.npz")]) == 0


def test_vectorised_form_in_float64_differs_by_no_more_than_eps_and_cancellation_explain(shared):
    """If W is about eps = 1e-8, the literal w = 1 - 2 pi + sum pi^2 has lost its last eight digits."""
    for case in conformance.load_cases(shared / "vectors" / "otb_reference.npz"):
        result = conformance.trainer_advantages(case, dtype=torch.float64)
        torch.testing.assert_close(result, case.advantages, atol=1e-7, rtol=0)
