"""Copies a trace of torch.profiler without what identifies people and machines: the JSON half of ``scrub``.

The idea: the values that stay are copied as they are written, so that no time loses a digit; which ones stay is what
the reader reads, and what a viewer needs to draw the tracks and arrows.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from overlap_probe.readers.bytes_source import read_pieces
from overlap_probe.readers.json_stream import EventStream
from overlap_probe.readers.kineto_events import Args, part_of
from overlap_probe.readers.kineto_metadata import recorded_waits
from overlap_probe.readers.losses import declared_losses
from overlap_probe.readers.repair import clean
from overlap_probe.run_queue import METADATA_KEY

_PIECE_BYTES = 1 << 20

_VIEWED = frozenset({"ac2g", "fwdbwd", "gpu_user_annotation"})
"""Categories that the reader does not want but a viewer shows: arrows, and the labels above the streams."""
_TRACK_LABEL = re.compile(r"CPU|GPU \d+|stream \d+ ?")
_EVENT_KEYS = frozenset({"ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "bp"})
"""Of the trace event format; ``args`` are looked at one by one."""
_ARGUMENTS = frozenset(field.encode_name for field in msgspec.structs.fields(Args))

_JSON = msgspec.json.Encoder(decimal_format="number")
_decode_events = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode


def scrub_kineto(path: Path, out: Path, without_paths: Callable[[str], str], packed: bool) -> None:
    """Write the copy to ``out``, compressed if ``packed``. Raises TraceError if the original cannot be read."""
    with out.open("wb") as file:
        pieces = _Copy(path, without_paths).pieces()
        if not packed:
            file.writelines(pieces)
            return
        # Neither a name nor a time in the header of the gzip data.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as unpacked:
            unpacked.writelines(pieces)


class _Copy:
    def __init__(self, path: Path, without_paths: Callable[[str], str]) -> None:
        self._stream = EventStream[dict[str, Raw]](path, read_pieces(path, _PIECE_BYTES), _decode_events, _raw_fields)
        self._without_paths = without_paths

    def pieces(self) -> Iterator[bytes]:
        """The text: the events first, because what else there is may follow them in the original."""
        before = b'{"traceEvents": [\n'
        for events in self._stream:
            for event in events:
                if kept := self._event(event):
                    yield before + _JSON.encode(kept)
                    before = b",\n"
        yield b"\n]" if before == b",\n" else before + b"]"
        for key, value in self._metadata().items():
            yield b",\n" + _JSON.encode(key) + b": " + _JSON.encode(value)
        yield b"}\n"

    def _event(self, event: dict[str, Raw]) -> dict[str, Any] | None:
        """The event with only the fields that reader or viewer wants; None if neither wants the event."""
        arguments = _decode_object(event["args"]) if bytes(event.get("args", b""))[:1] == b"{" else {}
        if _string(event.get("ph")) == "M":
            kept = {key: value for key, value in arguments.items() if _labels_a_track(key, value)}
            wanted = bool(kept)
        else:
            kept = {key: value for key, value in arguments.items() if key in _ARGUMENTS}
            category = _string(event.get("cat"))
            wanted = part_of(category) is not None or category in _VIEWED
        if not wanted:
            return None
        fields: dict[str, Any] = {key: self._value(value) for key, value in event.items() if key in _EVENT_KEYS}
        return fields | ({"args": {key: self._value(value) for key, value in kept.items()}} if kept else {})

    def _value(self, value: Raw) -> Raw | str:
        """A text without paths; anything else as it is written, to the last digit."""
        return self._without_paths(_string(value)) if bytes(value)[:1] == b'"' else value

    def _metadata(self) -> dict[str, Any]:
        """Numbers, what the reader reads, and what says that rows are missing."""
        metadata = self._stream.metadata
        kept = _numbers(metadata) | self._texts(metadata, "displayTimeUnit")
        if isinstance(devices := metadata.get("deviceProperties"), list):
            kept["deviceProperties"] = [_numbers(d) | self._texts(d, "name") for d in devices if isinstance(d, dict)]
        if isinstance(run := metadata.get("distributedInfo"), dict):
            kept["distributedInfo"] = _numbers(run) | self._texts(run, "backend", "rank", "world_size")
            if isinstance(groups := run.get("pg_config"), list):
                kept["distributedInfo"]["pg_config"] = [self._group(g) for g in groups if isinstance(g, dict)]
        if waits := recorded_waits(metadata):
            kept[METADATA_KEY] = waits
        still_said = declared_losses(kept)
        said = (text for text in declared_losses(metadata) if text not in still_said)
        losses = [self._without_paths(text.removeprefix("the profiler says: ")) for text in said]
        if self._stream.lost:
            losses.append(f"{len(self._stream.lost)} events of broken JSON were dropped")
        return kept | ({"losses": losses} if losses else {})

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        """A process group: its name, and its ranks as a list or, in older traces, as a text."""
        kept = _numbers(group) | self._texts(group, "pg_name", "ranks")
        if isinstance(ranks := group.get("ranks"), list):
            kept["ranks"] = [rank for rank in ranks if isinstance(rank, int)]
        return kept

    def _texts(self, values: dict[str, Any], *keys: str) -> dict[str, Any]:
        return {key: self._without_paths(clean(values[key])) for key in keys if isinstance(values.get(key), str)}


def _labels_a_track(key: str, value: Raw) -> bool:
    """Whether an argument of a metadata event says only where a track is, or which device or stream it is."""
    return key == "sort_index" or (key in ("name", "labels") and bool(_TRACK_LABEL.fullmatch(_string(value))))


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, int | Decimal)}


def _string(value: Raw | None) -> str:
    """The text that a JSON value is; empty if it is another value."""
    text = bytes(value or b"")
    return msgspec.json.decode(text, type=str) if text[:1] == b'"' else ""


def _raw_fields(event: dict[str, Any]) -> dict[str, Raw]:
    """An event that had to be repaired, in the form of the others."""
    return {clean(key): Raw(_JSON.encode(_encodable(value))) for key, value in event.items()}


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): _encodable(member) for key, member in value.items()}
    return [_encodable(member) for member in value] if isinstance(value, list) else value
