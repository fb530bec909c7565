"""Several sources in training: losses told apart, rewards and their guards, resume, curves, validation."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._python_dispatch import TorchDispatchMode

from andrea_callbacks import RunJournal, SourceMonitor, read_journal
from andrea_pl import (
    ClipSingleDeviceStrategy,
    Curriculum,
    LanguageModule,
    Mixture,
    TextDataModule,
    TextSource,
    TokenWeightedModule,
    TransformerConfig,
    Ucb1,
    UserError,
    Window,
    WindowLoader,
)
from tests.support.runs import NAMES, sources
from tests.support.toy import ListLoader, RowLogger, ToyU, build_trainer, window


def data(curriculum: Curriculum | None, **options: Any) -> TextDataModule:
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "block_size": 16,
        "sequences_per_update": 6,
        "micro_batch_tokens": 24,
        "val_fraction": 0.0,
    }
    return TextDataModule(
        options.pop("sources", None) or sources(), curriculum=curriculum, **(settings | options)
    )


def bandit(**options: Any) -> Curriculum:
    settings = {"mixture": Ucb1(), "phases": [3, 5], "updates_per_epoch": 20}
    return Curriculum(**(settings | options))


def module(dropout: float = 0.0, **options: Any) -> LanguageModule:
    torch.manual_seed(0)
    shape = TransformerConfig(
        vocab_size=32, block_size=16, d_model=16, n_heads=2, n_layers=1, dropout=dropout
    )
    return LanguageModule(shape, **({"lr": 1e-2, "schedule": "constant"} | options))


class Watcher(pl.Callback):
    """Keeps windows, what each source lost before the update by an independent sum, and reports."""

    def __init__(self) -> None:
        self.documents: list[list[int]] = []
        self.expected: list[dict[int, tuple[float, int]]] = []
        self.reports: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Window, batch_idx: int) -> None:
        self.documents.append([each for part in batch for each in part["document_id"].tolist()])
        sums: dict[int, tuple[float, int]] = {}
        for part in batch:
            for row, source in enumerate(part["source_id"].tolist()):
                length = int(part["valid_mask"][row].sum())
                with torch.no_grad():
                    logits = pl_module.network(part["input_ids"][row : row + 1, :length]).double()
                loss = F.cross_entropy(logits[0], part["labels"][row, :length], reduction="sum")
                before = sums.get(source, (0.0, 0))
                sums[source] = (before[0] + float(loss), before[1] + length)
        self.expected.append(sums)

    def take_report(self, trainer: Any, report: Any) -> None:
        self.reports.append(dict(report))


def train(datamodule: TextDataModule, model: LanguageModule, **options: Any) -> tuple[Any, Watcher]:
    watcher = Watcher()
    ckpt_path = options.pop("ckpt_path", None)
    trainer = build_trainer(
        **{"max_steps": 40, **options, "callbacks": [watcher, *options.get("callbacks", [])]}
    )
    trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer, watcher


class TestLossesBySource:
    @pytest.mark.system
    def test_equal_an_independent_sum(self) -> None:
        """Token mean and tokens of every source in every window; together they are the update's loss."""
        _, watcher = train(data(bandit()), module())
        assert len(watcher.reports) == 40
        for expected, report in zip(watcher.expected, watcher.reports, strict=True):
            losses, tokens = report["source_losses"], report["source_tokens"]
            for source in range(3):
                total, count = expected.get(source, (0.0, 0))
                assert tokens[source] == count
                assert losses[source] == (pytest.approx(total / count, rel=1e-5) if count else None)
            whole = sum(loss * count for loss, count in zip(losses, tokens, strict=True) if count)
            assert whole / sum(tokens) == pytest.approx(float(report["loss"]), rel=1e-6)

    def test_label_smoothing_is_part_of_the_loss(self) -> None:
        _, watcher = train(data(bandit()), module(label_smoothing=0.1), max_steps=3)
        for report in watcher.reports:
            parts = zip(report["source_losses"], report["source_tokens"], strict=True)
            whole = sum(loss * count for loss, count in parts if count) / report["tokens"]
            assert whole == pytest.approx(float(report["loss"]), rel=1e-6)

    @pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
    def test_a_module_of_somebody_s_own(self) -> None:
        """`record_source_losses` in `loss_sum` is all it takes: here by sequence, with counts."""

        class Own(ToyU):
            def loss_sum(self, micro_batch: Any) -> torch.Tensor:
                labels = micro_batch["labels"]
                logits = self.b.expand(*labels.shape, 2).flatten(0, 1)
                losses = F.cross_entropy(
                    logits, labels.clamp(max=1).flatten(), ignore_index=-100, reduction="none"
                )
                rows = losses.reshape(labels.shape).sum(1)
                self.record_source_losses(micro_batch["source_id"], rows, (labels != -100).sum(1))
                return rows.sum()

            def count_tokens(self, micro_batch: Any) -> int:
                return micro_batch["num_tokens"]

        watcher = Watcher()
        watcher.on_train_batch_start = lambda *_: None  # type: ignore[method-assign]
        trainer = build_trainer(max_steps=5, callbacks=[watcher])
        trainer.fit(Own(), datamodule=data(bandit()))
        reports = watcher.reports
        assert reports[0]["source_losses"] == pytest.approx([0.693147] * 3, abs=1e-6)
        assert all(sum(report["source_tokens"]) == report["tokens"] for report in reports)

    @pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
    def test_a_module_that_tells_nothing_is_refused(self) -> None:
        class Silent(ToyU):
            def loss_sum(self, micro_batch: Any) -> torch.Tensor:
                return super().loss_sum(micro_batch["labels"].clamp(max=1))

            def count_tokens(self, micro_batch: Any) -> int:
                return micro_batch["num_tokens"]

        trainer = build_trainer(max_steps=5)
        with pytest.raises(
            UserError, match="Ucb1 learns from the loss of each source, and Silent reports none"
        ):
            trainer.fit(Silent(), datamodule=data(bandit()))
        again = build_trainer(max_steps=5)
        again.fit(Silent(), datamodule=data(Curriculum()))

    def test_nothing_waits_for_an_accelerator(self) -> None:
        """Noting losses reads no number from the device, and what is of no source counts for none."""

        class Waiting(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.found: list[str] = []

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "index_put")):
                    self.found.append(str(func))
                return func(*args, **(kwargs or {}))

        model = ToyU()
        sources = model._accumulator.sources
        sources.tell_apart(["a", "b", "c"])
        sources.open(torch.device("cpu"))
        with Waiting() as waiting:
            model.record_source_losses(torch.tensor([0, 2, 2, -1]), torch.tensor([1.0, 2.0, 4.0, 8.0]))
        assert waiting.found == []
        sums = sources.close()
        assert sums is not None
        assert sums.tolist() == [[1.0, 0.0, 6.0], [1.0, 0.0, 2.0]]

    def test_one_source_under_a_bandit(self) -> None:
        """There is nothing to learn, and nothing to refuse."""
        logger = RowLogger()
        train(data(bandit(), sources=sources()[:1]), module(), max_steps=10, logger=logger)
        assert {value for _, value in logger.series("data/prose/weight")} == {1.0}

    def test_a_loader_without_its_datamodule_is_refused(self) -> None:
        datamodule = data(bandit())
        datamodule.prepare_data()
        datamodule.setup()
        with pytest.raises(UserError, match=r"Ucb1 has heard of none of \d+ updates; give the datamodule"):
            build_trainer(max_steps=40).fit(module(), datamodule.train_dataloader())

    def test_batches_that_name_no_source(self) -> None:
        """In validation they count for the whole alone, as does a source that nobody named."""
        model = module()
        model.evaluation.begin(["a", "b", "c"])
        batch = {
            "input_ids": torch.ones(2, 3, dtype=torch.int64),
            "labels": torch.ones(2, 3, dtype=torch.int64),
            "valid_mask": torch.ones(2, 3, dtype=torch.bool),
        }
        model.validation_step(batch, 0)
        model.validation_step({**batch, "source_id": torch.tensor([-1, 1])}, 1)
        model.validation_step({**batch, "source_id": torch.tensor([0, 7])}, 2)
        assert model.evaluation.mean.compute()["group_tokens"].tolist() == [3, 3, 0, 12]

    def test_without_sources_nothing_is_added(self) -> None:
        watcher = Watcher()
        watcher.on_train_batch_start = lambda *_: None  # type: ignore[method-assign]
        model: TokenWeightedModule = ToyU()
        build_trainer(callbacks=[watcher]).fit(model, ListLoader([window([0], [1, 1, 1])]))
        assert "source_losses" not in watcher.reports[0]

    @pytest.mark.system
    def test_on_an_accelerator_they_come_with_the_verdict(self, read_late: Any) -> None:
        """The same run, bit for bit, as when the host waits; a lag of 0 waits at the start of a phase."""
        for lag, workers in ((0, 0), (7, 2)):
            runs = []
            for late in (False, True):
                read_late(late)
                model = module(
                    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)
                )
                datamodule = data(bandit(reward_lag=lag), num_workers=workers, prefetch_factor=3)
                _, watcher = train(datamodule, model, strategy=ClipSingleDeviceStrategy(clipper="torch"))
                runs.append((watcher.documents, [each["source_losses"] for each in watcher.reports]))
            assert runs[0] == runs[1]
            assert len(runs[0][1]) == 40


class TestGuards:
    """No reward from an update that was skipped or clipped hard."""

    @staticmethod
    def pulls(curriculum: Curriculum, **options: Any) -> int:
        datamodule = data(curriculum)
        train(datamodule, module(**options))
        return sum(datamodule._sampler.mixture.pulls)

    @pytest.mark.system
    @pytest.mark.guarantee("skipped updates teach the mixture nothing")
    def test_clipped_hard(self) -> None:
        assert self.pulls(bandit(), max_norm=1e-3) == 0
        assert self.pulls(bandit(min_clip_coefficient=0.0), max_norm=1e-3) > 80
        assert self.pulls(bandit(), max_norm=None) > 80

    @pytest.mark.system
    @pytest.mark.guarantee("skipped updates teach the mixture nothing")
    def test_skipped(self) -> None:
        """A NaN in every other update: those teach nothing, and are no pull."""

        class Poisoned(LanguageModule):
            def loss_sum(self, micro_batch: dict[str, Any]) -> torch.Tensor:
                loss = super().loss_sum(micro_batch)
                return loss * float("nan") if self.trainer.global_step % 2 else loss

        datamodule = data(bandit(phases=[40], min_clip_coefficient=0.0), sequences_per_update=30)
        shape = TransformerConfig(vocab_size=32, block_size=16, d_model=16, n_heads=2, n_layers=1)
        model = Poisoned(shape, lr=1e-3, schedule="constant", on_nonfinite="skip", max_norm=None)
        with pytest.warns(UserWarning, match="not finite"):
            train(datamodule, model, max_steps=20)
        assert datamodule._sampler.mixture.pulls == [10, 10, 10]

    def test_a_guarded_update_shows_no_reward(self) -> None:
        logger = RowLogger()
        train(data(bandit()), module(max_norm=1e-3), logger=logger, max_steps=10)
        assert not logger.series("data/prose/reward")
        train(data(bandit(min_clip_coefficient=0.0)), module(max_norm=1e-3), logger=logger, max_steps=10)
        assert logger.series("data/prose/reward")

    def test_a_nan_stays_with_its_source(self) -> None:
        """In an update that is skipped, and in validation: which source it was can be seen."""

        class Poisoned(LanguageModule):
            def loss_sum(self, micro_batch: dict[str, Any]) -> torch.Tensor:
                return self.sequence_losses(micro_batch).sum()

            def sequence_losses(self, micro_batch: dict[str, Any]) -> torch.Tensor:
                losses = super().sequence_losses(micro_batch)
                losses = torch.where(micro_batch["source_id"] == 1, float("nan"), losses)
                tokens = (micro_batch["labels"] != -100).sum(1)
                self.record_source_losses(micro_batch["source_id"], losses, tokens)
                return losses

        held = [
            TextSource(name=f"{each.name}-held", kind="tokens", documents=each.documents, split="val")
            for each in sources(5)
        ]
        shape = TransformerConfig(vocab_size=32, block_size=16, d_model=16, n_heads=2, n_layers=1)
        model = Poisoned(shape, lr=1e-3, schedule="constant", on_nonfinite="skip")
        logger = RowLogger()
        with pytest.warns(UserWarning, match="not finite"):
            _, watcher = train(
                data(
                    bandit(updates_per_epoch=2),
                    sources=[held[0], *sources(), *held[1:]],
                    sequences_per_update=30,
                ),
                model,
                max_steps=2,
                logger=logger,
            )
        losses = watcher.reports[0]["source_losses"]
        assert [loss if loss is None else loss == loss for loss in losses] == [
            None,
            False,
            True,
            True,
            None,
            None,
        ]
        assert logger.series("val/prose-held/loss")[0][1] > 0
        assert not logger.series("val/prose/loss")

    def test_repeated_text_is_measured_and_penalised(self) -> None:
        datamodule = data(bandit(repetition_penalty=2.0))
        train(datamodule, module(), max_steps=1)
        prose, lists, answers = (pool.repetition for pool in datamodule.corpus.pools())
        assert prose < 0.01
        assert answers < 0.01
        assert lists > 0.8
        factors = [arm.reward_factor for arm in datamodule._sampler.mixture.arms]
        assert factors == pytest.approx([(1 - prose) ** 2, (1 - lists) ** 2, (1 - answers) ** 2])
        plain = data(bandit(repetition_penalty=0.0))
        train(plain, module(), max_steps=1)
        assert [arm.reward_factor for arm in plain._sampler.mixture.arms] == [1.0] * 3


class TestResume:
    @pytest.mark.system
    @pytest.mark.parametrize("workers", [0, 2])
    def test_continues_bitwise(self, tmp_path: Path, workers: int) -> None:
        """Cut within a phase, at an epoch's end and before; the rest has the same windows and weights."""
        options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": 3}
        model = module()
        _, straight = train(data(bandit(), **options), model)
        for cut in (3, 20, 27) if not workers else (27,):
            trainer, first = train(data(bandit(), **options), module(), max_steps=cut)
            trainer.save_checkpoint(tmp_path / "cut.ckpt")
            torch.load(tmp_path / "cut.ckpt", weights_only=True)
            resumed = module()
            _, rest = train(data(bandit(), **options), resumed, ckpt_path=tmp_path / "cut.ckpt")
            assert first.documents + rest.documents == straight.documents
            for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
                assert torch.equal(ours, theirs)

    @pytest.mark.system
    def test_a_trainer_that_goes_on(self) -> None:
        """`fit` again with more epochs goes on in the text; a new trainer starts anew."""
        fixed = Curriculum(updates_per_epoch=20)
        _, straight = train(data(fixed), module(), max_steps=-1, max_epochs=2)
        datamodule, model = data(fixed), module()
        trainer, watcher = train(datamodule, model, max_steps=-1, max_epochs=1)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, datamodule=datamodule)
        assert watcher.documents == straight.documents
        _, again = train(datamodule, module(), max_steps=5)
        assert again.documents == straight.documents[:5]

    @pytest.mark.system
    def test_a_loader_that_is_made_anew_each_epoch(self) -> None:
        _, straight = train(data(bandit()), module())
        _, reloaded = train(data(bandit()), module(), reload_dataloaders_every_n_epochs=1)
        assert reloaded.documents == straight.documents

    @pytest.mark.system
    def test_workers_change_nothing(self) -> None:
        runs = [train(data(bandit(), num_workers=workers), module())[1].documents for workers in (0, 2)]
        assert runs[0] == runs[1]


class TestSeen:
    @pytest.mark.system
    def test_every_update_and_phase(self, tmp_path: Path) -> None:
        """Curves at each update; phases in the journal, where the weights of the curves change."""
        logger, journal = RowLogger(), RunJournal(path=str(tmp_path / "journal.jsonl"))
        train(data(bandit()), module(), logger=logger, callbacks=[journal], log_every_n_steps=1)
        updates = list(range(1, 41))
        weights = {name: dict(logger.series(f"data/{name}/weight")) for name in NAMES}
        for name in NAMES:
            assert list(weights[name]) == updates
            assert [step for step, _ in logger.series(f"data/{name}/tokens")] == updates
            epochs = [value for _, value in logger.series(f"data/{name}/epochs")]
            assert epochs == sorted(epochs)
            assert epochs[-1] > 0
        rewards = [step for step, _ in logger.series("data/prose/reward")]
        losses = [step for step, _ in logger.series("data/prose/loss")]
        assert set(rewards) <= set(losses)
        rows = read_journal(tmp_path / "journal.jsonl")
        phases = [row for row in rows if row["kind"] == "phase"]
        assert [row["phase"] for row in phases] == list(range(1, len(phases) + 1))
        starts = [row["update"] for row in phases]
        assert [row["length"] for row in phases][:-1] == [b - a for a, b in pairwise(starts)]
        for row in phases:
            assert row["weights"] == pytest.approx({name: weights[name][row["update"]] for name in NAMES})
        for before, after in pairwise(updates):
            moved = any(weights[name][before] != weights[name][after] for name in NAMES)
            assert not moved or after in starts
        stairs = dict(logger.series("data/phase"))
        assert [stairs[update] for update in starts] == [row["phase"] for row in phases]
        reported = [row for row in rows if row["kind"] == "update"]
        assert all(len(row["source_losses"]) == 3 for row in reported)

    @pytest.mark.system
    def test_a_source_that_runs_out_is_named(self, tmp_path: Path) -> None:
        """Within a phase its weight goes to 0; the journal and the console say so, before that update."""
        logger, journal = RowLogger(), RunJournal(path=str(tmp_path / "journal.jsonl"))
        texts = sources()
        texts[1] = replace(texts[1], max_epochs=1)
        train(data(bandit(phases=[42]), sources=texts), module(), logger=logger, callbacks=[journal])
        weights = dict(logger.series("data/lists/weight"))
        gone = min(step for step, weight in weights.items() if not weight)
        assert 5 < gone < 40
        assert dict(logger.series("data/lists/epochs"))[gone] == 1.0
        kinds = [(row["kind"], row["update"]) for row in read_journal(tmp_path / "journal.jsonl")]
        assert kinds.index(("exhausted", gone)) == kinds.index(("update", gone)) - 1
        assert kinds.index(("phase", 1)) < kinds.index(("update", 1))

    @pytest.mark.system
    def test_console_summary(self, caplog: pytest.LogCaptureFixture) -> None:
        logger = RowLogger()
        with caplog.at_level("INFO"):
            train(data(bandit()), module(), max_steps=20, logger=logger)
        (said,) = [record.message for record in caplog.records if "by source" in record.message]
        tokens = sum(value for _, value in logger.series("data/prose/tokens"))
        counts = dict(logger.series("data/prose/tokens"))
        losses = logger.series("data/prose/loss")
        mean = sum(loss * counts[step] for step, loss in losses) / tokens
        assert f"prose: loss {mean:.4f} over {int(tokens)} tokens" in said
        assert said.startswith("epoch 1, by source:")
        assert all(f"\n  {name}: loss " in said for name in NAMES)
        assert "weight now" in said

    @pytest.mark.system
    def test_an_unfinished_epoch_is_continued(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("INFO"):
            train(data(bandit()), module(), max_steps=20)
            save = ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1)
            train(data(bandit()), module(), max_steps=8, callbacks=[save], enable_checkpointing=True)
            (cut,) = tmp_path.glob("*.ckpt")
            train(data(bandit()), module(), max_steps=20, ckpt_path=cut)
        whole, _, resumed = [record.message for record in caplog.records if "by source" in record.message]
        assert resumed == whole

    def test_monitor_is_added_once(self) -> None:
        trainer, _ = train(data(bandit()), module(), max_steps=1, callbacks=[SourceMonitor()])
        assert sum(isinstance(each, SourceMonitor) for each in trainer.callbacks) == 1

    def test_validation_by_source(self) -> None:
        """Each source's token mean, and the mean of all tokens over all."""
        held = [
            TextSource(name=f"{each.name}-held", kind="tokens", documents=each.documents, split="val")
            for each in sources(15)[:2]
        ]
        logger, model = RowLogger(), module()
        datamodule = data(None, sources=[*sources(), *held])
        train(datamodule, model, max_steps=20, logger=logger)
        expected: dict[str, tuple[float, int]] = {}
        model.eval()
        for each in held:
            total, count = 0.0, 0
            for document in each.documents:
                tokens = torch.tensor(document)
                with torch.no_grad():
                    logits = model.network(tokens[None, :-1]).double()
                total += float(F.cross_entropy(logits[0], tokens[1:], reduction="sum"))
                count += len(document) - 1
            expected[each.name] = (total, count)
            ((step, value),) = logger.series(f"val/{each.name}/loss")
            assert step == 20
            assert value == pytest.approx(total / count, rel=1e-5)
        whole = sum(total for total, _ in expected.values()) / sum(count for _, count in expected.values())
        assert logger.series("val/loss")[0][1] == pytest.approx(whole, rel=1e-5)
        assert not logger.series("val/prose/loss"), "nothing of it is held out"


class TestSourcesOfText:
    def test_a_sequence_is_traced_to_its_line(self, tmp_path: Path) -> None:
        lines = [f"line {number} has the words {'ab ' * (number % 7)}end" for number in range(1, 301)]
        (tmp_path / "prose.txt").write_text("\n".join(lines))
        (tmp_path / "rows.jsonl").write_text(
            '{"text": "first\\nrow"}\n{"text": "' + "second\\n" * 60 + '"}\n'
        )
        datamodule = TextDataModule(
            [
                TextSource(name="prose", paths=[str(tmp_path / "prose.txt")]),
                TextSource(name="rows", paths=[str(tmp_path / "rows.jsonl")]),
            ],
            vocab_size=270,
            block_size=16,
            sequences_per_update=50,
            val_fraction=0.0,
            cache_dir=str(tmp_path / "cache"),
        )
        datamodule.prepare_data()
        datamodule.setup()
        seen = set()
        for each in (batch for part in datamodule.train_dataloader() for batch in part):
            for row in range(len(each["document_id"])):
                place = datamodule.locate(int(each["document_id"][row]), int(each["offset"][row]))
                name, _, at = place.partition(" ")
                file, _, line = at.rpartition(":")
                length = int(each["valid_mask"][row].sum())
                text = datamodule.tokenizer.decode(each["input_ids"][row, :length].tolist())
                seen.add(name)
                if name == "prose":
                    assert file == str(tmp_path / "prose.txt")
                    rest = "\n".join(lines[int(line) - 1 :])
                    assert text in rest
                    # the sequence starts within that very line
                    assert rest.index(text) <= len(lines[int(line) - 1]) or text.startswith("\n")
                else:
                    assert file == str(tmp_path / "rows.jsonl")
                    assert line == ("1" if "first" in text or "row" in text else "2")
        assert seen == {"prose", "rows"}
        with pytest.raises(UserError, match="there is no document 99"):
            datamodule.locate(99, 3)

    def test_format_beats_the_name(self, tmp_path: Path) -> None:
        (tmp_path / "rows.data").write_text('{"text": "first row"}\n{"text": "second row"}\n')
        with pytest.raises(UserError, match=r"no known kind; .* or give the source a format: text, jsonl"):
            TextSource(name="s", paths=[str(tmp_path / "rows.data")]).files()
        options: dict[str, Any] = {"vocab_size": 257, "val_fraction": 0.0, "cache_dir": str(tmp_path / "c")}
        for kind, count in (("jsonl", 2), ("text", 1)):
            source = TextSource(name="s", paths=[str(tmp_path / "rows.data")], format=kind)
            datamodule = TextDataModule([source], **options)
            datamodule.prepare_data()
            datamodule.setup()
            assert len(datamodule.corpus.stores["s"].records) == count

    def test_share_of_validation_by_source(self, tmp_path: Path) -> None:
        rows = [f'{{"text": "row number {number}"}}' for number in range(400)]
        (tmp_path / "a.jsonl").write_text("\n".join(rows))
        (tmp_path / "b.jsonl").write_text("\n".join(row.replace("row", "line") for row in rows))
        (tmp_path / "c.jsonl").write_text("\n".join(row.replace("row", "verse") for row in rows))
        datamodule = TextDataModule(
            [
                TextSource(name="a", paths=[str(tmp_path / "a.jsonl")]),
                TextSource(name="b", paths=[str(tmp_path / "b.jsonl")], val_fraction=0.5),
                TextSource(name="c", paths=[str(tmp_path / "c.jsonl")], val_fraction=0.0),
            ],
            vocab_size=257,
            val_fraction=0.1,
            cache_dir=str(tmp_path / "cache"),
        )
        datamodule.prepare_data()
        datamodule.setup()
        held = {name: len(store.split("val")) for name, store in datamodule.corpus.stores.items()}
        assert 20 < held["a"] < 60
        assert 160 < held["b"] < 240
        assert held["c"] == 0

    def test_mixing_options_prepare_nothing_anew(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("some words " * 50)
        folders = {
            TextDataModule(
                [TextSource(name="a", paths=[str(tmp_path / "a.txt")], **options)], cache_dir=str(tmp_path)
            ).preparation.folder
            for options in ({}, {"weight": 2.0}, {"min_weight": 0.1, "max_epochs": 3})
        }
        assert len(folders) == 1


class Alternating(Mixture):
    """A user's own: all of one source, then all of the next."""

    learns = True

    def __init__(self, step: int = 1) -> None:
        self.step = step
        self.seen = 0

    def weights(self, allowed: Any = None) -> Any:
        tentative = [
            float(number == self.seen * self.step % len(self.arms)) for number in range(len(self.arms))
        ]
        return self._normalise(tentative, allowed)

    def update(self, observation: Any) -> dict[int, float]:
        self.seen += 1
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_mixture_of_somebody_s_own() -> None:
    datamodule = data(bandit(mixture=Alternating(), phases=[1], reward_lag=0, min_clip_coefficient=0.0))
    _, watcher = train(datamodule, module(), max_steps=9)
    assert [set(each) for each in watcher.expected] == [{0}, {1}, {2}] * 3


def test_overfit_batches_repeats_the_windows() -> None:
    _, watcher = train(data(bandit()), module(), max_steps=9, overfit_batches=3)
    assert watcher.documents[:3] == watcher.documents[3:6] == watcher.documents[6:]


def test_a_window_loader_needs_no_sources() -> None:
    loader = WindowLoader(torch.utils.data.DataLoader(list(torch.zeros(4, 2, dtype=torch.int64))), 2)
    build_trainer().fit(ToyU(), loader)
