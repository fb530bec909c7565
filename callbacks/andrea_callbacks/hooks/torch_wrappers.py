"""Wraps torch's backward pass and clips while a watched fit runs."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.utils.clip_grad as torch_clip
from torch import Tensor

from andrea_callbacks.numerics.gradient_norm import present_gradients


class TorchWrappers:
    """Wrappers around functions of torch that report backward passes and clips to watched fits.

    `clip_grad_norm_`, `clip_grad_value_` and `clip_grads_with_norm_` first group their gradients by device,
    with a function that they look up in their own module. Wrapping that function reaches all of them, however
    they were imported. Without a watched fit the wrappers only call the original. `torch.compile` does not
    trace them.

    Args:
        tell: Calls a method of every watch; takes its name and arguments.
        is_watched: Returns whether any fit is watched.
    """

    def __init__(self, tell: Callable[..., None], is_watched: Callable[[], bool]) -> None:
        self._tell = tell
        self._is_watched = is_watched
        self._put: list[tuple[Any, str, Any, Any]] = []
        self._in_backward: set[int] = set()
        self._norm_type = 2.0
        self.pauses = 0

    def is_in_backward(self) -> bool:
        """Return whether this thread runs a backward pass, or works for one."""
        is_of_torch = isinstance(threading.current_thread(), threading._DummyThread)  # pyright: ignore
        return bool(self._in_backward) and (threading.get_ident() in self._in_backward or is_of_torch)

    def put_in(self) -> None:
        """Wrap the functions, unless they are wrapped already."""
        if self._put:
            return
        for owner, name, wrap in (
            (torch.autograd, "backward", self._backward),
            (torch_clip, "_group_tensors_by_device_and_dtype", self._group),
            (torch_clip, "_get_total_norm", self._total_norm),
            (torch_clip, "_clip_grads_with_norm_", self._clip_by_norm),
            (torch.nn.utils, "clip_grad_value_", self._clip_by_value),
        ):
            original = getattr(owner, name, None)
            if original is not None:
                wrapper = wraps(original)(self._where_watched(original, wrap(original)))
                setattr(owner, name, wrapper)
                self._put.append((owner, name, original, wrapper))

    def take_out(self) -> None:
        """Restore the functions, except those that other code has wrapped since."""
        put, self._put = self._put, []
        for owner, name, original, wrapper in put:
            if getattr(owner, name) is wrapper:
                setattr(owner, name, original)

    def _where_watched(self, original: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.pauses or not self._is_watched():
                return original(*arguments, **options)
            return watched(*arguments, **options)

        return torch.compiler.disable(call)  # dynamo would trace it, and what it tells would get lost

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*arguments: Any, **options: Any) -> Any:
            thread = threading.get_ident()
            if self.is_in_backward():  # checkpointing runs backward passes within one
                return original(*arguments, **options)
            self._tell("backward_begins")
            self._in_backward.add(thread)
            try:
                result = original(*arguments, **options)
            finally:
                self._in_backward.discard(thread)
            self._tell("backward_ends")
            return result

        return backward

    def _group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def group(tensors: Any, *arguments: Any, **options: Any) -> Any:
            self._tell("change_begins", [each for each in tensors[0] if each is not None])
            return original(tensors, *arguments, **options)

        return group

    def _total_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def total_norm(tensors: Any, norm_type: float = 2.0, *arguments: Any, **options: Any) -> Any:
            self._norm_type = float(norm_type)
            return original(tensors, norm_type, *arguments, **options)

        return total_norm

    def _clip_by_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, *arguments: Any, **options: Any) -> Any:
            listed = _listed(parameters)
            result = original(listed, max_norm, *arguments, **options)
            threshold = float(max_norm) if self._norm_type == 2.0 else None
            self._tell("change_ends", present_gradients(listed), threshold, True)
            return result

        return clip

    def _clip_by_value(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
            listed = _listed(parameters)
            result = original(listed, *arguments, **options)
            self._tell("change_ends", present_gradients(listed), None, False)
            return result

        return clip


def _listed(parameters: Any) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
