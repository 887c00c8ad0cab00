"""Blocks with inline scales through NIXL, over UCX on this machine."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import output_of

pytest.importorskip("torch", reason="torch is not installed")
if find_spec("nixl") is None:
    pytest.skip(
        "nixl is not installed: pip install --no-deps nixl nixl-cu12, which needs no GPU",
        allow_module_level=True,
    )


def test_blocks_are_read_out_of_another_process():
    """Every byte of the pool is as if the sequence had been written here."""
    file = Path(__file__).with_name("nixl_sides.py")
    state, equal, nonzero = output_of("", arguments=[str(file)]).split()[-3:]
    assert (state, equal) == ("DONE", "equal")
    assert int(nonzero) > 500_000
