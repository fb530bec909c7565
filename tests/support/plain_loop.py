"""Training by hand in plain PyTorch: what `Trainer.fit` must equal.

Nothing of the product's update is used.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def train(
    model: nn.Module,
    updates: Sequence[Sequence[dict[str, Any]]],
    optimizer: torch.optim.Optimizer,
    lr_factor: Callable[[int], float],
    max_norm: float,
) -> list[float]:
    """Train on updates made of micro-batches; return the norm of each averaged gradient before clipping."""
    base = [group["lr"] for group in optimizer.param_groups]
    norms = []
    for number, update in enumerate(updates):
        for group, rate in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = rate * lr_factor(number)
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in update)
        for batch in update:
            logits = model(batch["input_ids"], batch["valid_mask"])
            loss = F.cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                batch["labels"].reshape(-1),
                ignore_index=-100,
                reduction="sum",
            )
            loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= tokens
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        norms.append(norm)
        if norm > max_norm:
            for gradient in gradients:
                gradient *= max_norm / norm
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms
