"""Device code: one kernel a file, an ordinary Python function that the compiler turns into SPIR-V.

The rules of this folder:

* Annotations are the argument types: ``"word*"`` is a pointer to the type that ``TYPES["word"]``
  ranges over, ``"int64"`` a scalar. A pointer never wraps a negative index around.
* ``IN_RECORD = True`` in a file that only a CPU device is given: the kernel takes one argument, the address
  of a record of them all, since a CPU's launch takes about 2 us longer with every pointer.
* Axis 0 is the fast one: it carries the word within the row, never the token.
* Guard slots at both ends, and never the end of a row: `parts` cuts rows so that none is needed.
* Load everything, then store everything, in a loop for each of its turns.
* Addresses are 64 bits wide from the slot on; no 64-bit division.
* No float64: every literal and every integer that meets a float is wrapped in ``np.float32``.
* Nothing is imported but NumPy and the helpers of this folder (`device`, `int8`, `parts`), so a kernel runs
  as plain Python.
"""
