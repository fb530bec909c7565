"""What every callback keeps: state, loggers, short runs, company of its own kind, and the run as it was."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from andrea_callbacks import FiniteGuard, NonFiniteError, SpikeForensics
from tests.support.projects import BUILDERS, TextRows, everything
from tests.support.toy import RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
]
EACH = pytest.mark.parametrize("name", BUILDERS)
STATEFUL = [name for name in BUILDERS if name not in ("Throughput", "RunJournal", "UpdateLog")]


class Noisy(pl.LightningModule):
    """Dropout and BatchNorm, AdamW and a scheduler: whatever is touched shows in the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.network = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4))

    def sequence_losses(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self.network(batch), torch.ones(len(batch), 4), reduction="none").sum(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.sequence_losses(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.sequence_losses(batch).mean(), logger=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(TextRows(48), batch_size=4)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(TextRows(8), batch_size=4)


def run(callbacks: list[Any], ckpt_path: Any = None, **options: Any) -> tuple[pl.Trainer, Noisy]:
    module = Noisy()
    torch.manual_seed(9)
    trainer = build_trainer(callbacks=callbacks, **({"gradient_clip_val": 0.5} | options))
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer, module


def state_of(trainer: pl.Trainer, module: Noisy) -> list[Tensor]:
    """Return weights, buffers and optimizer state."""
    states = trainer.optimizers[0].state.values()
    return [
        *(each.detach() for each in module.state_dict().values()),
        *(value for state in states for value in state.values()),
        torch.get_rng_state(),
    ]


@EACH
def test_state_goes_through_a_checkpoint(name: str, tmp_path: Path) -> None:
    first = BUILDERS[name]()
    trainer, _ = run([first], logger=TensorBoardLogger(tmp_path))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"]
    assert (first.state_key in stored) == (name in STATEFUL and name != "TensorBoardLayout")
    second = BUILDERS[name]()
    second.load_state_dict(stored.get(first.state_key, {}))
    assert repr(second.state_dict()) == repr(first.state_dict())  # where NaN is like NaN
    again = BUILDERS[name]()
    resumed, _ = run([again], ckpt_path=tmp_path / "a.ckpt", max_epochs=2)
    assert resumed.global_step == 24
    counts = {
        "PreClipNorm": {"counted": 24.0, "has_named": True},
        "FiniteGuard": {"flagged": 0, "reports": 0},
    }
    state = again.state_dict()
    assert {key: state[key] for key in counts.get(name, {})} == counts.get(name, {})
    if name == "SpikeForensics":
        assert len(state["detectors"]["0/norm"]["levels"]) == 16  # a sixth of the history, over both runs
    if name == "CoherenceGate":
        assert state["last"] is not None


@EACH
@pytest.mark.parametrize("logger", [False, None, "two"])
def test_any_loggers(name: str, logger: Any, tmp_path: Path) -> None:
    loggers: Any = [RowLogger("a"), RowLogger("b"), CSVLogger(tmp_path)] if logger == "two" else logger
    trainer, _ = run([BUILDERS[name]()], logger=loggers, default_root_dir=tmp_path)
    assert trainer.global_step == 12
    if logger == "two":
        assert loggers[0].rows == loggers[1].rows
        assert [step for step, _ in loggers[0].rows] == sorted(step for step, _ in loggers[0].rows)


@EACH
def test_short_runs(name: str) -> None:
    run([BUILDERS[name]()], fast_dev_run=True)
    trainer, _ = run([BUILDERS[name]()], max_steps=0)
    assert trainer.global_step == 0
    build_trainer(callbacks=[BUILDERS[name]()]).validate(Noisy(), verbose=False)


@EACH
def test_two_of_a_kind(name: str) -> None:
    run(
        [BUILDERS[name](), BUILDERS[name](name="second")]
        if name != "TensorBoardLayout"
        else [BUILDERS[name](), BUILDERS[name]()]
    )


@EACH
def test_used_twice(name: str) -> None:
    """The second fit of the same instance starts from step 0 like the first."""
    callback, logger = BUILDERS[name](), RowLogger()
    run([callback])
    run([callback], logger=logger)
    assert all(1 <= step <= 12 for step, _ in logger.rows)


@EACH
def test_weights_are_bitwise_those_without_it(name: str) -> None:
    plain = state_of(*run([]))
    watched = state_of(*run([BUILDERS[name]()], logger=RowLogger()))
    assert all(map(torch.equal, plain, watched))


def test_weights_are_bitwise_the_same_when_a_report_is_made() -> None:
    class Eager(SpikeForensics):
        """Takes every update from the tenth on for a spike."""

        def on_before_optimizer_step(self, *arguments: Any) -> None:
            for detector in self._detectors.values():
                detector.threshold, detector.ratio = -1e9, 0.0
            super().on_before_optimizer_step(*arguments)

    eager = Eager(min_history=5, max_reports=100, patience=1000)
    callbacks = [each for each in everything() if not isinstance(each, SpikeForensics)]
    plain = state_of(*run([]))
    watched = state_of(*run([eager, *callbacks], logger=RowLogger()))
    assert eager.spikes >= 4
    assert len(list(Path("reports").iterdir())) == eager.spikes
    assert all(map(torch.equal, plain, watched))


def test_weights_are_those_before_when_an_origin_is_searched() -> None:
    class Poisoned(TextRows):
        def __getitem__(self, index: int) -> Tensor:
            return self.rows[index] * (float("nan") if index == 22 else 1.0)

    module, guard = Noisy(), FiniteGuard(policy="skip")
    torch.manual_seed(9)
    loader = torch.utils.data.DataLoader(Poisoned(48), batch_size=4)
    seen: list[Tensor] = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(torch.cat([each.detach().flatten().clone() for each in pl_module.parameters()]))

    trainer = build_trainer(callbacks=[guard, Keep()])
    trainer.fit(module, loader, torch.utils.data.DataLoader(TextRows(8), batch_size=4))
    assert torch.equal(seen[4], seen[5])
    assert not torch.equal(seen[5], seen[6]) or guard.flagged > 1
    assert Path("reports/update-000006-nonfinite/report.json").exists()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("PreClipNorm", {"every": 0}, "PreClipNorm: every must be at least 1, got 0"),
        ("PreClipNorm", {"layers": ["("]}, r"PreClipNorm: layers: '\(' cannot be parsed"),
        ("FiniteGuard", {"policy": "mend"}, "FiniteGuard: policy must be .* got 'mend'"),
        ("FiniteGuard", {"max_consecutive": -1}, "FiniteGuard: max_consecutive must be at least 0, got -1"),
        ("FiniteGuard", {"state_every": 0}, "FiniteGuard: state_every must be at least 1, got 0"),
        ("FiniteGuard", {"max_reports": -1}, "FiniteGuard: max_reports must be at least 0, got -1"),
        ("SpikeForensics", {"threshold": 0}, "SpikeForensics: threshold must be more than 0, got 0"),
        ("SpikeForensics", {"ratio": 0.5}, "SpikeForensics: ratio must be at least 1, got 0.5"),
        ("SpikeForensics", {"loss_ratio": 0.5}, "SpikeForensics: loss_ratio must be at least 1, got 0.5"),
        ("SpikeForensics", {"min_history": 2}, "SpikeForensics: min_history must be at least 5, got 2"),
        (
            "SpikeForensics",
            {"history": 10},
            "SpikeForensics: history must be at least min_history=20, got 10",
        ),
        ("SpikeForensics", {"patience": 0}, "SpikeForensics: patience must be at least 1, got 0"),
        ("SpikeForensics", {"max_reports": -1}, "SpikeForensics: max_reports must be at least 0, got -1"),
        ("SpikeForensics", {"per_updates": 0}, "SpikeForensics: per_updates must be at least 1, got 0"),
        ("SpikeForensics", {"stop_after": 0}, "SpikeForensics: stop_after must be at least 1, got 0"),
        ("RunJournal", {"name": "../up"}, "RunJournal: name '../up' must be a word or two"),
        ("MomentMonitor", {"every": 0}, "MomentMonitor: every must be at least 1, got 0"),
        ("CoherenceGate", {"every": 0}, "CoherenceGate: every must be at least 1, got 0"),
        ("CoherenceGate", {"start": -1}, "CoherenceGate: start must be at least 0, got -1"),
        ("CoherenceGate", {"patience": 0}, "CoherenceGate: patience must be at least 1, got 0"),
        ("CoherenceGate", {"max_new_tokens": 0}, "CoherenceGate: max_new_tokens must be at least 1, got 0"),
        ("CoherenceGate", {"threshold": 101}, r"CoherenceGate: threshold must lie in \[0, 100\], got 101"),
        ("CoherenceGate", {"action": "kill"}, "CoherenceGate: action must be 'warn' or 'stop', got 'kill'"),
        ("CoherenceGate", {"prompts": []}, "CoherenceGate: prompts must not be empty"),
        ("Throughput", {"every": 0}, "Throughput: every must be at least 1, got 0"),
        ("RunJournal", {"every": 0}, "RunJournal: every must be at least 1, got 0"),
        ("RunJournal", {"seconds": -1}, "RunJournal: seconds must be at least 0, got -1"),
    ],
)
def test_options_are_refused_by_name(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BUILDERS[name](**options)


def test_exceptions_leave_no_hook_and_no_update_behind() -> None:
    """After a run that a NaN ended, the same callbacks serve another one."""
    callbacks = everything()
    module = Noisy()
    torch.manual_seed(9)
    bad = torch.utils.data.DataLoader(TextRows(48).rows * float("nan"), batch_size=4)
    with pytest.raises(NonFiniteError, match=r"update 1: the loss .* (is|are) not finite"):
        build_trainer(callbacks=callbacks).fit(module, bad)
    assert not any(each._forward_hooks for each in module.modules())
    trainer, _ = run(callbacks)
    assert trainer.global_step == 12
