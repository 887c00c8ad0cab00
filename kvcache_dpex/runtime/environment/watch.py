"""Notices when dpctl, dpnp or numba_dpex is about to be imported, and when the process is forked.

Every import of the package loads this file, so it imports no more than it must.
"""

from __future__ import annotations

import os
import sys

WATCHED = ("dpctl", "dpnp", "numba_dpex")


class Watcher:
    """Meta path finder that finds nothing: it prepares the process for a module that others find."""

    forked = False

    def find_spec(self, name, path=None, target=None):
        if name in WATCHED:
            from . import libraries

            libraries.prepare(name)

    def note_fork(self) -> None:
        """Any operation of dpnp starts SYCL, and nothing tells whether one has run."""
        self.forked = "dpctl" in sys.modules


def is_watcher(finder: object) -> bool:
    """Whether a finder is a watcher, be it of another copy of the package."""
    return type(finder).__name__ == Watcher.__name__ and type(finder).__module__.endswith(_MODULE)


_MODULE = "kvcache_dpex.runtime.environment.watch"


def _watcher() -> Watcher:
    """The one of an earlier import, where the package was dropped from sys.modules, else a new one."""
    for finder in sys.meta_path:
        if type(finder).__module__ == __name__:
            return finder  # type: ignore[return-value]
    return Watcher()


watcher = _watcher()


def start() -> None:
    """Prepare the process whenever dpctl, dpnp or numba_dpex is imported from now on."""
    if watcher in sys.meta_path:
        return
    sys.meta_path.insert(0, watcher)
    os.register_at_fork(after_in_child=watcher.note_fork)
    if "dpctl" in sys.modules:
        from . import libraries

        # SYCL looks for OpenCL drivers when it is first asked for devices, which may be yet to come.
        libraries.set_opencl_driver()
        watcher.forked = libraries.was_forked_with_dpctl()


def is_forked() -> bool:
    """Whether this process is the child of a fork that happened after dpctl was loaded."""
    return watcher.forked
