"""Hashes of full blocks. Each covers the one before it, so equal hashes mean equal prefixes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256

from ..layout import whole_number
from .arguments import ExtraKeys, checked_keys, token_array


def block_hashes(tokens: Sequence[int], block_size: int, extra_keys: ExtraKeys | None = None) -> list[bytes]:
    """Hashes of the full blocks of a sequence of tokens, as `BlockPool` uses them.

    A hash is the SHA-256 digest of the previous block's hash, of the block's token ids and of its extra
    keys. It is the same in every process and on every machine. Two different prefixes share a hash only
    if SHA-256 collides, so a match is not verified against the tokens.

    Parameters
    ----------
    tokens : sequence of int
        Token ids; each must fit in 64 bits. Tokens after the last full block are ignored.
    block_size : int
        Tokens in a block. Hashes of different block sizes never match.
    extra_keys : mapping of int to str or bytes, optional
        As for `BlockPool.allocate`.

    Returns
    -------
    list of bytes
        ``len(tokens) // block_size`` hashes of 32 bytes.

    Examples
    --------
    >>> first, second = block_hashes([5, 6, 7, 8, 9], block_size=2)
    >>> block_hashes([5, 6, 0, 0], block_size=2)[0] == first
    True
    >>> block_hashes([0, 0, 7, 8], block_size=2)[1] == second
    False
    """
    block_size = whole_number("block_size", block_size, least=1)
    ids = token_array(tokens)
    keys = checked_keys(extra_keys, 0, len(ids))
    return chained(ids, keys, block_size, [], len(ids) // block_size)


def chained(
    tokens: array, keys: Mapping[int, bytes], block_size: int, known: Sequence[bytes], stop: int
) -> list[bytes]:
    """Hashes of the blocks ``len(known) <= block < stop``, where `known` are those before them."""
    start = len(known)
    parent = known[-1] if known else _root(block_size)
    data = _little_endian(tokens[start * block_size : stop * block_size])
    step = block_size * tokens.itemsize
    hashes = []
    for offset in range(0, len(data), step):
        text = parent + data[offset : offset + step]
        if keys:
            text += _packed(keys, start + offset // step, block_size)
        parent = sha256(text).digest()
        hashes.append(parent)
    return hashes


def _root(block_size: int) -> bytes:
    """What stands for the hash before the first."""
    return sha256(b"kvcache_dpex.blocks 1 " + block_size.to_bytes(8, "little")).digest()


def _little_endian(tokens: array) -> bytes:
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _packed(keys: Mapping[int, bytes], block: int, block_size: int) -> bytes:
    """Position, length and bytes of each key of a block, so that different keys never pack to equal bytes."""
    positions = range(block * block_size, (block + 1) * block_size)
    return b"".join(
        position.to_bytes(8, "little") + len(keys[position]).to_bytes(8, "little") + keys[position]
        for position in positions
        if position in keys
    )
