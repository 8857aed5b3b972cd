"""Real ranks that die, hang or are stopped: who is named, how soon everything has ended, and what stays.

The idea: each rank starts a child of its own and leaves both process ids behind; in the end none of them may live.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent
SOON_S = 5.0

RANK = """
    import os, signal, subprocess, sys, time
    import torch
    rank = os.environ["RANK"]
    child = subprocess.Popen(["sleep", "300"])
    def note(name, text):
        with open(name + ".part", "w") as file:
            file.write(text)
        os.rename(name + ".part", name)
    note(f"pids{rank}", f"{os.getpid()} {child.pid}")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train(steps):
        for _ in range(steps):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
"""
LAUNCH = """
    import sys; sys.path.insert(0, {root!r})
    from overlap_probe.launch import LaunchError, LaunchInterrupted, LaunchOptions, run
    try:
        run(LaunchOptions(out="out", warmup=1, steps=2, timeout={timeout}, script=("script.py",)))
    except LaunchInterrupted as stopped:
        print(stopped); sys.exit(100 + stopped.signal_number)
    except LaunchError as error:
        print(error); sys.exit(2)
"""


def lives(process: int) -> bool:
    """A zombie that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, f"waited {seconds} s for {what}"
        time.sleep(0.05)


class Launch:
    """A launcher in a process of its own, whose ranks run ``body`` after RANK."""

    def __init__(self, folder: Path, body: str, timeout: float = 100) -> None:
        self.folder = folder
        (folder / "script.py").write_text(textwrap.dedent(RANK) + textwrap.dedent(body))
        program = textwrap.dedent(LAUNCH.format(root=str(ROOT), timeout=timeout))
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def wait_for(self, *names: str) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return all((self.folder / name).exists() for name in names)

        wait_until(there, 120, " and ".join(names))

    def pids(self, rank: int) -> list[int]:
        return [int(word) for word in (self.folder / f"pids{rank}").read_text().split()]

    def ends(self, seconds: float = SOON_S) -> tuple[int, str]:
        """Exit code and output; fails unless the launcher ends in time and nothing that it started lives on."""
        text, _ = self.process.communicate(timeout=seconds)
        self.nothing_lives(1.0)
        return self.process.returncode, text

    def nothing_lives(self, seconds: float) -> None:
        pids = [pid for rank in (0, 1) for pid in self.pids(rank)]
        wait_until(lambda: not any(map(lives, pids)), seconds, f"the end of {pids}")

    def clean_up(self) -> None:
        self.process.kill()
        self.process.communicate()
        for rank in (0, 1):
            for pid in self.pids(rank) if (self.folder / f"pids{rank}").exists() else []:
                if lives(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(body: str, timeout: float = 100) -> Launch:
        launches.append(Launch(tmp_path, body, timeout))
        return launches[-1]

    yield start
    for started in launches:
        started.clean_up()


def test_killed_rank_is_named_and_takes_everything_with_it(launch: Callable[..., Launch], tmp_path: Path) -> None:
    started = launch(
        """
        train(9 if rank == "0" else 2)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"rank {rank} is in its epoch 7", flush=True)
        note(f"ready{rank}", "")
        time.sleep(300)
        """
    )
    started.wait_for("ready0", "ready1", "out/rank0.json.gz")
    os.kill(started.pids(1)[0], signal.SIGKILL)
    code, text = started.ends()
    assert code == 2
    assert text.startswith("rank 1 was killed by SIGKILL\n")
    assert "rank 1 is in its epoch 7" in text
    assert "rank 0" not in text
    # What rank 0 had written stays; of rank 1, which was in its second step, nothing is left.
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logs", "rank0.json.gz"]


def test_hanging_rank_is_named_with_the_line_where_it_hangs(launch: Callable[..., Launch]) -> None:
    started = launch(
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        train(2)
        print(f"rank {rank} has trained", flush=True)
        note(f"ready{rank}", "")
        if rank == "1":
            time.sleep(300)  # the line to be shown
        dist.all_reduce(torch.ones(1))
        """,
        timeout=3,
    )
    started.wait_for("ready0", "ready1")
    code, text = started.ends(3 + SOON_S)
    assert code == 2
    assert text.startswith("rank 1 gave no sign of life for 3 s (--timeout)\n")
    line = (started.folder / "script.py").read_text().splitlines().index(
        "    time.sleep(300)  # the line to be shown"
    ) + 1  # fmt: skip
    assert f'it is now in (innermost first):\n    File "script.py", line {line} in <module>\n' in text
    assert "    rank 1 has trained\n" in text


def test_interrupted_launcher_ends_even_ranks_that_refuse(launch: Callable[..., Launch]) -> None:
    started = launch(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        train(2)
        print(f"rank {rank} is busy", flush=True)
        note(f"ready{rank}", "")
        time.sleep(300)
        """
    )
    started.wait_for("ready0", "ready1")
    started.process.send_signal(signal.SIGINT)
    code, text = started.ends()
    assert code == 100 + signal.SIGINT
    assert text.startswith("stopped by SIGINT\nrank 0's last report was 'step 2/2'")
    assert "rank 0 is busy" in text
    assert "rank 1 is busy" in text


def test_killed_launcher_leaves_no_orphan(launch: Callable[..., Launch]) -> None:
    started = launch(
        """
        note(f"ready{rank}", "")
        if rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)  # a rank that can do nothing about it itself
        time.sleep(300)
        """
    )
    started.wait_for("ready0", "ready1")
    started.process.kill()
    started.process.wait()
    started.nothing_lives(SOON_S)
