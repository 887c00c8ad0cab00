"""What a caller passes, checked: tokens, extra keys."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

from ..layout import whole_number

Tokens = Union[int, Sequence[int]]  # token ids, or how many tokens where ids are unknown
ExtraKeys = Mapping[int, Union[str, bytes]]  # by position


class NewTokens(NamedTuple):
    """Tokens of a new sequence, or to append to one."""

    ids: array | None  # None where only their number is known
    num_tokens: int
    keys: dict[int, bytes]  # extra keys by position


def new_tokens(tokens: Tokens, extra_keys: ExtraKeys | None, start: int = 0) -> NewTokens:
    """Tokens whose first has position `start` of its sequence."""
    ids = None
    if hasattr(tokens, "__index__") and not hasattr(tokens, "__len__"):  # arrays have both
        num_tokens = whole_number("tokens", tokens, least=0)
    else:
        ids = token_array(tokens)
        num_tokens = len(ids)
    return NewTokens(ids, num_tokens, checked_keys(extra_keys, start, start + num_tokens))


def token_array(tokens: Any) -> array:
    """Token ids as 64-bit integers."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(
            f"`tokens` must be a sequence of ints or a number of tokens, got {type(tokens).__name__}"
        )
    try:
        return array("q", tokens)
    except OverflowError:
        raise ValueError("`tokens` must be ids that fit in 64 bits, got a larger one") from None
    except TypeError as error:
        raise TypeError(f"`tokens` must be a sequence of ints or a number of tokens: {error}") from None


def checked_keys(extra_keys: ExtraKeys | None, start: int, stop: int) -> dict[int, bytes]:
    """Extra keys as bytes; each must be at a position ``start <= position < stop``."""
    keys: dict[int, bytes] = {}
    if not extra_keys:
        return keys
    for position, key in extra_keys.items():
        if not isinstance(key, (str, bytes)):
            raise TypeError(f"`extra_keys[{position!r}]` must be str or bytes, got {type(key).__name__}")
        if not start <= whole_number("extra_keys", position, least=0) < stop:
            raise ValueError(
                f"`extra_keys` must be at positions of these tokens, {start} <= position < {stop}, "
                f"got {position}"
            )
        keys[int(position)] = key.encode() if isinstance(key, str) else key
    return keys
