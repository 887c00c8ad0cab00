"""Lets ``import dpnp`` come before ``import kvcache_dpex``, as import sorters put it.

``kvcache_dpex.pth`` imports this module whenever Python starts in an environment where kvcache_dpex is
installed. It costs a fraction of a millisecond and imports the package only when dpctl, dpnp or numba_dpex
is imported first: kvcache_dpex then finds the libraries that they need.
"""

import sys


class StartupFinder:
    """Meta path finder that finds nothing itself."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("dpctl", "dpnp", "numba_dpex") and "kvcache_dpex" not in sys.modules:
            try:
                from kvcache_dpex.runtime.environment import watch
            except ImportError:
                # The package itself is gone, such as the checkout of an editable install.
                return
            watch.watcher.find_spec(name)


sys.meta_path.insert(0, StartupFinder)
