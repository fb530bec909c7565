"""A network whose sizes come from the data, and are unknown until a trainer connects module and data.

LanguageModule(TransformerConfig(d_model=…, …))      vocab_size, block_size left out: UnbuiltNetwork
trainer.fit(module, datamodule=…) ─> complete()      the datamodule's sizes, or those of ckpt_path
                                  ─> build()         the network, as if its sizes had been given
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from typing_extensions import override

from andrea_pl.errors import UserError
from andrea_pl.network import RoPELanguageModel, TransformerConfig
from andrea_pl.network.sizes import refuse_what_cannot_fit

SIZES = ("vocab_size", "block_size")
"""Fields of a network's shape that a datamodule knows too."""


class UnbuiltNetwork(nn.Module):
    """Stands in for a network until its sizes are known. Everything that needs weights raises.

    Args:
        config: The shape, without `vocab_size`, `block_size` or both.

    Raises:
        UserError: On every use; the message names the missing sizes.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self._dtype = torch.get_default_dtype()

    def build(self) -> RoPELanguageModel:
        """Return the network that the module would have built in its constructor with these sizes.

        Lightning calls `configure_model` with other default devices and dtypes, which would draw other random
        numbers. So the network is made on the CPU with the earlier dtype, and the strategy moves it.
        """
        require_memory(self.config)
        with torch.device("cpu"), _default_dtype(self._dtype):
            return RoPELanguageModel(self.config)

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Return the error about the missing sizes."""
        names = " and ".join(self.config.missing) or "weights"
        raise UserError(
            f"the network is not built yet: its {names} were left out. Give them "
            f"(TransformerConfig({', '.join(f'{name}=…' for name in self.config.missing)}, …), or "
            f"{' and '.join(f'`network.{name}`' for name in self.config.missing)} in a configuration), "
            "call build_network(datamodule), or train with a datamodule that has them, such as TextDataModule"
        )

    @override
    def forward(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse."""
        self.refuse()

    compile = run_blocks = hidden_states = logits = count_parameters = refuse  # pyright: ignore
    _save_to_state_dict = _load_from_state_dict = refuse  # pyright: ignore


def built(network: Any, source: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a built network, with missing sizes from a datamodule or a shape.

    Args:
        network: An `UnbuiltNetwork`, possibly within `torch.compile`. Any other network is returned as it is.
        source: An object with `vocab_size` and `block_size`, or None.
        device: Device for the weights.
        dtype: Dtype of the weights.

    Raises:
        UserError: If a size is unknown.
    """
    wrapped = getattr(network, "_orig_mod", None)  # torch.compile(module.network)
    unbuilt = network if wrapped is None else wrapped
    if not isinstance(unbuilt, UnbuiltNetwork):
        return network
    config = complete(unbuilt.config, source)
    if wrapped is not None or config.missing:
        unbuilt.refuse()
    unbuilt.config = config
    return unbuilt.build().to(device, dtype)


def shard(network: RoPELanguageModel, mesh: Any) -> None:
    """Shard the parameters of a network over a device mesh, by layers (FSDP2)."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for layer in (network.embedding, *network.blocks, network.final_norm, network.output):
        if not isinstance(layer, FSDPModule) and any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)


def complete(config: TransformerConfig, source: Any) -> TransformerConfig:
    """Return a shape with missing sizes taken from a datamodule or another shape."""
    return replace(config, **{name: _size(source, name) for name in config.missing})


def compare(config: TransformerConfig, datamodule: Any) -> None:
    """Refuse a given size that is too small for the data.

    Raises:
        UserError: If a size is too small; the message names both.
    """
    for name in SIZES:
        ours, theirs = getattr(config, name), _size(datamodule, name)
        if ours is not None and theirs is not None and ours < theirs:
            raise UserError(
                f"`network.{name}` is {ours} and `{name}` is {theirs}: the network must be as large "
                f"as the data; make them equal, or leave `network.{name}` out"
            )


def knows_sizes(config: TransformerConfig, datamodule: Any) -> bool:
    """Return whether a datamodule has a shape's missing sizes; False if it gets them later."""
    with suppress(Exception):  # a property of the user's may raise anything before `setup`
        return all(_size(datamodule, name) is not None for name in config.missing)
    return False


def require_memory(config: TransformerConfig) -> None:
    """Refuse a network that exceeds this machine's memory, before anything is allocated.

    A network with unknown sizes, or on the device `meta`, passes.
    """
    if not config.missing and torch.get_default_device().type != "meta":
        refuse_what_cannot_fit(config.to_dict(), *config.sizes)


def _size(datamodule: Any, name: str) -> int | None:
    value = getattr(datamodule, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
