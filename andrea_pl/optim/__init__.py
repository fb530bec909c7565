"""Optimizer, schedule and clip. Imports nothing of training."""

from andrea_pl.optim.clipping import clip_coefficient as clip_coefficient
from andrea_pl.optim.clipping import scale_gradients as scale_gradients
from andrea_pl.optim.groups import build_optimizer as build_optimizer
from andrea_pl.optim.groups import parameter_groups as parameter_groups
from andrea_pl.optim.schedules import build_scheduler as build_scheduler
from andrea_pl.optim.schedules import warmup_cosine as warmup_cosine
