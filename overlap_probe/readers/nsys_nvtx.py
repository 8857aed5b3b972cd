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

from overlap_probe.readers.nsys_schema import NVTX, Database, damage_is_an_error
from overlap_probe.tables import I32, I64, NO_TIME, Bool

PUSH_POP, START_END = 59, 60
"""Values of ``eventType`` that are ranges; all others are marks, domains, categories and names."""

_APPENDED = re.compile(r", (?:seq|op_id|sizes) = ")
_NOTHING, _LABEL, _OPERATION = range(3)
"""What a range can be for us."""
_NO_TEXT = 0
"""The meaning of a range without a text of its own."""

_SIZES, _INPUT_OPERATIONS = ", sizes = ", ", input_op_ids = "
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
        different, place = np.unique(values, return_inverse=True)
        texts = (text_of(int(value)) for value in different)
        codes = np.array([-1 if text is None else self.code(text) for text in texts], np.int64)
        result: I64 = codes[place]
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
    columns = ("start", "end", "globalTid", "textId", "text")
    meanings = _Meanings(names)
    numbers, rows_of_meaning = [np.empty((4, 0), np.int64)], [np.empty(0, np.int64)]
    with damage_is_an_error(database.path):
        for rows in database.batches(NVTX, columns, {"eventType": (PUSH_POP, START_END)}):
            *four, texts = zip(*rows, strict=True)
            numbers.append(np.array(four, np.int64))
            rows_of_meaning.append(np.fromiter(map(meanings.of, texts), np.int64, len(texts)))
    (start_ns, end_ns, thread, text_id), meaning = np.concatenate(numbers, 1), np.concatenate(rows_of_meaning)
    # A registered string is stored once, in StringIds; the row has its number in place of the text.
    registered = np.flatnonzero((meaning == _NO_TEXT) & (text_id >= 0))
    different, place = np.unique(text_id[registered], return_inverse=True)
    strings = database.texts(different.tolist())
    meaning[registered] = np.array([meanings.of(strings.get(int(i))) for i in different], np.int64)[place]
    name, shapes, kind = np.array(meanings.known, np.int32).T[:, meaning]
    kept = (kind != _NOTHING) & (start_ns != NO_TIME)
    return HostRanges(start_ns[kept], end_ns[kept], thread[kept], name[kept], shapes[kept], kind[kept] == _OPERATION)


class _Meanings:
    """What texts mean; ``known`` has the different meanings: codes of name and shapes (-1: none), and the kind."""

    def __init__(self, names: Names) -> None:
        self.known = [(names.code(""), -1, _LABEL)]
        self._names = names
        self._rows: dict[str | None, int] = {None: _NO_TEXT}

    def of(self, text: str | None) -> int:
        """Row in ``known`` of the meaning of a text."""
        row = self._rows.get(text)
        if row is None:
            assert text is not None
            appended = _APPENDED.search(text)
            # What is appended differs from row to row; the text up to it repeats, and so do the sizes.
            head = text[: appended.end()] if appended else text
            sizes = text.partition(_SIZES)[2].partition(_INPUT_OPERATIONS)[0] if _SIZES in text else ""
            row = self._rows.get(head + sizes)
            if row is None:
                row = self._rows[head + sizes] = len(self.known)
                self.known.append(self._look_at(head, appended, sizes))
        return row

    def _look_at(self, head: str, appended: re.Match[str] | None, sizes: str) -> tuple[int, int, int]:
        if not appended:
            return self._names.code(head), -1, _LABEL
        name = head[: appended.start()]
        if name == _WITHOUT_ITS_ARGUMENTS:
            return -1, -1, _NOTHING
        # PyTorch numbers ("seq") what takes part in autograd, which a user's record_function never does.
        if appended[0] == ", seq = " or _OPERATOR.fullmatch(name):
            return self._names.code(name), self._names.code(sizes) if sizes else -1, _OPERATION
        return self._names.code(name), -1, _LABEL
