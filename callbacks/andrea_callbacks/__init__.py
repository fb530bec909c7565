"""Callbacks for any Lightning project: they import lightning, torch and torchmetrics, and nothing else.

gradients   norms that agree with float64
scalars     a buffer that writes each scalar once, at its own step
updates     UpdateLog, EpochSummary: what a module reports of its updates
clip_norm   PreClipNorm
finite      FiniteGuard
console     UpdateProgressBar, RunReport
"""

from andrea_callbacks.clip_norm import PreClipNorm as PreClipNorm
from andrea_callbacks.console import RunReport as RunReport
from andrea_callbacks.console import UpdateProgressBar as UpdateProgressBar
from andrea_callbacks.finite import FiniteGuard as FiniteGuard
from andrea_callbacks.finite import NonFiniteWarning as NonFiniteWarning
from andrea_callbacks.gradients import GradientNorm as GradientNorm
from andrea_callbacks.gradients import gradient_norm as gradient_norm
from andrea_callbacks.scalars import ScalarBuffer as ScalarBuffer
from andrea_callbacks.scalars import ScalarCallback as ScalarCallback
from andrea_callbacks.scalars import scalar_buffer as scalar_buffer
from andrea_callbacks.updates import EpochSummary as EpochSummary
from andrea_callbacks.updates import UpdateLog as UpdateLog
from andrea_callbacks.updates import publish_report as publish_report
