"""Finds tensors in batches and outputs of any structure, and NaN and Inf in them."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DEEPEST = 8
"""Levels of nesting that are searched."""


def named_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a value with their paths, such as `inputs.x[0]`.

    Searches mappings, lists, tuples, named tuples, dataclasses, attrs classes, and the attributes of other
    objects. NumPy arrays and lists of floats count as tensors. Properties are not evaluated, and iterators
    are not advanced.

    Args:
        value: A batch, or a module's output.
    """
    yield from _walk(value, "", DEEPEST, set())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value; see `named_tensors`."""
    for _, tensor in named_tensors(value):
        yield tensor


def _walk(value: Any, place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
        return
    if depth == 0 or id(value) in seen or _is_leaf(value):
        return
    seen.add(id(value))
    numbers = _as_tensor(value)
    if numbers is not None:
        yield place, numbers
        return
    for name, part in _parts(value):
        yield from _walk(part, f"{place}{name}" if place else name.removeprefix("."), depth - 1, seen)


def _is_leaf(value: Any) -> bool:
    """Return whether a value cannot hold tensors of a batch, such as a module or a string."""
    kinds = (str, bytes, int, float, complex, type(None), type, ModuleType, nn.Module, Optimizer, torch.dtype)
    return isinstance(value, kinds) or callable(value)


def _as_tensor(value: Any) -> Tensor | None:
    """Return a NumPy array or a list of floats as a tensor, None for anything else."""
    if isinstance(value, (list, tuple)):
        items = cast("list[Any]", value)
        is_plain = bool(items) and all(type(each) is float for each in items)
        return torch.tensor(items, dtype=torch.float64) if is_plain else None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "fc":
        return torch.as_tensor(value.copy())
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return the parts of a container or record with their names, without those that cannot be read."""
    fields = _attempt(partial(getattr, value, "_fields")) if isinstance(value, tuple) else None
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        keys: list[Any] = _attempt(lambda: list(mapping)) or []
        found = [(_spell_key(key), _attempt(partial(mapping.__getitem__, key))) for key in keys]
    elif isinstance(fields, tuple):
        pairs = zip(cast("tuple[str, ...]", fields), cast("tuple[Any, ...]", value), strict=False)
        found = [(f".{name}", part) for name, part in pairs]
    elif isinstance(value, (list, tuple, set, frozenset)):
        found = [(f"[{place}]", part) for place, part in enumerate(cast("list[Any]", value))]
    else:  # graphs of PyTorch Geometric keep theirs in private mappings
        found = [
            ("" if name.startswith("_") else f".{name}", _attempt(partial(_read, value, name)))
            for name in _names(value)
        ]
    return [(name, part) for name, part in found if part is not None]


def _spell_key(key: Any) -> str:
    return f".{key}" if isinstance(key, str) else f"[{key!r}]"


def _attempt(read: Callable[[], Any]) -> Any:
    """Return the result of the project's code, None if it raises."""
    try:
        return read()
    except Exception:  # a property that raises, or a lazy mapping
        return None


def _names(value: Any) -> list[str]:
    """Return the names of a record's fields in order."""
    kind = cast("type[Any]", type(value))
    if dataclasses.is_dataclass(kind):
        return [each.name for each in dataclasses.fields(kind)]  # without InitVar and ClassVar
    attributes: Any = getattr(kind, "__attrs_attrs__", None)
    if attributes is not None:
        return [each.name for each in attributes]
    return [*_attributes(value), *_slots(kind)]


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes in an object's `__dict__`, if it has one."""
    return _attempt(partial(vars, value)) or {}


def _slots(kind: type) -> list[str]:
    names: list[str] = []
    for each in kind.__mro__:
        slots: Any = vars(each).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


def _read(value: Any, name: str) -> Any:
    kept = _attributes(value)
    return kept[name] if name in kept else getattr(value, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """NaN or Inf in a tensor of a batch."""

    key: str
    """The tensor's path in the batch; empty if the batch itself is a tensor."""
    value: str
    """`NaN` or `Inf`."""
    rows: tuple[int, ...]
    """Indices in the tensor's first dimension, from 0; empty for a 0-d tensor."""
    length: int
    """Number of rows of the tensor."""


def faults_in(batch: Any) -> list[Fault]:
    """Return the tensors of a batch that hold NaN or Inf, except additive masks of zeros and -Inf.

    The host waits for the device. Tensors of kinds that cannot be read are skipped.
    """
    found: list[Fault] = []
    for key, tensor in named_tensors(batch):
        try:
            fault = _fault_of(key, tensor)
        except Exception:  # quantized, without data, of somebody's own
            fault = None
        if fault is not None:
            found.append(fault)
    return found


def _fault_of(key: str, tensor: Tensor) -> Fault | None:
    values = real_view(tensor)
    if values is None or kind_of(values) is None:
        return None
    bad = ~torch.isfinite(values)
    if not bool(torch.isnan(values).any()) and is_mask(values):
        return None
    rows = bad.flatten(1).any(1) if bad.ndim > 1 else bad
    numbers = cast("list[int]", rows.nonzero().flatten().tolist()) if bad.ndim else []
    return Fault(
        key=key,
        value=kind_of(values) or "NaN",
        rows=tuple(numbers),
        length=len(values) if values.ndim else 0,
    )


def real_view(tensor: Tensor) -> Tensor | None:
    """Return a tensor's values, dense and real; None for integers and for tensors without data."""
    values = tensor.detach()
    if values.is_meta or not (values.is_floating_point() or values.is_complex()):
        return None
    if values.layout != torch.strided:
        values = values.to_dense()
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def kind_of(tensor: Tensor, with_negative: bool = True) -> str | None:
    """Return `NaN` or `Inf` if a tensor has one, else None."""
    values = real_view(tensor)
    if values is None:
        return None
    if bool(torch.isnan(values).any()):
        return "NaN"
    found = torch.isinf(values) if with_negative else values == float("inf")
    return "Inf" if bool(found.any()) else None


def is_mask(values: Tensor) -> bool:
    """Return whether real values are an additive mask: only zeros and -Inf."""
    return bool(((values == 0) | (values == float("-inf"))).all())
