"""What the sampler records of threads that wait for a core, by made-up counters and by real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlap_probe import run_queue
from overlap_probe.run_queue import PERIOD_SECONDS, RunQueueSampler


def count(tasks: Path, task: str, waited_ns: int) -> None:
    """The system has counted so much: time on a core, time waited for one, turns."""
    (tasks / task).mkdir(parents=True, exist_ok=True)
    (tasks / task / "schedstat").write_text(f"123 {waited_ns} 9\n")


def wait_for_a_look() -> None:
    time.sleep(20 * PERIOD_SECONDS)


def test_each_growth_of_a_counter_is_a_wait_that_ended_then(tmp_path: Path) -> None:
    count(tmp_path, "7", 1_000)
    count(tmp_path, "8", 5_000)
    sampler = RunQueueSampler(tmp_path)
    began = time.time_ns()
    sampler.start()
    count(tmp_path, "9", 4_000)  # a thread that began meanwhile: what it waited before is of no interest
    wait_for_a_look()
    count(tmp_path, "7", 4_000)
    wait_for_a_look()
    count(tmp_path, "7", 4_000 + 10**9)
    count(tmp_path, "9", 4_001)
    made = sampler.stop()
    ended = time.time_ns()
    assert made is not None
    assert json.loads(json.dumps(made))["process"] == made["process"]
    assert (made["process"], set(made["waits"])) == (os.getpid(), {"7", "9"})
    short, long = made["waits"]["7"]
    assert (short[2], long[2]) == (3_000, 10**9)
    assert began <= short[0] < short[1] <= long[1] <= ended
    # It may have begun as soon as the one before it had ended, and that may have been right after the look before.
    assert short[0] < long[0] == short[0] + 3_000


def test_a_wait_may_have_ended_right_after_the_look_before_and_begun_as_long_before_as_it_lasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_queue, "PERIOD_SECONDS", 60.0)  # on a busy machine the sampler waits for a core, too
    count(tmp_path, "7", 0)
    sampler = RunQueueSampler(tmp_path)
    sampler.start()
    looked = time.time_ns()
    time.sleep(0.05)
    count(tmp_path, "7", 30_000_000)
    made = sampler.stop()
    assert made is not None
    ((start, end, waited),) = made["waits"]["7"]
    assert waited == 30_000_000
    assert end >= looked + 50_000_000
    assert start <= looked - 30_000_000


def test_a_sampler_that_is_late_between_reading_and_the_clock_dates_no_later_wait_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, after_reading = [1_000], [0]
    read = os.pread

    def pread(*arguments: int) -> bytes:
        read_now = read(*arguments)
        clock[0] += after_reading[0]
        return read_now

    monkeypatch.setattr(run_queue.os, "pread", pread)
    monkeypatch.setattr(run_queue.time, "time_ns", lambda: clock[0])
    sampler = RunQueueSampler(tmp_path)
    count(tmp_path, "7", 0)
    sampler._look()
    clock[0], after_reading[0] = 1_005, 25  # nothing counted yet at 1005, and the clock asked at 1030
    sampler._look()
    clock[0], after_reading[0] = 1_035, 0
    count(tmp_path, "7", 20)  # from 1003 to 1023
    sampler._look()
    ((start, end, waited),) = sampler._waits["7"]
    assert waited == 20
    assert start <= 1_003 < 1_023 <= end


def test_a_thread_that_ends_takes_nothing_with_it(tmp_path: Path) -> None:
    count(tmp_path, "7", 1_000)
    sampler = RunQueueSampler(tmp_path)
    sampler.start()
    count(tmp_path, "7", 2_000)
    wait_for_a_look()
    (tmp_path / "7" / "schedstat").write_text("")
    wait_for_a_look()
    made = sampler.stop()
    assert made is not None
    assert [waited for _, _, waited in made["waits"]["7"]] == [1_000]
    assert sampler.stop() == made


@pytest.mark.parametrize("files", [{}, {"7/status": "Name: x"}, {"7/schedstat": ""}, {"7/schedstat": "0\n"}])
def test_where_the_system_does_not_count_nothing_is_recorded(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    tasks = tmp_path if files else tmp_path / "none"
    sampler = RunQueueSampler(tasks)
    sampler.start()
    assert sampler.stop() is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count")
def test_threads_that_share_one_core_wait_and_a_thread_that_sleeps_does_not() -> None:
    code = """
import json, os, sys, threading, time
from overlap_probe import run_queue
from overlap_probe.run_queue import RunQueueSampler
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.fork() == 0:
    until = time.time() + 0.6
    while time.time() < until:
        pass
    os._exit(0)
asleep = threading.Thread(target=time.sleep, args=(0.5,))
asleep.start()
sampler = RunQueueSampler()
sampler.start()
until = time.time() + 0.5
while time.time() < until:
    pass
waits = sampler.stop()["waits"]
total = {name: sum(waited for _, _, waited in waits.get(str(task), [])) / 1e9
         for name, task in (("busy", os.getpid()), ("asleep", asleep.native_id))}
print(json.dumps(total))
"""
    root = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    total = json.loads(done.stdout)
    # Two processes share a core for 0.5 s: each waits for about half of it, for more if others want it too.
    assert 0.1 < total["busy"] < 0.6
    assert total["asleep"] < 0.1
