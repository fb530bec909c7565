"""The language module: loss, schedule, evaluation, checkpoints, generation."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from andrea_pl import (
    DynamicPaddingCollator,
    LanguageModule,
    TextDataModule,
    TextSource,
    TokenizedDataset,
    TransformerConfig,
    UserError,
    Window,
    WindowLoader,
)
from andrea_pl.block import read_block
from andrea_pl.checkpoint import read_checkpoint
from andrea_pl.data import TextTokenizer
from andrea_pl.metrics import TokenMean
from toy import ListLoader, Recorder, RowLogger, ToyU, build_trainer, fit

SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1)


def token_data(count: int = 12, **options: Any) -> TextDataModule:
    """Return documents of token ids of several lengths, three an update."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 40, (3 + n % 7,), generator=generator).tolist() for n in range(count)]
    defaults: dict[str, Any] = {
        "vocab_size": 40,
        "block_size": 8,
        "sequences_per_update": 3,
        "val_fraction": 0.0,
    }
    return TextDataModule([TextSource(name="t", kind="tokens", documents=rows)], **(defaults | options))


def micro_batch(**changes: Any) -> dict[str, Any]:
    dataset = TokenizedDataset([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]], 8)
    return {**DynamicPaddingCollator(0)([dataset[n] for n in range(3)]), **changes}


class TestLoss:
    def test_is_the_sum_over_labels(self) -> None:
        module = LanguageModule(SHAPE)
        batch = micro_batch()
        logits = module(batch["input_ids"], batch["valid_mask"])
        expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        torch.testing.assert_close(module.loss_sum(batch), expected)
        torch.testing.assert_close(module.sequence_losses(batch).sum(), expected)

    @pytest.mark.parametrize(
        "without", [["token_index"], ["token_index", "num_tokens"], ["token_index", "valid_mask"]]
    )
    def test_optional_keys(self, without: list[str]) -> None:
        module = LanguageModule(SHAPE)
        batch = micro_batch()
        fewer = {key: value for key, value in batch.items() if key not in without}
        torch.testing.assert_close(module.loss_sum(fewer), module.loss_sum(batch))
        assert int(module.count_tokens(fewer)) == 7

    def test_masked_labels_and_left_padding(self) -> None:
        """Fine-tuning masks prompts; left-padded batches are masked for real."""
        module = LanguageModule(SHAPE)
        batch = micro_batch()
        labels = batch["labels"].clone()
        labels[0, :2] = -100
        masked = {**batch, "labels": labels, "num_tokens": int((labels != -100).sum())}
        per_row = [
            F.cross_entropy(module(batch["input_ids"][n : n + 1, :w])[0], labels[n, :w], reduction="sum")
            for n, w in enumerate((4, 1, 2))
        ]
        torch.testing.assert_close(module.sequence_losses(masked), torch.stack(per_row))
        left = {
            "input_ids": torch.tensor([[0, 0, 6], [1, 2, 3]]),
            "valid_mask": torch.tensor([[False, False, True], [True, True, True]]),
            "labels": torch.tensor([[-100, -100, 7], [2, 3, 4]]),
        }
        alone = module.loss_sum({"input_ids": torch.tensor([[6]]), "labels": torch.tensor([[7]])})
        full = module.loss_sum({"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, 3, 4]])})
        torch.testing.assert_close(module.loss_sum(left), alone + full)

    def test_no_label_at_all_keeps_a_graph(self) -> None:
        module = LanguageModule(SHAPE)
        loss = module.loss_sum(micro_batch(labels=torch.full((3, 4), -100), num_tokens=0))
        loss.backward()
        assert float(loss.detach()) == 0.0

    def test_no_double_shift(self) -> None:
        """transformers#47394: on 0, 1, 2, 0, 1, 2, … the trained argmax at t is token t + 1."""
        module = LanguageModule(
            TransformerConfig(vocab_size=3, block_size=12, d_model=16, n_heads=2, n_layers=1), lr=1e-2
        )
        data = TextDataModule(
            [TextSource(name="t", kind="tokens", documents=[[0, 1, 2] * 4])],
            vocab_size=3,
            block_size=12,
            val_fraction=0.0,
        )
        build_trainer(max_epochs=60).fit(module, datamodule=data)
        ids = torch.tensor([[0, 1, 2, 0, 1, 2, 0]])
        assert module.eval()(ids)[0].argmax(-1).tolist() == [1, 2, 0, 1, 2, 0, 1]


class TestSchedule:
    def rates(self, module: LanguageModule, loader: Any, **options: Any) -> list[float]:
        _, recorder = fit(module, loader, **options)
        return [report["lr"] for report in recorder.reports]

    def windows(self, count: int) -> WindowLoader:
        return WindowLoader(ListLoader([micro_batch() for _ in range(count)]), 4)

    def test_total_is_windows_times_epochs(self) -> None:
        """Lightning#11599: ceil(10 / 4) * 2 = 6 updates, the cosine ending there."""
        module = LanguageModule(SHAPE, lr=1.0)
        rates = self.rates(module, self.windows(10), max_epochs=2)
        expected = [0.5 * (1 + math.cos(math.pi * index / 6)) for index in range(6)]
        assert rates == pytest.approx(expected)

    def test_total_is_capped_by_max_steps(self) -> None:
        rates = self.rates(LanguageModule(SHAPE, lr=1.0), self.windows(10), max_epochs=2, max_steps=4)
        assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * index / 4)) for index in range(4)])

    def test_limit_train_batches_counts(self) -> None:
        rates = self.rates(
            LanguageModule(SHAPE, lr=1.0), self.windows(10), max_epochs=2, limit_train_batches=2
        )
        assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * index / 4)) for index in range(4)])

    def test_unknown_length(self) -> None:
        class Stream:
            def __iter__(self) -> Any:
                return iter([micro_batch()] * 3)

        with pytest.raises(UserError, match=r"set trainer\.max_steps"):
            fit(LanguageModule(SHAPE), WindowLoader(Stream(), 2))
        assert len(self.rates(LanguageModule(SHAPE, schedule="constant"), WindowLoader(Stream(), 2))) == 2

    def test_warm_up_longer_than_the_run(self) -> None:
        with pytest.raises(UserError, match="warmup_updates=9 and total_updates=3"):
            fit(LanguageModule(SHAPE, warmup_updates=9), self.windows(10))

    def test_named_optimizer_and_scheduler(self) -> None:
        shape = TransformerConfig(
            vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1, norm_weight=False
        )
        module = LanguageModule(
            shape,
            optimizer=lambda parameters: torch.optim.Muon(parameters, lr=0.1),
            schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        )
        trainer, recorder = fit(module, self.windows(10))
        assert isinstance(trainer.optimizers[0], torch.optim.Muon)
        assert [report["lr"] for report in recorder.reports] == pytest.approx([0.1, 0.05, 0.025])

    def test_resume_over_a_stream(self, tmp_path: Path) -> None:
        """A loader without a length resumes at any update, though Lightning asks for one window ahead."""

        class Stream(torch.utils.data.IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(range(12))

        def run(ckpt: Any = None) -> list[list[int]]:
            seen: list[list[int]] = []

            class Counting(ToyU):
                def loss_sum(self, micro_batch: Any) -> torch.Tensor:
                    return super().loss_sum(torch.tensor([0]))

                def count_tokens(self, micro_batch: Any) -> int:
                    return 1

            class Seen(pl.Callback):
                def on_train_batch_start(
                    self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
                ) -> None:
                    seen.append([int(part) for part in batch])

            saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
            trainer = build_trainer(callbacks=[Seen(), saving], enable_checkpointing=True, max_epochs=2)
            trainer.fit(Counting(), WindowLoader(DataLoader(Stream(), batch_size=1), 4), ckpt_path=ckpt)
            return seen

        straight = run()
        assert straight == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] * 2
        for cut in range(1, 6):
            assert run(tmp_path / f"step={cut}.ckpt") == straight[cut:], cut

    def test_resume_with_max_epochs_alone(self, tmp_path: Path) -> None:
        """A resume at update 2 delivers window 3 next, and ends with the straight run's weights."""

        def run(ckpt: Any = None, stop: int = -1) -> tuple[list[list[int]], Any, torch.Tensor]:
            torch.manual_seed(3)
            module = LanguageModule(SHAPE, lr=1e-2, warmup_updates=2)
            seen: list[list[int]] = []

            class Seen(pl.Callback):
                def on_train_batch_start(
                    self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
                ) -> None:
                    seen.append(sorted(n for part in batch for n in part["document_id"].tolist()))

            saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
            trainer = build_trainer(callbacks=[Seen(), saving], enable_checkpointing=True, max_epochs=2)
            trainer.fit(module, datamodule=token_data(), ckpt_path=ckpt)
            return seen, trainer, torch.cat([p.detach().flatten() for p in module.parameters()])

        straight, _, weights = run()
        assert len(straight) == 8
        for cut in (2, 4, 6):
            epoch = 0 if cut <= 4 else 1
            path = next(tmp_path.glob(f"epoch={epoch}-step={cut}.ckpt"))
            resumed, _, end = run(ckpt=path)
            assert resumed == straight[cut:]
            assert torch.equal(end, weights)


class TestEvaluation:
    def test_validation_is_token_weighted(self) -> None:
        """torchtitan#4167: (2 over 1 token) and (90 over 9) is 9.2."""
        metric = TokenMean()
        metric.update(torch.tensor(2.0), 1)
        metric.update(torch.tensor(90.0), 9)
        assert float(metric.compute()["loss"]) == pytest.approx(9.2)
        assert metric.compute()["loss"].dtype == torch.float64
        assert "bits_per_byte" not in metric.compute()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_sums_stay_float64_in_half_precision(self, dtype: torch.dtype) -> None:
        module = torch.nn.ModuleList([TokenMean()]).to(dtype)
        for _ in range(2000):
            module[0].update(torch.tensor(300.0), 100)
        assert float(module[0].compute()["loss"]) == 3.0
        module[0].reset()
        assert module[0].loss_sum.dtype == torch.float64

    def test_written_at_the_update_after_which_it_ran(self) -> None:
        logger = RowLogger()
        sources = token_data().preparation.sources[0].documents
        data = TextDataModule(
            [
                TextSource(name="t", kind="tokens", documents=sources),
                TextSource(name="v", kind="tokens", documents=sources[:5], split="val"),
            ],
            vocab_size=40,
            block_size=8,
            sequences_per_update=3,
            val_fraction=0.0,
        )
        module = LanguageModule(SHAPE, lr=1e-2)
        trainer = build_trainer(logger=logger, val_check_interval=2, max_epochs=1, num_sanity_val_steps=2)
        trainer.fit(module, datamodule=data)
        assert [step for step, _ in logger.series("val/loss")] == [2, 4]
        heads = [{name.split("/")[0] for name in row} for _, row in logger.rows]
        order = [next(each for each in ("train", "val", "epoch") if each in head) for head in heads]
        assert order == ["train", "train", "val", "train", "train", "val", "epoch"]
        network = module.network.eval()
        losses = [
            (
                F.cross_entropy(network(torch.tensor([d[:-1]]))[0], torch.tensor(d[1:]), reduction="sum"),
                len(d) - 1,
            )
            for d in sources[:5]
        ]
        expected = sum(float(loss.detach()) for loss, _ in losses) / sum(count for _, count in losses)
        assert logger.series("val/loss")[-1][1] == pytest.approx(expected, rel=1e-6)
        assert logger.series("val/perplexity")[-1][1] == pytest.approx(math.exp(expected), rel=1e-6)
        assert not logger.series("val/bits_per_byte")
        assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(expected, rel=1e-6)

    def test_bits_per_byte(self, tmp_path: Path) -> None:
        """Nats over ln 2 and over the bytes of all label tokens, first words included."""
        (tmp_path / "a.txt").write_text("the cat sat on the mat|the dog sat on the log|" * 20)
        source = TextSource(name="s", paths=[str(tmp_path / "a.txt")], document_separator="|", split="val")
        data = TextDataModule([source], vocab_size=270, block_size=64)
        shape = TransformerConfig(vocab_size=270, block_size=64, d_model=16, n_heads=2, n_layers=1)
        module = LanguageModule(shape)
        logger = RowLogger()
        with pytest.warns(UserWarning, match="stay unused"):
            build_trainer(logger=logger).validate(module, datamodule=data, verbose=False)
        texts = ["the cat sat on the mat", "the dog sat on the log"] * 20
        tokens = [data.tokenizer.encode_documents([text])[0] for text in texts]
        nll = sum(
            float(
                F.cross_entropy(
                    module(torch.tensor([t[:-1]]))[0], torch.tensor(t[1:]), reduction="sum"
                ).detach()
            )
            for t in tokens
        )
        expected = nll / math.log(2) / sum(len(text) for text in texts)
        assert logger.series("val/bits_per_byte")[0][1] == pytest.approx(expected, rel=1e-5)

    def test_overfit_batches_repeats_the_windows(self) -> None:
        recorder = Recorder()
        seen: list[list[int]] = []

        class Seen(pl.Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                seen.append(sorted(n for part in batch for n in part["document_id"].tolist()))

        trainer = build_trainer(callbacks=[recorder, Seen()], overfit_batches=2, max_epochs=3)
        trainer.fit(LanguageModule(SHAPE), datamodule=token_data())
        assert seen == seen[:2] * 3


@pytest.mark.filterwarnings("ignore:the text gave")
class TestCheckpoint:
    SHAPE = TransformerConfig(vocab_size=260, block_size=8, d_model=16, n_heads=2, n_layers=1)

    def saved(self, tmp_path: Path, tokenizer: TextTokenizer | None = None) -> tuple[LanguageModule, Path]:
        torch.manual_seed(5)
        module = LanguageModule(self.SHAPE)
        module.tokenizer = tokenizer
        trainer = build_trainer(max_steps=2)
        trainer.fit(module, datamodule=token_data())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return module, tmp_path / "a.ckpt"

    def test_rebuilt_from_the_file_alone(self, tmp_path: Path) -> None:
        tokenizer = TextTokenizer.train(["abcabc" * 50], 260)
        module, path = self.saved(tmp_path, tokenizer)
        again = LanguageModule.load_from_checkpoint(path)
        assert again.network.config == self.SHAPE
        assert again.tokenizer is not None
        assert again.tokenizer.fingerprint == tokenizer.fingerprint
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
        block = read_checkpoint(path)["andrea_pl"]
        assert set(block) == {"format", "network", "tokenizer", "tokenizer_fingerprint", "libraries"}

    def test_another_network_is_told(self, tmp_path: Path) -> None:
        _, path = self.saved(tmp_path)
        wider = TransformerConfig(vocab_size=260, block_size=8, d_model=32, n_heads=2, n_layers=1)
        with pytest.raises(UserError, match="d_model: checkpoint 16, here 32"):
            build_trainer(max_steps=4).fit(LanguageModule(wider), datamodule=token_data(), ckpt_path=path)

    def test_another_tokenizer_is_told(self, tmp_path: Path) -> None:
        _, path = self.saved(tmp_path, TextTokenizer.train(["abcabc" * 50], 260))
        module = LanguageModule(self.SHAPE)
        module.tokenizer = TextTokenizer.train(["xyzxyz" * 50], 260)
        with pytest.raises(UserError, match="is not the one that the weights were trained with"):
            module.check_block(read_block(read_checkpoint(path)))

    def test_what_changes_no_weight_may_differ(self, tmp_path: Path) -> None:
        _, path = self.saved(tmp_path)
        shape = TransformerConfig(
            vocab_size=260,
            block_size=4,
            d_model=16,
            n_heads=2,
            n_layers=1,
            d_ff=64,
            dropout=0.1,
            init_std=0.5,
        )
        LanguageModule(shape).check_block(read_block(read_checkpoint(path)))

    def test_bad_files(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no such checkpoint"):
            read_checkpoint(tmp_path / "none.ckpt")
        with pytest.raises(UserError, match="not fetched from the web"):
            read_checkpoint("https://example.com/a.ckpt")
        (tmp_path / "bad.ckpt").write_bytes(b"not a checkpoint")
        with pytest.raises(UserError, match=r"bad\.ckpt is not a checkpoint that can be loaded"):
            read_checkpoint(tmp_path / "bad.ckpt")
        torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
        with pytest.raises(UserError, match="no block of andrea_pl"):
            read_block(read_checkpoint(tmp_path / "other.ckpt"))
        with pytest.raises(UserError, match="upgrade"):
            read_block({"andrea_pl": {"format": 99}})


def test_tokenizer_larger_than_the_network() -> None:
    with pytest.raises(UserError, match="257 ids and the network vocab_size=40"):
        LanguageModule(SHAPE)._adopt_tokenizer(TextTokenizer.train(["a"], 257))


class TestGeneration:
    @pytest.mark.filterwarnings("ignore:the text gave")
    def test_text_in_text_out(self) -> None:
        torch.manual_seed(0)
        shape = TransformerConfig(vocab_size=280, block_size=16, d_model=16, n_heads=2, n_layers=1)
        module = LanguageModule(shape)
        module.tokenizer = TextTokenizer.train(["the cat sat on the mat " * 50], 270)
        texts = [module.generate(["", "the cat"], 12, torch.Generator().manual_seed(1)) for _ in range(2)]
        assert texts[0] == texts[1]
        assert all(isinstance(text, str) for text in texts[0])

    def test_without_a_tokenizer(self) -> None:
        with pytest.raises(UserError, match="no tokenizer is known"):
            LanguageModule(SHAPE).generate([""], 1)


def test_refused_smoothing() -> None:
    with pytest.raises(UserError, match="label_smoothing"):
        LanguageModule(SHAPE, label_smoothing=1.0)


def test_smoothing_changes_training_alone() -> None:
    smooth, plain = LanguageModule(SHAPE, label_smoothing=0.1), LanguageModule(SHAPE)
    smooth.load_state_dict(plain.state_dict())
    batch = micro_batch()
    assert float(smooth.loss_sum(batch).detach()) != pytest.approx(
        float(plain.loss_sum(batch).detach()), rel=1e-6
    )
    assert torch.equal(smooth.sequence_losses(batch), plain.sequence_losses(batch))


def test_window_of_one() -> None:
    """A batch that is no window is an update of its own."""
    reports = []
    for batch in (micro_batch(), Window([micro_batch()])):
        torch.manual_seed(0)
        _, recorder = fit(LanguageModule(SHAPE, schedule="constant"), [batch])
        reports.append(recorder.weights[0])
    assert torch.equal(reports[0], reports[1])


class TestLoading:
    """Lightning#19281: the arguments of Lightning's own load_from_checkpoint, and strict_loading."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Return a checkpoint of two updates, without the output matrix."""
        trainer, _ = fit(LanguageModule(SHAPE), [micro_batch()] * 2)
        trainer.save_checkpoint(tmp_path / "whole.ckpt")
        kept = torch.load(tmp_path / "whole.ckpt", weights_only=True)
        del kept["state_dict"]["network.output.weight"]
        torch.save(kept, tmp_path / "part.ckpt")
        return tmp_path / "part.ckpt"

    def test_not_strict(self, path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"network\.output\.weight"):
            LanguageModule.load_from_checkpoint(path)
        with pytest.raises(RuntimeError, match=r"network\.output\.weight"):
            LanguageModule.load_from_checkpoint(path, strict=True)
        with pytest.warns(
            UserWarning, match=r"not in the file: \['network\.output\.weight'\], not in .*none"
        ):
            loaded = LanguageModule.load_from_checkpoint(path, strict=False)
        kept = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in kept.items())

    def test_arguments_that_change_nothing(self, path: Path) -> None:
        whole = path.with_name("whole.ckpt")
        loaded = LanguageModule.load_from_checkpoint(
            whole, map_location="cpu", hparams_file=None, strict=None, weights_only=True, lr=1e-2
        )
        assert loaded._lr == 1e-2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"hparams_file": "hparams.yaml"}, r"hparams_file='hparams\.yaml' is not read"),
            ({"weights_only": False}, "weights_only=False would run code"),
        ],
    )
    def test_arguments_without_a_meaning(self, path: Path, options: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            LanguageModule.load_from_checkpoint(path.with_name("whole.ckpt"), **options)

    def test_a_module_that_is_not_strict(self, path: Path) -> None:
        """Both ways to go on from a checkpoint without some weights: loading, and a resume."""

        class Lenient(LanguageModule):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.strict_loading = False

        with pytest.warns(UserWarning, match="loaded without strict"):
            Lenient.load_from_checkpoint(path)
        module = Lenient(SHAPE)
        build_trainer(max_epochs=2).fit(module, ListLoader([micro_batch()] * 2), ckpt_path=path)
        assert module.updates_applied == 4
