"""Supports Lightning's two packages, `lightning.pytorch` and `pytorch_lightning`: two sets of equal classes.

This library uses the first. It recognises classes of the second if they are imported, but never imports them.
"""

import sys
from typing import Any, cast

TWINS = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
"""Packages and the other names of the same code."""

_extended: dict[tuple[type, type], type] = {}


def is_kind(value: object, kind: type) -> bool:
    """Return whether a value is an instance of a Lightning class, or of its twin in the other package.

    Args:
        value: Any object.
        kind: A class of `lightning.pytorch` or `lightning.fabric`.
    """
    twin = twin_of(kind)
    return isinstance(value, kind) or (twin is not None and isinstance(value, twin))


def twin_of(kind: type) -> type | None:
    """Return the same Lightning class in the other package, None if that package is not imported."""
    for package, other in TWINS.items():
        if kind.__module__ == package or kind.__module__.startswith(f"{package}."):
            module = sys.modules.get(other + kind.__module__.removeprefix(package))
            found = getattr(module, kind.__name__, None)
            return found if isinstance(found, type) else None
    return None


def overrides(value: object, method: str) -> bool:
    """Return whether the class of a module or callback overrides one of Lightning's methods."""
    lightnings = (*TWINS, *TWINS.values())
    owner = next((each for each in type(value).__mro__ if method in vars(each)), None)
    return owner is not None and not owner.__module__.startswith(tuple(f"{name}." for name in lightnings))


def with_twin(cls: type) -> type:
    """Return a class whose instances both packages accept; `cls` itself if only one package is imported.

    The class has the name of `cls`, and is a subclass of `cls` and of the twin of its nearest Lightning base.
    Instances can be pickled and copied: the pickle names `cls`. Assign it at the end of the constructor:
    `self.__class__ = with_twin(type(self))`.
    """
    twin = next((twin for base in cls.__mro__ if (twin := twin_of(base)) is not None), None)
    if twin is None or issubclass(cls, twin):
        return cls
    if (cls, twin) not in _extended:
        namespace = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "__reduce_ex__": _reduce,
        }
        metaclass = cast("Any", type(cls))
        _extended[cls, twin] = metaclass(cls.__name__, (cls, twin), namespace)
    return _extended[cls, twin]


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    del protocol
    return _make, (type(self).__mro__[1],), self.__getstate__()


def _make(cls: type) -> Any:
    return cast("Any", with_twin(cls)).__new__(with_twin(cls))
