"""The command `andrea`: LightningCLI's fit, validate, test and predict, and some that are ours."""

import json
import logging
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, cast

import lightning.pytorch as pl
import lightning.pytorch.strategies
import torch
import yaml
from jsonargparse import ArgumentParser, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

import andrea_pl.strategies
from andrea_callbacks.console import RunReport, UpdateProgressBar
from andrea_pl.block import read_block
from andrea_pl.checkpoint import read_checkpoint
from andrea_pl.data.module import TextDataModule
from andrea_pl.errors import UserError
from andrea_pl.language import LanguageModule
from andrea_pl.network import Sampling
from andrea_pl.optim import build_extension
from andrea_pl.optim.extension import canonical_target, load_extension
from andrea_pl.strategies import ClipDDPStrategy, ClipModelParallelStrategy, ClipSingleDeviceStrategy
from andrea_pl.update import NonFiniteError

TRUSTED_IMPORTS = [
    "andrea_callbacks",
    "andrea_pl",
    "lightning.fabric.plugins",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "torch.optim",
]
"""What a configuration file may name as a class."""

TRUST_FLAG = "--trust_imports"
TRUST_HELP = (
    f"A configuration may name classes of {', '.join(TRUSTED_IMPORTS)}; {TRUST_FLAG} NAME on the command "
    "line allows another module or package, NAME, as well."
)

CLIP_STRATEGIES: dict[str, type[Strategy]] = {
    each.strategy_name: each
    for each in (ClipSingleDeviceStrategy, ClipDDPStrategy, ClipModelParallelStrategy)
}
"""The strategies that carry the clip hook, by the names they are registered under."""

NO_CALLBACK = r" *- Problem with given class_path 'lightning.Callback':\n.*\n"
"""What the parser adds to the faults of any callback: that the base class would not do either."""

LIBRARY_REMEDY = "Add the import path to import_path_allowlist in set_parsing_settings to allow it"

LIGHTNING_KEYWORDS = ("best", "last", "hpc", "registry")
"""What Lightning takes for a checkpoint besides a path."""

REPLACED_WHOLE = {"data.sources": "[]", "data.curriculum.mixture": "null", "trainer.callbacks": "[]"}
"""Keys whose later value has nothing of an earlier one, and what they are emptied by."""

UNION_NOISE = re.compile(
    r"^ *(?:- )?(?:Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Expected a "
    r"<class 'NoneType'>|Given value type: .*|Given value: (?:NestedArg|Namespace|\{).*)(?:\n|$)",
    re.MULTILINE,
)
"""What the parser says around the fault of a value that may also be null."""

EXIT_ERROR = 1


class CommandTrainer(pl.Trainer):
    """Lightning's Trainer with what the command adds to it."""

    @override
    def fit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: pl.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        init_from: str | None = None,
    ) -> None:
        """Train a model, preparing its text first where needed.

        Args:
            model: The model.
            train_dataloaders: Not used by the command.
            val_dataloaders: Not used by the command.
            datamodule: The text.
            ckpt_path: Checkpoint to resume from: weights, optimizer, schedule and position in the text.
            init_from: Checkpoint to take the weights from, and nothing else, for fine-tuning.
        """
        if init_from is not None:
            _load_weights(cast(LanguageModule, model), init_from)
        _check_checkpoint(ckpt_path)
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    @override
    def validate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a checkpoint on the held-out documents."""
        _require_checkpoint(kwargs)
        return super().validate(*args, **kwargs)

    @override
    def test(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a checkpoint on the test documents."""
        _require_checkpoint(kwargs)
        return super().test(*args, **kwargs)

    @override
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Write the loss of every held-out sequence under a checkpoint, as JSON lines."""
        _require_checkpoint(kwargs)
        return super().predict(*args, **kwargs)

    def prepare(self, model: pl.LightningModule, datamodule: TextDataModule) -> None:
        """Prepare the text: learn the tokenizer, write the token stores. Nothing is trained.

        Args:
            model: Not used.
            datamodule: The text.
        """
        del model
        datamodule.prepare_data()
        datamodule.setup()
        print(f"prepared in {datamodule.preparation.folder}")


class KeepConfig(SaveConfigCallback):
    """Saves configuration and tokenizer beside the logs; without a logger there is no such place.

    The tokenizer in the cache follows the text when that changes; the one here stays that of the run.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save on the first call."""
        if not trainer.loggers:
            return
        super().setup(trainer, pl_module, stage)
        folder = trainer.log_dir  # all ranks must ask
        tokenizer = cast(TextDataModule, cast(Any, trainer).datamodule).tokenizer
        if trainer.is_global_zero and tokenizer is not None and folder is not None:
            (Path(folder) / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")


class FinalCheckpoint(Callback):
    """Saves the last update's weights where Lightning's own checkpoint, after validation, did not."""

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, unless this update has its checkpoint."""
        saving = trainer.checkpoint_callback
        folder = saving.dirpath if isinstance(saving, ModelCheckpoint) else None
        if folder is None or not trainer.global_step:
            return
        wanted = f"step={trainer.global_step}.ckpt"
        has_it = any(file.name.endswith(wanted) for file in Path(folder).glob("*.ckpt"))
        if not trainer.strategy.broadcast(has_it):
            trainer.save_checkpoint(Path(folder) / f"end-{wanted}")


class CommandParser(LightningArgumentParser):
    """Keeps the list of subcommands at hand, for those that LightningCLI does not know."""

    subcommand_action: Any = None

    @override
    def add_subcommands(self, *args: Any, **kwargs: Any) -> Any:
        """Add the list."""
        self.subcommand_action = super().add_subcommands(*args, **kwargs)
        return self.subcommand_action

    @override
    def print_usage(self, file: Any = None) -> None:
        """Print one line instead of every option, so that an error below it can be seen."""
        print(f"usage: {self.prog.replace(' [options]', '')} [options]", file=file)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say how a module is trusted, where a configuration named another."""
        message = UNION_NOISE.sub("", re.sub(NO_CALLBACK, "", message))
        remedy = f"{TRUST_FLAG} NAME allows it, on the command line, if you trust NAME"
        super().error(message.replace(LIBRARY_REMEDY, remedy), ex)


class AndreaCLI(LightningCLI):
    """LightningCLI with a fixed model and data class; a checkpoint can slip nothing in."""

    def __init__(self, args: list[str]) -> None:
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
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let the data decide vocabulary and block size, when arguments are parsed."""
        parser.link_arguments("data.vocab_size", "model.network.vocab_size")
        parser.link_arguments("data.block_size", "model.network.block_size")

    @override
    def instantiate_classes(self) -> None:
        """Say what a class refuses in one line."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            fault: BaseException = error  # the parser wraps it in what else the value is not, once a level
            while fault.__cause__ is not None and not isinstance(fault, UserError):
                fault = fault.__cause__
            raise fault if isinstance(fault, UserError) else UserError(str(fault)) from error

    @override
    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Add the bar and the final report, where the user gave none of their kind."""
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
        if checkpoints and not any(isinstance(each, ModelCheckpoint) for each in given):
            added.append(FinalCheckpoint())
        self.trainer_defaults["callbacks"] = added
        try:
            return super().instantiate_trainer(**kwargs)
        except ValueError as error:
            ours = f" Ours are {', '.join(CLIP_STRATEGIES)}." if "strategy name" in str(error) else ""
            raise UserError(f"the trainer refuses its options: {error}{ours}") from error

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; commands without a trainer go their own way, and must be the first word."""
        super().parse_arguments(parser, args)
        name = self.config["subcommand"]
        if name in STANDALONE:
            raise UserError(f"write andrea {name} first and its options after it")

    @override
    def after_instantiate_classes(self) -> None:
        """Prepare text with the tokenizer of the checkpoint that is continued, evaluated or fine-tuned."""
        options = self.config_init[cast(str, self.subcommand)]
        if options.get("ckpt_path") and options.get("init_from"):
            raise UserError("give --ckpt_path to resume or --init_from to start from weights alone, not both")
        path = options.get("ckpt_path") or options.get("init_from")
        if path and path not in LIGHTNING_KEYWORDS:
            tokenizer = read_block(read_checkpoint(path), path).tokenizer
            if tokenizer is not None:
                cast(TextDataModule, self.datamodule).use_tokenizer(tokenizer)

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
        print(f"losses of {len(rows)} sequences: {path}")

    @override
    def _parse_ckpt_path(self) -> None:
        """Take nothing from a checkpoint into the configuration: flags and files alone decide."""


def generate_text(
    ckpt_path: str,
    prompt: str = "",
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Continue a prompt with the model and the tokenizer of a checkpoint; nothing else is needed.

    Args:
        ckpt_path: A checkpoint that `andrea fit` wrote.
        prompt: The text to continue; empty to start a document.
        max_new_tokens: Most tokens to write; less where the document ends before.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Draw only from the k likeliest tokens.
        top_p: Draw only from the likeliest tokens that together reach this probability.
        seed: The same seed writes the same text.
        device: Where the model runs, such as cpu or cuda.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("the prompt is not UTF-8; convert it") from error
    module = LanguageModule.load_from_checkpoint(ckpt_path)
    try:
        module.to(device)
        generator = torch.Generator(device).manual_seed(seed)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used here: {error}") from error
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    print(prompt + module.generate([prompt], max_new_tokens, generator, sampling)[0])


def build_extensions(architectures: list[str]) -> None:
    """Build the clip extension ahead of time, and say where it lies.

    Args:
        architectures: CUDA architectures, such as sm_90; the part for CPUs is built in any case.
    """
    targets = ["cpu", *map(canonical_target, architectures)]
    for target in targets:
        print(f"{target}: {build_extension(target)}")
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
        parser = ArgumentParser(prog=f"andrea {self.name}", description=self.description)
        parser.add_argument("-c", "--config", action="config", help="A YAML file with these options.")
        self.add_arguments(parser)
        return parser

    def __call__(self, arguments: list[str]) -> None:
        """Parse and run."""
        options = self.parser().parse_args(arguments).as_dict()
        options.pop("config", None)
        self.run(**options)


def _add_generate_arguments(parser: ArgumentParser) -> None:
    parser.add_function_arguments(generate_text)


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
        0, or 1 where the user has something to mend. Wrong usage raises SystemExit(2).
    """
    arguments = sys.argv[1:] if argv is None else argv
    _quieten_lightning()
    try:
        arguments = _restrict(arguments)
        if arguments and arguments[0] in STANDALONE:
            STANDALONE[arguments[0]](arguments[1:])
        else:
            AndreaCLI(arguments)
    except (UserError, NonFiniteError, MisconfigurationException, OSError, UnicodeError) as error:
        print(f"andrea: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def _quieten_lightning() -> None:
    """Leave out what Lightning says that is no news here: advertisements, and advice for other modules."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip: For seamless" not in record.getMessage()
    )
    for message in (
        "Using ModelCheckpoint with manual optimization",
        "LightningCLI's args parameter is intended to run from within Python",
        "`isinstance",  # Lightning 2.6 on a newer torch
    ):
        warnings.filterwarnings("ignore", message=message)


def _check_configuration(path: Path) -> None:
    """Name a configuration file that holds nothing or no text; the parser's own words name no file."""
    try:
        if not path.read_text(encoding="utf-8").strip():
            raise UserError(f"{path}: an empty configuration; start from one of the shipped configs")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not UTF-8 (byte {error.start}); convert the file, with iconv say"
        ) from error


def _restrict(arguments: list[str]) -> list[str]:
    """Close what a configuration file could reach; take the names that the user trusts."""
    kept: list[str] = []
    trusted: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == TRUST_FLAG:
            name = next(rest, None)
            if name is None:
                raise UserError(f"{TRUST_FLAG} needs the name of a module or package")
            trusted.append(name)
        elif argument.startswith(f"{TRUST_FLAG}="):
            trusted.append(argument.partition("=")[2])
        else:
            kept.append(argument)
    for before, argument in pairwise(["", *kept]):
        path = argument.partition("=")[2] if argument.startswith("--config=") else argument
        if (before in ("-c", "--config") or path != argument) and Path(path).is_file():
            _check_configuration(Path(path))
    kept = _name_strategy_class(_replace_whole(kept))
    set_parsing_settings(config_read_mode_urls_enabled=False, config_read_mode_fsspec_enabled=False)
    try:
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*TRUSTED_IMPORTS, *trusted])
    except ValueError as error:
        raise UserError(f"{TRUST_FLAG}: {error}") from error
    return kept


def _replace_whole(arguments: list[str]) -> list[str]:
    """Have a later value replace an earlier one where the parser would mix both: lists item by item, say."""
    replaced: list[str] = []
    given: set[str] = set()
    for place, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        content: Any = _read_configuration(value or following) if flag in ("-c", "--config") else None
        for key, nothing in REPLACED_WHOLE.items():
            if flag == f"--{key}" or _has(content, key):
                if key in given:
                    replaced.append(f"--{key}={nothing}")
                given.add(key)
        replaced.append(argument)
    return replaced


def _has(content: Any, key: str) -> bool:
    """Say whether nested mappings have a dotted key; options of a class alone, without its path, are none."""
    for part in key.split("."):
        if not isinstance(content, dict) or part not in content:
            return False
        content = cast("dict[str, Any]", content)[part]
    return not isinstance(content, dict) or "class_path" in content


def _read_configuration(path: str) -> Any:
    """Return what a configuration file holds, nothing where the parser will find fault with it."""
    if not Path(path).is_file():
        return {}
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}


def _name_strategy_class(arguments: list[str]) -> list[str]:
    """Write the class where one of our strategies is named and the command line gives it options."""
    flag = "--trainer.strategy"
    options = [place for place, argument in enumerate(arguments) if argument.startswith(f"{flag}.")]
    if not options:
        return arguments
    named: list[str] = []
    name: str | None = None
    for before, argument in pairwise(["", *arguments]):
        is_name = argument.startswith(f"{flag}=") or before == flag
        name = argument.removeprefix(f"{flag}=") if is_name else name
        named.append(argument.replace(name, _class_path(name)) if is_name and name else argument)
    if name is None:
        name = _configured_strategy(arguments)
        if name in CLIP_STRATEGIES:
            named.insert(options[0], f"{flag}={_class_path(name)}")
    return named


def _class_path(name: str) -> str:
    found = CLIP_STRATEGIES.get(name)
    return name if found is None else f"{found.__module__}.{found.__qualname__}"


def _configured_strategy(arguments: list[str]) -> str | None:
    """Return the strategy that the last configuration file names, if any names one."""
    name: str | None = None
    for before, argument in pairwise(["", *arguments]):
        path = argument.partition("=")[2] if argument.startswith("--config=") else argument
        if before in ("-c", "--config") or path != argument:
            content = _read_configuration(path)
            trainer = cast("dict[str, Any]", content).get("trainer") if isinstance(content, dict) else None
            named = cast("dict[str, Any]", trainer).get("strategy") if isinstance(trainer, dict) else None
            name = named if isinstance(named, str) else name
    return name


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


def _load_weights(module: LanguageModule, path: str) -> None:
    checkpoint = read_checkpoint(path)
    module.check_block(read_block(checkpoint, path))
    module.load_state_dict(checkpoint["state_dict"])


def _check_checkpoint(path: str | None) -> None:
    """Refuse a path that Lightning would fetch, or that is not there; its own keywords pass."""
    if path is not None and path not in LIGHTNING_KEYWORDS:
        read_block(read_checkpoint(path), path)


def _require_checkpoint(options: dict[str, Any]) -> None:
    if options.get("ckpt_path") in (None, *LIGHTNING_KEYWORDS):
        raise UserError("--ckpt_path is needed, a file: without a checkpoint the weights would be random")
    _check_checkpoint(options["ckpt_path"])
