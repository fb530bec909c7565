"""The command `andrea`: LightningCLI's fit, validate, test and predict, and some that are ours."""

import json
import logging
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import lightning.pytorch.strategies
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

import andrea_pl.strategies
from andrea_callbacks.console import RunReport, UpdateProgressBar
from andrea_callbacks.events import RunEvent
from andrea_callbacks.terminal import escaped
from andrea_pl.arguments import CLIP_STRATEGIES, TRUST_HELP, given_texts, restrict
from andrea_pl.block import read_block, read_weights, refuse_nonfinite
from andrea_pl.checkpoint import DurableCheckpointIO, read_checkpoint
from andrea_pl.configuration import UsageError
from andrea_pl.data.listing import listed_once
from andrea_pl.data.module import TextDataModule
from andrea_pl.data.pruning import prune as prune_cache
from andrea_pl.errors import UserError
from andrea_pl.export import export_model
from andrea_pl.faults import dead_worker, encoding_hint
from andrea_pl.folders import RunFolders
from andrea_pl.generating import generate_text
from andrea_pl.interrupting import EXIT_INTERRUPTED
from andrea_pl.language import LanguageModule
from andrea_pl.optim import build_extension
from andrea_pl.optim.extension import canonical_target, load_extension
from andrea_pl.output import survive_dead_output
from andrea_pl.parsing import RECORDS, CommandParser, RefusedArguments, explain
from andrea_pl.paths import expand_home, resolve
from andrea_pl.restoring import require_state, restoring
from andrea_pl.resuming import KEY as SETTINGS_KEY
from andrea_pl.resuming import (
    ONLY_THIS_CALL,
    Continuation,
    choose_text,
    compare_settings,
    continue_logs,
    find_run,
    requeued_run,
)
from andrea_pl.saving import DurableCheckpoint
from andrea_pl.signals import EndedBySignal, StoppedBySignal, ending_in_order
from andrea_pl.sizes import refuse_absurd_numbers
from andrea_pl.starting import say_error, slurm_fault, start_command
from andrea_pl.update import NonFiniteError

LIGHTNING_KEYWORDS = ("best", "last", "hpc", "registry")
"""What Lightning takes for a checkpoint besides a path."""

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_NONFINITE = 3
EXIT_STOPPED = 4


class CommandTrainer(pl.Trainer):
    """Lightning's Trainer with what the command adds to it."""

    resumes_only_when_asked = True

    @override
    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        init_from: str | None = None,
        resume: str | None = None,
        allow_drift: list[str] | None = None,
    ) -> None:
        """Train a model, preparing its text first where needed.

        Args:
            model: The model.
            train_dataloaders: Not used by the command.
            val_dataloaders: Not used by the command.
            datamodule: The text.
            ckpt_path: Checkpoint to resume from: weights, optimizer, schedule, position in the text, random
                states. The logs are those of a new run.
            init_from: Checkpoint to take the weights from, and nothing else, for fine-tuning.
            resume: Go on with a run, in its own log folder, from its newest checkpoint that verifies: the
                newest run where no folder follows.
            allow_drift: A setting that may differ from the checkpoint's, which stops the run otherwise, with
                all that is below it; may be given several times.
        """
        del resume, allow_drift  # the command has acted on them
        if init_from is not None:
            _load_weights(cast(LanguageModule, model), init_from)
        with restoring(ckpt_path):
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only=True)

    @override
    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a checkpoint on the held-out documents."""
        _require_checkpoint(kwargs)
        with restoring(kwargs["ckpt_path"]):
            return super().validate(
                *args, **kwargs | {"verbose": False}
            )  # the command prints lines of its own

    @override
    def test(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a checkpoint on the test documents."""
        _require_checkpoint(kwargs)
        with restoring(kwargs["ckpt_path"]):
            return super().test(*args, **kwargs | {"verbose": False})  # the command prints lines of its own

    @override
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Write the loss of every held-out sequence under a checkpoint, as JSON lines."""
        _require_checkpoint(kwargs)
        with restoring(kwargs["ckpt_path"]):
            return super().predict(*args, **kwargs)

    def prepare(
        self,
        model: pl.LightningModule,
        datamodule: TextDataModule,
        verify: bool = False,
        prune: bool = False,
    ) -> None:
        """Prepare the text: learn the tokenizer, write the token stores. Nothing is trained.

        Args:
            model: Not used.
            datamodule: The text.
            verify: Compare every document with what was prepared, also where no size or time has changed.
            prune: Then remove old stores from the whole cache that no run needs any more.
        """
        del model
        datamodule.prepare_data(verify=verify)
        datamodule.setup()
        print(escaped(f"prepared in {datamodule.preparation.folder}"))
        if prune:
            removed = prune_cache(datamodule.preparation.cache_dir)
            for each in removed:
                print(escaped(f"removed {each.path} ({each.size:,} bytes)"))
            print(f"removed {sum(each.size for each in removed):,} bytes in all")


class KeepConfig(SaveConfigCallback):
    """Saves configuration and tokenizer beside the logs, and the configuration in every checkpoint.

    Options of the call alone, such as `ckpt_path`, are left out, so that what is saved can be run again. The
    tokenizer in the cache follows the text when that changes; the one here stays that of the run. A run that
    is gone on with keeps the files that it has.
    """

    def __init__(self, parser: LightningArgumentParser, config: Any, *args: Any, **kwargs: Any) -> None:
        config = config.clone()
        for key in ONLY_THIS_CALL:
            config.pop(key, None)
        super().__init__(parser, config, *args, **kwargs)
        self.settings: dict[str, Any] = _plain(parser, config)
        """The configuration as plain values."""

    @property
    def defaults(self) -> dict[str, Any]:
        """What the settings are when they are not given."""
        return _plain(self.parser, self.parser.get_defaults(skip_validation=True))

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the configuration."""
        checkpoint[SETTINGS_KEY] = self.settings

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save on the first call."""
        if not trainer.loggers:
            return
        folder = trainer.log_dir  # all ranks must ask
        has_it = folder is not None and (Path(folder) / self.config_filename).exists()
        if trainer.strategy.broadcast(has_it):
            return
        super().setup(trainer, pl_module, stage)
        tokenizer = cast(TextDataModule, cast(Any, trainer).datamodule).tokenizer
        if trainer.is_global_zero and tokenizer is not None and folder is not None:
            (Path(folder) / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")


def _plain(parser: LightningArgumentParser, config: Any) -> dict[str, Any]:
    """Return a configuration as plain values; records, of which there may be many, by themselves."""
    config = config.clone()
    records = {key: config.pop(key) for key in RECORDS if config.get(key)}
    text = parser.dump(config, skip_unset=False, skip_validation=True)
    plain = cast("dict[str, Any]", yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506
    for key, value in records.items():
        place = plain
        *above, last = key.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[last] = [each.as_dict() for each in value]
    return plain


class StopReason(Callback):
    """Notes the event by which a callback stopped the run."""

    event: RunEvent | None = None

    def take_event(self, trainer: pl.Trainer, event: RunEvent) -> None:
        """Keep an event that says so."""
        del trainer
        if event.details.get("stops"):
            self.event = event


class AndreaCLI(LightningCLI):
    """LightningCLI with a fixed model and data class; a checkpoint can slip nothing in."""

    def __init__(self, args: list[str]) -> None:
        self.stop_reason = StopReason()
        self.folders = RunFolders()
        try:
            super().__init__(
                LanguageModule,
                TextDataModule,
                save_config_callback=KeepConfig,
                save_config_kwargs={"overwrite": True},
                trainer_class=CommandTrainer,
                trainer_defaults={"log_every_n_steps": 1},
                seed_everything_default=0,
                parser_class=CommandParser,
                args=args,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )
        except BaseException:
            self.folders.give_back()
            raise

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        """Return the subcommands that run with a trainer, and the arguments that are filled in."""
        return {**LightningCLI.subcommands(), "prepare": {"model", "datamodule"}}

    @override
    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        """Add the subcommands that need no trainer."""
        main_kwargs.setdefault("description", "Pretrain language models by exact, token-weighted updates.")
        super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
        action = cast(CommandParser, self.parser).subcommand_action
        for name, command in STANDALONE.items():
            action.add_subcommand(name, command.parser(), help=command.description)

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Say in every help what a configuration may name."""
        kwargs["epilog"] = TRUST_HELP
        kwargs["allow_abbrev"] = False
        return super().init_parser(**kwargs)

    @override
    def instantiate_classes(self) -> None:
        """Say what a class refuses in one line.

        Classes get paths expanded; what is saved of the configuration has them as they were written, so that
        it runs in another home folder too.
        """
        self._as_written = self.config
        self.config = self.config.clone()
        self.config[self.subcommand] = resolve(self.config[self.subcommand])
        try:
            super().instantiate_classes()
        except ValueError as error:
            fault: BaseException = error  # the parser wraps it in what else the value is not, once a level
            while fault.__cause__ is not None and not isinstance(fault, UserError):
                fault = fault.__cause__
            raise fault if isinstance(fault, UserError) else UserError(str(fault)) from error
        finally:
            self.config = self._as_written

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Add the bar and the final report, where the user gave none of their kind."""
        self.config = self._as_written
        config = self._get(self.config_init, "trainer", default={})
        strategy = _named_strategy(config.get("strategy"))
        if strategy is not None:
            kwargs["strategy"] = strategy
        callbacks: Any = config.get("callbacks") or []
        given = cast("list[Callback]", callbacks if isinstance(callbacks, list) else [callbacks])
        added: list[Callback] = []
        if config.get("enable_progress_bar") is not False and not any(
            isinstance(each, ProgressBar) for each in given
        ):
            added.append(UpdateProgressBar())
        if not any(isinstance(each, RunReport) for each in given):
            added.append(RunReport())
        checkpoints = config.get("enable_checkpointing") is not False
        if checkpoints and not any(isinstance(each, Checkpoint) for each in given):
            added.append(DurableCheckpoint(monitor="val/loss"))
        elif checkpoints and not any(isinstance(each, DurableCheckpoint) for each in given):
            rank_zero_info(
                "no DurableCheckpoint among trainer.callbacks: a signal ends this run without saving"
            )
        added += [self.stop_reason, self.folders]
        self.trainer_defaults["callbacks"] = added
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except ValueError as error:
            ours = f" Ours are {', '.join(CLIP_STRATEGIES)}." if "strategy name" in str(error) else ""
            raise UserError(slurm_fault() or f"the trainer refuses its options: {error}{ours}") from error
        except (RuntimeError, KeyError) as error:
            fault = slurm_fault()
            raise (error if fault is None else UserError(fault)) from error
        fault = slurm_fault() if _is_under_slurm(trainer) else None
        if fault is not None:
            raise UserError(fault)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = DurableCheckpointIO()
        return trainer

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; commands without a trainer go their own way, and must be the first word."""
        super().parse_arguments(parser, args)
        name: str = cast(Any, self.config)["subcommand"]
        if name in STANDALONE:
            raise UserError(f"write andrea {name} first and its options after it")
        refuse_absurd_numbers(cast(Any, self.config)[name].as_dict())

    @override
    def after_instantiate_classes(self) -> None:
        """Find the checkpoint that is used, then take the run's folders, before loggers open files there."""
        if self.subcommand != "prepare":
            cast(LanguageModule, self.model).build_network(self.datamodule)  # --init_from has weights for it
        options = self.config_init[cast(str, self.subcommand)]
        given = [name for name in ("ckpt_path", "init_from", "resume") if options.get(name)]
        if len(given) > 1:
            raise UserError(
                f"--{given[0]} and --{given[1]} are not given both: --resume goes on with a run in its own "
                "folder, --ckpt_path resumes into a new one, --init_from starts from weights alone"
            )
        run = None
        if self.subcommand == "fit":
            run = self._find_run(options.get("resume"), is_free=not given)
            if run is not None:
                options["ckpt_path"] = str(run.checkpoint.path)
        path = options.get("ckpt_path") or options.get("init_from")
        if path:
            self._use_checkpoint(path, is_resumed=self.subcommand == "fit" and bool(options.get("ckpt_path")))
        if run is not None:
            for renamed in continue_logs(self.trainer, run):
                self.folders.note_renamed(*renamed)
        if self.subcommand != "prepare":
            self.folders.take(self.trainer, trains=self.subcommand == "fit")

    def _use_checkpoint(self, path: str, is_resumed: bool) -> None:
        """Compare a checkpoint's settings where it is resumed from; prepare text with its tokenizer."""
        if path in LIGHTNING_KEYWORDS:
            raise UserError(
                f"--ckpt_path {path}: Lightning takes that for a word of its own, which may find nothing and "
                f"start afresh; give a file (./{path}), or --resume"
            )
        checkpoint = read_checkpoint(path, mmap="://" not in path)
        block = read_block(checkpoint, path)
        refuse_nonfinite(read_weights(checkpoint, block, path), path)
        if is_resumed:
            options = self.config_init[cast(str, self.subcommand)]
            keeper = next(each for each in self._callbacks() if isinstance(each, KeepConfig))
            allowed = cast("list[str]", options.get("allow_drift") or [])
            require_state(checkpoint, path)
            if SETTINGS_KEY in checkpoint:  # a path may be written with or without ~
                checkpoint = {**checkpoint, SETTINGS_KEY: expand_home(checkpoint[SETTINGS_KEY])}
            ours = expand_home(keeper.settings)
            with restoring(path):
                compare_settings(checkpoint, ours, path, allowed, keeper.defaults)
        choose_text(cast(TextDataModule, self.datamodule), checkpoint, path, block.tokenizer, is_resumed)

    def _find_run(self, given: str | None, is_free: bool) -> Continuation | None:
        """Return the run that is gone on with: the one given, or that of a job which SLURM requeued."""
        if given is not None:
            return find_run(self.trainer, given, self._lock)
        return requeued_run(self.trainer, self._lock) if is_free else None

    def _lock(self, folder: Path) -> None:
        self.folders.lock(self.trainer, folder)

    def _callbacks(self) -> list[Callback]:
        return cast("list[Callback]", cast(Any, self.trainer).callbacks)

    def before_fit(self) -> None:
        """Say how large the model is."""
        module = cast(LanguageModule, self.model)
        print(f"parameters: {module.network.count_parameters():,}")

    def after_validate(self) -> None:
        """Say how it went."""
        self._print_metrics()

    def after_test(self) -> None:
        """Say how it went."""
        self._print_metrics()

    def _print_metrics(self) -> None:
        for name, value in self.trainer.callback_metrics.items():
            print(f"{name}: {float(value):.6g}")

    def predict(self, **kwargs: Any) -> None:
        """Write predictions as JSON lines in the trainer's root folder, those of all ranks in one file."""
        path = Path(self.trainer.default_root_dir) / "predictions.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        batches = cast("list[list[dict[str, Any]]]", self.trainer.predict(**kwargs)) or []
        rows = [row for batch in batches for row in batch]
        if self.trainer.world_size > 1:
            shares: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(shares, rows)
            rows = [row for share in shares for row in share]
        if not self.trainer.is_global_zero:
            return
        rows.sort(key=lambda row: (row["document_id"], row["offset"]))
        data = cast(TextDataModule, self.datamodule)
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                place = data.locate(row["document_id"], row["offset"])
                file.write(json.dumps({**row, "document": place}) + "\n")
        print(escaped(f"losses of {len(rows)} sequences: {path}"))

    @override
    def _parse_ckpt_path(self) -> None:
        """Take nothing from a checkpoint into the configuration: flags and files alone decide."""


def build_extensions(architectures: list[str]) -> None:
    """Build the clip extension ahead of time, and say where it lies.

    Args:
        architectures: CUDA architectures, such as sm_90; the part for CPUs is built in any case.
    """
    targets = ["cpu", *map(canonical_target, architectures)]
    for target in targets:
        print(escaped(f"{target}: {build_extension(target)}"))
    load_extension(torch.device("cpu"))  # a damaged file is found now


@dataclass(frozen=True, kw_only=True)
class StandaloneCommand:
    """A subcommand that needs no trainer."""

    name: str
    description: str
    run: Callable[..., None]
    add_arguments: Callable[[ArgumentParser], None]

    def parser(self) -> ArgumentParser:
        """Return the parser of its arguments."""
        parser = CommandParser(prog=f"andrea {self.name}", description=self.description)
        parser.add_argument("-c", "--config", action="config", help="A YAML file with these options.")
        self.add_arguments(parser)
        return parser

    def __call__(self, arguments: list[str]) -> None:
        """Parse and run."""
        options = resolve(self.parser().parse_args(arguments).as_dict())
        options.pop("config", None)
        self.run(**options)


def _add_generate_arguments(parser: ArgumentParser) -> None:
    parser.add_function_arguments(generate_text)


def _add_export_arguments(parser: ArgumentParser) -> None:
    parser.add_function_arguments(export_model)


def _add_architectures(parser: ArgumentParser) -> None:
    told = "CUDA architectures, such as sm_90; the part for CPUs is built in any case."
    parser.add_argument("architectures", nargs="*", type=str, default=[], help=told)


STANDALONE = {
    command.name: command
    for command in (
        StandaloneCommand(
            name="generate",
            description="Continue a prompt with a checkpoint.",
            run=generate_text,
            add_arguments=_add_generate_arguments,
        ),
        StandaloneCommand(
            name="export",
            description="Write a checkpoint's model and tokenizer for Hugging Face's transformers.",
            run=export_model,
            add_arguments=_add_export_arguments,
        ),
        StandaloneCommand(
            name="build-extension",
            description="Build the clip extension ahead of time.",
            run=build_extensions,
            add_arguments=_add_architectures,
        ),
    )
}


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; those of the process when left out.

    Returns:
        0; 1 where the user has something to mend; 3 where loss, gradients or weights were not finite; 4 where
        a callback stopped the run; 128 and a signal's number where that did. Wrong usage raises
        SystemExit(2).
    """
    survive_dead_output()
    start_command()
    given = sys.argv[1:] if argv is None else argv
    _quieten_lightning()
    try:
        arguments = restrict(given)
        with ending_in_order(), listed_once():
            if arguments and arguments[0] in STANDALONE:
                STANDALONE[arguments[0]](arguments[1:])
                return 0
            stopped = AndreaCLI(arguments).stop_reason.event
    except StoppedBySignal as stop:
        say_error(f"andrea: {stop}; the same command with --resume goes on")
        return int(cast(int, stop.code))
    except RefusedArguments as refused:
        say_error(f"andrea: error: {explain(refused, given_texts(given))}")
        raise
    except (NonFiniteError, UserError, MisconfigurationException, OSError, UnicodeError) as error:
        hint = encoding_hint() if isinstance(error, UnicodeError) else ""
        say_error(f"andrea: error: {dead_worker(error) or error}{hint}")
        if isinstance(error, UsageError):
            raise SystemExit(EXIT_USAGE) from error
        return EXIT_NONFINITE if isinstance(error, NonFiniteError) else EXIT_ERROR
    except Exception as error:  # torch says that a worker died within whatever the run just did
        fault = dead_worker(error)
        if fault is None:
            raise
        say_error(f"andrea: error: {fault}")
        return EXIT_ERROR
    except (KeyboardInterrupt, SystemExit) as end:
        if not isinstance(end, (KeyboardInterrupt, EndedBySignal)) and not isinstance(
            end.__context__, KeyboardInterrupt
        ):
            raise
        say_error("andrea: interrupted outside of training, where there is nothing to save")
        return int(cast(int, end.code)) if isinstance(end, EndedBySignal) else EXIT_INTERRUPTED
    if stopped is not None:
        say_error(f"andrea: stopped by {stopped.kind}: {stopped.message}")
        return EXIT_STOPPED
    return 0


def _quieten_lightning() -> None:
    """Leave out what Lightning says that is no news here: advertisements, and advice for other modules."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
    for message in (
        "Using ModelCheckpoint with manual optimization",
        "LightningCLI's args parameter is intended to run from within Python",
        "Experiment logs directory .* exists",  # metrics.csv has been given another name
        "`isinstance",  # Lightning 2.6 on a newer torch
    ):
        warnings.filterwarnings("ignore", message=message)


def _named_strategy(name: Any) -> Strategy | None:
    """Return the strategy of a class path without options, which the parser takes for a registered name."""
    if not isinstance(name, str):
        return None
    module, _, kind = name.rpartition(".")
    for package in (andrea_pl.strategies, lightning.pytorch.strategies):
        found = getattr(package, kind, None)
        if module in ("", package.__name__) and isinstance(found, type) and issubclass(found, Strategy):
            try:
                return found()
            except TypeError as error:
                raise UserError(
                    f"trainer.strategy: {name} needs options, or is none by itself: {error}"
                ) from error
    return None


def _is_under_slurm(trainer: pl.Trainer) -> bool:
    connector = getattr(trainer, "_accelerator_connector", None)
    return isinstance(getattr(connector, "cluster_environment", None), SLURMEnvironment)


def _load_weights(module: LanguageModule, path: str) -> None:
    checkpoint = read_checkpoint(path)
    block = read_block(checkpoint, path)
    weights = read_weights(checkpoint, block, path)
    refuse_nonfinite(weights, path)
    module.check_block(block)
    module.network.load_state_dict(weights)


def _require_checkpoint(options: dict[str, Any]) -> None:
    if options.get("ckpt_path") is None:
        raise UserError("--ckpt_path is needed, a file: without a checkpoint the weights would be random")
