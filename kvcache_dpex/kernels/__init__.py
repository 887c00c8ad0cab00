"""Device code: one kernel a file, an ordinary Python function that the compiler turns into SPIR-V.

The rules of this folder:

* Annotations are the argument types: ``"word*"`` is a pointer to the type that ``TYPES["word"]``
  ranges over, ``"int64"`` a scalar. A pointer never wraps a negative index around.
* A file of the CPU's alone may say ``IN_RECORD = True``: its kernel then takes one argument, the address of a
  record of them all in host memory, which launches sooner.
* Axis 0 is the fast one: it carries the word within the row, never the token.
* Guard slots at both ends, and never the end of a row: `parts` cuts rows so that none is needed.
* Load everything, then store everything.
* Addresses are 64 bits wide from the slot on; no 64-bit division.
* No float64: every literal and every integer that meets a float is wrapped in ``np.float32``.
* Nothing is imported but NumPy and the helpers of this folder (`device`, `int8`, `parts`), so a kernel runs
  as plain Python.
"""
