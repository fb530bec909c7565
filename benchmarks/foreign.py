"""Do the callbacks work in other people's projects?

    python -m venv foreign && source foreign/bin/activate
    pip install -e . -r benchmarks/foreign-requirements.txt
    python benchmarks/foreign.py [--only NAME] [--folder FOLDER]

Each project trains the example of its tutorial, made smaller, through its own API. It does so three times
from the same seed, in a process of its own:

    bare      without callbacks and without a logger
    watched   with every callback and with the TensorBoard logger of the project's Lightning package
    reported  like `watched`, but SpikeForensics takes almost any update for a spike and runs it again

The table has one line for each project:

    equal     whether weights and buffers of the three runs are equal to the bit
    norm      worst relative error of `grad_norm` in the journal, against a float64 sum over the gradients
    clip      worst relative error of the curve `train/clip_coefficient`, against threshold / that norm
    reports   reports of spikes, and the worst agreement of a replayed gradient with the gradient of the run
    reloads   whether the project saves and loads a watched run, with bitwise equal predictions afterwards

The script exits with 1 if a project fails anywhere, or if a norm or a coefficient is off by more than 1e-6.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim import Optimizer

from andrea_callbacks import (
    CoherenceGate,
    EpochSummary,
    ExactResume,
    FiniteGuard,
    MomentMonitor,
    PreClipNorm,
    RunJournal,
    RunReport,
    SourceMonitor,
    SpikeForensics,
    TensorBoardLayout,
    Throughput,
    UpdateLog,
    UpdateProgressBar,
    read_journal,
)

LARGEST_ERROR = 1e-6
"""Relative error of a norm or a clip coefficient that still passes."""

INSTALL = (
    "Install the projects in an environment of their own: python -m venv foreign && "
    "source foreign/bin/activate && pip install -e . -r benchmarks/foreign-requirements.txt"
)

LEAST_AGREEMENT = 1 - 1e-6
"""Cosine of the replayed gradient and the run's that still passes."""

POSITIONS = 32
"""Of the small GPT-2."""

SENTENCES = [
    f"the {size} {animal} {verb} over the {place}"
    for size, animal, verb, place in product(
        ("small", "large"), ("fox", "hare", "crane", "otter"), ("runs", "looks", "jumps"), ("river", "hill")
    )
]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A project's example after its training."""

    module: nn.Module
    callbacks: list[Callback]
    """Those that took part; some projects train with copies of what they are given."""
    save_and_load: Callable[[Path], tuple[Any, Any]]
    """Saves into a new folder and loads, both as the project does; returns predictions before and after."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """A project and its example."""

    package: str
    """The Lightning package that its Trainer comes from."""
    train: Callable[[list[Callback], Any], Trained]
    """Trains through the project's own API with callbacks and a logger; the logger is False for none."""
    is_text: bool = False
    """Whether the module continues text, which CoherenceGate needs."""
    replay: Callable[[Any, Any], Tensor] | None = None
    """What the callbacks run an update again with; `step_again` if left out."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the project itself needs to run beside this torch."""

    def callbacks(self, reports: bool) -> list[Callback]:
        """Return every callback.

        Args:
            reports: Have SpikeForensics report almost any update, and run it again.
        """
        replay = self.replay or step_again
        spikes = SpikeForensics()
        if reports:
            spikes = SpikeForensics(
                threshold=0.01, ratio=1.0, loss_ratio=1.0, min_history=5, patience=1000, replay=replay
            )
        every: list[Callback] = [
            PreClipNorm(every=5),
            FiniteGuard(state_every=5, replay=replay),
            spikes,
            MomentMonitor(every=5),
            Throughput(every=5),
            RunJournal(),
            UpdateLog(),
            EpochSummary(),
            SourceMonitor(),
            TensorBoardLayout(),
            RunReport(),
            ExactResume(),
            UpdateProgressBar(refresh_rate=0),
        ]
        if self.is_text:
            known = {word for sentence in SENTENCES for word in sentence.split()}
            every.append(CoherenceGate(every=10, start=0, max_new_tokens=20, known=known))
        return every


class Witness(Callback):
    """Measures what the callbacks measure in another way: a float64 sum over the gradients."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.threshold = 0.0
        self.package = ""
        self.progress_bars = 0
        self.has_learnt = False
        self._first: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note how the project trains, and the weights that it starts from."""
        self._first = copy_of_state(pl_module)
        self.threshold = trainer.gradient_clip_val
        self.package = next(kind.__module__ for kind in reversed(type(trainer).__mro__) if kind is not object)
        lineages = [[kind.__name__ for kind in type(each).__mro__] for each in trainer.callbacks]
        self.progress_bars = sum("ProgressBar" in names for names in lineages)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Measure the gradients."""
        del trainer, pl_module
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        squares = [each.grad.double().square().sum() for each in parameters if each.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note whether the weights have changed."""
        del trainer
        self.has_learnt = not is_equal(self._first, copy_of_state(pl_module))


def step_again(module: Any, batch: Any) -> Tensor:
    """Return the loss of a batch, 0-d, through the project's own training step."""
    outputs = module.training_step(batch, 0)
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs


def copy_of_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of weights and buffers."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def is_equal(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Say whether two copies are equal to the bit."""
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def train_neuralforecast(callbacks: list[Callback], logger: Any) -> Trained:
    """Train NHITS on the monthly passengers of two airlines."""
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS
    from neuralforecast.utils import AirPassengersPanel

    model = NHITS(
        h=12,
        input_size=24,
        max_steps=60,
        val_check_steps=20,
        mlp_units=[[64, 64]] * 3,
        random_seed=1,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=logger,
        callbacks=callbacks,
    )
    forecast = NeuralForecast(models=[model], freq="ME")
    forecast.fit(df=AirPassengersPanel, val_size=24)

    def save_and_load(folder: Path) -> tuple[Any, Any]:
        forecast.save(str(folder))
        loaded = NeuralForecast.load(str(folder))
        before, after = (each.predict()["NHITS"].to_numpy() for each in (forecast, loaded))
        return before, after

    used = forecast.models[0]
    return Trained(module=used, callbacks=used.trainer_kwargs["callbacks"], save_and_load=save_and_load)


def train_pytorch_tabular(callbacks: list[Callback], logger: Any) -> Trained:
    """Train a classifier of rows with numbers and categories."""
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, ExperimentConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    rows = mixed_rows(800)
    tracked = ExperimentConfig(project_name=logger.save_dir, run_name="run") if logger else None
    model = TabularModel(
        data_config=DataConfig(
            target=["target"], continuous_cols=["a", "b", "c"], categorical_cols=["kind", "place"]
        ),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="64-32", learning_rate=1e-2),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=64,
            max_epochs=6,
            gradient_clip_val=0.3,
            accelerator="cpu",
            progress_bar="simple",
        ),
        experiment_config=tracked,
        verbose=False,
    )
    model.fit(train=rows[:640], validation=rows[640:], callbacks=callbacks)

    def save_and_load(folder: Path) -> tuple[Any, Any]:
        model.save_model(str(folder))
        loaded = TabularModel.load_model(str(folder))
        before, after = (each.predict(rows[640:]).to_numpy() for each in (model, loaded))
        return before, after

    return Trained(module=model.model, callbacks=callbacks, save_and_load=save_and_load)


def mixed_rows(count: int) -> Any:
    """Return a table with three columns of numbers, two of categories, and a class that they decide."""
    from pandas import DataFrame

    draw = np.random.default_rng(0)
    rows = DataFrame(draw.normal(size=(count, 3)), columns=["a", "b", "c"])
    rows["kind"] = draw.choice(["x", "y", "z"], count)
    rows["place"] = draw.choice(["north", "south"], count)
    score = rows["a"] - rows["b"] + 2.0 * (rows["kind"] == "x") + draw.normal(scale=0.3, size=count)
    rows["target"] = np.where(score > 0.5, "yes", "no")
    return rows


def train_pytorch_forecasting(callbacks: list[Callback], logger: Any) -> Trained:
    """Train N-BEATS on the package's artificial series."""
    from pytorch_forecasting import NBeats, TimeSeriesDataSet
    from pytorch_forecasting.data import NaNLabelEncoder
    from pytorch_forecasting.data.examples import generate_ar_data

    series = generate_ar_data(seasonality=10.0, timesteps=200, n_series=20, seed=42)
    training = TimeSeriesDataSet(
        series[series.time_idx <= 160],
        time_idx="time_idx",
        target="value",
        categorical_encoders={"series": NaNLabelEncoder().fit(series.series)},
        group_ids=["series"],
        time_varying_unknown_reals=["value"],
        max_encoder_length=60,
        max_prediction_length=20,
    )
    validation = TimeSeriesDataSet.from_dataset(training, series, min_prediction_idx=161)
    loaders = [
        dataset.to_dataloader(train=dataset is training, batch_size=64, num_workers=0)
        for dataset in (training, validation)
    ]
    model = NBeats.from_dataset(
        training, learning_rate=4e-3, weight_decay=1e-2, widths=[32, 128], backcast_loss_ratio=0.1
    )
    trainer = build_trainer(callbacks, logger, max_epochs=3, limit_train_batches=20, gradient_clip_val=0.1)
    trainer.fit(model, *loaders)

    def save_and_load(folder: Path) -> tuple[Any, Any]:
        trainer.save_checkpoint(folder / "nbeats.ckpt")
        loaded = NBeats.load_from_checkpoint(folder / "nbeats.ckpt", weights_only=False)
        before, after = (each.predict(loaders[1]).numpy() for each in (model, loaded))
        return before, after

    return Trained(module=model, callbacks=callbacks, save_and_load=save_and_load)


def train_chemprop(callbacks: list[Callback], logger: Any) -> Trained:
    """Train a message-passing network on the solubility of small molecules."""
    from chemprop import data, models
    from chemprop import nn as layers

    points = [data.MoleculeDatapoint.from_smi(smiles, [value]) for smiles, value in small_molecules()]
    training, validation = data.MoleculeDataset(points[:160]), data.MoleculeDataset(points[160:])
    scaler = training.normalize_targets()
    validation.normalize_targets(scaler)
    unscale = layers.UnscaleTransform.from_standard_scaler(scaler)
    model = models.MPNN(
        layers.BondMessagePassing(d_h=64),
        layers.MeanAggregation(),
        layers.RegressionFFN(input_dim=64, output_transform=unscale),
        batch_norm=True,
    )
    loaders = [
        data.build_dataloader(training, num_workers=0, seed=0),
        data.build_dataloader(validation, num_workers=0, shuffle=False),
    ]
    trainer = build_trainer(callbacks, logger, max_epochs=20, gradient_clip_val=1.0)
    trainer.fit(model, *loaders)

    def predict(module: Any) -> Any:
        quiet = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False)
        return torch.cat(quiet.predict(module, loaders[1])).numpy()

    def save_and_load(folder: Path) -> tuple[Any, Any]:
        folder.mkdir()
        models.save_model(folder / "model.pt", model)
        trainer.save_checkpoint(folder / "model.ckpt")
        before = predict(model)
        saved, checkpoint = (
            models.load_model(folder / "model.pt"),
            models.MPNN.load_from_checkpoint(folder / "model.ckpt"),
        )
        return np.stack([before, before]), np.stack([predict(saved), predict(checkpoint)])

    return Trained(module=model, callbacks=callbacks, save_and_load=save_and_load)


def small_molecules() -> list[tuple[str, float]]:
    """Return 200 molecules, each a chain between two groups, with the logP that Crippen's rules give."""
    from rdkit.Chem import Crippen, MolFromSmiles

    heads = ("O", "N", "Cl", "c1ccccc1", "OC(=O)", "N#C", "C1CC1", "CO", "F", "Br")
    chains, tails = ("C", "CC", "CCC", "CCCC", "C(C)C"), ("O", "N", "c1ccncc1", "C(=O)O")
    made = ["".join(parts) for parts in product(heads, chains, tails)]
    order = np.random.default_rng(0).permutation(len(made))
    return [(made[place], Crippen.MolLogP(MolFromSmiles(made[place]))) for place in order]


def train_scvi(callbacks: list[Callback], logger: Any) -> Trained:
    """Train SCVI on the package's synthetic cells of two batches."""
    import scvi

    scvi.settings.seed = 0
    cells = scvi.data.synthetic_iid()
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_hidden=64, n_latent=8)
    model.train(
        max_epochs=20,
        accelerator="cpu",
        gradient_clip_val=10.0,
        check_val_every_n_epoch=5,
        simple_progress_bar=False,
        logger=logger,
        callbacks=callbacks,
    )

    def save_and_load(folder: Path) -> tuple[Any, Any]:
        model.save(str(folder))
        loaded = scvi.model.SCVI.load(str(folder), cells)
        return model.get_latent_representation(), loaded.get_latent_representation()

    return Trained(module=model.module, callbacks=callbacks, save_and_load=save_and_load)


class Tuned(pl.LightningModule):
    """A GPT-2 of transformers with adapters of peft, as a tutorial wraps it."""

    def __init__(self, network: Any, words: list[str]) -> None:
        super().__init__()
        self.network = network
        self.words = words

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss that transformers computes."""
        del batch_idx
        return self.network(**batch).loss

    def configure_optimizers(self) -> Optimizer:
        """Train the adapters."""
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)

    def generate(
        self, prompts: list[str], max_new_tokens: int, generator: torch.Generator | None = None
    ) -> list[str]:
        """Continue the start of a sentence, for every prompt, with words."""
        start = torch.zeros(len(prompts), 1, dtype=torch.int64)
        for _ in range(max_new_tokens):
            logits = self.network(input_ids=start[:, -POSITIONS:]).logits[:, -1]
            start = torch.cat([start, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        return [" ".join(self.words[place] for place in row) for row in start.tolist()]


def train_peft(callbacks: list[Callback], logger: Any) -> Trained:
    """Train the adapters of a small GPT-2 on sentences."""
    from peft import PeftModel

    network, words = build_adapters()
    numbers = {word: place for place, word in enumerate(words)}
    rows = torch.tensor([[numbers[word] for word in sentence.split()] for sentence in SENTENCES])
    batches = [{"input_ids": part, "labels": part} for part in rows.split(8)]
    module = Tuned(network, words)
    trainer = build_trainer(callbacks, logger, max_epochs=10, gradient_clip_val=0.1)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None, num_workers=0))

    def save_and_load(folder: Path) -> tuple[Any, Any]:
        network.save_pretrained(folder)
        trainer.save_checkpoint(folder / "module.ckpt")
        adapted = PeftModel.from_pretrained(build_base(len(words)), folder)
        checkpoint = Tuned.load_from_checkpoint(
            folder / "module.ckpt", network=build_adapters()[0], words=words
        )
        with torch.no_grad():
            before, *after = (
                each.eval()(input_ids=rows).logits for each in (network, adapted, checkpoint.network)
            )
        return np.stack([before, before]), np.stack(after)

    return Trained(module=module, callbacks=callbacks, save_and_load=save_and_load)


def build_base(vocabulary: int) -> Any:
    """Return a small GPT-2, the same every time; nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    shape = GPT2Config(
        vocab_size=vocabulary,
        n_positions=POSITIONS,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(shape)


def build_adapters() -> tuple[Any, list[str]]:
    """Return the small GPT-2 with adapters, and its words."""
    from peft import LoraConfig, get_peft_model

    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    adapters = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True
    )
    return get_peft_model(build_base(len(words)), adapters), words


def sentence_losses(module: Any, batch: Any) -> Tensor:
    """Return the loss of each sentence, (B,)."""
    logits = module.network(input_ids=batch["input_ids"]).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return losses.mean(1)


def build_trainer(callbacks: list[Callback], logger: Any, **options: Any) -> pl.Trainer:
    """Return a Trainer of `lightning.pytorch` on the CPU."""
    return pl.Trainer(
        accelerator="cpu", logger=logger, callbacks=callbacks, enable_model_summary=False, **options
    )


ONE, OTHER = "lightning.pytorch", "pytorch_lightning"

PROJECTS: dict[str, Project] = {
    "neuralforecast": Project(package=OTHER, train=train_neuralforecast),
    "pytorch-tabular": Project(
        package=OTHER,
        train=train_pytorch_tabular,
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},  # its own checkpoints hold omegaconf's objects
    ),
    "pytorch-forecasting": Project(package=ONE, train=train_pytorch_forecasting),
    "chemprop": Project(package=ONE, train=train_chemprop),
    "scvi-tools": Project(package=ONE, train=train_scvi),
    "peft": Project(
        package=ONE,
        train=train_peft,
        is_text=True,
        replay=sentence_losses,
        environment={"HF_HUB_OFFLINE": "1"},
    ),
}


@dataclass(kw_only=True)
class Row:
    """What was found in a project."""

    parameters: int = 0
    updates: int = 0
    equal: bool = False
    norm: float = float("inf")
    """Worst relative error."""
    clip: float = float("inf")
    """Worst relative error."""
    reports: int = 0
    agreement: float = 0.0
    """The worst."""
    reloads: bool = False
    faults: list[str] = field(default_factory=list[str])
    """All that failed; empty where everything is right."""

    HEAD = (
        "project",
        "version",
        "Trainer of",
        "parameters",
        "updates",
        "equal",
        "norm",
        "clip",
        "reports",
        "reloads",
    )

    def cells(self, name: str) -> list[str]:
        """Return the project's line of the table."""
        return [
            name,
            version(name),
            PROJECTS[name].package,
            f"{self.parameters:,}",
            str(self.updates),
            "yes" if self.equal else "NO",
            f"{self.norm:.1e}",
            f"{self.clip:.1e}",
            f"{self.reports}, {self.agreement:.7f}",
            "yes" if self.reloads else "NO",
        ]


class Examination:
    """Trains a project three times and compares the runs.

    Args:
        project: The project.
        folder: Where its runs log and save.
    """

    def __init__(self, project: Project, folder: Path) -> None:
        self.project = project
        self.folder = folder
        self.row = Row()
        self._states: list[dict[str, Tensor]] = []
        self._errors: list[tuple[float, float]] = []
        self._reloaded: list[bool] = []

    def examine(self) -> Row:
        """Return what was found. An exception is a fault; its traceback goes to the console."""
        for run in ("bare", "watched", "reported"):
            with self._noting(run):
                self._examine_run(run)
        row = self.row
        row.equal = len(self._states) == 3 and all(is_equal(self._states[0], each) for each in self._states)
        if len(self._errors) == 2:
            row.norm, row.clip = map(max, zip(*self._errors, strict=True))
        row.reloads = self._reloaded == [True, True]
        self._expect(row.equal, "weights differ between the runs, or a run is missing")
        self._expect(row.reloads, "predictions differ after loading, or saving or loading failed")
        return row

    def _examine_run(self, run: str) -> None:
        callbacks: list[Callback] = []
        logger: Any = False
        if run != "bare":
            callbacks = [Witness(), *self.project.callbacks(reports=run == "reported")]
            loggers = import_module(f"{self.project.package}.loggers")
            logger = loggers.TensorBoardLogger(self.folder / run, name="", version="")
        pl.seed_everything(1, verbose=False)
        trained = self.project.train(callbacks, logger)
        self._states.append(copy_of_state(trained.module))
        self.row.parameters = sum(each.numel() for each in trained.module.parameters())
        if run == "bare":
            return
        with self._noting(f"{run}, figures"):
            (witness,) = (each for each in trained.callbacks if isinstance(each, Witness))
            self._check_witness(run, witness)
            self._compare_figures(run, witness)
        if run == "reported":
            with self._noting(f"{run}, reports"):
                self._read_reports()
        with self._noting(f"{run}, save and load"):
            before, after = trained.save_and_load(self.folder / f"{run}-saved")
            self._reloaded.append(np.array_equal(before, after))

    def _check_witness(self, run: str, witness: Witness) -> None:
        package = self.project.package
        self._expect(witness.package.startswith(package), f"{run}: the Trainer is from {witness.package}")
        self._expect(witness.has_learnt, f"{run}: training changed no weight, so that nothing is shown")
        self._expect(witness.progress_bars == 1, f"{run}: {witness.progress_bars} progress bars, expected 1")

    def _compare_figures(self, run: str, witness: Witness) -> None:
        """Compare journal and curves with what was measured on the spot."""
        (journal,) = (self.folder / run).rglob("journal.jsonl")
        norms = np.array(witness.norms)
        noted = [row["grad_norm"] for row in read_journal(journal) if row["kind"] == "update"]
        self.row.updates = len(norms)
        norm = worst_error(noted, norms)
        self._expect(norm <= LARGEST_ERROR, f"{run}: norms are off by {norm:.1e}")
        events = EventAccumulator(str(journal.parent), {"scalars": 0, "tensors": 0}).Reload()
        curves, tag = events.Tags(), "train/clip_coefficient"
        points = events.Scalars(tag) if tag in curves["scalars"] else []
        coefficients = np.minimum(1.0, witness.threshold / (norms + 1e-6))
        clip = worst_error([point.value for point in points], coefficients)
        self._expect(clip <= LARGEST_ERROR, f"{run}: {tag} is off by {clip:.1e}")
        self._errors.append((norm, clip))
        steps = [point.step for point in points]
        self._expect(steps == [*range(1, len(norms) + 1)], f"{run}: {tag} has not every update once")
        laid_out = "custom_scalars__config__" in curves["tensors"]
        self._expect(laid_out, f"{run}: TensorBoardLayout laid nothing out")

    def _read_reports(self) -> None:
        """Read how well the replays agree with the run."""
        files = sorted((self.folder / "reported").rglob("report.json"))
        found = [json.loads(file.read_text())["attribution"] for file in files]
        for reason in {each["unavailable"] for each in found if "unavailable" in each}:
            self._expect(False, f"reported: {reason}")
        self.row.reports = len(found)
        self.row.agreement = min((each.get("agreement") or 0.0 for each in found), default=0.0)
        is_same = self.row.agreement >= LEAST_AGREEMENT
        self._expect(is_same, "reported: no report, or a replay with another gradient than the run's")

    def _expect(self, holds: bool, fault: str) -> None:
        if not holds:
            self.row.faults.append(fault)

    @contextmanager
    def _noting(self, what: str) -> Generator[None, None, None]:
        """Turn what is raised into a fault."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.row.faults.append(f"{what}: {type(error).__name__}: {first_line(error)}")


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    return (str(error).splitlines() or [""])[0]


def worst_error(found: Sequence[float], expected: Any) -> float:
    """Return the largest relative error, infinite where a value is missing or there is none."""
    if len(found) != len(expected) or not len(found):
        return float("inf")
    return float(np.max(np.abs(np.array(found) - expected) / expected))


def is_installed(package: str) -> bool:
    """Say whether a package is installed."""
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def examine_outside(name: str, folder: Path) -> Row:
    """Examine a project in a process of its own, whose output goes to a file."""
    own = folder / name
    own.mkdir(parents=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--only", name, "--inside", str(own)]
    with (own / "output.txt").open("w") as output:
        done = subprocess.run(
            command,
            cwd=own,
            env=os.environ | PROJECTS[name].environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        last = (own / "output.txt").read_text().rstrip().rpartition("\n")[2]
        return Row(faults=[f"the process ended with {done.returncode}: {last}"])
    return Row(**json.loads((own / "row.json").read_text()))


def examine_inside(name: str, folder: Path) -> None:
    """Examine a project in this process, and write what was found."""
    torch.set_num_threads(1)
    row = Examination(PROJECTS[name], folder).examine()
    (folder / "row.json").write_text(json.dumps(asdict(row)))


def main() -> None:
    """Examine and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PROJECTS, help="examine one project")
    parser.add_argument("--folder", type=Path, help="new folder that keeps logs and console output")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [options.only] if options.only else list(PROJECTS)
    missing = [name for name in names if not is_installed(name)]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}. {INSTALL}")
    if options.inside:
        examine_inside(options.only, options.inside)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = (options.folder or Path(place)).resolve()
        rows = {name: examine_outside(name, folder) for name in names}
    lines = [list(Row.HEAD), ["---"] * len(Row.HEAD), *(row.cells(name) for name, row in rows.items())]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    faults = [f"{name}: {fault}" for name, row in rows.items() for fault in row.faults]
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
