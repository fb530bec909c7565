"""`Trainer.fit` and a loop by hand end with the same weights, however windows are cut."""

import copy
from typing import Any

import pytest
import torch

from andrea_pl import DynamicPaddingCollator, LanguageModule, TokenizedDataset, TransformerConfig, Window
from andrea_pl.data.windows.window import pack
from andrea_pl.optim import warmup_cosine
from tests.support.plain_loop import train
from tests.support.toy import ListLoader, build_trainer

UPDATES, PER_UPDATE, WARMUP = 20, 8, 3
SHAPE = TransformerConfig(vocab_size=61, block_size=24, d_model=32, n_heads=4, n_layers=2)


def sequences() -> TokenizedDataset:
    """Return sequences of varying length, some cut from longer documents, whose last window is short."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(2, 40, (200,), generator=generator).tolist()
    documents = [torch.randint(0, 61, (size,), generator=generator).tolist() for size in sizes]
    dataset = TokenizedDataset(documents, SHAPE.block_size)
    assert len(dataset) > UPDATES * PER_UPDATE
    return dataset


def windows_of(cut: str) -> list[Window]:
    """Return the same updates, each cut in one of several ways; the last is a tail of three sequences."""
    dataset, collate = sequences(), DynamicPaddingCollator(pad_token_id=0)
    windows = []
    for number in range(UPDATES):
        count = 3 if number == UPDATES - 1 else PER_UPDATE
        chosen = list(range(number * PER_UPDATE, number * PER_UPDATE + count))
        lengths = dataset.lengths[chosen].tolist()
        parts = {
            "one": [list(range(count))],
            "each": [[place] for place in range(count)],
            "pairs": [list(range(start, min(start + 2, count))) for start in range(0, count, 2)],
            "uneven": [[0], list(range(1, count))],
            "reversed": [list(range(count))[::-1]],
            "budget": pack(lengths, 48),
        }[cut]
        windows.append(Window(collate([dataset[chosen[place]] for place in part]) for part in parts))
    return windows


def optimizer_of(kind: str) -> Any:
    """Return a builder of one of the optimizers compared."""
    if kind == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    return lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def weights_by_hand(dtype: torch.dtype, kind: str) -> tuple[torch.Tensor, list[float]]:
    torch.manual_seed(1)
    model = LanguageModule(SHAPE).network.to(dtype)
    norms = train(
        model,
        windows_of("one"),
        optimizer_of(kind)(model.parameters()),
        lambda number: warmup_by_hand(number),
        max_norm=0.5,
    )
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]), norms


def warmup_by_hand(number: int) -> float:
    """Write the schedule down once more, from the first seed's formula."""
    if number < WARMUP:
        return (number + 1) / WARMUP
    return 0.5 * (1.0 + torch.cos(torch.tensor(torch.pi * (number - WARMUP) / (UPDATES - WARMUP))).item())


def weights_by_trainer(dtype: torch.dtype, kind: str, cut: str) -> tuple[torch.Tensor, list[float]]:
    torch.manual_seed(1)

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_by_hand)

    module = LanguageModule(SHAPE, optimizer_of(kind), schedule=scheduler, max_norm=0.5).to(dtype)
    norms: list[float] = []

    trainer = build_trainer(max_steps=UPDATES)
    step = module.training_step

    def recording(batch: Any, batch_idx: int) -> Any:
        report = step(batch, batch_idx)
        norms.append(float(report["grad_norm"]))
        return report

    module.training_step = recording  # type: ignore[method-assign]
    trainer.fit(module, ListLoader(windows_of(cut)))
    return torch.cat([p.detach().flatten().double() for p in module.network.parameters()]), norms


@pytest.mark.system
@pytest.mark.parametrize("cut", ["one", "each", "pairs", "uneven", "reversed", "budget"])
@pytest.mark.parametrize(
    ("dtype", "kind", "tolerance"),
    [
        (torch.float64, "adamw", 1e-10),
        (torch.float64, "sgd", 1e-10),
        (torch.float32, "sgd", 1e-6),
        (torch.float32, "adamw", 1e-4),
    ],
    ids=["float64-adamw", "float64-sgd", "float32-sgd", "float32-adamw"],
)
def test_equal_weights(dtype: torch.dtype, kind: str, tolerance: float, cut: str) -> None:
    expected, norms = weights_by_hand(dtype, kind)
    weights, measured = weights_by_trainer(dtype, kind, cut)
    assert float((weights - expected).norm() / expected.norm()) < tolerance
    assert measured == pytest.approx(norms, rel=max(tolerance, 1e-9) * 10)
    assert max(norms) > 0.5, "the clip must have had something to do"


def test_negative_control() -> None:
    """Averaging micro-batches equally, as others do, ends elsewhere."""
    torch.manual_seed(1)
    model = LanguageModule(SHAPE).network.double()
    wrong = [[batch] for window in windows_of("pairs") for batch in window][:UPDATES]
    train(model, copy.deepcopy(wrong), optimizer_of("adamw")(model.parameters()), warmup_by_hand, 0.5)
    expected, _ = weights_by_hand(torch.float64, "adamw")
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((weights - expected).norm() / expected.norm()) > 1e-3


def test_schedule_formula() -> None:
    for number in range(UPDATES):
        assert warmup_cosine(number, UPDATES, WARMUP) == pytest.approx(warmup_by_hand(number), abs=1e-6)
