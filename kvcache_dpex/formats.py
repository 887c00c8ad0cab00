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
        Bytes of the scale of each token and head; 0 where there is none.
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

# Codes whose scale, one for a cache or one for each head, is given and not made of the rows.
STATIC = {
    each.name: each for each in (Format("fp8_e4m3", "float8_e4m3fn", 1), Format("fp8_e5m2", "float8_e5m2", 1))
}
VLLM_STATIC = {"fp8": "fp8_e4m3", **{name: name for name in STATIC}}  # by the names of vLLM's kv_cache_dtype


def quantized(name: Any) -> Format:
    """The format of this name, which has codes and scales.

    >>> quantized("fp8_per_token_head").dtype
    'float8_e4m3fn'
    """
    return _named(name, QUANTIZED)


def of_codes(argument: str, dtype: str, name: Any = None, known: dict[str, Format] | None = None) -> Format:
    """The format of an array of codes, by its dtype, or of this name, which the dtype must fit.

    NumPy and dpnp keep the bits of float8 as uint8, so such arrays need the name. `known` are the formats
    to choose among, by default those that can be read.
    """
    known = {**QUANTIZED, **STATIC} if known is None else known
    if name is None:
        found = [each for each in known.values() if each.dtype == dtype]
        if not found:
            dtypes = ", ".join(dict.fromkeys(each.dtype for each in known.values()))
            names = " or ".join(repr(each.name) for each in known.values() if _has_bits(each))
            raise TypeError(f"`{argument}` must be {dtypes}, or uint8 with format={names}, got {dtype}")
        return found[0]
    wanted = _named(name, known)
    if dtype != wanted.dtype and not (dtype == "uint8" and _has_bits(wanted)):
        also = " or uint8" if _has_bits(wanted) else ""
        raise TypeError(f"`{argument}` must be {wanted.dtype}{also} for format {name!r}, got {dtype}")
    return wanted


def _named(name: Any, known: dict[str, Format]) -> Format:
    if name not in known:
        raise ValueError(f"`format` must be one of {', '.join(known)}, got {name!r}")
    return known[name]


def _has_bits(found: Format) -> bool:
    """Whether uint8 arrays hold codes of this format."""
    return found.dtype.startswith("float8")
