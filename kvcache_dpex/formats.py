"""What a cache stores: one row for each format, whatever the device."""

from __future__ import annotations

from typing import Any, NamedTuple


class Format(NamedTuple):
    """How the values of one token and head are kept.

    Attributes
    ----------
    name
        As vLLM spells it, where vLLM has it.
    dtype
        Of an element: the values themselves, or codes.
    itemsize
        Bytes of an element.
    scale_bytes
        Bytes of the scale of each token and head; 0 where values are kept as they are.
    """

    name: str
    dtype: str
    itemsize: int
    scale_bytes: int = 0

    def row_bytes(self, head_size: int) -> int:
        """Bytes of the keys, or of the values, of one token and head.

        >>> QUANTIZED["int8_per_token_head"].row_bytes(128)
        132
        """
        return head_size * self.itemsize + self.scale_bytes


PLAIN = {
    each.name: each
    for each in (
        Format("float32", "float32", 4),
        Format("float16", "float16", 2),
        Format("bfloat16", "bfloat16", 2),
        Format("float8_e4m3fn", "float8_e4m3fn", 1),
        Format("float8_e5m2", "float8_e5m2", 1),
    )
}
QUANTIZED = {
    each.name: each
    for each in (
        Format("int8_per_token_head", "int8", 1, scale_bytes=4),
        Format("fp8_per_token_head", "float8_e4m3fn", 1, scale_bytes=4),
    )
}


def quantized(name: Any) -> Format:
    """The format of this name, which has codes and scales.

    >>> quantized("fp8_per_token_head").dtype
    'float8_e4m3fn'
    """
    if name not in QUANTIZED:
        raise ValueError(f"`format` must be one of {', '.join(QUANTIZED)}, got {name!r}")
    return QUANTIZED[name]


def of_codes(argument: str, dtype: str, name: Any = None) -> Format:
    """The format of an array of codes, by its dtype, or of this name, which the dtype must fit.

    NumPy and dpnp keep the bits of float8 as uint8, so such arrays need the name.
    """
    if name is None:
        found = [each for each in QUANTIZED.values() if each.dtype == dtype]
        if not found:
            raise TypeError(
                f"`{argument}` must be int8, float8_e4m3fn, or uint8 with format='fp8_per_token_head', "
                f"got {dtype}"
            )
        return found[0]
    wanted = quantized(name)
    if dtype not in (wanted.dtype, *(("uint8",) if wanted.dtype.startswith("float8") else ())):
        also = " or uint8" if wanted.dtype.startswith("float8") else ""
        raise TypeError(f"`{argument}` must be {wanted.dtype}{also} for format {name!r}, got {dtype}")
    return wanted
