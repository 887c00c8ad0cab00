"""Reads SPIR-V modules: entry points, capabilities, extensions, and whether the bytes are whole."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAGIC = 0x07230203
VERSION_1_1 = 0x00010100
OP_NAME, OP_MEMBER_NAME, OP_EXTENSION, OP_ENTRY_POINT, OP_EXECUTION_MODE, OP_CAPABILITY = 5, 6, 10, 15, 16, 17
SUBGROUP_DISPATCH = 58  # a capability
SUBGROUP_SIZE = 35  # an execution mode

# Names of the SPIR-V specification, section 3.31.
CAPABILITIES = {
    4: "Addresses",
    5: "Linkage",
    6: "Kernel",
    7: "Vector16",
    8: "Float16Buffer",
    9: "Float16",
    10: "Float64",
    11: "Int64",
    12: "Int64Atomics",
    18: "Groups",
    22: "Int16",
    38: "GenericPointer",
    39: "Int8",
    SUBGROUP_DISPATCH: "SubgroupDispatch",
}


def instructions(binary: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield ``(opcode, operands)``; raise ValueError where the bytes are no whole module."""
    if len(binary) < 20 or len(binary) % 4 or struct.unpack_from("<I", binary)[0] != MAGIC:
        raise ValueError(f"not a SPIR-V module: {len(binary)} bytes, starting {binary[:4]!r}")
    words = struct.unpack(f"<{len(binary) // 4}I", binary)
    at = 5
    while at < len(words):
        opcode, count = words[at] & 0xFFFF, words[at] >> 16
        if count == 0 or at + count > len(words):
            raise ValueError(f"damaged SPIR-V module: instruction at word {at} has {count} words")
        yield opcode, words[at + 1 : at + count]
        at += count


def without_names(binary: bytes) -> bytes:
    """The module without debug names, which differ from one compile to the next."""
    kept = [binary[:20]]
    for opcode, operands in instructions(binary):
        if opcode not in (OP_NAME, OP_MEMBER_NAME):
            kept.append(_encoded(opcode, *operands))
    return b"".join(kept)


def with_subgroup_size(binary: bytes, size: int) -> bytes:
    """The module with a required sub-group size for each of its kernels.

    Parameters
    ----------
    binary
        A SPIR-V module; its version becomes 1.1 where it is lower, as the execution mode demands.
    size
        Items in a sub-group. The device must list it among its ``sub_group_sizes``.
    """
    version = max(struct.unpack_from("<I", binary, 4)[0], VERSION_1_1)
    parts = [binary[:4], struct.pack("<I", version), binary[8:20], _encoded(OP_CAPABILITY, SUBGROUP_DISPATCH)]
    modes: list[bytes] = []
    for opcode, operands in instructions(binary):
        # A module lists all its entry points before its execution modes.
        if opcode != OP_ENTRY_POINT and modes:
            parts += modes
            modes = []
        parts.append(_encoded(opcode, *operands))
        if opcode == OP_ENTRY_POINT:
            modes.append(_encoded(OP_EXECUTION_MODE, operands[1], SUBGROUP_SIZE, size))
    return b"".join(parts)


def _encoded(opcode: int, *operands: int) -> bytes:
    return struct.pack(f"<{len(operands) + 1}I", opcode | (len(operands) + 1) << 16, *operands)


def entry_points(binary: bytes) -> list[str]:
    """Names of the kernels in a module."""
    return [_text(operands[2:]) for code, operands in instructions(binary) if code == OP_ENTRY_POINT]


def is_module(binary: bytes, entry: str) -> bool:
    """Whether the bytes are a whole module with one entry point of this name."""
    try:
        return entry_points(binary) == [entry]
    except ValueError:
        return False


def capabilities(binary: bytes) -> list[str]:
    """What a device must be able to do, sorted; unknown ones by number."""
    declared = (operands[0] for code, operands in instructions(binary) if code == OP_CAPABILITY)
    return sorted(CAPABILITIES.get(number, str(number)) for number in declared)


def extensions(binary: bytes) -> list[str]:
    """SPIR-V extensions that a module uses, sorted."""
    return sorted(_text(operands) for code, operands in instructions(binary) if code == OP_EXTENSION)


def _text(words: tuple[int, ...]) -> str:
    return struct.pack(f"<{len(words)}I", *words).split(b"\0", 1)[0].decode()
