"""The commands that need no trainer: generate, export, build-extension."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jsonargparse import ArgumentParser

from andrea_callbacks.hooks.terminal import escaped
from andrea_pl.cli.parser import CommandParser
from andrea_pl.cli.paths import resolve
from andrea_pl.cli.starting import shown
from andrea_pl.errors import UserError
from andrea_pl.language.export import export_model
from andrea_pl.language.module import LanguageModule
from andrea_pl.network import Sampling
from andrea_pl.optim import build_extension
from andrea_pl.optim.extension import canonical_target, load_extension

SEEDS = (-(2**63), 2**64 - 1)
"""The smallest and the largest seed of torch's generators."""


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
    """Continue a prompt. The checkpoint holds everything that this needs.

    Args:
        ckpt_path: A checkpoint that `andrea fit` wrote.
        prompt: The text to continue; empty to start a document.
        max_new_tokens: Maximum number of tokens; fewer if the document ends earlier.
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Sample only from the k likeliest tokens.
        top_p: Sample only from the likeliest tokens that together reach this probability.
        seed: The same seed gives the same text.
        device: Device for the model, such as cpu or cuda.

    Raises:
        UserError: If a value is out of range, or the checkpoint cannot be used.
        NonFiniteError: If a weight of the checkpoint is NaN or infinite.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError("the prompt is not UTF-8; convert it") from error
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if not SEEDS[0] <= seed <= SEEDS[1]:
        raise UserError(f"--seed must lie in {SEEDS[0]} … {SEEDS[1]}, got {seed}")
    module = LanguageModule.load_verified(ckpt_path)
    try:
        module.to(device)
        generator = torch.Generator(device).manual_seed(seed)
    except Exception as error:  # torch has several kinds for a device that it does not have
        reason = str(error).partition("\n")[0]
        raise UserError(f"--device {device} cannot be used here: {reason}") from error
    text = prompt + module.generate([prompt], max_new_tokens, generator, sampling)[0]
    print(shown(text, sys.stdout))


def build_extensions(architectures: list[str]) -> None:
    """Build the clip extension ahead of time, and print its path.

    Args:
        architectures: CUDA architectures, such as sm_90. The CPU part is always built.
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
