"""Messages between a stage and the process that runs its reward functions: JSON, with or without an Arrow table."""

import json
import os
import select
import struct
import time
from typing import Any

import pyarrow as pa

SIZES = struct.Struct(">QQ")  # bytes of the JSON, bytes of the table
CHUNK = 1 << 20

Message = dict[str, Any]
Frame = tuple[Message, pa.Table | None]


class TimeIsUp(Exception):
    """No whole message came in time."""


def send(descriptor: int, message: Message, table: pa.Table | None = None) -> None:
    """Write one frame to a pipe; raises OSError if nobody reads it any more."""
    text = json.dumps(message, ensure_ascii=False).encode(errors="replace")  # texts may hold half a surrogate pair
    rows = b"" if table is None else _encoded(table)
    for part in (SIZES.pack(len(text), len(rows)), text, rows):
        left = memoryview(part)
        while left:
            left = left[os.write(descriptor, left) :]


def receive(descriptor: int, until: float | None = None) -> Frame:
    """Read one frame from a pipe; raises EOFError if the other end is gone and TimeIsUp if `until` passes first.

    until: in seconds of time.monotonic.
    """
    text_size, table_size = SIZES.unpack(_exactly(descriptor, SIZES.size, until))
    message = json.loads(_exactly(descriptor, text_size, until))
    table = _decoded(_exactly(descriptor, table_size, until)) if table_size else None
    return message, table


def _exactly(descriptor: int, size: int, until: float | None) -> bytes:
    found = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(found) < size:
        if until is not None and not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeIsUp
        part = os.read(descriptor, min(CHUNK, size - len(found)))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _encoded(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _decoded(data: bytes) -> pa.Table:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()
