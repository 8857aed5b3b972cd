"""Opens a trace file as a stream of bytes, whatever it is packed in.

The idea: the content says what a file is, never its name, and nobody needs more than one piece of it at a time. So a
source is an iterator of pieces of bounded size, and everything above it is the same for plain and for compressed files.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from overlap_probe.errors import TraceError

GZIP_MAGIC = b"\x1f\x8b"
SQLITE_MAGIC = b"SQLite format 3\x00"

_DISK_BYTES = 1 << 16
"""Compressed bytes read at a time: a trace shrinks about thirteen times, so this makes a piece of about 1 MB."""


def read_pieces(path: Path, piece_bytes: int) -> Iterator[bytes]:
    """The (decompressed) content of ``path`` in pieces of at most ``piece_bytes`` bytes, none of them empty.

    Raises TraceError where the file cannot be read, or is gzip that is damaged or cut off.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            if packed:
                disk = iter(lambda: file.read(min(_DISK_BYTES, piece_bytes)), b"")
                yield from _unzip(path, disk, piece_bytes)
            else:
                yield from iter(lambda: file.read(piece_bytes), b"")
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}", "give a trace file") from error


def first_bytes(path: Path, count: int = 16) -> bytes:
    """The first bytes of the (decompressed) content; fewer where the file is shorter."""
    head = b""
    for piece in read_pieces(path, max(count, 64)):
        head += piece
        if len(head) >= count:
            break
    return head[:count]


def _unzip(path: Path, packed: Iterator[bytes], piece_bytes: int) -> Iterator[bytes]:
    """Decompress all members of a gzip stream, never more than ``piece_bytes`` at once."""
    unpacker, read_bytes, made_bytes, data = zlib.decompressobj(31), 0, 0, b""
    while True:
        if not data:
            data = next(packed, b"")
            read_bytes += len(data)
            if not data:
                break
        try:
            piece = unpacker.decompress(data, piece_bytes)
        except zlib.error as error:
            where = (
                f"the gzip data is damaged after {read_bytes - len(data)} bytes, at byte {made_bytes} of its content"
            )
            raise TraceError(path, f"{where} ({error})", "copy the file again or record again") from error
        made_bytes += len(piece)
        data = unpacker.unconsumed_tail
        if piece:
            yield piece
        if unpacker.eof:  # another member may follow; padding or anything else is the end
            data = unpacker.unused_data.lstrip(b"\0") or next(packed, b"").lstrip(b"\0")
            if not data.startswith(GZIP_MAGIC):
                return
            unpacker = zlib.decompressobj(31)
    raise TraceError(
        path,
        f"the gzip data is cut off: it ends after {read_bytes} bytes, at byte {made_bytes} of its content",
        "copy the file again or record again",
    )
