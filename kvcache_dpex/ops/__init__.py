"""Public operations, one module a verb: validate, work out the geometry, launch."""
