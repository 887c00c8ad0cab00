"""Caches of several processes, over torch.distributed: sharded heads, blocks that travel, split contexts.

Transport is torch.distributed's. The gloo backend with tensors on the CPU is tested; xccl, which Intel GPUs
use, has not been run.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .torch import merge_attention_states

__all__ = ["Sending", "gather_heads", "merge_over_ranks", "receive_blocks", "send_blocks", "shard_heads"]

_VERSION = 1
_WORDS = 4  # of the header before each layer: version, number of blocks, checksums of layout and content


def shard_heads(num_q_heads: int, num_kv_heads: int, *, rank: int, world_size: int) -> tuple[slice, slice]:
    """Which query heads, and which heads of the cache, a rank keeps.

    Query heads are cut into equal parts, one for each rank; a rank keeps the heads of keys and values that
    its query heads attend to. Where there are more ranks than heads of the cache, several ranks keep the same
    one.

    Parameters
    ----------
    num_q_heads, num_kv_heads
        Of the whole model.
    rank, world_size
        As torch.distributed counts them.

    Returns
    -------
    (slice, slice)
        Of the query heads and of the heads of the cache.

    Raises
    ------
    ValueError
        The heads cannot be shared out so that each rank has whole groups, or an equal part of one group.

    Examples
    --------
    >>> shard_heads(32, 8, rank=1, world_size=4)
    (slice(8, 16, None), slice(2, 4, None))
    >>> shard_heads(32, 2, rank=3, world_size=4)  # two ranks for each head of the cache
    (slice(24, 32, None), slice(1, 2, None))
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank` must be in [0, {world_size}), got {rank}")
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(
            f"`num_q_heads` must be a multiple of `num_kv_heads`, got {num_q_heads} and {num_kv_heads}"
        )
    fits = num_kv_heads % world_size == 0 or world_size % num_kv_heads == 0
    if num_q_heads % world_size or not fits:
        raise ValueError(
            f"`world_size` must divide the {num_kv_heads} heads of the cache, or be a multiple of them that "
            f"divides the {num_q_heads} query heads, got {world_size}"
        )
    count = num_q_heads // world_size
    group = num_q_heads // num_kv_heads
    first = rank * count
    return slice(first, first + count), slice(first // group, (first + count - 1) // group + 1)


def gather_heads(out: Tensor, *, group: Any = None) -> Tensor:
    """The attention of all ranks' query heads, side by side, on every rank.

    Parameters
    ----------
    out : [num_tokens, heads of this rank, head_size]
        As `kvcache_dpex.torch.paged_attention` returns it, of equal shape on every rank.
    group
        A process group, by default the whole world.

    Returns
    -------
    Tensor [num_tokens, num_q_heads, head_size]
    """
    parts = _all_gathered(out, group)
    return torch.cat(parts, dim=1)


def merge_over_ranks(out: Tensor, lse: Tensor, *, group: Any = None) -> tuple[Tensor, Tensor]:
    """Attention to a context whose tokens are spread over the ranks, from the attention to each part.

    While decoding, each rank attends with the same query to the tokens that it keeps
    (``paged_attention(..., return_lse=True)``, whose `seq_lens` count the rank's own tokens), and this
    function merges the results in the order of the ranks, so that all ranks get the same bits. Sinks must be
    given on one rank alone, and a sliding window is for the rank's caller to apply. A rank without tokens of
    a sequence contributes nothing.

    Parameters
    ----------
    out : [num_tokens, num_q_heads, head_size]
        The attention to this rank's tokens.
    lse : [num_tokens, num_q_heads], float32
        The logarithms (base e) of its softmax's denominators.
    group
        A process group, by default the whole world.

    Returns
    -------
    (Tensor, Tensor)
        `out` and `lse` for all tokens.
    """
    (out, lse), *others = zip(_all_gathered(out, group), _all_gathered(lse, group))
    for each_out, each_lse in others:
        out, lse = merge_attention_states(out, lse, each_out, each_lse)
    return out, lse


def _all_gathered(tensor: Tensor, group: Any) -> list[Tensor]:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts


class Sending:
    """A layer under way to another rank; `send_blocks` makes it, and `wait` ends it."""

    def __init__(self, messages: list[Tensor], works: list[Any]) -> None:
        self._messages, self._works = messages, works  # torch does not keep what it sends

    def wait(self, timeout: float = 60.0) -> None:
        """Return when the layer has been handed to the transport.

        Raises
        ------
        RuntimeError
            The other rank did not take it within `timeout` seconds, or is gone.
        """
        for work in self._works:
            work.wait(timedelta(seconds=timeout))
        self._messages = []


def send_blocks(
    layer: Sequence[Tensor], block_ids: Sequence[int] | Tensor, dst: int, *, group: Any = None
) -> Sending:
    """Send blocks of one layer, codes and scales as one message, to a rank that calls `receive_blocks`.

    Returns as soon as the blocks are copied, so that the next layer can be computed while they travel.

    Parameters
    ----------
    layer
        The layer's tensors, of any strides: ``(key_cache, value_cache)``, or with their scales, as
        `kvcache_dpex.torch.empty_quant_cache` returns them. The first axis of each is the block, or the slot.
    block_ids : [n], integers
        The blocks in order.
    dst
        The rank that receives, in the whole world.
    group
        A process group, by default the whole world.

    Returns
    -------
    Sending
        Call its `wait` before the process ends, and when the blocks of the last layer have been sent.

    Raises
    ------
    TypeError, ValueError
        The tensors do not have a common block size, or an id is not that of a block; nothing is sent.

    Examples
    --------
    On the rank that computes the prompt, and on the one that goes on from it::

        sending = []
        for layer in layers:
            ...  # compute the layer's keys and values and write them
            sending.append(send_blocks(layer, block_ids, dst=1))
        for each in sending:
            each.wait()

        receive_blocks(layers, pool.allocate(len(block_ids)), src=0)
    """
    ids = _ids(layer, block_ids)
    views = _block_views(layer)
    message = torch.cat([_bytes(view.index_select(0, ids)) for view in views])
    words = [_VERSION, len(ids), _layout(layer, views), _checksum(message)]
    messages = [torch.tensor(words, dtype=torch.int64, device=ids.device), message]
    return Sending(messages, [dist.isend(each, dst, group=group) for each in messages])


def receive_blocks(
    layers: Sequence[Sequence[Tensor]],
    block_ids: Sequence[int] | Tensor,
    src: int,
    *,
    group: Any = None,
    timeout: float = 60.0,
) -> None:
    """Receive blocks of all layers from a rank that calls `send_blocks` once for each, in this order.

    The caches are changed once everything has arrived and was found whole: after an error nothing of the
    transfer is in them.

    Parameters
    ----------
    layers
        For each layer the tensors that take its blocks, as for `send_blocks`. The strides may differ from the
        sender's; dtypes and shapes of a block must not.
    block_ids : [n], integers
        The blocks that take them, in the sender's order; all different.
    src
        The rank that sends, in the whole world.
    group
        A process group, by default the whole world.
    timeout
        Seconds that each layer may take.

    Raises
    ------
    TypeError, ValueError
        The caches, or the number of blocks, are not those of the sender, or an id is not that of a block.
    RuntimeError
        A layer did not arrive in time, or is damaged, or the other rank is gone.
    """
    ids = [_ids(layer, block_ids) for layer in layers]
    views = [_block_views(layer) for layer in layers]
    if any(len(torch.unique(each)) != len(each) for each in ids):
        raise ValueError(f"`block_ids` must be all different, got {ids[0].tolist()}")
    limit = timedelta(seconds=timeout)
    messages = [_received(*each, src, group, limit) for each in zip(layers, views, ids)]
    for of_layer, message, where in zip(views, messages, ids):
        for view in of_layer:
            rows = view.new_empty((len(where), *view.shape[1:]))
            content, message = message.tensor_split([rows.nbytes])
            _bytes(rows).copy_(content)
            view.index_copy_(0, where, rows)


def _received(
    layer: Sequence[Tensor], views: list[Tensor], ids: Tensor, src: int, group: Any, timeout: timedelta
) -> Tensor:
    """The message of one layer, found whole."""
    header = torch.empty(_WORDS, dtype=torch.int64, device=ids.device)
    _receive(header, src, group, timeout)
    version, num_blocks, layout, checksum = header.tolist()
    if version != _VERSION:
        raise ValueError(f"rank {src} sends version {version} of a layer, and this package reads {_VERSION}")
    if num_blocks != len(ids):
        raise ValueError(f"`block_ids` must be as many as rank {src} sends, {num_blocks}, got {len(ids)}")
    if layout != _layout(layer, views):
        kinds = ", ".join(f"{list(view.shape[1:])} {each.dtype}" for each, view in zip(layer, views))
        raise ValueError(f"`layers` must have the blocks that rank {src} sends, got blocks of {kinds}")
    size = sum(view[0].nbytes for view in views) * num_blocks
    message = torch.empty(size, dtype=torch.uint8, device=ids.device)
    _receive(message, src, group, timeout)
    if _checksum(message) != checksum:
        raise RuntimeError(f"a layer arrived damaged from rank {src}: send it again")
    return message


def _receive(buffer: Tensor, src: int, group: Any, timeout: timedelta) -> None:
    work = dist.irecv(buffer, src, group=group)
    assert work is not None, "this process is not in the group"
    work.wait(timeout)


def _layout(layer: Sequence[Tensor], views: list[Tensor]) -> int:
    """A hash over dtypes and shapes of the blocks of a layer."""
    kinds = [(str(each.dtype), *view.shape[1:]) for each, view in zip(layer, views)]
    return zlib.crc32(repr(kinds).encode())


def _checksum(message: Tensor) -> int:
    return zlib.crc32(message.cpu().numpy().data)


def _ids(layer: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Tensor:
    """The blocks as int64 where the layer is; raises where one of them is not a block."""
    ids = torch.as_tensor(block_ids, device=layer[0].device)
    if ids.ndim != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)):
        raise TypeError(f"`block_ids` must be one-dimensional integers, got {ids.dtype} {list(ids.shape)}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(layer[0]):
        raise ValueError(f"`block_ids` must be in [0, {len(layer[0])}), got {ids.tolist()}")
    return ids.long()


def _block_views(layer: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a layer with the block as their first axis."""
    num_blocks = len(layer[0])
    views = []
    for tensor in layer:
        if len(tensor) % num_blocks:
            raise ValueError(
                f"the first axis of each of a layer's tensors must be the {num_blocks} blocks of the first, "
                f"or their slots, got a tensor of shape {list(tensor.shape)}"
            )
        view = tensor if len(tensor) == num_blocks else tensor.unflatten(0, (num_blocks, -1))
        # torch does not index float8.
        views.append(view.view(torch.uint8) if view.dtype.itemsize == 1 else view)
    return views


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(torch.uint8).view(-1)
