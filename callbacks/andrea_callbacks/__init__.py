"""Callbacks for any Lightning project: they import lightning, torch and torchmetrics, and nothing else.

The one exception is safetensors, imported when a report has tensors to write.

Each callback has a file named like its class. Three packages hold what the callbacks share:

hooks       facts about the current update: reports, events, scalars, window, gradients
              on_before_optimizer_step ─> measuring       norm, clip, loss scale; measured once for all
              on_train_batch_start ────> update_window    micro-batches and random state
              a module's reports ──────> reports          what the module measured itself
forensics   why an update was bad
              replay         runs micro-batches again without side effects
                ├─ nonfinite_origin   where a NaN came from
                └─ attribution        which sequences made the gradient
numerics    norms, transfers, random states, atomic writes; imports neither of the other two
"""

from andrea_callbacks.coherence_gate import CoherenceGate as CoherenceGate
from andrea_callbacks.coherence_gate import IncoherenceWarning as IncoherenceWarning
from andrea_callbacks.epoch_summary import EpochSummary as EpochSummary
from andrea_callbacks.exact_resume import ExactResume as ExactResume
from andrea_callbacks.finite_guard import FiniteGuard as FiniteGuard
from andrea_callbacks.forensics.coherence_score import Coherence as Coherence
from andrea_callbacks.forensics.coherence_score import known_units as known_units
from andrea_callbacks.forensics.coherence_score import score_coherence as score_coherence
from andrea_callbacks.forensics.detector import SpikeDetector as SpikeDetector
from andrea_callbacks.forensics.investigation import NonFiniteError as NonFiniteError
from andrea_callbacks.forensics.investigation import NonFiniteWarning as NonFiniteWarning
from andrea_callbacks.hooks.events import RunEvent as RunEvent
from andrea_callbacks.hooks.events import publish_event as publish_event
from andrea_callbacks.hooks.gradient_watch import UnwatchedWarning as UnwatchedWarning
from andrea_callbacks.hooks.reports import UpdateReport as UpdateReport
from andrea_callbacks.hooks.reports import publish_report as publish_report
from andrea_callbacks.hooks.scalars import ScalarBuffer as ScalarBuffer
from andrea_callbacks.hooks.scalars import ScalarCallback as ScalarCallback
from andrea_callbacks.hooks.scalars import scalar_buffer as scalar_buffer
from andrea_callbacks.moment_monitor import MomentMonitor as MomentMonitor
from andrea_callbacks.numerics.gradient_norm import GradientNorm as GradientNorm
from andrea_callbacks.numerics.gradient_norm import gradient_norm as gradient_norm
from andrea_callbacks.numerics.moment_trace import MomentTrace as MomentTrace
from andrea_callbacks.numerics.moment_trace import moment_trace as moment_trace
from andrea_callbacks.pre_clip_norm import ClipWarning as ClipWarning
from andrea_callbacks.pre_clip_norm import PreClipNorm as PreClipNorm
from andrea_callbacks.run_journal import RunJournal as RunJournal
from andrea_callbacks.run_journal import read_journal as read_journal
from andrea_callbacks.run_report import RunReport as RunReport
from andrea_callbacks.source_monitor import SourceMonitor as SourceMonitor
from andrea_callbacks.spike_forensics import SpikeForensics as SpikeForensics
from andrea_callbacks.tensorboard_layout import TensorBoardLayout as TensorBoardLayout
from andrea_callbacks.throughput import Throughput as Throughput
from andrea_callbacks.update_log import UpdateLog as UpdateLog
from andrea_callbacks.update_progress_bar import UpdateProgressBar as UpdateProgressBar
