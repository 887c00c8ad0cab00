"""The sequence and the position of each token of a batch, a token an item."""

from .sequences import query_place
from .views import store

TYPES = {"index": ("int32", "int64")}


def token_places(
    item: "item[1]",
    append_indptr: "index[n]",
    seq_lens: "index[sequence]",
    out: "index[token]",
    positions: "index[token]",
    num_tokens: "int64",
    num_seqs: "int64",
):
    """Sequence and position of each token; -1 and -1 for a token of none."""
    token = item.get_id(0)
    if token < num_tokens:
        sequence, position = query_place(append_indptr, seq_lens, token, num_seqs, 1)
        store(out, sequence, token)
        store(positions, position if sequence >= 0 else sequence, token)
