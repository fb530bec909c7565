"""Optimizer, schedule and clip. Imports nothing of training."""

from andrea_pl.optim.clipping import Clipper as Clipper
from andrea_pl.optim.clipping import supports_skip_flag as supports_skip_flag
from andrea_pl.optim.extension import ExtensionError as ExtensionError
from andrea_pl.optim.extension import build_extension as build_extension
from andrea_pl.optim.groups import build_optimizer as build_optimizer
from andrea_pl.optim.groups import parameter_groups as parameter_groups
from andrea_pl.optim.schedules import build_scheduler as build_scheduler
from andrea_pl.optim.schedules import warmup_cosine as warmup_cosine
