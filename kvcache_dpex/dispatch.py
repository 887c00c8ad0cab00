"""Operations in torch's dispatcher: their schemas, implementations and fakes, made from their declarations.

Importing this registers every operation under ``torch.ops.kvcache_dpex``. Every call on tensors goes
through the dispatcher, so autograd, tracers, transforms, modes and the profiler treat it as they treat
torch's own operations. One with results is registered twice: ``name`` returns new tensors, ``name_out``
writes `out` and others that are given. A result that a call does not ask for is an empty tensor.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from .ops import (  # noqa: F401  (each declares its operations)
    attention,
    cast,
    dequantize,
    merge,
    moves,
    quantize,
    rotary,
    slots,
    write,
)
from .ops.declaration import Parameter
from .ops.operation import OPERATIONS, Operation
from .runtime.launch.arrays import Operand
from .runtime.launch.tensors import dtype_of

# A copy of the package under another name, as the kernels hub makes them, has operations of its own.
NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")
# A package that was dropped from sys.modules and is imported again takes the place of what it registered.
_libraries = vars(torch.library).setdefault("_kvcache_dpex", {})
if NAMESPACE in _libraries:
    _libraries.pop(NAMESPACE)._destroy()
_library = _libraries[NAMESPACE] = torch.library.Library(NAMESPACE, "DEF")
_grad_enabled = torch.is_grad_enabled
_in_inference_mode = torch.is_inference_mode_enabled


def schema_of(operation: Operation, *, out: bool) -> str:
    """The schema of an operation in torch's language, with or without `out` and other results.

    >>> schema_of(OPERATIONS["reshape_and_cache"], out=False).partition(" slot_mapping")[0]
    'reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor'
    """
    parts, letters = [], iter("abcdefgh")
    for name, parameter in operation.signature.parameters.items():
        declared = next(each for each in operation.parameters if each.name == name)
        if name in operation.results and not out:
            continue
        if parameter.kind == parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(_schema_of_parameter(declared, letters if declared.kind == "written" else None))
    name = f"{operation.name}_out" if out else operation.name
    returned = ", ".join(["Tensor"] * (0 if out else len(operation.results)))
    return f"{name}({', '.join(parts)}) -> ({returned})"


def _schema_of_parameter(parameter: Parameter, letters: Any) -> str:
    if parameter.name == "out":
        return f"Tensor({next(letters)}!) out"
    kind = parameter.kind
    if parameter.is_array:
        kind = f"Tensor({next(letters)}!)" if letters else "Tensor"
    if not parameter.optional:
        return f"{kind} {parameter.name}"
    optional = "?" if parameter.default is None else ""
    return f"{kind}{optional} {parameter.name}={parameter.default}"


def implementation_of(operation: Operation) -> Callable[..., Any]:
    """What the dispatcher calls for tensors on the CPU and on XPUs, after tracers and autograd."""
    function = operation.function
    written = [
        at
        for at, array in enumerate(operation.arrays)
        if array.kind == "written" and array.name not in operation.results
    ]

    def run(*arguments: Any, **keywords: Any) -> Any:
        __tracebackhide__ = True
        _refuse_derivatives(operation, arguments, keywords)
        changed = [arguments[at] for at in written if at < len(arguments) and arguments[at] is not None]
        changed += [keywords[name] for name in operation.results if keywords.get(name) is not None]
        if not _in_inference_mode():
            for tensor in changed:
                if tensor.is_inference():
                    name = _name_of(tensor, operation, arguments, keywords)
                    raise RuntimeError(
                        f"`{name}` was made in inference mode, so it can only be written there; pass a clone "
                        "made outside of it, or call this under torch.inference_mode()"
                    )
        found = function(*arguments, **keywords)
        if changed:
            increment_version(changed)  # autograd then notices where it had saved one of them
        if "out" in keywords:
            return None
        return found if len(operation.results) < 2 else _padded(operation, arguments, keywords, found)

    return run


def _padded(operation: Operation, arguments: tuple, keywords: dict[str, Any], found: Any) -> tuple:
    """As many results as the schema says: an empty tensor for one that the call does not ask for."""
    asked = operation.returned(operation.options_of(arguments, keywords))
    tensors = iter(found if isinstance(found, tuple) else (found,))
    return tuple(
        next(tensors) if at in asked else arguments[0].new_empty(0) for at in operation.result_places
    )


def refuse_lazy_of(operation: Operation) -> Callable[..., Any]:
    """For tensors whose memory does not hold what they show: conjugated, negated and all-zero views."""

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        for array, tensor in named(operation, arguments, keywords):
            if tensor is not None and (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()):
                name = array.name
                raise TypeError(
                    f"`{name}` must hold its own values, got a conjugated, negated or all-zero view; pass "
                    f"{name}.resolve_conj().resolve_neg().clone()"
                )
        raise AssertionError("called for lazy tensors only")

    return refuse


def transform_of(operation: Operation, name: str) -> Callable[..., Any]:
    """What torch.func's transforms call: they have no rule for an operation, unless they leave it alone."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        interpreter = retrieve_current_functorch_interpreter()
        for array, tensor in named(operation, arguments, keywords):
            if tensor is not None and is_functorch_wrapped_tensor(tensor):
                raise NotImplementedError(
                    f"{operation.name} has no rule for torch.func's {interpreter.key().name.lower()}, which "
                    f"transforms `{array.name}`; call it outside of the transform"
                )
        with interpreter.lower():
            return getattr(registered, name).default(*arguments, **keywords)

    return run


def fake_of(operation: Operation) -> Callable[..., Any]:
    """What tracers call: the same checks of metadata, and a result without data."""

    def fake(*arguments: Any, **keywords: Any) -> Any:
        _refuse_derivatives(operation, arguments, keywords)
        _require_one_device(operation, arguments, keywords)
        given = [tensor for _, tensor in named(operation, arguments, keywords)]
        operands = [tensor if tensor is None else _described(tensor) for tensor in given]
        options = operation.options_of(arguments, keywords)
        # Sizes that depend on data are checked when the operation runs.
        with contextlib.suppress(GuardOnDataDependentSymNode):
            operation.validate(operands, options)
        if not operation.results or "out" in keywords:
            return None
        made = empty_results(operation, arguments, keywords)
        made = [given[0].new_empty(0) if each is None else each for each in made]
        return made[0] if len(made) == 1 else tuple(made)

    return fake


def empty_results(operation: Operation, arguments: tuple, keywords: dict[str, Any]) -> list[Tensor | None]:
    """For each result of an operation a tensor without values, or None where it is not asked for."""
    given = [tensor for _, tensor in named(operation, arguments, keywords)]
    options = operation.options_of(arguments, keywords)
    operands = [tensor if tensor is None else _described(tensor) for tensor in given]
    results, returned = operation.results_of(operands, options), operation.returned(options)
    return [
        given[0].new_empty(results[name].shape, dtype=dtype_of(results[name].dtype))
        if at in returned
        else None
        for name, at in zip(operation.results, operation.result_places)
    ]


def _refuse_derivatives(operation: Operation, arguments: tuple, keywords: dict[str, Any]) -> None:
    """Raise where a derivative would be lost: the operations have none."""
    if _grad_enabled():
        for tensor in (*arguments, *keywords.values()):
            if getattr(tensor, "requires_grad", False):
                name = _name_of(tensor, operation, arguments, keywords)
                raise ValueError(
                    f"`{name}` must not require a gradient, for this operation has none; pass "
                    f"{name}.detach() or call it under torch.no_grad()"
                )
    if forward_ad._current_level >= 0:
        for array, tensor in named(operation, arguments, keywords):
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                name = array.name
                raise ValueError(
                    f"`{name}` must not have a forward-mode tangent, for this operation has no derivative; "
                    f"pass torch.autograd.forward_ad.unpack_dual({name}).primal"
                )


def named(operation: Operation, arguments: tuple, keywords: dict[str, Any]) -> list[tuple[Parameter, Any]]:
    """Each array parameter with its tensor, or None where it is left out."""
    given = operation.signature.bind(*arguments, **keywords).arguments
    return [(array, given.get(array.name)) for array in operation.arrays]


def _name_of(tensor: Tensor, operation: Operation, arguments: tuple, keywords: dict[str, Any]) -> str:
    return next(array.name for array, each in named(operation, arguments, keywords) if each is tensor)


def _require_one_device(operation: Operation, arguments: tuple, keywords: dict[str, Any]) -> None:
    (first, one), *others = named(operation, arguments, keywords)
    for array, tensor in others:
        if tensor is not None and tensor.device != one.device:
            raise ValueError(
                f"`{array.name}` must be on the device of `{first.name}`, {one.device}, got {tensor.device}"
            )


def _described(tensor: Tensor) -> Operand:
    return Operand(tuple(tensor.shape), tensor.stride(), tensor.dtype, None)


def register(operation: Operation) -> None:
    """Define an operation in torch's library, for tensors on the CPU and on XPUs."""
    run, fake, refuse_lazy = implementation_of(operation), fake_of(operation), refuse_lazy_of(operation)
    for out in (False, True) if operation.results else (False,):
        schema = schema_of(operation, out=out)
        name = schema.partition("(")[0]
        _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
        for key in ("CPU", "XPU"):
            _library.impl(name, run, key)
        for key in ("Conjugate", "Negative", "ZeroTensor"):
            _library.impl(name, refuse_lazy, key)
        _library.impl(name, transform_of(operation, name), "FuncTorchDynamicLayerFrontMode")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def register_composite(schema: str, function: Callable[..., Any]) -> None:
    """Define an operation that only calls others, which tracers see in its place."""
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


for _operation in OPERATIONS.values():
    register(_operation)

registered = getattr(torch.ops, NAMESPACE)
"""``torch.ops.kvcache_dpex``: the operations as the dispatcher calls them."""
