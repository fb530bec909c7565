"""Callbacks for any Lightning project: they import lightning, torch and torchmetrics, and nothing else.

The one exception is safetensors, imported when a report has tensors to write.

What they see of a run:

    on_before_optimizer_step ─> measuring     norm, clip, loss scale; measured once for all callbacks
    on_train_batch_start ────> window         micro-batches and random state of the update being made
    a module's reports ──────> updates        what it measured itself
                               replay         micro-batches run again, without a trace
                                 ├─ origin        where a NaN came from
                                 └─ attribution   whose gradient it is
    events ──────────────────> each other     spike, nonfinite, coherence: the journal keeps them

clip_norm  PreClipNorm      moments     MomentMonitor, moment_trace  journal  RunJournal, read_journal
finite     FiniteGuard      coherence   CoherenceGate                layout   TensorBoardLayout
spikes     SpikeForensics   throughput  Throughput                   console  UpdateProgressBar, RunReport
updates    UpdateLog, EpochSummary
sources    SourceMonitor    resume      ExactResume
"""

from andrea_callbacks.clip_norm import ClipWarning as ClipWarning
from andrea_callbacks.clip_norm import PreClipNorm as PreClipNorm
from andrea_callbacks.coherence import Coherence as Coherence
from andrea_callbacks.coherence import CoherenceGate as CoherenceGate
from andrea_callbacks.coherence import IncoherenceWarning as IncoherenceWarning
from andrea_callbacks.coherence import known_units as known_units
from andrea_callbacks.coherence import score_coherence as score_coherence
from andrea_callbacks.console import RunReport as RunReport
from andrea_callbacks.console import UpdateProgressBar as UpdateProgressBar
from andrea_callbacks.detector import SpikeDetector as SpikeDetector
from andrea_callbacks.events import RunEvent as RunEvent
from andrea_callbacks.events import publish_event as publish_event
from andrea_callbacks.finite import FiniteGuard as FiniteGuard
from andrea_callbacks.finite import NonFiniteError as NonFiniteError
from andrea_callbacks.finite import NonFiniteWarning as NonFiniteWarning
from andrea_callbacks.gradient_watch import UnwatchedWarning as UnwatchedWarning
from andrea_callbacks.gradients import GradientNorm as GradientNorm
from andrea_callbacks.gradients import gradient_norm as gradient_norm
from andrea_callbacks.journal import RunJournal as RunJournal
from andrea_callbacks.journal import read_journal as read_journal
from andrea_callbacks.layout import TensorBoardLayout as TensorBoardLayout
from andrea_callbacks.moments import MomentMonitor as MomentMonitor
from andrea_callbacks.moments import MomentTrace as MomentTrace
from andrea_callbacks.moments import moment_trace as moment_trace
from andrea_callbacks.resume import ExactResume as ExactResume
from andrea_callbacks.scalars import ScalarBuffer as ScalarBuffer
from andrea_callbacks.scalars import ScalarCallback as ScalarCallback
from andrea_callbacks.scalars import scalar_buffer as scalar_buffer
from andrea_callbacks.sources import SourceMonitor as SourceMonitor
from andrea_callbacks.spikes import SpikeForensics as SpikeForensics
from andrea_callbacks.throughput import Throughput as Throughput
from andrea_callbacks.updates import EpochSummary as EpochSummary
from andrea_callbacks.updates import UpdateLog as UpdateLog
from andrea_callbacks.updates import publish_report as publish_report
