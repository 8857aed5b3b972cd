"""What a cause of exposure means, what to do about it, and what the numbers of a report are.

The idea: one sentence each, in literal tables, so that every format says the same thing about the same word. The words
are those of the design, section 3; the advice is what was measured to help.
"""

from __future__ import annotations

CAUSE_MEANING: dict[str, str] = {
    "first": "It is the first all-gather of its pass: nothing computes yet that could hide it.",
    "peer_wait": "Most of its exposed time is waiting for a rank that arrives later, not moving bytes.",
    "late_launch": "It started as soon as the host launched it, but the host launched it too late.",
    "sm_contention": "Launched in time, it found free SMs only in the tail of a compute kernel that fills the device.",
    "dependency": "Launched in time, it was made to wait for work on another stream, and started when that ended.",
    "longer_than_compute": "It covers all of the compute that it is paired with, and is longer.",
    "serial": "It runs on the compute stream, so nothing can compute while it does.",
    "unknown": "The timeline shows none of the known causes; nothing is guessed.",
}
"""What the timeline shows, one line a cause."""

CAUSE_ADVICE: dict[str, str] = {
    "first": "Expected once a pass. Keep the first unit small, or give it other work to run beside.",
    "peer_wait": "Look at the rank that arrives last: balance its input, its host work and the collectives before.",
    "late_launch": "Cut host time before the gather: prefetch further ahead, make units fewer and larger, or compile.",
    "sm_contention": "Gather by copy engine (NCCL zero-CTA, in place), or leave SMs free for the gather's kernel.",
    "dependency": "Find the event it waits for, often a release or a copy: record it earlier, or on another stream.",
    "longer_than_compute": "Give it more to hide behind (a larger batch), gather faster, or reshard less often.",
    "serial": "Issue it on a stream of its own, before the preceding unit computes.",
    "unknown": "Compare it with its neighbours in the timeline; profile with shapes and on every rank to see more.",
}
"""What to do about it, one line a cause."""

WAITED_FOR: dict[str, str] = {
    "sm": "for free SMs",
    "peer": "for another rank",
    "dependency": "for work on another stream",
}
"""What an all-gather in a long queue waited for, whether or not it was exposed."""

DEFINITIONS: dict[str, str] = {
    "window": "The stretch that a row counts: a training step, or the whole trace where no step is marked. "
    "An activity belongs to the window in which the host launched it.",
    "count": "Collectives of the row. One call is one, however many kernels or copies it takes.",
    "expected": "n - 1 for n units below the root that gathered (or reduced) in a pass, summed over passes: "
    "the first (or last) has nothing to hide behind. Absent where there is at most one.",
    "overlapped": "How many ran beside a GEMM for longer than the minimum overlap: of the units that count for "
    "what is expected, or of all where nothing is expected.",
    "time": "Length of the union of the collectives: two at once count once.",
    "hidden": "The part of that time in which any compute kernel ran beside it, as a share of the time.",
    "exposed": "Time less hidden: the collective ran and nothing computed.",
    "stalled": "The part of the exposed time in which the rank's compute streams stood idle: what it really cost.",
    "slowdown": "How much longer GEMMs ran with a collective beside them than comparable GEMMs without. "
    "Absent where no comparable GEMM ran alone.",
    "net hidden": "Hidden less slowdown: overlap is not speed-up.",
    "queue": "From its launch, or the end of what preceded on its stream if that is later, to its start: "
    "launched, its stream free, and still not started.",
    "wait": "What the same collective took longer here than on the fastest rank: it waited for a peer.",
}
"""The numbers of a report, in the order of its columns (design, section 3)."""

WHAT_IF: dict[str, str] = {
    "all_hidden": "all gathers hidden",
    "no_waits": "no waits for other ranks",
    "no_slowdown": "no slowdown of GEMMs",
    "host_in_time": "host always in time",
}
"""The changes with which a pass is replayed, by the fields of `results.WhatIf` without their unit."""

WHAT_IF_ASSUMES = (
    "Each pass is replayed on all ranks with one thing different: all gathers that can be are hidden, no rank waits "
    "for another, no GEMM is slowed down, or the host launches everything before it could start. Else the host "
    "launches when it did, and what was seen to wait for something still does. The changes do not add up."
)
"""What a prediction rests on (`what_if`)."""
