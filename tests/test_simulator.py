"""The device simulator: each gate, each resource, and what follows from them, on hand-made task lists (times in ns)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_probe.simulator import Room, Task, simulate

SMS = {"sms": 132}


def gemm(work_ns: int, *, tail_ns: int = 0) -> Task:
    """A persistent kernel that fills the device and leaves 36 SMs free in its tail."""
    return Task("compute", work_ns, room=Room("sms", 132, True, tail_ns, tail_amount=96, short_speed=0.8))


def ring(work_ns: int, *, sms: int = 24, earliest_ns: int = 0) -> Task:
    return Task("gather", work_ns, earliest_ns=earliest_ns, room=Room("sms", sms))


def spans(*tasks: Task) -> list[tuple[int, int]]:
    return [(r.start_ns, r.end_ns) for r in simulate(tasks, SMS)]


def test_tasks_of_a_queue_run_one_after_another() -> None:
    assert spans(Task("a", 10), Task("b", 3), Task("a", 5)) == [(0, 10), (0, 3), (10, 15)]


def test_a_task_waits_for_what_it_comes_after_even_if_that_is_later_in_the_list() -> None:
    assert spans(Task("a", 10, after=(1,)), Task("b", 7, after=(2,)), Task("c", 5)) == [(12, 22), (5, 12), (0, 5)]


def test_a_host_launches_and_synchronises_like_any_queue() -> None:
    """Two calls of 4 ns, a kernel of 100 ns launched by the first with 2 ns of latency, then a synchronisation."""
    ran = simulate(
        [
            Task("host", 4),
            Task("compute", 100, after=(0,), delay_ns=2),
            Task("host", 4),
            Task("host", 0, after=(1,)),
            Task("host", 4),
        ],
        {},
    )
    assert [(r.start_ns, r.end_ns) for r in ran] == [(0, 4), (6, 106), (4, 8), (106, 106), (106, 110)]


def test_each_gate_says_when_it_opened() -> None:
    ran = simulate([Task("a", 10), Task("b", 30), Task("a", 5, after=(1,), delay_ns=2)], {})[2]
    assert (ran.queue_free_ns, ran.after_ns, ran.ready_ns, ran.start_ns) == (10, 30, 32, 32)


def test_a_task_does_not_start_before_its_earliest_time() -> None:
    assert spans(Task("a", 10, earliest_ns=50), Task("a", 10, earliest_ns=20)) == [(50, 60), (60, 70)]


def test_a_ring_starts_only_in_the_tail_of_a_kernel_that_fills_the_device() -> None:
    """350 ns of which the last 45 leave room: the ring, ready at 20, starts at 305 and the kernel loses nothing."""
    assert spans(gemm(350, tail_ns=45), ring(100, earliest_ns=20)) == [(0, 350), (305, 405)]


def test_without_a_tail_a_ring_waits_for_the_end_and_comes_before_the_next_kernel() -> None:
    """The next kernel starts beside it with 108 of 132 SMs: 100 ns at 0.8 do 80, the other 220 take 220."""
    assert spans(gemm(350), ring(100, earliest_ns=20), gemm(300)) == [(0, 350), (350, 450), (350, 670)]


def test_a_tail_with_too_few_free_sms_is_no_room() -> None:
    assert spans(gemm(350, tail_ns=45), ring(100, sms=40, earliest_ns=20)) == [(0, 350), (350, 450)]


def test_a_kernel_that_starts_beside_a_ring_takes_all_sms_when_that_is_over() -> None:
    """Beside the ring until 100: 80 done; 220 left of 300."""
    assert spans(ring(100), gemm(300)) == [(0, 100), (0, 320)]


def test_a_tail_is_not_slowed_by_the_ring_that_starts_in_it() -> None:
    """305 full, then the tail of 45 beside the ring, which goes on alone; the next kernel is short until 405."""
    first, second, third = spans(gemm(350, tail_ns=45), ring(100), gemm(100))
    assert (first, second) == ((0, 350), (305, 405))
    assert third == (350, 461)  # 55 ns at 0.8 do 44; 56 are left


def test_what_has_too_few_sms_takes_those_that_come_free_before_what_waits() -> None:
    """Two rings on one stream: the kernel beside the first takes its SMs, so the second waits for the kernel's end."""
    assert spans(ring(100), gemm(300), ring(50)) == [(0, 100), (0, 320), (320, 370)]


def test_kernels_of_a_collective_start_apart_and_end_together() -> None:
    ran = simulate([Task("rank 0", 100, meets="call"), Task("rank 1", 100, earliest_ns=40, meets="call")], {})
    assert [(r.start_ns, r.met_ns, r.end_ns) for r in ran] == [(0, 40, 140), (40, 40, 140)]


def test_copies_behind_a_meeting_start_together_and_may_end_apart() -> None:
    tasks = [
        Task("rank 0", 0, meets="call"),
        Task("rank 0", 70),
        Task("rank 1", 0, earliest_ns=40, meets="call"),
        Task("rank 1", 100),
    ]
    assert spans(*tasks) == [(0, 40), (40, 110), (40, 40), (40, 140)]


def test_a_rank_that_waits_for_its_peers_holds_its_sms() -> None:
    tasks = [
        Task("gather 0", 50, room=Room("sms", 132), meets="call"),
        Task("compute 0", 10, room=Room("sms", 132, elastic=True)),
        Task("gather 1", 50, earliest_ns=100, meets="call"),
    ]
    assert spans(*tasks) == [(0, 150), (150, 160), (100, 150)]


def test_copy_engines_are_a_resource_like_any_other() -> None:
    copies = [Task(f"stream {n}", 10, room=Room("copy engines", 1)) for n in range(3)]
    ran = simulate(copies, {"copy engines": 2})
    assert [(r.start_ns, r.end_ns) for r in ran] == [(0, 10), (0, 10), (10, 20)]


def test_devices_do_not_share_their_sms() -> None:
    tasks = [Task(f"rank {n}", 10, room=Room(("sms", n), 132)) for n in range(2)]
    assert [r.start_ns for r in simulate(tasks, {("sms", 0): 132, ("sms", 1): 132})] == [0, 0]


@pytest.mark.parametrize(
    "tasks",
    [
        [Task("a", 1, after=(1,)), Task("b", 1, after=(0,))],
        [Task("a", 1, after=(1,)), Task("a", 1)],
        [Task("a", 1, room=Room("sms", 133))],
        [Task("a", 1, meets="x"), Task("b", 1, meets="y"), Task("a", 1, meets="y"), Task("b", 1, meets="x")],
    ],
    ids=["a circle", "after what is behind it in its queue", "more room than there is", "collectives in another order"],
)
def test_what_can_never_run_is_an_error(tasks: list[Task]) -> None:
    with pytest.raises(ValueError, match="wait for one another, or for more room than there is"):
        simulate(tasks, SMS)


@st.composite
def task_lists(draw: st.DrawFn) -> list[Task]:
    """Any tasks of four queues, of which each may come after earlier ones."""
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 12))):
        queue = draw(st.sampled_from("abcd"))
        after = draw(st.lists(st.integers(0, number - 1), max_size=2)) if number else []
        room = draw(
            st.sampled_from(
                [
                    None,
                    Room("sms", 24),
                    Room("sms", 132, elastic=True, short_speed=0.7),
                    Room("sms", 132, elastic=True, tail_ns=9, tail_amount=90, short_speed=0.31),
                ]
            )
        )
        work, earliest, delay = draw(st.integers(0, 50)), draw(st.integers(0, 60)), draw(st.integers(0, 5))
        tasks.append(Task(queue, work, tuple(after), earliest, delay, room))
    return tasks


@given(task_lists())
def test_no_task_starts_before_its_gates_and_none_is_faster_than_its_work(tasks: list[Task]) -> None:
    ran = simulate(tasks, SMS)
    last: dict[object, int] = {}
    for task, r in zip(tasks, ran, strict=True):
        gates = [task.earliest_ns, last.get(task.queue, 0), *(ran[n].end_ns for n in task.after)]
        assert r.start_ns >= r.ready_ns == max(gates) + task.delay_ns
        slowest = task.room.short_speed if task.room else 1.0
        assert task.work_ns - 1 <= r.end_ns - r.start_ns <= task.work_ns / slowest + 1
        last[task.queue] = r.end_ns


@given(task_lists())
def test_room_is_never_left_unused_by_what_waits_for_it(tasks: list[Task]) -> None:
    """A task that starts later than it was ready starts at the moment at which another ends or enters its tail."""
    ran = simulate(tasks, SMS)
    for task, r in zip(tasks, ran, strict=True):
        if r.start_ns > r.ready_ns:
            assert task.room is not None
            moments = {q.end_ns for q in ran} | {
                q.end_ns - t.room.tail_ns for t, q in zip(tasks, ran, strict=True) if t.room and t.room.tail_ns
            }
            assert min(abs(r.start_ns - moment) for moment in moments) <= 1
