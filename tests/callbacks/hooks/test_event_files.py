"""TensorBoard shows every step once, however often a run is resumed in its folder from Python."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from andrea_callbacks import ExactResume, scalar_buffer
from andrea_callbacks.hooks.event_files import _put_before
from andrea_pl import DurableCheckpoint, UserError
from andrea_pl.runs.lock import FolderLock
from tests.support.runs import Windows, difference
from tests.support.toy import ListLoader, ToyU, build_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:Checkpoint directory",
    "ignore:Using ModelCheckpoint with manual",
    "ignore:The dirpath has changed",
)

FOLDER = Path("lightning_logs/version_0")


class Validated(ToyU):
    """Records validation at the update it follows, and something at steps of its own: tokens seen."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        buffer = scalar_buffer(self.trainer)
        buffer.record(self.trainer.global_step, {"val/loss": self.b.detach()[0]})
        buffer.flush()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        step = self.trainer.global_step + 1
        scalar_buffer(self.trainer).record(1000 * step, {"by_tokens": float(step)})


class Killed(pl.Callback):
    """Ends a run after an update, as a kill would: nothing is closed, what was logged is on the disk."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            raise SystemExit


def run(
    stop: int | None = None,
    resume: int | str | None = None,
    more: list[pl.Callback] | None = None,
    last: int = 6,
) -> Path:
    """Train six updates, or until one, in the same log folder; return the folder of checkpoints."""
    logger = TensorBoardLogger(".", version=0)
    saving = ModelCheckpoint("kept", "{step}", save_top_k=-1, every_n_train_steps=1)
    trainer = build_trainer(
        callbacks=[LearningRateMonitor("step"), saving, *(more or []), *([Killed(stop)] if stop else [])],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=True,
        max_steps=last,
        val_check_interval=2,
    )
    path = f"kept/step={resume}.ckpt" if isinstance(resume, int) else resume
    validation = ListLoader([torch.tensor([0])])
    try:
        trainer.fit(Validated(), Windows(), validation, ckpt_path=path)
    except SystemExit:
        logger.experiment.flush()
        logger.experiment.close()
    return Path("kept")


def steps() -> dict[str, list[int]]:
    """Return the steps of every tag as TensorBoard shows the folder."""
    events = EventAccumulator(str(FOLDER), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [each.step for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expect_each_once(last: int = 6) -> None:
    found = steps()
    updates = list(range(1, last + 1))
    assert found["train/loss"] == updates
    assert found["train/grad_norm"] == updates
    assert found["val/loss"] == [each for each in updates if each % 2 == 0]
    assert found["by_tokens"] == [1000 * each for each in updates]
    assert found["lr-AdamW"] == [each - 1 for each in updates]  # Lightning's own count


class TestFromPython:
    """Promise 2: a curve has every step once, the command or not."""

    def test_killed_at_five_and_resumed_from_two(self) -> None:
        run(stop=5)
        assert steps()["train/loss"] == [1, 2, 3, 4, 5]
        run(resume=2)
        expect_each_once()

    def test_resumed_before_a_validation_that_was_logged(self) -> None:
        """The checkpoint of update 4 is from before its validation, which is made up for."""
        run(stop=5)
        run(resume=4)
        expect_each_once()

    def test_three_runs_in_a_row(self) -> None:
        """The third goes back before what the second began with; a fourth continues the end."""
        run(stop=5)
        run(stop=4, resume=3)
        run(resume=1)
        expect_each_once()
        run(resume=6, last=9)
        expect_each_once(9)

    def test_resumed_from_the_first_run_twice(self) -> None:
        """The second run never saved."""
        first = run(stop=3)
        kept = {file: file.read_bytes() for file in first.glob("*.ckpt")}
        run(stop=5, resume=2)
        for file in first.glob("*.ckpt"):
            file.unlink()
        for file, content in kept.items():
            file.write_bytes(content)
        run(resume=2)
        expect_each_once()

    @pytest.mark.parametrize("back", [3600.0, 0.0], ids=["an hour back", "the same second"])
    def test_the_clock(self, monkeypatch: Any, back: float) -> None:
        """TensorBoard reads files by the time in their names."""
        now = int(time.time())
        times = iter([now, now - back, now - 2 * back])

        def at(moment: float) -> None:
            monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time.time", lambda: moment)

        for stop, resume in ((5, None), (4, 3), (None, 3)):
            at(next(times))
            run(stop, resume)
        expect_each_once()
        assert len(list(FOLDER.glob("*tfevents*"))) == 3

    def test_a_run_without_marks(self, monkeypatch: Any) -> None:
        """An old one: what is at later steps is discarded."""
        with monkeypatch.context() as patch:
            patch.setattr("andrea_callbacks.exact_resume.mark_curves", lambda *_: None)
            run(stop=5)
        run(resume=2)
        assert steps()["train/loss"] == [1, 2, 3, 4, 5, 6]

    def test_checkpoints_know_nothing_of_it(self) -> None:
        """That of a resumed run is the very one of a run that nobody stopped, names of files included."""
        run(stop=5)
        run(resume=2)
        resumed = torch.load("kept/step=6.ckpt", weights_only=True)
        run()
        straight = torch.load("kept/step=6.ckpt", weights_only=True)
        assert difference(resumed, straight) is None

    def test_a_torn_end(self) -> None:
        """The last record of a killed run may be half there."""
        run(stop=5)
        file = next(FOLDER.glob("*tfevents*"))
        file.write_bytes(file.read_bytes()[:-7])
        run(resume=2)
        expect_each_once()

    def test_another_folder(self) -> None:
        """A run that is resumed into a folder of its own has nothing to discard."""
        run(stop=5)
        logger = TensorBoardLogger(".", version=1)
        trainer = build_trainer(logger=logger, max_steps=6, limit_val_batches=0)
        trainer.fit(Validated(), Windows(), ckpt_path="kept/step=2.ckpt")
        assert steps()["train/loss"] == [1, 2, 3, 4, 5]
        events = EventAccumulator(logger.log_dir)
        events.Reload()
        assert [each.step for each in events.Scalars("train/loss")] == [3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
@pytest.mark.parametrize("resume", [2, 3, 4])
def test_a_project_that_logs_by_lightning(resume: int) -> None:
    """Steps of `self.log` begin at 0: update k is at k - 1."""

    class Logs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss["loss"])
            return loss

    for stop, path in ((5, None), (None, f"kept/step={resume}.ckpt")):
        logger = TensorBoardLogger(".", version=0)
        saving = ModelCheckpoint("kept", "{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = build_trainer(
            callbacks=[saving, ExactResume(), *([Killed(stop)] if stop else [])],
            logger=logger,
            log_every_n_steps=1,
            enable_checkpointing=True,
            max_steps=6,
            limit_val_batches=0,
        )
        with suppress(SystemExit):
            trainer.fit(Logs(), ckpt_path=path)
        logger.experiment.close()
    assert steps()["loss"] == [0, 1, 2, 3, 4, 5]


def test_names_that_follow_each_other_closely() -> None:
    """Where a host gives every process the same number, names differ by their time only; none is lost."""
    names = ["98", "99", "5000"]
    for each in names:
        Path(f"events.out.tfevents.{int(each):010d}.host.1.0").write_text(each)
    placed = _put_before(Path("events.out.tfevents.0000000100.host.1.0"), sorted(Path().glob("events*")))
    assert [each.read_text() for each in placed] == names
    assert [each.read_text() for each in sorted(Path().glob("events*"))] == names
    assert placed[-1].name == "events.out.tfevents.0000000099.host.1.0"


def test_a_refused_run_discards_nothing() -> None:
    """Its folder is locked by a run that lives."""
    run(stop=5)
    Path("locked").mkdir()
    lock = FolderLock(Path("locked"))
    with pytest.raises(UserError, match="is being written by another run"):
        run(resume=2, more=[DurableCheckpoint(dirpath="locked")])
    assert steps()["train/loss"] == [1, 2, 3, 4, 5]
    lock.release()


def test_tensorboards_other_reader() -> None:
    """The data server, which is what `tensorboard` runs where it can, shows the same."""
    server = pytest.importorskip("tensorboard_data_server")
    binary = server.server_binary()
    if binary is None:
        pytest.skip("no server for this machine")
    run(stop=5)
    run(stop=4, resume=3)
    run(resume=2)
    found = read_by_server(binary)
    for tag, expected in steps().items():
        assert found[tag] == expected, tag


def read_by_server(binary: str) -> dict[str, list[int]]:
    """Return the steps of every scalar of the folder, by TensorBoard's data server."""
    import grpc
    from tensorboard.context import RequestContext
    from tensorboard.data import grpc_provider
    from tensorboard.data.proto import data_provider_pb2_grpc

    process = subprocess.Popen(
        [
            binary,
            f"--logdir={FOLDER.parent}",
            "--port=0",
            "--port-file=port",
            "--die-after-stdin",
            "--reload=once",
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not (Path("port").exists() and Path("port").read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        address = f"localhost:{Path('port').read_text().strip()}"
        channel = grpc.insecure_channel(address)
        stub = data_provider_pb2_grpc.TensorBoardDataProviderStub(channel)
        provider = grpc_provider.GrpcDataProvider(address, stub)
        context = RequestContext()
        found: dict[str, list[int]] = {}
        while not found and time.monotonic() < deadline:
            read: Any = provider.read_scalars(
                context, experiment_id="", plugin_name="scalars", downsample=1000
            )
            found = {
                tag: [each.step for each in rows] for tags in read.values() for tag, rows in tags.items()
            }
        channel.close()
        return found
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)
