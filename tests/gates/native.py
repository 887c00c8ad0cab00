"""What Intel's own compiler makes of a module, for GPUs that are not here.

``python -m tests.gates.native`` prints a table of every packaged module. The compiler, ocloc, is
unpacked by ``python -m tests.gates.fetch``; results are kept beside it, by the content of the module.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvcache_dpex.runtime.compile import store

PRODUCTS = {
    "tgllp": "Iris Xe",
    "adl-p": "Iris Xe, Alder Lake",
    "dg2": "Arc A",
    "mtl": "Meteor Lake",
    "lnl": "Lunar Lake",
    "bmg": "Arc B",
    "pvc": "Data Center Max",
}


class Facts(NamedTuple):
    """A kernel's native code. Messages are those of each lane: arguments and fences are left out."""

    simd: int
    registers: int
    spilled: int  # bytes a thread
    private: int  # bytes a thread of memory that was meant to be registers
    local: int  # bytes a work-group
    instructions: int
    float64: int  # instructions
    loads: dict[str, int]  # bytes a lane -> messages
    stores: dict[str, int]


class Refused(Exception):
    """The compiler does not take the module; the text says why."""


def folder() -> Path:
    """Where ocloc is unpacked: `KVCACHE_DPEX_IGC`, or a part of the package's cache folder."""
    chosen = os.environ.get("KVCACHE_DPEX_IGC")
    return Path(chosen) if chosen else store.cache_folder() / "igc"


def missing() -> str | None:
    """Why there is no compiler, or None."""
    if _programs():
        return None
    return f"no ocloc in {folder()}; `python -m tests.gates.fetch` unpacks it there"


def _programs() -> list[Path]:
    return sorted(folder().glob("usr/bin/ocloc*"))


def compile_all(
    modules: dict[str, bytes], products: Iterable[str] = tuple(PRODUCTS)
) -> dict[tuple[str, str], Facts | Refused]:
    """Facts, or the refusal, of every module for every product."""
    wanted = [(name, product) for name in modules for product in products]

    def work(pair: tuple[str, str]) -> Facts | Refused:
        try:
            return facts(modules[pair[0]], pair[1])
        except Refused as refusal:
            return refusal

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return dict(zip(wanted, pool.map(work, wanted)))


def facts(binary: bytes, product: str) -> Facts:
    """Compile one kernel for one product; raise `Refused` where the compiler does not take it."""
    reason = missing()
    if reason:
        raise FileNotFoundError(reason)
    version = _programs()[-1].name
    rules = Path(__file__).read_bytes()
    key = hashlib.sha256(b"\0".join([rules, version.encode(), product.encode(), binary])).hexdigest()
    kept = folder() / "facts" / f"{key}.json"
    if kept.exists():
        return Facts(**json.loads(kept.read_text()))
    found = _compile(binary, product)
    with contextlib.suppress(OSError):  # a folder that cannot be written costs time, nothing else
        kept.parent.mkdir(exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        partial.write_text(json.dumps(found._asdict()))
        os.replace(partial, kept)
    return found


def _compile(binary: bytes, product: str) -> Facts:
    with tempfile.TemporaryDirectory() as work:
        module = Path(work, "kernel.spv")
        module.write_bytes(binary)
        options = "-output", "kernel", "-out_dir", work, "-output_no_suffix", "--format", "zebin"
        log = _ocloc(work, "compile", "-spirv_input", "-file", str(module), "-device", product, *options)
        native = Path(work, "kernel.bin")
        if not native.exists():
            raise Refused(log.strip()[-800:])
        dump = Path(work, "dump")
        _ocloc(work, "disasm", "-file", str(native), "-device", product, "-dump", str(dump))
        kernels = list(dump.glob(".text.*.asm"))
        if len(kernels) != 1:
            raise Refused(f"{len(kernels)} kernels in the module; {log.strip()[-800:]}")
        return _read(dump.joinpath(".ze_info").read_text(), kernels[0].read_text())


def _ocloc(work: str, *arguments: str) -> str:
    """Run ocloc with the C library that came with it."""
    libraries = folder() / "usr/lib/x86_64-linux-gnu"
    loader = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(_programs()[-1])]
    result = subprocess.run([*loader, *arguments], cwd=work, capture_output=True, text=True, timeout=300)
    return result.stdout + result.stderr


def _read(information: str, assembly: str) -> Facts:
    kernel = information.split("kernels_misc_info:")[0]

    def number(name: str) -> int:
        found = re.search(rf"^ +{name}: +(\d+)", kernel, re.M)
        return int(found[1]) if found else 0

    buffers = re.search(r"^    per_thread_memory_buffers:\n((?:^      .*\n)+)", kernel, re.M)
    private = [int(size) for size in re.findall(r"size: +(\d+)", buffers[1])] if buffers else []
    lines = [line.strip() for line in assembly.splitlines()]
    code = [line for line in lines if line and not re.match(r"(L\d+:|//|illegal\b|nop\b)", line)]
    loads: dict[str, int] = {}
    stores: dict[str, int] = {}
    for line in code:
        message = _message(line)
        if message:
            kind, width = message
            counts = loads if kind == "load" else stores
            counts[width] = counts.get(width, 0) + 1
    return Facts(
        simd=number("simd_size"),
        registers=number("grf_count"),
        spilled=number("spill_size"),
        private=sum(private),
        local=number("slm_size"),
        instructions=len(code),
        float64=sum(bool(re.search(r":df\b", line.split("//")[0])) for line in code),
        loads=loads,
        stores=stores,
    )


def _message(line: str) -> tuple[str, str] | None:
    """``("load", "16")`` for a message that moves 16 bytes of global memory a lane, else None."""
    sent = re.match(r"(?P<guard>(?:\([^)]*\)\s*)*)(?P<name>send[\w.]*)\s.*?//(?P<text>.*)$", line)
    if not sent or "EOT" in line or "(W)" in sent["guard"]:
        return None
    text = sent["text"]
    if ".slm" in sent["name"] or "slm" in text or re.search(r"0x\w{6}FE\b", line, re.I):
        return None
    kind = "store" if re.search(r"store|write|scattering", text) else "load"
    wide = re.search(r"\.d(?P<bits>\d+)(?:u32)?(?:x(?P<count>\d+))?\.", text)
    if wide:
        return kind, str(int(wide["bits"]) // 8 * int(wide["count"] or 1))
    surface = re.search(r"untyped (?:surface )?(?:read|write) with (?P<lanes>x?y?z?w?)", text)
    if surface:
        return kind, str(4 * len(surface["lanes"]))
    narrow = re.search(r"(?:gathering|scattering|scattered) (?:read|write) (?P<bits>\d+)b", text)
    if narrow:
        return kind, str(int(narrow["bits"]) // 8)
    return None if re.search(r"fence|barrier", text) else (kind, text.split(";")[-1].strip())


def packaged() -> dict[str, bytes]:
    """Every packaged module."""
    return {name: (store.PACKAGED / f"{name}.spv").read_bytes() for name in store.manifest()["modules"]}


def without_record() -> dict[str, bytes]:
    """Those that a GPU may be given: a record of arguments is for the CPU device."""
    entries = store.manifest()["modules"]
    return {name: binary for name, binary in packaged().items() if not entries[name]["in_record"]}


def table(facts: dict[tuple[str, str], Facts | Refused]):
    """One row a module, one column a product."""
    from rich.table import Column, Table

    products = list(dict.fromkeys(product for _, product in facts))
    result = Table(
        Column("kernel", no_wrap=True), *(f"{product}\n{PRODUCTS[product]}" for product in products)
    )
    for name in dict.fromkeys(name for name, _ in facts):
        result.add_row(name, *(_cell(facts[name, product]) for product in products))
    result.caption = "SIMD width, instructions; widest load / store in bytes a lane; spills"
    return result


def _cell(found: Facts | Refused) -> str:
    if isinstance(found, Refused):
        return "refused"
    widths = (max(map(int, widths), default=0) for widths in (found.loads, found.stores))
    spilled = f", {found.spilled} B spilled" if found.spilled else ""
    return f"SIMD{found.simd}, {found.instructions}\n{'/'.join(map(str, widths))} B{spilled}"


if __name__ == "__main__":
    from rich.console import Console

    reason = missing()
    if reason:
        raise SystemExit(reason)
    Console(width=None if sys.stdout.isatty() else 140).print(table(compile_all(without_record())))
