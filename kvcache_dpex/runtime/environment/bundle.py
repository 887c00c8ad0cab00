"""Loads several shared libraries into one scope, by an ELF library that only names them as needed.

dpnp's MKL libraries refer to one another without declaring it, so each must see the others. Loaded for the
whole process (RTLD_GLOBAL) they would replace the MKL inside torch, whose integers are half as wide, and
torch would crash. As dependencies of one library they see one another, and nobody else sees them.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

# From the ELF specification and its x86-64 supplement: the SYCL runtime has wheels for x86-64 only.
_NULL, _NEEDED, _HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _RUNPATH = 0, 1, 4, 5, 6, 10, 11, 29
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK, _READ_WRITE, _ET_DYN, _EM_X86_64 = 1, 2, 0x6474E551, 6, 3, 62
_HEADER, _SEGMENT, _SYMBOL, _ENTRY = 64, 56, 24, 16


def load(names: Sequence[str], folders: Sequence[str]) -> bool:
    """Load libraries from LD_LIBRARY_PATH or these folders, all or none, in this order; whether it worked."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    # Kept open: the linker takes a second file of the same name for the first one.
    file = os.memfd_create("libraries")
    os.write(file, image(names, folders))
    return dlopen(f"/proc/{os.getpid()}/fd/{file}".encode(), os.RTLD_LAZY) is not None


def image(names: Sequence[str], folders: Sequence[str]) -> bytes:
    """The bytes of the library."""
    strings = [*names, ":".join(folders)]
    starts = [
        1 + sum(len(os.fsencode(text)) + 1 for text in strings[:index]) for index in range(len(strings))
    ]
    table = b"\0" + b"".join(os.fsencode(text) + b"\0" for text in strings)
    hash_at = _HEADER + 3 * _SEGMENT
    symbols_at = hash_at + 24
    dynamic_at = symbols_at + _SYMBOL
    dynamic_size = _ENTRY * (len(strings) + 6)
    table_at = dynamic_at + dynamic_size
    entries = [
        *((_NEEDED, start) for start in starts[:-1]),
        (_RUNPATH, starts[-1]),
        (_HASH, hash_at),
        (_SYMTAB, symbols_at),
        (_SYMENT, _SYMBOL),
        (_STRTAB, table_at),
        (_STRSZ, len(table)),
        (_NULL, 0),
    ]
    header = struct.pack(
        "<16s2HI3QI6H",
        b"\x7fELF\x02\x01\x01",
        *(_ET_DYN, _EM_X86_64, 1, 0, _HEADER, 0, 0),
        *(_HEADER, _SEGMENT, 3, 0, 0, 0),
    )
    size = table_at + len(table)
    segments = struct.pack("<2I6Q", _PT_LOAD, _READ_WRITE, 0, 0, 0, size, size, 4096)
    place = (dynamic_at, dynamic_at, dynamic_at, dynamic_size, dynamic_size)
    segments += struct.pack("<2I6Q", _PT_DYNAMIC, _READ_WRITE, *place, 8)
    # Without it the stack would have to be executable, which glibc refuses since 2.41.
    segments += struct.pack("<2I6Q", _PT_GNU_STACK, _READ_WRITE, 0, 0, 0, 0, 0, 16)
    no_hashes = struct.pack("<5I4x", 1, 1, 0, 0, 0)
    dynamic = b"".join(struct.pack("<2Q", *entry) for entry in entries)
    return header + segments + no_hashes + bytes(_SYMBOL) + dynamic + table
