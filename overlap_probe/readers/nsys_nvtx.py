"""Reads the NVTX ranges of a database of Nsight Systems: a user's labels, NCCL's own, and PyTorch's operators.

The idea: under ``torch.autograd.profiler.emit_nvtx`` (``nsys profile --pytorch``) PyTorch pushes a range for every
operator and appends what it knows to the name: ``aten::mm, seq = 12, op_id = 34, sizes = [[2, 3], [3, 4]]``. Cut at the
first of these the name is what the same row has in a Kineto trace, and becomes an operation; all else is a label.
Source of the form: ``torch/csrc/profiler/util.cpp``, ``getNvtxStr``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from overlap_probe.readers.nsys_schema import NVTX, Columns, Database, Expression, damage_is_an_error, with_one_of
from overlap_probe.readers.repeats import first_of_alike
from overlap_probe.tables import I32, I64, NO_TIME, Bool

PUSH_POP, START_END = 59, 60
"""Values of ``eventType`` that are ranges; all others are marks, domains, categories and names."""

_SEQUENCE, _OPERATION_ID, _SIZES, _INPUT_OPERATIONS = ", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = "
_APPENDED = re.compile("|".join((_SEQUENCE, _OPERATION_ID, _SIZES)))
_NOTHING, _LABEL, _OPERATION = range(3)
"""What a range can be for us."""
_NO_TEXT = 0
"""The meaning of a range without a text of its own."""

_OPERATOR = re.compile(r"[a-z_]\w*::[\w.]+")
_WITHOUT_ITS_ARGUMENTS = "record_param_comms"
"""PyTorch's row of a collective call. All that it says is in its arguments, which NVTX does not carry; the ``c10d``
operator around it does say which collective it is, so that one has to be the innermost."""


class Names:
    """Texts and their codes: each different text gets the next number."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        """The text's number."""
        return self._codes.setdefault(text, len(self._codes))

    def codes(self, values: I64, text_of: Callable[[int], str | None]) -> I64:
        """The codes of the texts that numbers stand for; each number is looked up once. None has the code -1."""
        different = np.unique(values)
        texts = (text_of(int(value)) for value in different)
        codes = np.array([-1 if text is None else self.code(text) for text in texts], np.int64)
        result: I64 = codes[np.searchsorted(different, values)]  # few are different: quicker than a sort of all
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self._codes)


@dataclass(frozen=True, slots=True)
class HostRanges:
    """All ranges of a file, a row each, in any order; ``end_ns`` is NO_TIME where a range has no end."""

    start_ns: I64
    end_ns: I64
    thread: I64
    """``globalTid`` of the thread that opened it; -1 where the file does not say."""
    name: I32
    shapes: I32
    """Code of the text of the input shapes; -1 where the name carries none."""
    is_operation: Bool


def read_ranges(database: Database, names: Names) -> HostRanges:
    """All NVTX ranges of the file. Their texts are added to ``names``."""
    columns = ("start", "end", "globalTid", "textId")
    meanings = _Meanings(names)
    numbers, rows_of_meaning = [np.empty((4, 0), np.int64)], [np.empty(0, np.int64)]
    with damage_is_an_error(database.path):
        for rows in database.batches(NVTX, columns, with_one_of(eventType=(PUSH_POP, START_END)), _what_repeats):
            *four, texts = zip(*rows, strict=True)
            numbers.append(np.array(four, np.int64))
            rows_of_meaning.append(np.fromiter(map(meanings.__getitem__, texts), np.int64, len(texts)))
    (start_ns, end_ns, thread, text_id), meaning = np.concatenate(numbers, 1), np.concatenate(rows_of_meaning)
    # A registered string is stored once, in StringIds; the row has its number in place of the text.
    registered = np.flatnonzero((meaning == _NO_TEXT) & (text_id >= 0))
    different, place = np.unique(text_id[registered], return_inverse=True)
    strings = database.texts(different.tolist())
    meaning[registered] = np.array([meanings[_encoded(strings.get(int(i)))] for i in different], np.int64)[place]
    name, shapes, kind = np.array(meanings.known, np.int32).T[:, meaning]
    kept = np.flatnonzero((kind != _NOTHING) & (start_ns != NO_TIME))
    kept = kept[first_of_alike(start_ns[kept], end_ns[kept], (thread[kept], meaning[kept]))]
    return HostRanges(start_ns[kept], end_ns[kept], thread[kept], name[kept], shapes[kept], kind[kept] == _OPERATION)


def _what_repeats(column: Columns) -> Expression:
    """A range's text, in UTF-8, without PyTorch's numbers: these differ from row to row, and all else repeats."""
    text = column("text")
    at = {mark: sa.func.instr(text, mark) for mark in (_SEQUENCE, _OPERATION_ID, _SIZES, _INPUT_OPERATIONS)}
    head = sa.case(
        *((at[mark] > 0, sa.func.substr(text, 1, at[mark] + (len(mark) - 1))) for mark in (_SEQUENCE, _OPERATION_ID)),
        (at[_SIZES] > 0, sa.func.substr(text, 1, at[_SIZES] - 1)),
        else_=text,
    )
    sizes = sa.case(
        (at[_SIZES] == 0, ""),
        (at[_INPUT_OPERATIONS] == 0, sa.func.substr(text, at[_SIZES])),
        else_=sa.func.substr(text, at[_SIZES], at[_INPUT_OPERATIONS] - at[_SIZES]),
    )
    return sa.cast(head.op("||")(sizes), sa.LargeBinary)


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "replace")


class _Meanings(dict["bytes | None", int]):
    """Row in ``known`` of the meaning of each text, which is looked at when it is first asked for.

    ``known`` has the different meanings: codes of name and shapes (-1: none), and the kind.
    """

    def __init__(self, names: Names) -> None:
        super().__init__({None: _NO_TEXT})
        self.known = [(names.code(""), -1, _LABEL)]
        self._names = names

    def __missing__(self, text: bytes | None) -> int:
        assert text is not None
        self.known.append(self._look_at(text.decode("utf-8", "replace")))
        self[text] = len(self.known) - 1
        return self[text]

    def _look_at(self, text: str) -> tuple[int, int, int]:
        appended = _APPENDED.search(text)
        if not appended:
            return self._names.code(text), -1, _LABEL
        name = text[: appended.start()]
        if name == _WITHOUT_ITS_ARGUMENTS:
            return -1, -1, _NOTHING
        # PyTorch numbers ("seq") what takes part in autograd, which a user's record_function never does.
        if appended[0] == _SEQUENCE or _OPERATOR.fullmatch(name):
            sizes = text.partition(_SIZES)[2].partition(_INPUT_OPERATIONS)[0]
            return self._names.code(name), self._names.code(sizes) if sizes else -1, _OPERATION
        return self._names.code(name), -1, _LABEL
