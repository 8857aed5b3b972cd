"""Gathers without SMs: the protocol between ranks, the copies, and which gather a group of ranks gets.

What needs GPUs is in tests/gpu. Here the device is simulated: streams are queues, memory is a dictionary, and the test
decides which stream is late.
"""

from __future__ import annotations

import gc
import logging
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_runtime import (
    FsdpError,
    MixedPrecision,
    ProcessGroupGather,
    collectives,
    copy_engine,
    fully_shard,
    selection,
    zero_cta,
)
from fsdp_runtime.copy_engine import CopyEngineGather, PassSignals
from fsdp_runtime.gather import Exchange
from fsdp_runtime.parameter_group import ParameterGroup
from fsdp_runtime.selection import Facts, objections, preferred
from fsdp_runtime.zero_cta import ZeroCtaGather

from .conftest import OnRanks
from .models import Root, shard_children
from .simulated_device import Device, SimulatedGather, SimulatedLinear

PASSES = 4


class Stream:
    def __init__(self) -> None:
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def enqueue(self, operation: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, operation))

    def wait_stream(self, other: Stream) -> None:
        done: list[bool] = []
        other.enqueue(lambda: done.append(True))
        self.enqueue(lambda: None, lambda: bool(done))


def run(streams: list[Stream], late: list[Stream], seed: int) -> None:
    """Runs the queues in a random order, an operation of a late stream only if no other can run."""
    order = random.Random(seed)
    while any(stream.queue for stream in streams):
        able = [stream for stream in streams if stream.queue and stream.queue[0][0]()]
        assert able, "every stream waits for another"
        _, operation = order.choice([s for s in able if s not in late] or able).queue.popleft()
        operation()


class Ranks:
    """``PassSignals`` of several ranks over simulated memory; ``deaf`` waits for nothing of these kinds."""

    def __init__(
        self,
        world: int,
        monkeypatch: pytest.MonkeyPatch,
        deaf: str = "",
        synchronize: Callable[[torch.device], None] = lambda device: None,
    ) -> None:
        self.words: dict[int, int] = {}
        self.world = world
        self.deaf = deaf
        # Rank r's words lie from 1000 * r on: ``written`` of each rank, then ``read`` of each; 4 bytes a word.
        self.bases = [1000 * rank for rank in range(world)]
        handle = SimpleNamespace(buffer_ptrs=self.bases)
        monkeypatch.setattr(copy_engine, "symmetric_empty", lambda *_: torch.empty(2 * world, dtype=torch.int32))
        monkeypatch.setattr(copy_engine.symmetric_memory, "rendezvous", lambda *_: handle)
        monkeypatch.setattr(copy_engine.stream_memory, "write_and_wait", self._write_and_wait)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(dist, "barrier", lambda *_: None)
        groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: world, group_name="") for r in range(world)]
        self.signals = [PassSignals(group, torch.device("cpu")) for group in groups]
        self.gathers = [Stream() for _ in range(world)]
        self.callers = [Stream() for _ in range(world)]

    def _write_and_wait(self, stream: Stream, writes: list[tuple[int, int]], waits: list[tuple[int, int]]) -> None:
        for address, value in writes:
            stream.enqueue(lambda a=address, v=value: self.words.__setitem__(a, v))
        for address, value in waits:
            kind = "written" if address % 1000 < 4 * self.world else "read"
            if kind not in self.deaf:
                stream.enqueue(lambda: None, lambda a=address, v=value: self.words.get(a, 0) >= v)

    def train(self) -> dict[tuple[int, int, int], int]:
        """What each reader saw of each owner in each pass; in pass n the optimizer had written n."""
        shards = [0] * self.world
        seen: dict[tuple[int, int, int], int] = {}
        for number in range(1, PASSES + 1):
            for rank in range(self.world):  # the hosts run ahead: all is enqueued before anything runs
                caller, stream = self.callers[rank], self.gathers[rank]
                caller.enqueue(lambda r=rank, n=number: shards.__setitem__(r, n))
                stream.wait_stream(caller)
                self.signals[rank].open(stream)
                for owner in range(self.world):
                    stream.enqueue(lambda r=rank, o=owner, n=number: seen.__setitem__((r, o, n), shards[o]))
                self.signals[rank].close(stream, caller)
        return seen

    def wrong(self, late: Callable[[Ranks], list[Stream]], seed: int) -> list[tuple[int, int, int]]:
        """(reader, owner, pass) that saw another pass's shard."""
        seen = self.train()
        run(self.gathers + self.callers, late(self), seed)
        assert len(seen) == self.world**2 * PASSES
        return [key for key, value in seen.items() if value != key[2]]


LATE: dict[str, Callable[[Ranks], list[Stream]]] = {
    "nobody": lambda ranks: [],
    "owner": lambda ranks: [ranks.callers[0]],
    "reader": lambda ranks: [ranks.gathers[1]],
    "rank": lambda ranks: [ranks.callers[0], ranks.gathers[0]],
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_reads_what_the_owner_wrote_for_this_pass(
    world: int, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        assert Ranks(world, monkeypatch).wrong(LATE[late], seed) == []


@pytest.mark.parametrize(("deaf", "late"), [("written", "owner"), ("read", "reader")])
def test_each_wait_of_the_protocol_is_needed(deaf: str, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the first a slow owner's shard is read too early, without the second a slow reader's is overwritten."""
    assert Ranks(2, monkeypatch, deaf).wrong(LATE[late], seed=0)


def test_passes_are_counted_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2, monkeypatch)
    ranks.signals[0]._pass = 2**32 - 1
    ranks.signals[0].open(ranks.gathers[0])
    ranks.gathers[0].queue.popleft()[1]()
    assert set(ranks.words.values()) == {0}  # the device compares cyclically


class _Copies(TorchDispatchMode):
    """Byte offsets in ``buffer`` that were copied to."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.buffer = buffer
        self.offsets: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            self.offsets.append(args[0].data_ptr() - self.buffer.data_ptr())
        return function(*args, **(kwargs or {}))


def test_peers_shards_are_copied_first_the_next_rank_s_before_all_and_the_own_one_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Two parameters, of 4 and 2 bytes a shard, over 3 ranks; rank r's shards hold r everywhere. This is rank 1.
    flats = [torch.full((6,), rank, dtype=torch.uint8) for rank in range(3)]
    handle = SimpleNamespace(
        get_buffer=lambda peer, shape, dtype, offset: flats[peer].narrow(0, offset, shape[0]).view(dtype)
    )
    monkeypatch.setattr(copy_engine.symmetric_memory, "rendezvous", lambda *_: handle)
    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 3, group_name="")
    event: Any = SimpleNamespace(record=lambda stream: None)
    buffer = torch.full((18,), 9, dtype=torch.uint8)
    buffers, shards = [buffer[:12], buffer[12:]], [flats[1][:4], flats[1][4:]]
    with _Copies(buffer) as copies:
        CopyEngineGather(group, torch.device("cpu")).gather(buffers, shards, group, None, event)
    assert buffer.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 2 + [1] * 2 + [2] * 2
    # Places of the first parameter at 0, 4, 8, of the second at 12, 14, 16; ranks 2, 0, 1.
    assert copies.offsets == [8, 16, 0, 12, 4, 14]


def test_a_peer_is_looked_up_once_for_each_unit_and_its_shard_read_at_each_gather(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer_s = torch.tensor([1.0, 2.0])
    asked: list[int] = []
    handle = SimpleNamespace(get_buffer=lambda peer, *_: (asked.append(peer), peer_s)[1])
    monkeypatch.setattr(copy_engine.symmetric_memory, "rendezvous", lambda *_: handle)
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2, group_name="")
    event: Any = SimpleNamespace(record=lambda stream: None)
    gather = CopyEngineGather(group, torch.device("cpu"))
    own, other_own = torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0])
    buffer, other = torch.zeros(2, 4)  # views, as those of a unit are
    for _ in range(2):
        gather.gather([buffer], [own], group, None, event)
        gather.gather([other], [other_own], group, None, event)
        assert torch.equal(buffer, torch.cat((own, peer_s)))
        assert torch.equal(other, torch.cat((other_own, peer_s)))
        own += 1  # optimizers' steps
        peer_s += 1
    assert asked == [1, 1]
    shard = weakref.ref(own)
    del buffer, own
    assert shard() is None  # what is remembered of a unit goes with it


class _Told(ProcessGroupGather):
    """Writes down what the runtime asks of a gather, and stages as the copy engine does."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.staged: list[torch.Tensor] = []

    def staging(self, sharded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        self.staged.append(sharded.new_full(sharded.shape, torch.nan, dtype=dtype))
        return self.staged[-1]

    def gather(self, buffers: Any, shards: Any, group: Any, stream: Any, event: Any) -> Any:
        assert not any(shard.isnan().any() for shard in shards), "gathered before it was staged"
        self.log.append("gather")
        return super().gather(buffers, shards, group, stream, event)

    def exchange(self) -> Exchange:
        log = self.log

        class Log(Exchange):
            def open(self, stream: Any) -> None:
                log.append("open")

            def close(self, stream: Any, caller: Any) -> None:
                log.append("close")

        return Log()


def _passes(rank: int, world: int, schedule: str) -> list[str]:
    log: list[str] = []
    told = _Told(log)
    precision = MixedPrecision(compute_dtype=torch.float64)
    model = shard_children(Root(children=3), gather=told, schedule=schedule, mixed_precision=precision)
    x = torch.ones(2, 16, dtype=torch.float64)

    def mark(text: str) -> None:
        log.append(text)
        for staged in told.staged:  # nobody may rely on it between passes of a step
            if text == "step":
                staged.fill_(torch.nan)

    for _ in range(2):
        loss = model(x).sum()
        mark("forward")
        loss.backward()
        mark("step")
    with torch.no_grad():
        model(x)
    mark("evaluated")
    model(x)  # and no backward
    mark("dropped")
    model(x).sum().backward()
    return log


@pytest.mark.parametrize("schedule", ["serial", "implicit", "prefetch"])
def test_ranks_agree_around_every_forward_and_backward_and_gather_in_between(on_ranks: OnRanks, schedule: str) -> None:
    for log in on_ranks(2, _passes, schedule):
        words = " ".join(log)
        assert words.count("open") == words.count("close") == 2 * 2 + 1 + 1 + 2
        is_open = False
        for word in log:
            if word in ("open", "close"):
                assert is_open == (word == "close")
                is_open = word == "open"
            else:
                assert is_open == (word == "gather"), words
        assert words.count("gather") >= 4 * 5


class _Abort(Exception):
    pass


def _aborted(rank: int, world: int) -> list[str]:
    log: list[str] = []
    model = shard_children(Root(children=2), gather=_Told(log))
    output = model(torch.ones(2, 16))
    output.register_hook(lambda gradient: None)

    def fail(gradient: torch.Tensor) -> None:
        raise _Abort

    hidden = model.layers[1].weight  # type: ignore[index,union-attr]
    assert hidden is not None
    middle = output.grad_fn
    assert middle is not None
    middle.next_functions[0][0].register_prehook(lambda gradients: fail(gradients))
    with pytest.raises(_Abort):
        output.sum().backward()
    log.append("aborted")
    model(torch.ones(2, 16)).sum().backward()
    return log


def test_a_backward_that_raised_is_closed_before_the_next_pass_opens(on_ranks: OnRanks) -> None:
    for log in on_ranks(2, _aborted):
        signals = [word for word in log if word != "gather"]
        assert signals == ["open", "close", "open", "aborted", "close", "open", "close", "open", "close"]


class _Frozen(nn.Module):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SimulatedLinear.apply(self.device, x, self.weight)


def _read_late(rank: int, world: int) -> list[float]:
    """What slow peers read of the staged shard: of a forward, of a backward that raised, and of the next forward."""
    device = Device()
    peers = device.Stream(priority=0)
    staged: list[torch.Tensor] = []
    seen: list[float] = []

    class Read(Exchange):
        def close(self, stream: Any, caller: Any) -> None:
            peers.enqueue(lambda: seen.append(float(staged[0][0])))
            caller.wait_stream(peers)

    class Staged(SimulatedGather):
        def staging(self, sharded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            staged.append(torch.empty_like(sharded))
            return staged[-1]

        def exchange(self) -> Exchange:
            return Read()

    def publish(group: ParameterGroup) -> None:
        device.current_stream().enqueue(lambda: staged[0].copy_(group._sharded))

    def fail(ctx: Any, gradient: torch.Tensor) -> None:
        raise _Abort

    with mock.patch("torch.get_device_module", return_value=device):
        model = fully_shard(_Frozen(device), gather=Staged())
        shard = model.weight.to_local()  # type: ignore[attr-defined]
        # The queues run last, and need the storage that the host would have freed.
        with mock.patch.multiple(ParameterGroup, publish=publish, free=lambda group: None):
            output = model(torch.ones(1, 4, requires_grad=True))
            with mock.patch.object(SimulatedLinear, "backward", fail), pytest.raises(_Abort):
                output.sum().backward()
            device.compute.enqueue(lambda: shard.fill_(2))  # an optimizer's step
            model(torch.ones(1, 4))
        device.run([stream for stream in device.streams if stream is not peers] + [peers])
    return seen


def test_a_shard_is_staged_anew_only_when_peers_have_read_that_of_an_aborted_pass(on_ranks: OnRanks) -> None:
    assert on_ranks(1, _read_late) == [[1, 1, 2]]


def test_a_context_that_ends_waits_for_what_it_has_told_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    ranks = Ranks(2, monkeypatch, synchronize=waited.append)
    waited.clear()
    ranks.signals.pop()
    gc.collect()
    assert waited == [torch.device("cpu")]


# The life of a registered pool


class _Nccl:
    """An NCCL backend, its allocator's pools and the device: writes down what is done, and fails as they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.destroyed = False
        self.faulty = False
        self.orders: list[list[int]] | None = None  # what all ranks say; None: the same as this one
        self.mem_allocator = None
        self.made = 0
        nccl = self

        class Pool:
            def __init__(self, allocator: Any) -> None:
                pass

            def __del__(self) -> None:
                nccl.log.append("free")

        options = SimpleNamespace(config=SimpleNamespace(cta_policy=None))
        kind = SimpleNamespace(Options=lambda: options, NCCL_CTA_POLICY_ZERO=2)
        monkeypatch.setattr(torch.cuda, "MemPool", Pool)
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        monkeypatch.setattr(dist, "new_group", self._new_group)
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: None)
        monkeypatch.setattr(dist, "all_gather_object", self._all_gather_object)

    def gather(self, group: Any) -> ZeroCtaGather:
        gather = ZeroCtaGather(group, torch.device("cpu"))
        self.log.clear()
        return gather

    def register_mem_pool(self, pool: Any, symm: bool) -> None:
        assert symm
        self.log.append("register")

    def deregister_mem_pool(self, pool: Any) -> None:
        self.log.append("deregister")
        if self.destroyed:
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")

    def _new_group(self, ranks: list[int], **options: Any) -> Any:
        assert options["pg_options"].config.cta_policy == 2
        self.made += 1
        return SimpleNamespace(_get_backend=lambda device: self)

    def _synchronize(self, device: torch.device) -> None:
        self.log.append("wait")
        if self.faulty:
            raise RuntimeError("an illegal memory access was encountered")

    def _all_gather_object(self, said: list[Any], own: Any, group: Any) -> None:
        said[:] = self.orders or [own] * len(said)


class _Group:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> _Nccl:
    return _Nccl(monkeypatch)


def test_a_pool_is_deregistered_behind_the_device_s_work_and_then_freed(nccl: _Nccl) -> None:
    gather = nccl.gather(_Group())
    gather._register(100)
    gather._register(100)
    gather._register(200)  # perhaps in a new segment
    del gather
    assert nccl.log == ["register", "wait", "deregister", "register", "wait", "deregister", "free"]


def test_a_pool_that_was_never_used_is_only_freed(nccl: _Nccl) -> None:
    gather = nccl.gather(_Group())
    del gather
    assert nccl.log == ["free"]


@pytest.mark.filterwarnings("error")
def test_a_pool_outlives_a_communicator_that_is_destroyed(nccl: _Nccl) -> None:
    gather = nccl.gather(_Group())
    gather._register(100)
    nccl.destroyed = True
    del gather
    assert nccl.log == ["register", "wait", "deregister", "free"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_pool_is_deregistered_even_on_a_device_that_has_failed(nccl: _Nccl) -> None:
    gather = nccl.gather(_Group())
    gather._register(100)
    nccl.faulty = True
    del gather
    assert nccl.log[:3] == ["register", "wait", "deregister"]  # freed when the exception is forgotten


def test_what_is_registered_when_the_process_ends_is_deregistered_then(nccl: _Nccl) -> None:
    gather = nccl.gather(_Group())
    gather._register(100)
    assert gather._end is not None
    assert gather._end.atexit
    gather._end()  # what runs at exit
    assert nccl.log == ["register", "wait", "deregister"]
    del gather
    assert nccl.log == ["register", "wait", "deregister", "free"]


def test_all_gathers_of_a_process_group_share_one_communicator_that_does_not_keep_the_group(nccl: _Nccl) -> None:
    group, other = _Group(), _Group()
    for _ in range(3):
        nccl.gather(group)
    assert nccl.made == 1
    nccl.gather(other)
    assert nccl.made == 2
    known = len(zero_cta._communicators)
    del group
    assert len(zero_cta._communicators) == known - 1


def test_ranks_whose_buffers_lie_in_different_orders_are_refused_each_time(nccl: _Nccl) -> None:
    gather = nccl.gather(_Group())
    gather._register(200)
    nccl.orders = [[1, 0], [0, 1]]  # here the second buffer, at 100, comes before the first; on the other rank after it
    for _ in range(2):
        with pytest.raises(FsdpError, match=r"different orders.*copy_engine"):
            gather._register(100)
    nccl.orders = None
    gather._register(100)


# Selection

H200 = Facts(
    host="a",
    gpu="0",
    unreachable=frozenset(),
    nccl=(2, 28, 9),
    cta_policy=True,
    stream_memory=True,
    may_share_device=False,
)
TWO = [H200, replace(H200, gpu="1")]


def _both(**changed: Any) -> list[Facts]:
    return [replace(fact, **changed) for fact in TWO]


def test_two_gpus_of_one_host_get_the_copy_engine_and_the_others_their_reasons() -> None:
    name, others = preferred(TWO)
    assert name == "copy_engine"
    assert others == {
        "zero_cta": "it copies each rank's own shard before a gather, with SMs",
        "process_group": "its kernels wait for SMs",
    }


@pytest.mark.parametrize(
    ("facts", "copy_engine_reason", "zero_cta_reason"),
    [
        ([H200, replace(H200, host="b", gpu="1")], "the ranks are on 2 hosts", "the ranks are on 2 hosts"),
        (
            [replace(H200, unreachable=frozenset("1")), TWO[1]],
            "the GPU of rank 0 cannot access the memory of rank 1's",
            "the GPU of rank 0 cannot access the memory of rank 1's",
        ),
        (_both(stream_memory=False), "the CUDA driver offers no stream memory operations (cuStreamBatchMemOp)", None),
        (_both(nccl=None), None, "the process group is not NCCL's"),
        (_both(nccl=(2, 27, 5)), None, "NCCL 2.27.5 has no copy-engine collectives, 2.28 has"),
        (_both(cta_policy=False), None, "this torch cannot set NCCL's CTA policy"),
        (
            [H200, H200],
            "ranks share a GPU; to test it so, set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1",
            "ranks share a GPU",
        ),
        ([replace(H200, may_share_device=True)] * 2, None, "ranks share a GPU"),
    ],
)
def test_what_a_group_lacks_is_named(
    facts: list[Facts], copy_engine_reason: str | None, zero_cta_reason: str | None
) -> None:
    assert objections("copy_engine", facts) == copy_engine_reason
    assert objections("zero_cta", facts) == zero_cta_reason


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (_both(stream_memory=False), "zero_cta"),
        (_both(stream_memory=False, nccl=(2, 27, 5)), "process_group"),
        ([H200, replace(H200, host="b", gpu="1")], "process_group"),
        ([replace(H200, may_share_device=True)] * 2, "process_group"),  # sharing a GPU is for tests that ask for it
    ],
)
def test_auto_takes_the_best_that_is_left(facts: list[Facts], expected: str) -> None:
    name, others = preferred(facts)
    assert name == expected
    assert set(others) == {"copy_engine", "zero_cta", "process_group"} - {expected}
    assert all(others.values())


@pytest.fixture
def gpu_mesh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mesh of two ranks on GPUs, this one rank 0; its gathers are names."""
    made = {name: lambda mesh, name=name: SimpleGather(name) for name in ("process_group", "zero_cta", "copy_engine")}
    monkeypatch.setattr(selection, "_MECHANISMS", made)
    monkeypatch.setattr(selection, "_facts_of_all", lambda mesh: TWO)
    group = SimpleNamespace()
    return SimpleNamespace(device=torch.device("cuda", 0), world=2, rank=0, shard_group=group)


class SimpleGather(ProcessGroupGather):
    def __init__(self, name: str) -> None:
        self.name = name


def test_auto_says_once_what_it_chose_and_why_not_the_others(gpu_mesh: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fsdp_runtime")
    gathers = [selection.resolve_gather("auto", gpu_mesh) for _ in range(3)]
    assert gathers[0] is gathers[1] is gathers[2]
    assert gathers[0].name == "copy_engine"  # type: ignore[attr-defined]
    assert caplog.messages == [
        "gather=auto is copy_engine for 2 ranks (not zero_cta: it copies each rank's own shard before a gather, "
        "with SMs; not process_group: its kernels wait for SMs)"
    ]


def test_a_mechanism_that_the_ranks_do_not_support_is_refused_with_the_reason(
    gpu_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "_facts_of_all", lambda mesh: _both(nccl=(2, 27, 5)))
    with pytest.raises(FsdpError, match=r"^gather='zero_cta': NCCL 2.27.5 has no copy-engine collectives.*'auto'"):
        selection.resolve_gather("zero_cta", gpu_mesh)


def _on_cpu(rank: int, world: int) -> tuple[list[str], str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_runtime").addHandler(handler)
    module = fully_shard(nn.Linear(4, 4), gather="auto")
    module(torch.ones(1, 4))
    with pytest.raises(FsdpError) as refused:
        fully_shard(nn.Linear(4, 4), gather="copy_engine")
    return records, str(refused.value)


def test_on_a_cpu_auto_is_the_process_group_and_says_nothing(on_ranks: OnRanks) -> None:
    for records, refused in on_ranks(2, _on_cpu):
        assert records == []
        assert refused == "gather='copy_engine': needs GPUs, the mesh is on cpu; use gather='auto'"


def test_one_rank_of_an_accelerator_copies_and_calls_nobody() -> None:
    alone = mock.Mock(spec=["size"])  # anything else that is called of the group is an error
    alone.size.return_value = 1
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    pieces = [torch.empty(n, device="meta") for n in (6, 2)]
    own = [torch.empty(n, device="meta") for n in (6, 2)]
    with (
        mock.patch.object(torch.Tensor, "copy_", lambda output, source: copied.append((output, source))),
        mock.patch.object(torch.Tensor, "data_ptr", lambda tensor: id(tensor)),  # on meta all are 0
    ):
        assert collectives.all_gather(pieces, own, alone) is None
        assert collectives.reduce_scatter(pieces[0], own[0], dist.ReduceOp.SUM, alone) is None
        assert collectives.all_gather(own, own, alone) is None  # in place
    assert collectives.all_reduce(own[0], dist.ReduceOp.SUM, alone) is None
    assert [(id(output), id(source)) for output, source in copied] == [
        (id(output), id(source)) for output, source in [*zip(pieces, own, strict=True), (pieces[0], own[0])]
    ]
