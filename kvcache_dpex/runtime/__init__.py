"""Everything below the operations: the environment, the way from Python to SPIR-V, and launches."""
