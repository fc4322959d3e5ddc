"""Makes runs wait for the test at a named moment, so no test depends on being quick enough.

The test holds a `Hold`. Its `environment` tells the run, in whichever process it executes, at which moments to wait;
`install`, called in that process, makes the functions in which these moments occur wait. A held run continues when the
test releases it or a signal warns it, and it can be killed while it waits.

Moments:
  reward 1              in the first call of the reward, during the first evaluation
  row 3                 the metrics row of step 3 is written, and nothing after it
  writing optimizer.pt  the weights of a checkpoint are written, its optimizer's state is not
  checkpoint 6          the checkpoint of step 6 is complete
  warm start 9          nine steps of the warm start are done
"""

import contextlib
import os
from functools import wraps
from pathlib import Path

from tests.support.waiting import alive, wait_for

MOMENTS, FOLDER = "OTB_TEST_HOLD", "OTB_TEST_HOLD_FOLDER"
UNNAMED = "a run"  # where the moment lies outside of any run directory
state = {"installed": False, "rewards": 0}


class Hold:
    """Controls from the test where runs wait and which of them may continue.

    Args:
        folder: where run and test exchange files.
        moments: names as above; a run waits at each of them.
    """

    def __init__(self, folder: Path, *moments: str):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {MOMENTS: ",".join(moments), FOLDER: str(folder)}

    def held(self) -> dict[str, int]:
        """Returns the runs that wait now: name of the run directory -> process id."""
        waiting = {}
        for file in self.folder.glob("*.held"):
            with contextlib.suppress(FileNotFoundError):  # it has just gone on
                pid = int(file.read_text())
                if alive(pid):  # a killed run leaves its file behind
                    waiting[file.stem] = pid
        return waiting

    def wait(self, process=None, run: str | None = None) -> int:
        """Waits for a held run, named `run` if given, and returns its process id.

        Raises AssertionError if `process` (of multiprocessing or subprocess) ends instead.
        """
        wait_for(lambda: run in self.held() if run else self.held(), process)
        held = self.held()
        return held[run] if run else next(iter(held.values()))

    def release(self, run: str = UNNAMED) -> None:
        """Lets the run of this name continue, now and at every later moment; without a name, every run."""
        (self.folder / f"{run}.released").touch()


def install() -> None:
    """Installs the waiting in this process, if its environment asks for it. Call it before the run begins."""
    moments = os.environ.get(MOMENTS)
    if not moments or state["installed"]:
        return
    state["installed"] = True
    if "row" in moments or "checkpoint" in moments:
        hold_in_the_run_directory()
    if "writing" in moments:
        hold_in_torch_save()
    if "warm start" in moments:
        hold_in_the_warm_start()


def hold(moment: str, run: str = UNNAMED) -> None:
    """Waits here, if the environment names this moment."""
    from experiments.running.warning_signal import received

    if moment not in os.environ.get(MOMENTS, "").split(","):
        return
    folder = Path(os.environ[FOLDER])
    aside, file = folder / f"{run}.{os.getpid()}", folder / f"{run}.held"
    aside.write_text(str(os.getpid()))
    aside.rename(file)
    released = [folder / f"{name}.released" for name in (run, UNNAMED)]
    wait_for(lambda: received() or any(name.exists() for name in released), every=0.02)
    file.unlink()


def hold_at_reward() -> None:
    """Waits at a moment `reward N`. The test's task calls it in every call of its reward."""
    state["rewards"] += 1
    hold(f"reward {state['rewards']}")


def hold_in_the_run_directory() -> None:
    from otb.records import RunDirectory

    append, publish = RunDirectory.append, RunDirectory.publish_checkpoint

    @wraps(append)
    def append_and_hold(self, file, row):
        append(self, file, row)
        if file == self.metrics_file:
            hold(f"row {row['step']}", self.path.name)

    @wraps(publish)
    def publish_and_hold(self, written, step):
        final = publish(self, written, step)
        hold(f"checkpoint {step}", self.path.name)
        return final

    RunDirectory.append, RunDirectory.publish_checkpoint = append_and_hold, publish_and_hold


def hold_in_torch_save() -> None:
    import torch

    save = torch.save

    @wraps(save)
    def hold_and_save(what, file, *args, **kwargs):
        hold(f"writing {Path(str(file)).name}")
        return save(what, file, *args, **kwargs)

    torch.save = hold_and_save


def hold_in_the_warm_start() -> None:
    from experiments.running.progress import Progress

    shown = Progress.warm_start

    @wraps(shown)
    def show_and_hold(self, step, *args):
        shown(self, step, *args)
        hold(f"warm start {step}")

    Progress.warm_start = show_and_hold
