"""List the kernels and where their SPIR-V comes from, compile them, or install a compiler."""

from __future__ import annotations

import argparse
from typing import Any

from ..runtime.compile import elsewhere, package, spirv, store
from . import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="action", dest="action", required=True)
    text = (
        "one line for each kernel: its name, the bytes of its SPIR-V, where that comes from, its capabilities"
    )
    arguments.add_json(actions.add_parser("list", help=text, description=text))
    text = "compile every kernel into the package; needs numba-dpex"
    arguments.add_json(actions.add_parser("build", help=text, description=text))
    text = "install numba-dpex into the cache folder, to compile for newer Pythons too (3 GB, some minutes)"
    actions.add_parser("compiler", help=text, description=text)


def run(options: argparse.Namespace) -> int:
    """Print a line for each kernel."""
    if options.action == "compiler":
        print(f"kernels are now compiled by {elsewhere.install()}")
        return 0
    if options.action == "build":
        package.build_package()
    found = modules()
    if options.json:
        output.print_json(found)
        return 0
    header = ["kernel", "bytes", "from", "capabilities"]
    rows = [
        [row["kernel"], row["bytes"], row["from"], ", ".join(row["capabilities"]) or row["error"]]
        for row in found
    ]
    output.print_table(header, rows)
    return 0


def modules() -> list[dict[str, Any]]:
    """Each kernel of the package with its SPIR-V, or the error where there is none."""
    found = []
    for function, choice in package.catalogue():
        row: dict[str, Any] = {"kernel": store.signature(function, **choice).name, "error": None}
        try:
            module = store.load(function, **choice)
        except ImportError as error:
            row.update({"bytes": 0, "from": "nowhere", "capabilities": [], "error": str(error)})
        else:
            capabilities = list(spirv.capabilities(module.binary))
            row.update({"bytes": len(module.binary), "from": module.origin, "capabilities": capabilities})
        found.append(row)
    return found
