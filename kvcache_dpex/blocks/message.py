"""A sequence as bytes: a header of fixed size, what the sequence is, its token ids, and its rows.

The header is ``magic, version, length of the description, CRC-32`` of all that follows, little-endian. The
description is JSON.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

MAGIC, VERSION = b"KVDPEXSQ", 1
_HEADER = struct.Struct("<8sIII")


def pack(description: dict[str, Any], ids: array | None, rows: Sequence[np.ndarray]) -> bytes:
    """One contiguous buffer.

    Parameters
    ----------
    description
        What JSON can hold.
    ids
        Token ids, or None where only their number is known.
    rows
        Contiguous arrays, whose dtypes and shapes the reader knows from the description.
    """
    text = json.dumps({**description, "num_ids": None if ids is None else len(ids)}).encode()
    parts: list[Any] = [
        text,
        b"" if ids is None else ids.tobytes(),
        *(each.reshape(-1).data for each in rows),
    ]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([_HEADER.pack(MAGIC, VERSION, len(text), checksum), *parts])


def unpack(data: Any) -> tuple[dict[str, Any], array | None, memoryview]:
    """Description, token ids and the bytes of the rows; raises ValueError where these are not whole."""
    view = memoryview(data).cast("B")
    if len(view) < _HEADER.size or bytes(view[:8]) != MAGIC:
        raise ValueError("`data` must be what `export_sequence` returned, got other bytes")
    _, version, length, checksum = _HEADER.unpack(view[: _HEADER.size])
    if version != VERSION:
        raise ValueError(f"`data` has version {version}, and this package reads version {VERSION}")
    rest = view[_HEADER.size :]
    if zlib.crc32(rest) != checksum:
        raise ValueError("`data` is damaged or cut off: its checksum does not fit; export the sequence again")
    description = json.loads(bytes(rest[:length]))
    count, rest = description.pop("num_ids"), rest[length:]
    if count is None:
        return description, None, rest
    ids = array("q")
    ids.frombytes(rest[: count * ids.itemsize])
    return description, ids, rest[count * ids.itemsize :]
