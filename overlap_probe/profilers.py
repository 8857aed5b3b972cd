"""Who records the ranks of a run: torch.profiler inside each, or Nsight Systems around each.

The idea: to the launcher a profiler is an object that says what to start for a rank, what file that leaves, and how to
clean up after it; nothing else in the launcher asks which one it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from overlap_probe import nsys_command, torch_recording
from overlap_probe.errors import LaunchError, OverlapProbeError
from overlap_probe.job import Job
from overlap_probe.whole_file import remove_unfinished


class Profiler(Protocol):
    """How ranks are recorded."""

    ending: str
    """Of the file ``rank{R}...`` that each rank leaves in the run's folder."""
    rank_module: str
    """Its ``main`` is what torch's launcher starts for each rank."""

    def versions(self) -> dict[str, str]:
        """Its own versions, beside torch's. Raises LaunchError if it cannot be used here."""

    def be_rank(self, job: Job, rank: int) -> None:
        """Run the job in this process, which some launcher has made the rank. Raises LaunchError if it ends badly."""

    def clean_up(self, job: Job, rank: int) -> None:
        """End what is left of a rank that has ended, and remove what it has not finished."""


class TorchProfiler:
    """torch.profiler, inside each rank's process."""

    ending = torch_recording.ENDING
    rank_module = "overlap_probe.worker"

    def versions(self) -> dict[str, str]:
        return {}

    def be_rank(self, job: Job, rank: int) -> None:
        from overlap_probe.worker import run_rank

        run_rank(job.options, job.folder, job.device)

    def clean_up(self, job: Job, rank: int) -> None:
        remove_unfinished(job.folder / f"rank{rank}{self.ending}")


class NsysProfiler:
    """Nsight Systems, around each rank's process."""

    ending = nsys_command.ENDING
    rank_module = "overlap_probe.nsys_rank"

    def versions(self) -> dict[str, str]:
        return {"nsys": nsys_command.nsys_version()}

    def be_rank(self, job: Job, rank: int) -> None:
        from overlap_probe.nsys_rank import record
        from overlap_probe.ranks_at_work import how_it_ended, last_lines

        try:
            code = record(job, rank)
        except OverlapProbeError as error:
            raise LaunchError(f"rank {rank} failed ({error})") from error
        if code:
            fate = how_it_ended(128 - code if code > 128 else code)
            raise LaunchError(f"rank {rank} {fate}\n{last_lines(job.logs / f'rank{rank}.log', 'its last lines')}")

    def clean_up(self, job: Job, rank: int) -> None:
        from overlap_probe.nsys_rank import clean_up

        clean_up(job, rank)


PROFILERS: Mapping[str, Profiler] = {"torch": TorchProfiler(), "nsys": NsysProfiler()}
"""By the name in ``--profiler``."""
