"""Launches translated modules through the CUDA driver, in the place of `runtime.launch.launch.Launch`.

Memory is torch's; the operations see it as arrays of a stand-in device (`tests.gates.standin`).
"""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcache_dpex.runtime.compile import package, store

from .table import digest_of_modules

AXES = "xyz"


@functools.cache
def driver() -> ctypes.CDLL:
    torch.zeros(1, device="cuda")  # makes torch's context the current one
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {code} {(text.value or b'').decode()}")


class Translated:
    """The folder that `translate` wrote; `change` may damage a module's PTX, to show what notices."""

    def __init__(self, folder: Path, change: Any = None) -> None:
        self.folder, self.change = folder, change
        self.list = json.loads((folder / "modules.json").read_text())
        if self.list["digest"] != digest_of_modules():
            raise SystemExit(f"{folder} is of other modules than those packaged here: translate again")
        for function, choice in package.catalogue():
            if store.packaged(store.signature(function, **choice)) is None:
                raise SystemExit(
                    "the sources have changed since the package's modules were built: build them"
                )
        self.launched: set[str] = set()
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._modules: list[ctypes.c_void_p] = []

    def function(self, name: str) -> ctypes.c_void_p:
        """The kernel of a module, loaded once."""
        if name not in self._functions:
            text = (self.folder / f"{name}.ptx").read_text()
            text = self.change(text) if self.change else text
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            check(driver().cuModuleLoadData(ctypes.byref(module), text.encode() + b"\0"), f"loading {name}")
            entry = self.list["modules"][name]["entry"].encode()
            check(driver().cuModuleGetFunction(ctypes.byref(function), module, entry), f"finding {name}")
            self._functions[name] = function
            self._modules.append(module)
        return self._functions[name]

    def launcher(
        self,
        module: store.Module,
        queue: Any,
        scalars: tuple[int, ...],
        global_size: tuple[int, ...],
        local_size: tuple[int, ...],
    ) -> Launch:
        self.launched.add(module.name)
        grid = self.list["modules"][module.name]["grid"]
        return Launch(self.function(module.name), module.in_record, grid, scalars, global_size, local_size)


class Launch:
    """One kernel with its scalars and its grid: call it with pointers."""

    def __init__(
        self,
        function: ctypes.c_void_p,
        in_record: bool,
        grid: str,
        scalars: tuple[int, ...],
        global_size: tuple[int, ...],
        local_size: tuple[int, ...],
    ) -> None:
        self._function, self._in_record, self._scalars = function, in_record, scalars
        self._block = (*local_size, 1, 1)[:3]
        groups = [items // local for items, local in zip((*global_size, 1, 1), self._block)]
        self._grid = [groups[grid.index(axis)] for axis in AXES]
        if any(count > 65535 for count in self._grid[1:]):
            raise ValueError(f"a grid of {self._grid}: translate this kernel with another long axis")

    def __call__(self, pointers: tuple[int, ...], owners: Any = None) -> None:
        values = (*pointers, *self._scalars)
        if self._in_record:
            record = torch.tensor(values, device="cuda")
            values = (record.data_ptr(),)
        held = [ctypes.c_int64(value) for value in values]
        arguments = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = driver().cuLaunchKernel(self._function, *self._grid, *self._block, 0, stream, arguments, None)
        check(code, "launching")


def to_device(array: np.ndarray, margin: int = 0, fill: int = 0) -> torch.Tensor:
    """The bytes of an array on the GPU, between two margins."""
    content = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    whole = torch.full((content.numel() + 2 * margin,), fill, dtype=torch.uint8)
    whole[margin : margin + content.numel()] = content
    return whole.cuda()
