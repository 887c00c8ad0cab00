"""What all operations share. An operation is declared once, by a public function and two or three more:

* the **signature** says which arguments are arrays, which of those are written and which are options; the
  docstring is the documentation;
* ``check`` takes the metadata of the arrays and raises where it does not fit;
* ``plan`` chooses a kernel and its index space for operands that passed the check;
* ``results`` says the shapes and dtypes of what the operation returns, where it returns anything: arrays that
  the signature declares as written and optional, such as ``out``.

The call on dpnp arrays and torch tensors follows from these (`Operation.run`), and so do torch's schema, fake
implementation and registration (`kvcache_dpex.torch`) and the list of all operations (`OPERATIONS`). Checking
and planning happen once for each kind of call: later calls with equal metadata only launch.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, TypeVar

from ..runtime.compile import edits
from ..runtime.launch import arrays, launch
from ..runtime.launch.arrays import Operand, read, read_output
from . import calls, validate
from .calls import Kind, Plan, Result, Steps
from .declaration import parameters_of

Function = TypeVar("Function", bound=Callable[..., Any])
OPERATIONS: dict[str, Operation] = {}
"""Every operation by name, in the order of declaration."""


@contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Within, operations use other `Settings`, and none of the launches prepared before.

    Parameters
    ----------
    launch : callable
        What makes a launch of a `Plan`, by default `launch_of`.
    variant : str
        The name of a kernel to choose wherever it takes the case.
    """
    before = calls.settings
    kept = {operation: operation.prepared for operation in OPERATIONS.values()}
    calls.settings = before._replace(**changes)
    for operation in kept:
        operation.forget()
    try:
        yield
    finally:
        calls.settings = before
        for operation, prepared in kept.items():
            operation.prepared = prepared


def operation(
    check: Callable[..., None],
    plan: Callable[..., Plan | Steps | None],
    *,
    results: Callable[..., dict[str, Result]] | None = None,
    aligned: str = "",
    may_overlap: Sequence[tuple[str, str]] = (),
    before: Callable[..., None] | None = None,
) -> Callable[[Function], Function]:
    """Declare an operation by its public function.

    The function gets an attribute `operation`, an `Operation`, to which its body hands the arguments:
    ``return perform(name, (array, ...), (option, ...))``, both in the order of its signature.

    Parameters
    ----------
    check
        Called with an `Operand` (or None) for each array and with the options, all by name; raises where they
        do not fit. `Operand.queue` is None while torch traces.
    plan
        Called likewise after the check, with ``alignment`` as a further argument; returns a `Plan`,
        `Steps`, or None where there is nothing to do.
    results
        Called like the check where the operation returns arrays; says by name what they are. Those that a
        call leaves out are made. Where there is an option ``return_NAME``, it says whether that is returned.
    aligned
        Names of arrays, space-separated; ``alignment`` is the number of bytes, 16 at most, that all their
        addresses are multiples of.
    may_overlap
        Pairs of arrays, the first of which is written, that may share memory: with one that is read, and
        with another written one as long as they do not start at the same address. Any other overlap between
        a written array and another argument is refused.
    before
        Called with the arrays and options, by name, before each call that passes an option; may wait.
    """

    def declare(function: Function) -> Function:
        declared = Operation(function, check, plan, results, aligned, may_overlap, before)
        OPERATIONS[declared.name] = declared
        edits.on_edit(declared.forget)
        function.operation = declared  # type: ignore[attr-defined]
        return function

    return declare


def perform(function: Callable[..., Any], given: tuple, options: tuple) -> Any:
    """Run the operation that a public function declares; see `Operation.run`.

    A refused argument is reported without the frames of this package; ``python -X dev`` keeps them.
    """
    __tracebackhide__ = True  # IPython and pytest leave such functions out of a traceback
    try:
        return function.operation.run(given, options)  # type: ignore[attr-defined]
    except (IndexError, TypeError, ValueError) as error:
        if sys.flags.dev_mode:
            raise
        raise error.with_traceback(None) from None


class Operation:
    """A declared operation; `operation` makes it."""

    def __init__(
        self,
        function: Callable,
        check: Callable,
        plan: Callable,
        results: Callable[..., dict[str, Result]] | None,
        aligned: str,
        may_overlap: Sequence[tuple[str, str]],
        before: Callable | None,
    ) -> None:
        self.name = function.__name__
        self.function = function
        self.signature = inspect.signature(function)
        self.check, self.plan, self.before, self._results_of = check, plan, before, results
        self.parameters = parameters_of(function)
        self.arrays = tuple(parameter for parameter in self.parameters if parameter.is_array)
        self.options = tuple(parameter for parameter in self.parameters if not parameter.is_array)
        self.prepared = launch.LaunchCache()
        self.may_overlap = may_overlap
        self._readers = [(_READERS[array.kind, array.optional], array.name) for array in self.arrays]
        names = [array.name for array in self.arrays]
        self._aligned = [names.index(name) for name in aligned.split()]
        written = {each.name for each in self.arrays if each.kind == "written" and each.optional}
        self.results = tuple(name for name in names if results and name in written)
        self.result_places = [names.index(name) for name in self.results]
        options = [option.name for option in self.options]
        flags = [f"return_{name}" for name in self.results]
        self._flags = [options.index(flag) if flag in options else None for flag in flags]
        self._defaults = tuple(option.default for option in self.options)

    def forget(self) -> None:
        """Prepare every call anew, as after an edit of a kernel."""
        self.prepared = launch.LaunchCache()

    def __repr__(self) -> str:
        return f"<operation {self.name}{self.signature}>"

    def run(self, given: tuple, options: tuple) -> Any:
        """Check, prepare and launch; returns the results, as a tuple where there are several.

        Parameters
        ----------
        given, options
            Arrays (None for those that are left out) and options, in the order of the signature.
        """
        launch.refuse_after_fork()
        read = self.read(given)
        returned = self.returned(options)
        missing = [at for at in returned if given[at] is None]
        if missing:
            given = self._with_results(missing, given, read, options)
        addresses, fields = zip(*read)
        key = fields, options
        try:
            kind = self.prepared[key]
        except (KeyError, TypeError):
            kind = self._remember(key, self._kind)
        launched = kind[addresses]
        if self.before is not None and options != self._defaults:
            self.before(**self.by_name(given, options))
        launched(addresses, given)
        if len(returned) > 1:
            return tuple([given[at] for at in returned])
        return given[returned[0]] if returned else None

    def returned(self, options: tuple) -> list[int]:
        """Which of the arrays a call with these options returns."""
        return [at for at, flag in zip(self.result_places, self._flags) if flag is None or options[flag]]

    def read(self, given: Sequence[Any]) -> list[tuple[int, Any]]:
        """Address and `Operand` fields of each array."""
        return [reader(array, name) for array, (reader, name) in zip(given, self._readers)]

    def alignment_of(self, addresses: Sequence[int]) -> int:
        """The largest power of two, 16 at most, that divides the addresses of the arrays in `aligned`."""
        bits = functools.reduce(operator.or_, (addresses[at] for at in self._aligned), 16)
        return bits & -bits

    def validate(self, operands: Sequence[Operand | None], options: tuple) -> None:
        """Raise where the metadata of the arguments shows that they do not fit."""
        for array, operand in zip(self.arrays, operands):
            if array.kind == "written" and operand is not None:
                validate.distinct(array.name, operand)
        self.check(**self.by_name(operands, options))
        given = {name: operands[at] for name, at in zip(self.results, self.result_places)}
        wanted = self.results_of(operands, options) if any(given.values()) else {}
        for name, operand in given.items():
            if operand is not None:
                validate.result(name, operand, wanted[name])

    def results_of(self, operands: Sequence[Operand | None], options: tuple) -> dict[str, Result]:
        """What the operation returns for these arguments, by name."""
        assert self._results_of is not None
        return self._results_of(**self.by_name(operands, options))

    def options_of(self, arguments: tuple, keywords: dict[str, Any]) -> tuple:
        """The options of a call, in the order of the signature."""
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        return tuple(bound.arguments[option.name] for option in self.options)

    def by_name(self, given: Sequence[Any], options: tuple) -> dict[str, Any]:
        values = {array.name: value for array, value in zip(self.arrays, given)}
        return {**values, **{option.name: value for option, value in zip(self.options, options)}}

    def _remember(self, key: tuple, make: Callable[..., Any]) -> Any:
        """Prepare what calls of one kind share."""
        self._require_hashable(key[1])
        found = make(*key)
        self.prepared.add(key, Operand(*key[0][0]).queue, found)
        return found

    def _with_results(self, missing: list[int], given: tuple, read: list, options: tuple) -> tuple:
        """The arrays of a call, with new ones for those that are `missing`; `read` has them then, too."""
        key = tuple(fields for _, fields in read), options
        try:
            results = self.prepared[key]
        except (KeyError, TypeError):
            results = self._remember(key, self._checked_results)
        completed = list(given)
        for at in missing:
            name = self.arrays[at].name
            completed[at] = arrays.empty_like(given[0], *results[name])
            read[at] = read_output(completed[at], name)
        return tuple(completed)

    def _checked_results(self, fields: Sequence[Any], options: tuple) -> dict[str, Result]:
        operands = [field and Operand(*field) for field in fields]
        self.validate(operands, options)
        return self.results_of(operands, options)

    def _kind(self, fields: Sequence[Any], options: tuple) -> Kind:
        operands = [field and Operand(*field) for field in fields]
        present = {
            array.name: operand for array, operand in zip(self.arrays, operands) if operand is not None
        }
        validate.same_queue(**present)
        self.validate(operands, options)
        return Kind(self, operands, options)

    def _require_hashable(self, options: tuple) -> None:
        for option, value in zip(self.options, options):
            try:
                hash(value)
            except TypeError:
                raise TypeError(f"`{option.name}` must be of type {option.kind}, got {value!r}") from None


def _optional(reader: Callable) -> Callable:
    return lambda array, name: (0, None) if array is None else reader(array, name)


_READERS = {
    ("read", False): read,
    ("written", False): read_output,
    ("read", True): _optional(read),
    ("written", True): _optional(read_output),
}
