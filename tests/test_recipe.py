"""README's recipe for an operation, performed in a copy of the package."""

import os
import shutil
import textwrap

import pytest

from helpers import ROOT, output_of
from kvcache_dpex.runtime.compile import compiler, elsewhere

COMPILER = os.environ.get(elsewhere.VARIABLE, "")

KERNEL = '''
"""Set the rows of some slots to zero bits, a word an item."""

import numpy as np

from .parts import index_in_row
from .views import load, store

TYPES = {"word": ("uint8", "uint16", "uint32", "uint64"), "slot": ("int32", "int64")}


def clear_rows(
    item: "nditem[3]",  # (parts of a head, heads, slots), slots rounded up
    cache: "word[block, offset, head, element]",
    slot_mapping: "slot[token]",
    num_tokens: "int64",
    num_slots: "int64",
    block_size: "int64",
    head_size: "int64",
):
    """Zero slot ``slot_mapping[token]``, if there is such a slot."""
    element = index_in_row(item, head_size)
    head = item.get_global_id(1)
    token = item.get_global_id(2)
    if token < num_tokens:
        slot = load(slot_mapping, token)
        if 0 <= slot < num_slots:
            block = np.int64(np.uint32(slot) // np.uint32(block_size))
            store(cache, 0, block, slot - block * block_size, head, element)
'''

OPERATION = '''
"""clear_slots: rows that nobody needs any more."""

from __future__ import annotations

from ..kernels.clear_rows import clear_rows
from ..runtime.launch.arrays import Operand
from . import validate
from .calls import Plan
from .declaration import Array, Written
from .groups import head_groups
from .operation import operation, perform
from .plan import plan_of


def _check(cache: Operand, slot_mapping: Operand) -> None:
    if len(cache.shape) != 4:
        raise ValueError(f"`cache` must have four axes, got {list(cache.shape)}")
    validate.slots(slot_mapping, cache.shape[0] * cache.shape[1])


def _plan(cache: Operand, slot_mapping: Operand, alignment: int) -> Plan | None:
    num_blocks, block_size, num_kv_heads, head_size = cache.shape
    if 0 in cache.shape or 0 in slot_mapping.shape:
        return None
    (num_tokens,) = slot_mapping.shape
    return plan_of(
        clear_rows,
        {"word": f"uint{8 * cache.itemsize}", "slot": slot_mapping.dtype_name},
        head_groups(cache.queue, (head_size,), num_kv_heads, num_tokens),
        alignment,
        cache=cache,
        slot_mapping=slot_mapping,
        num_tokens=num_tokens,
        num_slots=num_blocks * block_size,
        block_size=block_size,
        head_size=head_size,
    )


@operation(_check, _plan)
def clear_slots(cache: Written, slot_mapping: Array) -> None:
    """Set the slots of `slot_mapping` to zero, in place."""
    perform(clear_slots, (cache, slot_mapping), ())
'''

ORACLE = '''

def clear_slots(cache, slot_mapping):
    """Set the slots of `slot_mapping` to zero; others stay."""
    num_blocks, block_size = cache.shape[:2]
    for slot in slot_mapping:
        if 0 <= slot < num_blocks * block_size:
            cache[divmod(int(slot), block_size)] = 0
'''

FILES = {"kernels/clear_rows.py": KERNEL, "ops/clear.py": OPERATION}
# A line added behind a line of a file.
LINES = [
    ("__init__.py", '    "copy_blocks": ".ops.blocks",', '    "clear_slots": ".ops.clear",'),
    ("dispatch.py", "    attention,", "    clear,"),
    (
        "torch.py",
        "merge_attention_states = _on_tensors(",
        'clear_slots = _on_tensors(clear.clear_slots, ">>> ...")',
    ),
    ("torch.py", "from .ops.operation import Operation", "from .ops import clear"),
]

COMPARED = """
    import numpy as np
    from kvcache_dpex import clear_slots, reference
    from kvcache_dpex.ops.operation import OPERATIONS
    from kvcache_dpex.runtime.launch import arrays

    assert "clear_slots" in OPERATIONS
    slots = np.array([7, -1, 19, 0, 20], "int32")
    for dtype in ("uint8", "float16", "float32"):
        host = np.full((5, 4, 2, 6), 77, dtype)
        device = arrays.tensor_module().asarray(host)
        clear_slots(device, arrays.tensor_module().asarray(slots, sycl_queue=device.sycl_queue))
        reference.clear_slots(host, slots)
        assert (host == 0).sum() == 3 * 12
        np.testing.assert_array_equal(arrays.to_numpy(device), host)
    try:
        clear_slots(device, device)
    except TypeError as error:
        print(error)
"""
ON_TENSORS = """
    import torch
    from kvcache_dpex.torch import clear_slots

    cache, slots = torch.full((5, 4, 2, 6), 77.0), torch.tensor([7, -1, 19])
    expected = cache.clone()
    expected.view(20, 12)[[7, 19]] = 0
    torch.compile(lambda: clear_slots(cache, slots), fullgraph=True, backend="eager")()
    assert torch.equal(cache, expected)
    print(torch.ops.kvcache_dpex.clear_slots.default._schema)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package with the operation in it."""
    if not (COMPILER or compiler.available()):
        pytest.skip(f"compiling needs numba-dpex, or {elsewhere.VARIABLE}")
    folder = tmp_path_factory.mktemp("recipe")
    package = folder / "kvcache_dpex"
    shutil.copytree(ROOT / "kvcache_dpex", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (package / name).write_text(text.lstrip())
    with (package / "reference" / "rows.py").open("a") as oracle:
        oracle.write(ORACLE)
    for name, before, added in LINES:
        text = (package / name).read_text()
        assert text.count(f"{before}\n") == 1, f"{name}: {before}"
        lines = (added, before) if before.endswith("(") else (before, added)
        (package / name).write_text(text.replace(f"{before}\n", "\n".join(lines) + "\n"))
    return folder


def run(tree, code):
    variables = {"KVCACHE_DPEX_CACHE": str(tree / "cache"), elsewhere.VARIABLE: COMPILER}
    code = f"import sys; sys.path.insert(0, {str(tree)!r})\n" + textwrap.dedent(code)
    return output_of(code, **variables)


def test_on_arrays(tree):
    assert run(tree, COMPARED) == "`slot_mapping` must be int32 or int64, got float32"


def test_on_tensors(tree):
    pytest.importorskip("torch", reason="torch is not installed")
    schema = "kvcache_dpex::clear_slots(Tensor(a!) cache, Tensor slot_mapping) -> ()"
    assert run(tree, ON_TENSORS) == schema
