"""The lock of a run directory: one writer, whatever the processes before it died of."""

import json
import multiprocessing
import os
import subprocess
import sys
import time

import psutil
import pytest

from experiments.running import run_lock
from experiments.running.run_lock import DEAD_AFTER_SECONDS, RunLock, restarts
from otb.errors import RunError
from otb.records.lock_file import machine, read_lock
from tests.support.waiting import PATIENCE_SECONDS, wait_for


def lock_of(folder, **facts):
    """Writes a lock as another process would have left it; heartbeat_age: seconds."""
    age = facts.pop("heartbeat_age", 0.0)
    known = {"token": "theirs", "host": "node7", "machine": "another", "pid": 1, "process_started": 0.0, "job": None}
    (folder / "lock.json").write_text(json.dumps(known | {"job_restarts": 0} | facts))
    os.utime(folder / "lock.json", (time.time() - age, time.time() - age))


def test_lock_is_there_while_held_and_gone_afterwards(tmp_path):
    with RunLock(tmp_path) as lock:
        assert lock.held()
        assert read_lock(lock.file)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_lock_of_a_living_process_on_this_machine_is_refused_whatever_its_heartbeat(tmp_path):
    me = psutil.Process()
    lock_of(tmp_path, machine=machine(), pid=me.pid, process_started=me.create_time(), heartbeat_age=1e6)
    with pytest.raises(RunError, match=f"in use by process {me.pid} on node7.*Wait for it"), RunLock(tmp_path):
        pass
    assert read_lock(tmp_path / "lock.json")["token"] == "theirs"


def test_lock_of_a_dead_process_on_this_machine_is_taken_over_at_once(tmp_path):
    gone = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    gone.start()
    started = psutil.Process(gone.pid).create_time()
    gone.join()
    lock_of(tmp_path, machine=machine(), pid=gone.pid, process_started=started)
    with RunLock(tmp_path) as lock:
        assert lock.held()


def test_a_process_that_ended_and_was_not_waited_for_holds_no_lock(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    started = psutil.Process(ended.pid).create_time()
    wait_for(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
    lock_of(tmp_path, machine=machine(), pid=ended.pid, process_started=started)
    try:
        with RunLock(tmp_path) as lock:
            assert lock.held()
    finally:
        ended.wait()


def test_lock_of_a_recycled_process_id_is_taken_over(tmp_path):
    lock_of(tmp_path, machine=machine(), pid=os.getpid(), process_started=12345.0)
    with RunLock(tmp_path) as lock:
        assert lock.held()


def test_lock_of_another_host_is_decided_by_its_heartbeat(tmp_path):
    lock_of(tmp_path, pid=os.getpid(), heartbeat_age=DEAD_AFTER_SECONDS / 10)
    with pytest.raises(RunError, match="on node7"), RunLock(tmp_path):
        pass
    lock_of(tmp_path, heartbeat_age=DEAD_AFTER_SECONDS * 10)
    with RunLock(tmp_path) as lock:
        assert lock.held()


def test_lock_of_another_host_is_not_judged_by_this_hosts_clock(tmp_path, monkeypatch):
    lock_of(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # decades behind the file system's
    with pytest.raises(RunError, match="on node7"), RunLock(tmp_path):
        pass


def test_lock_of_a_requeued_jobs_earlier_start_is_taken_over_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lock_of(tmp_path, job="42", job_restarts=0)
    with RunLock(tmp_path) as lock:
        assert lock.held()
    lock_of(tmp_path, job="42", job_restarts=1)  # another task of this very start
    with pytest.raises(RunError, match="on node7"), RunLock(tmp_path):
        pass


def test_restarts_are_those_that_a_launcher_counted_or_else_slurm(monkeypatch):
    monkeypatch.delenv("OTB_RESTARTS", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert restarts() == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert restarts() == 1
    monkeypatch.setenv("OTB_RESTARTS", "0")  # the first start of a run in a job that had been requeued for others
    assert restarts() == 0
    monkeypatch.setenv("OTB_RESTARTS", "3")
    assert restarts() == 3


def test_damaged_lock_is_taken_over(tmp_path):
    (tmp_path / "lock.json").write_text("")
    with RunLock(tmp_path) as lock:
        assert lock.held()


def test_heartbeat_goes_on_while_the_lock_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.02)
    with RunLock(tmp_path) as lock:
        os.utime(lock.file, (0, 0))
        wait_for(lambda: lock.file.stat().st_mtime > 0)
        assert lock.held()


def test_lock_that_was_taken_over_is_left_to_its_new_holder(tmp_path):
    with RunLock(tmp_path) as lock:
        lock_of(tmp_path)
        assert not lock.held()
    assert read_lock(tmp_path / "lock.json")["token"] == "theirs"


def test_unwritable_folder_is_a_clear_error(tmp_path):
    with pytest.raises(RunError, match="cannot be written: .*choose another runs_dir"), RunLock(tmp_path / "missing"):
        pass


def hold(folder, gate, results, everyone_tried):
    gate.wait()
    try:
        with RunLock(folder) as lock:
            results.put("taken")
            everyone_tried.wait(PATIENCE_SECONDS)
            results.put("held" if lock.held() else "lost")
    except RunError:
        results.put("refused")


def test_of_many_processes_that_find_a_dead_lock_one_holds_it_and_no_other_goes_on(tmp_path):
    """Two may take it within a moment; the first of them then knows that it has lost it, before it writes a row."""
    context = multiprocessing.get_context("fork")
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        lock_of(folder, heartbeat_age=2 * DEAD_AFTER_SECONDS)
        gate, results, everyone_tried = context.Barrier(8), context.Queue(), context.Event()
        processes = [context.Process(target=hold, args=(folder, gate, results, everyone_tried)) for _ in range(8)]
        for process in processes:
            process.start()
        first = [results.get(timeout=PATIENCE_SECONDS) for _ in processes]
        assert set(first) == {"taken", "refused"}
        everyone_tried.set()
        last = [results.get(timeout=PATIENCE_SECONDS) for outcome in first if outcome == "taken"]
        assert last.count("held") == 1 and set(last) <= {"held", "lost"}
        for process in processes:
            process.join()
        assert list(folder.iterdir()) == []
