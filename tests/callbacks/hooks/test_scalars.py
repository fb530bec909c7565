"""The buffer: each scalar once, at its own step, in order."""

import gc
from typing import Any
from weakref import ref

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from andrea_callbacks import ScalarBuffer, scalar_buffer
from tests.support.toy import RowLogger, build_trainer

TRAINERS: list[Any] = []


def buffer_of(logger: Any, capacity: int = 3) -> ScalarBuffer:
    TRAINERS.append(build_trainer(logger=logger))
    return ScalarBuffer(TRAINERS[-1], capacity)


@pytest.mark.guarantee("figures of update k are at step k")
def test_rows_are_merged_and_ordered() -> None:
    logger = RowLogger()
    buffer = buffer_of(logger)
    for step in range(1, 7):
        buffer.record(step, {"a": torch.tensor(float(step))})
        buffer.record(step, {"b": step})
    assert [step for step, _ in logger.rows] == [1, 2, 3]  # the newest may still be added to
    buffer.flush()
    buffer.flush()
    assert logger.rows == [(step, {"a": step, "b": step}) for step in range(1, 7)]


@pytest.mark.guarantee("figures of update k are at step k")
def test_steps_are_written_in_order_whoever_came_first() -> None:
    logger = RowLogger()
    buffer = buffer_of(logger)
    for step in (2, 1, 3):
        buffer.record(step, {"a": step})
    buffer.flush()
    assert logger.rows == [(step, {"a": step}) for step in (1, 2, 3)]


def test_values_keep_their_precision() -> None:
    """`self.log` would make 2^24 + 1 of 2^24."""
    logger = RowLogger()
    buffer = buffer_of(logger)
    buffer.record(1, {"tokens": 2**24 + 1, "sum": torch.tensor(2.0**24 + 1, dtype=torch.float64)})
    buffer.flush()
    assert logger.rows[0][1] == {"tokens": 2**24 + 1, "sum": 2.0**24 + 1}


def test_no_graph_is_kept() -> None:
    logger = RowLogger()
    buffer = buffer_of(logger)
    buffer.record(1, {"loss": torch.ones((), requires_grad=True) * 2})
    buffer.flush()
    assert logger.rows == [(1, {"loss": 2.0})]


def test_shared_by_trainer() -> None:
    one, two = build_trainer(), build_trainer()
    assert scalar_buffer(one) is scalar_buffer(one)
    assert scalar_buffer(one) is not scalar_buffer(two)


def test_without_loggers_nothing_is_kept() -> None:
    buffer = buffer_of(False)
    buffer.record(1, {"a": 1.0})
    assert not buffer._steps


def test_csv_rows_are_one_a_step(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    buffer = buffer_of(logger)
    for step in (1, 2):
        buffer.record(step, {"a": step})
        buffer.record(step, {"b": step})
    buffer.flush()
    logger.save()
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_shown(value: float) -> None:
    logger = RowLogger()
    buffer = buffer_of(logger)
    buffer.record(1, {"loss": torch.tensor(value)})
    buffer.flush()
    assert str(logger.rows[0][1]["loss"]) == str(value)


def test_no_trainer_is_kept_alive() -> None:
    trainer = build_trainer(logger=RowLogger())
    scalar_buffer(trainer).record(1, {"a": 1.0})
    gone = ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
