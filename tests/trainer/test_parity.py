"""Tests that training computes the same as before, bit for bit: weights and every logged number.

A deliberate change updates the file with `python -m tests.support.parity tests/data/parity.json`, and also the version
of the package.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.support.commands import ROOT
from tests.support.parity import REFERENCE, RUNS, TRAININGS

EXPECTED = json.loads((ROOT / "tests" / "data" / "parity.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """Returns the digests on this machine."""
    file = tmp_path_factory.mktemp("parity") / "found.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.parity", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(file.read_text())
    if found[REFERENCE] != EXPECTED[REFERENCE]:
        pytest.skip("TRL's own trainer computes other bits on this machine than on the one that wrote parity.json")
    return found


def test_the_file_has_every_configuration():
    assert EXPECTED.keys() == {REFERENCE, *TRAININGS, *RUNS}


@pytest.mark.parametrize("name", [*TRAININGS, *RUNS])
def test_a_configuration_trains_as_before(name, found):
    assert found[name] == EXPECTED[name], "[weights, everything that was logged]"
