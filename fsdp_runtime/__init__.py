"""A small, readable, correct FSDP runtime whose context owns the all-gather stream.

layout.py           where each parameter lies in a unit's flat buffers: the decision that everything rests on
parameter_group.py  the buffers of one unit
gather.py           how the bytes of a unit move                 schedule.py  when
selection.py        which gather a name means; zero_cta.py and copy_engine.py are those that leave the SMs alone
storage.py          which units are unsharded: delayed releases  reduction.py gradients
context.py          order of units, streams, passes
autograd_hooks.py   what tells when the backward of a unit begins and ends
fully_shard.py      the entry point and the module hooks
"""

from __future__ import annotations

from .context import FsdpContext
from .copy_engine import CopyEngineGather
from .errors import FsdpError
from .fully_shard import context_of, fully_shard, no_sync
from .gather import Gather, Handle, ProcessGroupGather
from .precision import MixedPrecision
from .schedule import Implicit, Prefetch, Schedule, Serial
from .zero_cta import ZeroCtaGather

__all__ = [
    "CopyEngineGather",
    "FsdpContext",
    "FsdpError",
    "Gather",
    "Handle",
    "Implicit",
    "MixedPrecision",
    "Prefetch",
    "ProcessGroupGather",
    "Schedule",
    "Serial",
    "ZeroCtaGather",
    "context_of",
    "fully_shard",
    "no_sync",
]
