"""Splits phi instructions of tuples, so that a tuple which a loop carries is as many numbers in LLVM.

numba makes one instruction of such a tuple, and no pass of LLVM takes it apart. The CPU device's compiler
crashes on some of them, and a device may keep the tuple in memory where registers would do.
"""

from __future__ import annotations

import re

_FUNCTION = re.compile(r"^define .*?^}$", re.MULTILINE | re.DOTALL)
_PHI = re.compile(r"  (?P<name>%\S+) = phi (?P<kind>\[(?P<count>\d+) x (?P<element>\w+)\]) (?P<cases>.*)")
_CASE = re.compile(r"\[ (?P<value>\[[^\]]*\]|[^,\]]+), (?P<block>%\S+) \]")
_LABEL = re.compile(r'(?P<name>[\w.$-]+|"[^"]*"):')
_END = re.compile(r"  (br|switch|ret|unreachable)\b")


def split(text: str) -> str:
    """The text of a module, with phi instructions of numbers in the place of those of arrays."""
    return _FUNCTION.sub(lambda match: _split_function(match[0]) if "= phi [" in match[0] else match[0], text)


def _split_function(text: str) -> str:
    # Numbered names must be in order, so they become others.
    text = re.sub(r"^(\d+):", r"n\1:", re.sub(r"%(\d+)\b", r"%n\1", text), flags=re.MULTILINE)
    blocks: list[list[str]] = [[]]
    for line in text.splitlines():
        if _LABEL.match(line):
            blocks.append([])
        blocks[-1].append(line)
    extracts: dict[str, list[str]] = {}  # what a block hands to the phi instructions of its successors
    for number, block in enumerate(blocks):
        block[:] = _split_block(block, f"%phi{number}", extracts)
    for block in blocks:
        label = _LABEL.match(block[0])
        handed = extracts.pop(f"%{label['name']}", []) if label else []
        if handed:
            end = next(at for at, line in enumerate(block) if _END.match(line))
            block[end:end] = handed
    assert not extracts, f"blocks {list(extracts)} have no label"
    return "\n".join(line for block in blocks for line in block)


def _split_block(block: list[str], prefix: str, extracts: dict[str, list[str]]) -> list[str]:
    """The lines of a block; what its predecessors hand to it is added to `extracts`."""
    found = {at: match for at, match in enumerate(map(_PHI.match, block)) if match}
    if not found:
        return block
    phis: list[str] = []
    wholes: list[str] = []
    for at, phi in found.items():
        whole, kind, count = "undef", phi["kind"], int(phi["count"])
        for index in range(count):
            part, cases = f"{prefix}.{at}.{index}", []
            for edge, case in enumerate(_CASE.finditer(phi["cases"])):
                extract = f"  {part}.{edge} = extractvalue {kind} {case['value']}, {index}"
                extracts.setdefault(case["block"], []).append(extract)
                cases.append(f"[ {part}.{edge}, {case['block']} ]")
            phis.append(f"  {part} = phi {phi['element']} {', '.join(cases)}")
            joined = phi["name"] if index + 1 == count else f"{part}.whole"
            wholes.append(f"  {joined} = insertvalue {kind} {whole}, {phi['element']} {part}, {index}")
            whole = joined
    kept = [line for at, line in enumerate(block) if at not in found]
    others = sum(" = phi " in line for line in kept)
    return [kept[0], *phis, *kept[1 : 1 + others], *wholes, *kept[1 + others :]]
