"""Device code: one kernel a file, an ordinary Python function that the compiler turns into SPIR-V.

A kernel is named after its file. Its arguments' annotations are their types, in which the names of
``TYPES`` stand for each of the values listed there; every choice is a module of its own, named after the
values:

* ``"value[token, head, element]"`` is a view: `views.load` and `views.store` take an index for each axis.
  The launch passes a pointer and, in elements, a stride for each axis. ``element=1`` fixes the last
  stride at 1.
* ``"value*8[token, head, eight=1]"`` has elements of 8 neighbouring values, tuples in the kernel. Their
  addresses are multiples of their size, up to 16 bytes, and strides count them.
* ``"int64"`` is a number, ``"word*"`` a bare pointer, and a variable whose value is an integer a
  constant.

The first argument is the item, ``"item[3]"``, or ``"nditem[3]"`` where the kernel asks for its
work-group.

The rules of this folder:

* Axis 0 is the fast one: it carries the place within the row, never the token.
* Load, then compute, then store. Guard slots and blocks at both ends, before memory is touched.
* Cut rows into equal `parts` instead of guarding their ends.
* Addresses are 64 bits wide, and a 64-bit division costs hundreds of instructions: divide uint32.
* No float64: wrap literals, and integers that meet a float, in ``np.float32``.
* A tuple must not depend on a branch (``x = a if c else b``): store in both branches, or a CPU device
  handles the items one by one.
* Nothing is imported but NumPy and this folder, by name, so that a kernel runs as plain Python.
* A name ends in ``_gpu`` for kernels whose items take 16 neighbouring bytes, in ``_cpu`` for those whose
  neighbouring items take neighbouring values, which a CPU makes vectors of, and in ``_strided`` for those
  that take any sizes and strides. ``IN_RECORD = True`` marks a kernel that only CPU devices are given: it
  takes the address of a record of its arguments, since each pointer costs a CPU's launch about 2 us.

To add a kernel: write the operation in NumPy in `reference`; write the kernel and try it with
`runtime.compile.simulate`; list it as a variant of the operation in `ops`; compare whole caches in the
tests; run ``python -m kvcache_dpex kernels build``. To add a format: a file in `codecs`, its row in
``codecs.CODECS`` and in `formats`, its oracle in `reference`, and its code type in the ``TYPES`` of the
kernels.
"""
