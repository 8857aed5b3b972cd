"""Which gather a name means, and what ``auto`` chooses for a process group.

The idea: every rank tells all others what it has (host, GPU, which GPUs it reaches, versions), so that all of them come
to the same choice from the same facts, and an explicit choice that cannot work is refused with the fact that is against
it.
"""

from __future__ import annotations

import logging
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from . import stream_memory
from .copy_engine import SHARED_DEVICE_VARIABLE, CopyEngineGather, may_share_device
from .errors import FsdpError
from .gather import Gather, GatherName, ProcessGroupGather
from .mesh import ShardMesh
from .zero_cta import CE_COLLECTIVES, ZeroCtaGather

logger = logging.getLogger("fsdp_runtime")


@dataclass(frozen=True)
class Facts:
    """What one rank says about itself.

    gpu: the UUID of its GPU. unreachable: UUIDs of visible GPUs whose memory it cannot access. nccl: version of the
    NCCL that its group communicates through, None if it is another backend.
    """

    host: str
    gpu: str
    unreachable: frozenset[str]
    nccl: tuple[int, ...] | None
    cta_policy: bool
    stream_memory: bool
    may_share_device: bool


def resolve_gather(gather: Gather | GatherName, mesh: ShardMesh) -> Gather:
    """The gather of that name for the ranks that shard; a Gather stays itself.

    One object for all units of a process group, as long as one of them lives. On a GPU the first call for a group is a
    collective. Raises FsdpError for an unknown name, and for a mechanism that the group does not support, with the
    reason.
    """
    if isinstance(gather, Gather):
        return gather
    if gather not in ("auto", *_MECHANISMS):
        names = ", ".join(("auto", *_MECHANISMS))
        raise FsdpError(f"gather: expected one of {names} or a Gather, got {gather!r}")
    key = (gather, id(mesh.shard_group))
    found = _shared.get(key)
    if found is None:
        found = _choose(mesh) if gather == "auto" else _make(gather, mesh)
        _shared[key] = found
    return found


def objections(name: str, facts: Sequence[Facts]) -> str | None:
    """Why the ranks of a group on GPUs cannot use the mechanism, None if they can. facts: of every rank, in their
    order."""
    return next(filter(None, (objection(facts) for objection in _OBJECTIONS[name])), None)


def preferred(facts: Sequence[Facts]) -> tuple[str, dict[str, str]]:
    """The best mechanism for a group on GPUs, and for each of the others why it is not that one."""
    reasons = {name: objections(name, facts) for name in ("copy_engine", "zero_cta")}
    if len({fact.gpu for fact in facts}) < len(facts):
        reasons["copy_engine"] = "ranks share a GPU"
    name = next((name for name, reason in reasons.items() if reason is None), "process_group")
    because = {
        "copy_engine": "",
        "zero_cta": "it copies each rank's own shard before a gather, with SMs",
        "process_group": "its kernels wait for SMs",
    }
    return name, {other: reasons.get(other) or because[other] for other in because if other != name}


def _choose(mesh: ShardMesh) -> Gather:
    if mesh.device.type != "cuda" or mesh.world == 1:
        return ProcessGroupGather()
    name, others = preferred(_facts_of_all(mesh))
    if mesh.rank == 0:
        against = "; ".join(f"not {other}: {reason}" for other, reason in others.items())
        logger.info("gather=auto is %s for %d ranks (%s)", name, mesh.world, against)
    return _MECHANISMS[name](mesh)


def _make(name: str, mesh: ShardMesh) -> Gather:
    if name != "process_group":
        if mesh.device.type != "cuda":
            raise FsdpError(f"gather={name!r}: needs GPUs, the mesh is on {mesh.device.type}; use gather='auto'")
        reason = objections(name, _facts_of_all(mesh))
        if reason is not None:
            raise FsdpError(f"gather={name!r}: {reason}; gather='auto' takes what the ranks support")
    return _MECHANISMS[name](mesh)


_MECHANISMS: dict[str, Callable[[ShardMesh], Gather]] = {
    "process_group": lambda mesh: ProcessGroupGather(),
    "zero_cta": lambda mesh: ZeroCtaGather(mesh.shard_group, mesh.device),
    "copy_engine": lambda mesh: CopyEngineGather(mesh.shard_group, mesh.device),
}

_shared: weakref.WeakValueDictionary[tuple[str, int], Gather] = weakref.WeakValueDictionary()
"""By name and process group. A gather keeps its group, so a number does not come to mean another group meanwhile."""


def _facts_of_all(mesh: ShardMesh) -> list[Facts]:
    """Also the first operation of a new communicator, which a rendezvous must not be."""
    facts: list[Facts | None] = [None] * mesh.world
    dist.all_gather_object(facts, _own_facts(mesh), group=mesh.shard_group)
    return [fact for fact in facts if fact is not None]


def _own_facts(mesh: ShardMesh) -> Facts:
    own = mesh.device.index
    others = [index for index in range(torch.cuda.device_count()) if index != own]
    return Facts(
        host=_host(),
        gpu=_uuid(own),
        unreachable=frozenset(_uuid(i) for i in others if not torch.cuda.can_device_access_peer(own, i)),
        nccl=torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if dist.get_backend(mesh.shard_group) == "nccl"
        else None,
        cta_policy=hasattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO"),
        stream_memory=stream_memory.available(),
        may_share_device=may_share_device(),
    )


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _host() -> str:
    """Containers of one machine have names of their own and one kernel."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _several_hosts(facts: Sequence[Facts]) -> str | None:
    hosts = len({fact.host for fact in facts})
    return f"the ranks are on {hosts} hosts" if hosts > 1 else None


def _no_peer_access(facts: Sequence[Facts]) -> str | None:
    for rank, fact in enumerate(facts):
        for peer, other in enumerate(facts):
            if other.gpu in fact.unreachable:
                return f"the GPU of rank {rank} cannot access the memory of rank {peer}'s"
    return None


def _shared_gpu(facts: Sequence[Facts]) -> str | None:
    return "ranks share a GPU" if len({fact.gpu for fact in facts}) < len(facts) else None


def _shared_gpu_unless_allowed(facts: Sequence[Facts]) -> str | None:
    reason = _shared_gpu(facts)
    if reason is None or all(fact.may_share_device for fact in facts):
        return None
    return f"{reason}; to test it so, set {SHARED_DEVICE_VARIABLE}=1"


def _no_stream_memory(facts: Sequence[Facts]) -> str | None:
    if all(fact.stream_memory for fact in facts):
        return None
    return "the CUDA driver offers no stream memory operations (cuStreamBatchMemOp)"


def _not_nccl(facts: Sequence[Facts]) -> str | None:
    return "the process group is not NCCL's" if any(fact.nccl is None for fact in facts) else None


def _old_nccl(facts: Sequence[Facts]) -> str | None:
    oldest = min(fact.nccl for fact in facts if fact.nccl is not None)
    if oldest >= CE_COLLECTIVES:
        return None
    return f"NCCL {'.'.join(map(str, oldest))} has no copy-engine collectives, {'.'.join(map(str, CE_COLLECTIVES))} has"


def _no_cta_policy(facts: Sequence[Facts]) -> str | None:
    return None if all(fact.cta_policy for fact in facts) else "this torch cannot set NCCL's CTA policy"


_OBJECTIONS: dict[str, tuple[Callable[[Sequence[Facts]], str | None], ...]] = {
    "copy_engine": (_several_hosts, _shared_gpu_unless_allowed, _no_peer_access, _no_stream_memory),
    "zero_cta": (_not_nccl, _no_cta_policy, _old_nccl, _several_hosts, _shared_gpu, _no_peer_access),
}
