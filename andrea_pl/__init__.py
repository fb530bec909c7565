"""Exact, token-weighted pretraining of language models with PyTorch Lightning."""

from andrea_pl.cli.interrupting import quieten_interrupts

quieten_interrupts()

# ruff: noqa: E402  what follows takes seconds
from andrea_pl.data import Arm as Arm
from andrea_pl.data import Curriculum as Curriculum
from andrea_pl.data import DynamicPaddingCollator as DynamicPaddingCollator
from andrea_pl.data import Exp3 as Exp3
from andrea_pl.data import Fixed as Fixed
from andrea_pl.data import Mixture as Mixture
from andrea_pl.data import Observation as Observation
from andrea_pl.data import Proportional as Proportional
from andrea_pl.data import TextDataModule as TextDataModule
from andrea_pl.data import TextSource as TextSource
from andrea_pl.data import TokenizedDataset as TokenizedDataset
from andrea_pl.data import Ucb1 as Ucb1
from andrea_pl.data import Window as Window
from andrea_pl.data import WindowLoader as WindowLoader
from andrea_pl.errors import UserError as UserError
from andrea_pl.language.module import LanguageModule as LanguageModule
from andrea_pl.network import FeedForward as FeedForward
from andrea_pl.network import RoPELanguageModel as RoPELanguageModel
from andrea_pl.network import Sampling as Sampling
from andrea_pl.network import TransformerConfig as TransformerConfig
from andrea_pl.optim import build_optimizer as build_optimizer
from andrea_pl.optim import build_scheduler as build_scheduler
from andrea_pl.runs.checkpoint_callback import DurableCheckpoint as DurableCheckpoint
from andrea_pl.runs.checkpoint_io import DurableCheckpointIO as DurableCheckpointIO
from andrea_pl.strategies import ClipDDPStrategy as ClipDDPStrategy
from andrea_pl.strategies import ClipModelParallelStrategy as ClipModelParallelStrategy
from andrea_pl.strategies import ClipSingleDeviceStrategy as ClipSingleDeviceStrategy
from andrea_pl.training.module import NonFiniteError as NonFiniteError
from andrea_pl.training.module import TokenWeightedModule as TokenWeightedModule
