"""Defines a task for tests of runs: arithmetic prompts, and a reward that varies even under an untrained policy."""

import os
from dataclasses import dataclass
from typing import ClassVar

from otb.tasks.arithmetic import Arithmetic
from tests.support import economy, holds

# in processes that know of the tests by this task alone
holds.install()
economy.leave_pictures_out()


@dataclass(frozen=True)
class Parity(Arithmetic):
    """Extends Arithmetic with a reward by parity; `task._target_=tests.support.parity_task.Parity` selects it."""

    name: ClassVar[str] = "parity"

    def reward(self, completions: list, **columns) -> list[float]:
        """Returns 1.0 if the sum of the response's characters is odd; infinity if OTB_TEST_INFINITE_REWARD is set.

        OTB_TEST_HOLD makes the run wait for the test (tests/support/holds.py); OTB_TEST_FAILING_RANK breaks one process
        of a run while OTB_TEST_FAILING_FILE exists.
        """
        holds.hold_at_reward()
        broken = os.path.exists(os.environ.get("OTB_TEST_FAILING_FILE", ""))
        if broken and os.environ["OTB_TEST_FAILING_RANK"] == os.environ["RANK"]:
            raise ValueError("the reward of this rank is broken")
        if "OTB_TEST_INFINITE_REWARD" in os.environ:
            return [float("inf")] * len(completions)
        return [float(sum(map(ord, messages[-1]["content"])) % 2) for messages in completions]
