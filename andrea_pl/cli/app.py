"""LightningCLI with a fixed model and data class: finds the checkpoint, acquires the folders, and runs."""

import json
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import lightning.pytorch.strategies
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

import andrea_pl.strategies
from andrea_callbacks import RunEvent, RunReport, UpdateProgressBar
from andrea_callbacks.hooks.lightning_state import cluster_environment
from andrea_callbacks.hooks.terminal import escaped
from andrea_callbacks.numerics.host_transfer import gather_objects
from andrea_pl.cli.arguments import CLIP_STRATEGIES, TRUST_HELP
from andrea_pl.cli.commands import STANDALONE
from andrea_pl.cli.parser import CommandParser
from andrea_pl.cli.paths import expand_home, resolve
from andrea_pl.cli.renamed import translate
from andrea_pl.cli.saved_configuration import KeepConfig
from andrea_pl.cli.starting import slurm_fault
from andrea_pl.cli.trainer import CommandTrainer
from andrea_pl.data.module import TextDataModule
from andrea_pl.errors import UserError
from andrea_pl.language.model_spec import read_block, read_weights, refuse_nonfinite
from andrea_pl.language.module import LanguageModule
from andrea_pl.network.sizes import refuse_absurd_numbers
from andrea_pl.runs.checkpoint_callback import DurableCheckpoint
from andrea_pl.runs.checkpoint_io import DurableCheckpointIO, read_checkpoint
from andrea_pl.runs.folders import RunFolders
from andrea_pl.runs.restoring import require_state, restoring
from andrea_pl.runs.resume import Continuation, choose_text, continue_logs, find_run, requeued_run
from andrea_pl.runs.settings import KEY as SETTINGS_KEY
from andrea_pl.runs.settings import compare_settings

LIGHTNING_KEYWORDS = ("best", "last", "hpc", "registry")
"""Words that Lightning accepts for a checkpoint besides a path."""


class StopReason(Callback):
    """Records the event by which a callback stopped the run."""

    event: RunEvent | None = None

    def take_event(self, trainer: pl.Trainer, event: RunEvent) -> None:
        """Keep an event that stops the run."""
        del trainer
        if event.details.get("stops"):
            self.event = event


class AndreaCLI(LightningCLI):
    """LightningCLI with a fixed model and data class; a checkpoint cannot change the configuration."""

    def __init__(self, args: list[str]) -> None:
        self.stop_reason = StopReason()
        self.folders = RunFolders()
        self._called = args[0] if args and args[0] in self.subcommands() else None
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
        """Return the subcommands that need a trainer, and the arguments that the command fills in."""
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
    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        """Add options only to the called subcommand, since adding them takes most of the start-up time."""
        if self._called in (None, subcommand):
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        return self.init_parser(**kwargs)

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Explain in every help text which classes a configuration may name."""
        kwargs["epilog"] = TRUST_HELP
        kwargs["allow_abbrev"] = False
        return super().init_parser(**kwargs)

    @override
    def instantiate_classes(self) -> None:
        """Instantiate the classes; turn a class's refusal into one line.

        Classes receive expanded paths. The saved configuration keeps them as written, so that it also works
        in another home folder.
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
        """Add the progress bar and the final report, unless the user configured their own."""
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
        """Parse. A command without a trainer must be the first word, and is run on its own."""
        super().parse_arguments(parser, args)
        name: str = cast(Any, self.config)["subcommand"]
        if name in STANDALONE:
            raise UserError(f"write andrea {name} first and its options after it")
        refuse_absurd_numbers(cast(Any, self.config)[name].as_dict())

    @override
    def after_instantiate_classes(self) -> None:
        """Find the checkpoint to use, then acquire the run's folders before loggers open files there."""
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
        """Compare the settings of a resumed checkpoint; prepare the text with its tokenizer."""
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
            if SETTINGS_KEY in checkpoint:  # paths with or without ~, options by their old names
                checkpoint = {**checkpoint, SETTINGS_KEY: translate(expand_home(checkpoint[SETTINGS_KEY]))}
            ours = expand_home(keeper.settings)
            with restoring(path):
                compare_settings(checkpoint, ours, path, allowed, keeper.defaults)
        choose_text(cast(TextDataModule, self.datamodule), checkpoint, path, block.tokenizer, is_resumed)

    def _find_run(self, given: str | None, is_free: bool) -> Continuation | None:
        """Return the run to continue: the given one, or that of a requeued SLURM job."""
        if given is not None:
            return find_run(self.trainer, given, self._lock)
        return requeued_run(self.trainer, self._lock) if is_free else None

    def _lock(self, folder: Path) -> None:
        self.folders.lock(self.trainer, folder)

    def _callbacks(self) -> list[Callback]:
        return cast("list[Callback]", cast(Any, self.trainer).callbacks)

    def before_fit(self) -> None:
        """Print the number of parameters."""
        module = cast(LanguageModule, self.model)
        print(f"parameters: {module.network.count_parameters():,}")

    def after_validate(self) -> None:
        """Print the figures."""
        self._print_metrics()

    def after_test(self) -> None:
        """Print the figures."""
        self._print_metrics()

    def _print_metrics(self) -> None:
        for name, value in self.trainer.callback_metrics.items():
            print(f"{name}: {float(value):.6g}")

    def predict(self, **kwargs: Any) -> None:
        """Write the predictions of all ranks into one file of JSON lines in the trainer's root folder."""
        path = Path(self.trainer.default_root_dir) / "predictions.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        batches = cast("list[list[dict[str, Any]]]", self.trainer.predict(**kwargs)) or []
        rows = [row for batch in batches for row in batch]
        rows = [row for share in gather_objects(rows) for row in share]
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
        """Do nothing: options come only from flags and files, never from a checkpoint."""


def _named_strategy(name: Any) -> Strategy | None:
    """Return the strategy for a class path without options, which the parser takes for a registered name."""
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
    return isinstance(cluster_environment(trainer), SLURMEnvironment)
