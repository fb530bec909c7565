"""Run by test_memory.py: 1,000 updates with every callback; prints bytes an update and live tensors."""

import gc
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import torch

from andrea_callbacks import (
    EpochSummary,
    FiniteGuard,
    MomentMonitor,
    PreClipNorm,
    RunJournal,
    RunReport,
    SpikeForensics,
    Throughput,
    UpdateLog,
    UpdateProgressBar,
)
from andrea_pl import LanguageModule, TextDataModule, TextSource, TransformerConfig

warnings.simplefilter("ignore")
torch.set_num_threads(1)
process = psutil.Process(os.getpid())
resident: list[tuple[int, int]] = []
tensors: list[int] = []


class Watch(pl.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step >= 300 and step % 5 == 0:
            resident.append((step, process.memory_info().rss))
        if step in (400, 1000):  # the buffer of scalars and the epoch stand alike
            gc.collect()
            tensors.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))


rows = [[(7 * n + k) % 50 for k in range(16)] for n in range(32)]
data = TextDataModule(
    [TextSource(name="t", kind="tokens", documents=rows)],
    vocab_size=50,
    block_size=16,
    sequences_per_update=4,
    micro_batch_tokens=32,
    val_fraction=0.0,
)
module = LanguageModule(TransformerConfig(vocab_size=50, block_size=16, d_model=16, n_heads=2, n_layers=1))
callbacks = [
    UpdateLog(),
    PreClipNorm(),
    FiniteGuard(),
    SpikeForensics(),
    MomentMonitor(),
    Throughput(),
    RunJournal(),
    EpochSummary(),
    UpdateProgressBar(),
    RunReport(),
    Watch(),
]
trainer = pl.Trainer(
    accelerator="cpu",
    max_steps=1001,
    logger=pl.loggers.TensorBoardLogger("."),
    callbacks=callbacks,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(module, datamodule=data)
steps, values = np.array(resident, dtype=np.float64).T
print(f"slope {np.polyfit(steps, values, 1)[0]:.1f} tensors {tensors[0]} {tensors[1]}")
