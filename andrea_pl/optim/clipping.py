"""One clip over all gradients of an optimizer, by their global L2 norm.

optimizer ──gradient_norm──> GradientNorm       cached until a gradient changes
          ──clip_gradients──> coefficient ─┬─> grad_scale, found_inf: a fused step divides as it reads
                                           └─> one pass over the gradients, for any other optimizer
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast, get_args

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from andrea_callbacks.hooks.gradient_watch import clip_begins, clip_ends, clip_is_planned
from andrea_callbacks.numerics.gradient_norm import (
    GradientNorm,
    NormCache,
    distinct,
    gradient_norm,
    local_gradient,
    optimizer_parameters,
    present_gradients,
    squared_norms,
)
from andrea_pl.errors import UserError
from andrea_pl.optim.extension import ExtensionError, load_extension
from andrea_pl.optim.next_step import SCALED_DTYPES, NextStep, supports_grad_scale, supports_skip_flag

Gradients = Optimizer | Tensor | Iterable[Tensor]
"""The gradients to measure or clip: those of an optimizer, or of parameters."""

ClipperKind = Literal["auto", "torch", "extension"]

LARGEST = torch.finfo(torch.float32).max

_told: set[str] = set()


class Clipper:
    """Measures and clips the gradients of optimizers of any kind, on any devices, sharded or not.

    A norm is computed once and cached until a gradient is replaced or written to, or the optimizer steps. The
    cache does not see writes that torch does not count, through `.data` and by `GradScaler.unscale_`. Call
    `invalidate` after them.

    Args:
        kind: `torch` uses torch's operations. `extension` uses compiled kernels for dense float32, bfloat16
            and float16 gradients. `auto` uses the kernels if they can be built, and otherwise warns.

    Raises:
        UserError: If `kind` is none of these.
    """

    def __init__(self, kind: ClipperKind = "auto") -> None:
        if kind not in get_args(ClipperKind):
            raise UserError(f"clipper must be one of {', '.join(get_args(ClipperKind))}, got {kind!r}")
        self.kind: ClipperKind = kind
        self._extended: dict[torch.device, bool] = {}
        self._reasons: dict[torch.device, str] = {}
        self._norms = NormCache(self._squared_norms)
        self._next_step = NextStep(self._norms)

    def __getstate__(self) -> dict[str, Any]:
        return {"kind": self.kind}  # what is known of optimizers holds for those alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["kind"])

    def has_extension(self, device: torch.device) -> bool:
        """Return whether to use the extension on a device; the first call builds it.

        Raises:
            ExtensionError: If the kind is `extension`, and it cannot be built or loaded.
        """
        if self.kind == "torch":
            return False
        if device not in self._extended:
            try:
                load_extension(device)
                self._extended[device] = True
            except ExtensionError as error:
                if self.kind == "extension":
                    raise
                self._extended[device] = False
                self._reasons[device] = str(error)
                _tell_once(f"clipping with torch: {error}")
        return self._extended[device]

    def agree_on_extension(self, device: torch.device) -> None:
        """Make either all ranks or no rank use the extension, so that their norms are equal bit for bit.

        Args:
            device: This rank's device. All ranks must call this together.

        Raises:
            ExtensionError: On every rank, if the kind is `extension` and one rank cannot build or load it.
        """
        fault: Exception | None = None
        try:
            self.has_extension(device)
        except Exception as error:  # whatever it is, the other ranks wait for this one's word
            fault = error
        mine = (self._reasons.get(device) if fault is None else str(fault), fault is not None)
        words: list[tuple[str | None, bool]] = [mine] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(words, mine)
        faulty = [(rank, *word) for rank, word in enumerate(words) if word[0] is not None]
        if not faulty:
            return
        if fault is not None:
            raise fault
        rank, reason, _ = faulty[0]
        if any(is_fault for *_, is_fault in faulty):
            raise ExtensionError(f"rank {rank} cannot have the clip extension: {reason}")
        if self._extended.get(device):
            _tell_once(f"clipping with torch, since rank {rank} cannot have the clip extension: {reason}")
        self._extended[device] = False

    def gradient_norm(self, optimizer: Gradients) -> GradientNorm:
        """Return norms and non-finite counts of the current gradients.

        Args:
            optimizer: An optimizer, whose norm is cached until a gradient changes; or parameters, as an
                iterable or a single tensor, which are measured each time.

        Raises:
            UserError: If the argument is something else, or there is no parameter.
        """
        owner = _owner(optimizer)
        if isinstance(owner, list):
            return gradient_norm(owner, self._squared_norms)
        self._next_step.watch(owner)
        return self._norms.norm(owner)

    def clip_gradients(self, optimizer: Gradients, max_norm: float, skip: Tensor | None = None) -> Tensor:
        """Clip to a global norm: `g * min(1, max_norm / norm)` (Pascanu et al., 2013).

        A fused optimizer divides its gradients during its next step, by `grad_scale`; until then they do not
        change. For any other optimizer the gradients are scaled here. A norm that is not finite clips
        nothing. Nothing waits for an accelerator. If the step never happens, nothing remains once gradients
        are set to None, as by `zero_grad`, or clipped again.

        Args:
            optimizer: An optimizer; or parameters, as an iterable or a single tensor, whose gradients are
                scaled here.
            max_norm: Threshold, more than 0; `inf` clips nothing.
            skip: 0-d float32; if it is 1, the next step changes nothing. Only for an optimizer that
                `supports_skip_flag`.

        Returns:
            The coefficient, 0-d float64 (float32 on devices without it).

        Raises:
            UserError: If the argument is something else, there is no parameter, or `max_norm` is out of
                range.
            ValueError: If `skip` is given for something without a step that can be skipped.
        """
        owner = _owner(optimizer)
        if not max_norm > 0:  # a negative one would flip signs
            raise UserError(f"max_norm must be more than 0, got {max_norm}; inf clips nothing")
        if isinstance(owner, Optimizer):
            coefficient = self._clip_optimizer(owner, max_norm, skip)
        elif skip is None:
            coefficient = self._clip_parameters(owner, max_norm)
        else:
            raise ValueError("parameters have no step to skip; give their optimizer")
        return coefficient

    def _clip_parameters(self, parameters: list[Tensor], max_norm: float) -> Tensor:
        norm, gradients = gradient_norm(parameters, self._squared_norms), present_gradients(parameters)
        if max_norm == math.inf:
            return torch.ones_like(norm.total)
        clip_begins(gradients)
        coefficient, *_ = self._figures(norm, max_norm)
        self._scale(gradients, coefficient)
        clip_ends(gradients, max_norm)
        return coefficient

    def _clip_optimizer(self, optimizer: Optimizer, max_norm: float, skip: Tensor | None) -> Tensor:
        if skip is None:
            skip = self._next_step.skip_flag_of(optimizer)  # a second clip keeps the skip flag of the first
        self._next_step.remove(optimizer)
        norm = self.gradient_norm(optimizer)
        if skip is not None and not supports_skip_flag(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be made to skip its step by a device now; see "
                "supports_skip_flag"
            )
        if max_norm < math.inf:
            clip_begins(_gradients(optimizer))
        coefficient = self._clip(optimizer, norm, max_norm, skip)
        if max_norm < math.inf:
            clip_is_planned(optimizer, max_norm, norm.total * coefficient)
        return coefficient

    def _clip(self, optimizer: Optimizer, norm: GradientNorm, max_norm: float, skip: Tensor | None) -> Tensor:
        if max_norm == math.inf:
            self._next_step.put(optimizer, None, skip)
            return torch.ones_like(norm.total)
        if norm.total.device.type == "cpu" and skip is None:
            return self._clip_on_host(optimizer, norm, max_norm)
        coefficient, divisor, overflow = self._figures(norm, max_norm)
        if supports_grad_scale(optimizer):
            self._next_step.put(optimizer, divisor, None if skip is None else torch.maximum(skip, overflow))
        else:
            self._scale(_gradients(optimizer), coefficient)
        return coefficient

    def scale_now(self, optimizer: Optimizer) -> None:
        """Apply now the clip that was left to the next step, for code that reads the gradients."""
        divisor = self._next_step.divisor_of(optimizer)
        skip = self._next_step.skip_flag_of(optimizer)
        self._next_step.remove(optimizer)
        if divisor is not None:
            self._scale(_gradients(optimizer), 1.0 / divisor.double())
        if skip is not None:
            self.gradient_norm(optimizer)
            self._next_step.put(optimizer, None, skip)

    def invalidate(self, optimizer: Optimizer) -> None:
        """Drop the cached norm after a write to gradients that torch does not count."""
        self._norms.invalidate(optimizer)

    def _clip_on_host(self, optimizer: Optimizer, norm: GradientNorm, max_norm: float) -> Tensor:
        value = float(norm.total)
        coefficient = max_norm / value if math.isfinite(value) and value > max_norm else 1.0
        result = torch.full_like(norm.total, coefficient)
        if coefficient == 1.0:
            return result
        if supports_grad_scale(optimizer) and value / max_norm <= LARGEST:
            self._next_step.put(optimizer, torch.tensor(value / max_norm, dtype=torch.float32), None)
        else:
            self._scale(_gradients(optimizer), result)
        return result

    def _figures(self, norm: GradientNorm, max_norm: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return coefficient, its inverse in float32, and 1 if norm or inverse overflow float32, else 0."""
        if self.has_extension(norm.total.device):
            figures, controls = torch.ops.andrea_clip.clip_figures(norm.rows, max_norm)
            return figures[1], controls[0], controls[1]
        clips = torch.isfinite(norm.total) & (norm.total > max_norm)
        one = torch.ones_like(norm.total)
        ratio = torch.where(clips, norm.total / max_norm, one)
        overflow = ~(torch.isfinite(norm.total.float()) & torch.isfinite(ratio.float()))
        coefficient = torch.where(clips, max_norm / norm.total, one)
        return coefficient, ratio.clamp(max=LARGEST).float(), overflow.float()

    def _squared_norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Measure supported gradients with the extension, and the rest with torch."""
        parts: dict[int, Tensor] = {}
        for places, is_supported in self._groups(tensors):
            group = [tensors[place] for place in places]
            part = torch.ops.andrea_clip.squared_norms(group) if is_supported else squared_norms(group)
            if len(places) == len(tensors):
                return part
            parts.update(zip(places, part.to(tensors[0].device), strict=True))
        return torch.stack([parts[place] for place in range(len(tensors))])

    @torch.no_grad()
    def _scale(self, gradients: list[Tensor], coefficient: Tensor) -> None:
        # a sparse gradient must be written to itself: a detached one would take the values alone
        tensors = [local_gradient(gradient) for gradient in gradients]
        for places, is_supported in self._groups(tensors):
            group = [tensors[place] for place in places]
            factor = coefficient.to(group[0].device)
            if is_supported:
                torch.ops.andrea_clip.scale_(group, factor)
                torch.autograd.graph.increment_version(group)  # which torch's own operators do themselves
            elif group[0].layout == torch.strided:
                if group[0].dtype == torch.float32:
                    factor = factor.float()  # one launch for all needs one dtype
                torch._foreach_mul_(group, factor)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            else:
                for each in group:
                    each.mul_(factor)

    def _groups(self, tensors: Sequence[Tensor]) -> list[tuple[list[int], bool]]:
        """Return groups of indices of similar tensors, and whether the extension supports each group."""
        groups: dict[Any, list[int]] = {}
        for place, tensor in enumerate(tensors):
            key = (tensor.dtype, tensor.device, tensor.layout, _is_dense(tensor))
            groups.setdefault(key, []).append(place)
        return [
            (places, dtype in SCALED_DTYPES and is_dense and self.has_extension(device))
            for (dtype, device, _, is_dense), places in groups.items()
        ]


def _owner(gradients: Gradients) -> Optimizer | list[Tensor]:
    """Return the raw optimizer, or the distinct parameters."""
    if isinstance(gradients, LightningOptimizer):
        return gradients.optimizer
    if isinstance(gradients, Optimizer):
        return gradients
    try:
        parameters = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    except TypeError:
        raise _unwanted(gradients) from None
    for each in cast("list[Any]", parameters):
        if not isinstance(each, Tensor):
            raise _unwanted(each, f" in a {type(gradients).__name__}")
    if not parameters:
        raise UserError(
            f"there is no parameter in this {type(gradients).__name__}; a generator such as "
            "module.parameters() can be read only once: call it again, or keep a list of it"
        )
    return distinct(parameters)


def _unwanted(given: object, place: str = "") -> UserError:
    return UserError(
        "wanted an optimizer or parameters (an iterable of tensors, such as module.parameters(), or a single "
        f"tensor), got a {type(given).__name__}{place}"
    )


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return present_gradients(optimizer_parameters(optimizer))


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has elements, and they fill one stretch of memory in any order."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _tell_once(message: str) -> None:
    if message not in _told:
        _told.add(message)
        rank_zero_info(message)
