"""List the kernels and where their SPIR-V comes from, compile them, or install a compiler."""

from __future__ import annotations

import argparse

from ..runtime.compile import elsewhere, spirv, store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("list", "build", "compiler"),
        help="build needs numba-dpex; compiler installs it into the cache folder (3 GB, some minutes)",
    )


def run(options: argparse.Namespace) -> int:
    """Print a table of the kernels."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import track
    from rich.table import Table

    if options.action == "compiler":
        print(f"kernels are now compiled by {elsewhere.install()}")
        return 0
    if options.action == "build":
        store.build_package(track)
    table = Table("kernel", "bytes", "from", "capabilities", title="SPIR-V modules")
    for function, choice in store.catalogue():
        try:
            module = store.load(function, **choice)
        except ImportError as error:
            table.add_row(store.signature(function, **choice).name, "", "nowhere", escape(str(error)))
            continue
        needs = ", ".join(spirv.capabilities(module.binary))
        table.add_row(module.name, str(len(module.binary)), module.origin, needs)
    Console().print(table)
    return 0
