"""Public operations, one module a verb: validate, work out the geometry, launch."""

from ..runtime import compile as _watches_kernels  # noqa: F401
