"""Hand-made runs for the tests of the renderers: what an analysis would have found, without a trace."""

from __future__ import annotations

from dataclasses import replace

from overlap_probe.results import Analysis, Collective, Finding, Lane, Phase, RunAnalysis, Totals, Verdict, Window

US = 1_000
"""Nanoseconds."""


def totals(*collectives: Collective) -> Totals:
    """Totals of collectives that do not overlap one another, so that unions are sums."""
    return Totals(
        count=len(collectives),
        overlapped_by_gemm=sum(c.overlapped for c in collectives),
        time_ns=sum(c.time_ns for c in collectives),
        hidden_ns=sum(c.hidden_ns for c in collectives),
        hidden_by_gemm_ns=sum(c.hidden_by_gemm_ns for c in collectives),
        exposed_ns=sum(c.exposed_ns for c in collectives),
        stalled_ns=sum(c.stalled_ns for c in collectives),
    )


def collective(index: int, start_us: int, time_us: int, hidden_us: int, **changes: object) -> Collective:
    """An all-gather of unit ``layers.INDEX``; all that is hidden is hidden by GEMMs, all that is exposed stalls."""
    start, time, hidden = start_us * US, time_us * US, hidden_us * US
    made = Collective(
        op="all_gather",
        unit=f"layers.{index}",
        phase="forward",
        mechanism="sm",
        found_by="operation",
        start_ns=start,
        end_ns=start + time,
        launch_ns=start - 15 * US,
        queue_ns=15 * US,
        time_ns=time,
        hidden_ns=hidden,
        hidden_by_gemm_ns=hidden,
        exposed_ns=time - hidden,
        stalled_ns=time - hidden,
        overlapped=hidden > 0,
        pass_index=0,
        name="ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        streams=(20,),
        index=index,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def window(name: str, *collectives: Collective, compute_us: int = 1600) -> Window:
    """A window of one pass: n units below the root expect n - 1 overlaps."""
    gathers = [c for c in collectives if c.op == "all_gather" and c.phase == "forward"]
    back = [c for c in collectives if c.op == "all_gather" and c.phase == "backward"]
    reduces = [c for c in collectives if c.op == "reduce_scatter"]
    n = len(gathers)
    return Window(
        name=name,
        communication=totals(*collectives),
        by_op={"all_gather": totals(*gathers, *back), "reduce_scatter": totals(*reduces)},
        compute_ns=compute_us * US,
        gemm_ns=compute_us * US,
        forward=Phase(totals(*gathers), totals(), n, n - 1 if n > 1 else None, sum(c.overlapped for c in gathers)),
        backward=Phase(
            totals(*back),
            totals(*reduces),
            len(back),
            len(back) - 1 if len(back) > 1 else None,
            sum(c.overlapped for c in back),
            len(reduces) - 1 if len(reduces) > 1 else None,
            sum(c.overlapped for c in reduces),
        ),
        collectives=tuple(collectives),
    )


def step(at_us: int, *hidden_us: int, time_us: int = 200, backward: bool = False) -> list[Collective]:
    """Gathers every 400 us, each hidden for so long; ``backward`` adds re-gathers, and a reduce after each."""
    made = [
        collective(
            i,
            at_us + 400 * i,
            time_us,
            hidden,
            cause=None if hidden == time_us else "first" if i == 0 else "late_launch",
            evidence=None
            if hidden == time_us
            else f"launched 15.00 us before it starts, exposed {time_us - hidden} us",
        )
        for i, hidden in enumerate(hidden_us)
    ]
    if backward:
        n, later = len(made), at_us + 400 * len(made)
        made += [
            collective(n + i, later + 400 * i, time_us, hidden, phase="backward", unit=f"layers.{n - 1 - i}")
            for i, hidden in enumerate(hidden_us)
        ]
        made += [
            collective(
                2 * n + i,
                later + 400 * i + time_us,
                100,
                100,
                phase="backward",
                op="reduce_scatter",
                unit=f"layers.{n - 1 - i}",
                streams=(24,),
            )
            for i in range(n)
        ]
    return made


def lanes(*collectives: Collective) -> tuple[Lane, ...]:
    """GEMMs of 390 us on stream 7 from the end of each gather on, and the collectives on their own streams."""
    gathers = [c for c in collectives if c.op == "all_gather"]
    made = [
        Lane(7, "gemm", tuple(c.end_ns + US for c in gathers), tuple(c.end_ns + 330 * US for c in gathers)),
        Lane(7, "compute", tuple(c.end_ns + 340 * US for c in gathers), tuple(c.end_ns + 380 * US for c in gathers)),
    ]
    for op in sorted({c.op for c in collectives}):
        of_op = [c for c in collectives if c.op == op]
        made.append(Lane(of_op[0].streams[0], op, tuple(c.start_ns for c in of_op), tuple(c.end_ns for c in of_op)))
    return tuple(made)


def analysis(rank: int | None, steps: dict[str, list[Collective]], **changes: object) -> Analysis:
    """A rank of two with these steps; ``whole`` holds all of them."""
    everything = [c for collectives in steps.values() for c in collectives]
    made = Analysis(
        path=f"/home/someone/out/rank{rank}.json.gz",
        format="kineto",
        rank=rank,
        world_size=2,
        windows={"whole": window("whole", *everything), **{n: window(n, *cs) for n, cs in steps.items()}},
        device_name="NVIDIA H200",
        lanes=lanes(*next(iter(steps.values()), ())),
        pictured=next(iter(steps), "whole"),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def run_of_two(*, backward: bool = False, **changes: object) -> RunAnalysis:
    """Rank 0 overlaps 3 of 3 in both steps, rank 1 only 1 of 3 in step1.

    Rank 1, step1, forward: 4 gathers of 200 us, hidden 0 + 200 + 0 + 0: 200 of 800 us are 25 %, 600 us exposed.
    """
    ranks = (
        analysis(0, {"step0": step(0, 0, 200, 200, 200, backward=backward), "step1": step(9000, 0, 200, 200, 150)}),
        analysis(1, {"step0": step(0, 0, 200, 200, 200, backward=backward), "step1": step(9000, 0, 200, 0, 0)}),
    )
    made = RunAnalysis(
        ranks=ranks,
        record={
            "command": "overlap_probe run --nproc 2",
            "versions": {"torch": "2.11.0+cu130"},
            "output": "/home/someone/out",
        },
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def overlaps(rank: int, window: str, found: int, **changes: object) -> Finding:
    """What `overlaps >= auto` finds where 3 are expected."""
    made = Finding(
        check="overlaps >= auto",
        status="pass" if found >= 3 else "fail",
        message=f"{found} of 3 expected all-gathers overlap a GEMM",
        rank=rank,
        trace=f"/home/someone/out/rank{rank}.json.gz",
        window=window,
        value=found,
        limit=3,
        evidence=()
        if found >= 3
        else ("layers.2: exposed 200.0 us, late_launch", "layers.3: exposed 200.0 us, late_launch"),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def failing_verdict() -> Verdict:
    """The verdict on `run_of_two`: rank 1 fails in step1."""
    found = {(0, "step0"): 3, (0, "step1"): 3, (1, "step0"): 3, (1, "step1"): 1}
    return Verdict("fail", tuple(overlaps(rank, name, n) for (rank, name), n in found.items()))


def passing_verdict() -> Verdict:
    """Two ranks of one step, both hold."""
    return Verdict("pass", (overlaps(0, "step0", 3), overlaps(1, "step0", 3)))


NASTY = "<script>alert('x')</script> \x1b[31m \x00 \ud800 ../../etc/x | `_*[a](b) & \"q\" \n </script>"
"""A name that tries to leave every format that it is put into."""


def nasty_run() -> RunAnalysis:
    """One rank, whose every text is NASTY."""
    bad = [collective(0, 0, 200, 0, unit=NASTY, name=NASTY, evidence=NASTY, cause="unknown", waited_for="sm")]
    return RunAnalysis(
        ranks=(
            analysis(
                0, {NASTY: bad}, path=f"/secret/folder/{NASTY}", notes=(NASTY,), incomplete=(NASTY,), device_name=NASTY
            ),
        ),
        problems=(NASTY,),
        record={NASTY: NASTY},
    )


def nasty_verdict() -> Verdict:
    return Verdict("fail", (overlaps(0, NASTY, 0, check=f"overlaps >= {NASTY}", message=NASTY, evidence=(NASTY,)),))


def starved(hidden: tuple[int, ...], *units: int) -> RunAnalysis:
    """A run of two steps in which these units missed their overlap because a thread had no core."""
    steps = {
        f"step{at}": [
            replace(c, starved_ns=90 * US, cause="unknown") if c.index in units else c for c in step(9000 * at, *hidden)
        ]
        for at in range(2)
    }
    return RunAnalysis((analysis(0, steps),))
