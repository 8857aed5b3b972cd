"""Knows kernel and operator names: the only place that does.

The idea: a name answers two questions, *which collective is it* and *is it a GEMM*, and each is answered by one ordered
list of literal patterns. The launching operation is asked before the kernel (design, section 3), because kernels are
renamed with every library release and operations are not. Sources: NCCL ``src/device``, RCCL, MSCCL, cuBLAS and nvjet,
CUTLASS, Tensile (``Cijk_``), MAGMA, and the operator names of PyTorch's c10d and ATen.
"""

from __future__ import annotations

import re
from functools import cache

_KINDS = (
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "all_reduce"),  # c10d implements a barrier as an all-reduce of one element
    ("reduce", "reduce"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)
"""Substrings of a name without punctuation, in lower case; the first that occurs names the kind."""

_COMMUNICATION_KERNEL = re.compile(
    r"^(?:void )?(?:nccl|rccl|msccl)\w*Kernel"
    r"|^(?:void )?(?:\w+::|\(anonymous namespace\)::)*(?:multimem|one_shot|two_shot)"
    r"_(?:all_reduce|all_gather|reduce_scatter)",
    re.IGNORECASE,
)
_COLLECTIVE_OPERATION = re.compile(r"^(?:record_param_comms$|c10d::|_c10d_functional(?:_autograd)?::)")
_NOT_A_CALL = re.compile(r"wait_tensor|_wrap_tensor|::wait|monitored_barrier|_reset")

_MATMUL_OPERATION = re.compile(
    r"^aten::(?:mm|addmm|bmm|baddbmm|addbmm|linear|linear_backward|matmul|_addmm_activation|_int_mm|_scaled_mm|_scaled_mm_v2"
    r"|_grouped_mm|_scaled_grouped_mm|_scaled_grouped_mm_v2|mkldnn_linear|_mkldnn_linear)(?:_out|_)?$"
)
_NOT_A_GEMM = re.compile(
    r"flash|fmha|sdpa|attention|attn"
    r"|split_?k\w{0,12}reduc|reduce\w{0,4}split_?k|postgsu"
    r"|^triton_(?!tem_|mm|bmm)|elementwise_kernel|softmax",
    re.IGNORECASE,
)
_GEMM_KERNEL = re.compile(r"nvjet|(?<!fb)gemm|cijk_|cutlass::kernel|matmul|^triton_(?:mm|bmm|tem_\w*mm)", re.IGNORECASE)

_TILE = re.compile(r"(?<![0-9a-z])(?:tilesize)?(\d{2,3})x(\d{2,3})(?=[x_])", re.IGNORECASE)

_BACKWARD = re.compile(r"^autograd::engine::evaluate_function: |^CompiledFunctionBackward$")
_FORWARD = "CompiledFunction"
"""What AOTAutograd calls the autograd function of a compiled graph that is trained: its forward."""

_COMPUTE_OPERATOR = re.compile(r"^(?!c10d::|_c10d_functional|autograd::|profiler::)\w+::\w+$")
_MOVES_NO_DATA = frozenset(
    "aten::" + name
    for name in [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "view",
        "view_as",
        "reshape",
        "_reshape_alias",
        "as_strided",
        "expand",
        "expand_as",
        "t",
        "transpose",
        "permute",
        "slice",
        "select",
        "narrow",
        "detach",
        "detach_",
        "alias",
        "resolve_conj",
        "resolve_neg",
        "unsqueeze",
        "squeeze",
        "resize_",
        "set_",
        "unbind",
        "split",
        "split_with_sizes",
        "chunk",
        "flatten",
        "unflatten",
        "is_nonzero",
        "result_type",
        "lift_fresh",
    ]
)

_GLOO = "gloo:"
FUSED_FAMILIES = {"all_reduce": "reduction", "reduce_scatter": "reduction", "reduce": "reduction"}
"""Kinds that gloo runs as one another: their calls and rows are paired within one family (design, section 3)."""


@cache
def kind_of(name: str) -> str:
    """Kind of collective that a collective's name says, one of ``results.OPS``; ``unknown`` if it says none."""
    letters = "".join(c for c in name.lower() if c.isalpha())
    return next((kind for text, kind in _KINDS if text in letters), "unknown")


@cache
def is_communication_kernel(name: str) -> bool:
    """Whether a kernel's name says that it moves data between ranks."""
    return bool(_COMMUNICATION_KERNEL.search(name))


@cache
def is_collective_operation(name: str) -> bool:
    """Whether a host operation calls a collective: ``record_param_comms``, ``c10d::*``, ``_c10d_functional::*``."""
    return bool(_COLLECTIVE_OPERATION.match(name)) and not _NOT_A_CALL.search(name)


@cache
def is_c10d_call(name: str) -> bool:
    """Whether it is the operation that a caller sees: not the ``record_param_comms`` that a backend nests in it."""
    return is_collective_operation(name) and name != "record_param_comms"


@cache
def is_matmul_operation(name: str) -> bool:
    """Whether a host operation multiplies matrices."""
    return bool(_MATMUL_OPERATION.match(name))


@cache
def phase_of_operation(name: str) -> str | None:
    """``forward`` or ``backward``, where a host operation says by itself which of the two runs in it."""
    return "backward" if _BACKWARD.match(name) else "forward" if name == _FORWARD else None


@cache
def is_compute_operator(name: str) -> bool:
    """Whether an operator computes on the CPU: it does something to data, rather than to a tensor's shape."""
    return bool(_COMPUTE_OPERATOR.match(name)) and name not in _MOVES_NO_DATA


@cache
def is_not_gemm(name: str) -> bool:
    """Whether a kernel is no GEMM whatever launched it: attention, split-k reductions, pointwise kernels."""
    return bool(_NOT_A_GEMM.search(name))


@cache
def is_gemm_kernel(name: str) -> bool:
    """Whether a kernel's own name says GEMM; exclusions win."""
    return bool(_GEMM_KERNEL.search(name)) and not is_not_gemm(name)


@cache
def tile_of(name: str) -> tuple[int, int] | None:
    """Rows and columns of the output tile that a GEMM's kernel says it works on: ``nvjet_..._256x128_64x4_...``."""
    found = _TILE.search(name) if is_gemm_kernel(name) else None
    return (int(found[1]), int(found[2])) if found else None


@cache
def is_gloo_row(name: str) -> bool:
    """Whether a range is the collective itself, run by gloo on a thread of its own."""
    return name.startswith(_GLOO)


@cache
def family_of(kind: str) -> str:
    """Family in which gloo's rows and the calls that caused them are paired in order."""
    return FUSED_FAMILIES.get(kind, kind)


def runs_once_a_rank(call: str) -> bool:
    """Whether gloo runs a call as one row a rank: a reduce-scatter of a list of tensors is an all-reduce of each."""
    return call == "c10d::reduce_scatter_"


def runs_once_a_tensor(call: str) -> bool:
    """Whether gloo runs a call as one row a tensor of its first list."""
    return call == "c10d::reduce_scatter_tensor_coalesced_"
