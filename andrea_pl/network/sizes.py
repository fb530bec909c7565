"""Computes how much memory a network needs before anything of it is allocated."""

import os
from collections.abc import Mapping
from typing import Any, cast

from andrea_pl.errors import UserError

WEIGHT_BYTES = 4
POSITION_BYTES = 16
"""Bytes per rotary angle: the float64 angle during its computation, and its cosine and sine."""

BLOCK_BYTES = 20_000
"""Approximate bytes per block besides its weights."""


BOUNDS = {
    "seed_everything": (0, 2**32 - 1),
    "data.num_workers": (-1, 4096),
    "trainer.devices": (-1, 65_536),
    "trainer.num_nodes": (1, 1_000_000),
}
"""Sensible bounds of settings; three of them start processes."""


def refuse_what_cannot_fit(network: Mapping[str, Any], vocab_size: int, block_size: int) -> None:
    """Refuse a network whose weights and tables exceed this machine's memory.

    Args:
        network: Options of `TransformerConfig`.
        vocab_size: Number of token ids.
        block_size: Length of the longest sequence in tokens.

    Raises:
        UserError: If the network does not fit; the message names the largest part.
    """
    sizes = [network.get(name) for name in ("d_model", "n_heads", "n_layers")]
    if not all(isinstance(size, int) and size > 0 for size in [*sizes, vocab_size, block_size]):
        return  # which is refused elsewhere
    needs = memory_needs(network, vocab_size, block_size)
    needed, there = sum(needs.values()), machine_memory()
    if there is not None and needed > there:
        largest = max(needs, key=lambda name: needs[name])
        raise UserError(
            f"this network takes {_said(needed)} before it learns anything, {_said(needs[largest])} of that "
            f"by {largest}, and this machine has {_said(there)}; make it smaller"
        )


def refuse_absurd_numbers(values: Any, key: str = "") -> None:
    """Refuse numbers out of range: seeds that no generator accepts, counts that overflow.

    Raises:
        UserError: If a number is out of range; the message names its key.
    """
    if isinstance(values, Mapping):
        for name, part in cast("Mapping[str, Any]", values).items():
            refuse_absurd_numbers(part, f"{key}.{name}" if key else name)
    elif isinstance(values, list):
        for part in cast("list[Any]", values):
            refuse_absurd_numbers(part, key)
    elif isinstance(values, str) and key in BOUNDS and values.lstrip("-").isdecimal():
        refuse_absurd_numbers(int(values[:30]), key)
    elif isinstance(values, int) and not isinstance(values, bool):
        least, most = BOUNDS.get(key, (-(2**63), 2**63 - 1))
        if not least <= values <= most:
            said = f"{values}" if abs(values) < 10**24 else f"a number of {len(str(abs(values)))} digits"
            raise UserError(f"{key} must lie from {least} to {most}, got {said}")


def memory_needs(network: Mapping[str, Any], vocab_size: int, block_size: int) -> dict[str, int]:
    """Return the bytes of weights and tables, by the option that determines them."""
    width, heads, layers = int(network["d_model"]), int(network["n_heads"]), int(network["n_layers"])
    hidden = network.get("d_ff")
    hidden = 4 * width if hidden is None else int(hidden)
    matrices = 3 if network.get("activation") == "swiglu" else 2
    tables = 1 if network.get("tie_output") else 2
    block = WEIGHT_BYTES * (4 * width * width + matrices * width * hidden) + BLOCK_BYTES
    return {
        f"vocab_size {vocab_size:,}": WEIGHT_BYTES * tables * vocab_size * width,
        f"n_layers {layers:,} of d_model {width:,}": layers * block,
        f"block_size {block_size:,}": POSITION_BYTES * block_size * max(width // heads // 2, 1),
    }


def machine_memory() -> int | None:
    """Return the bytes of memory and swap of this machine, None if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123  no path of anybody's
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * (sizes["MemTotal"] + sizes.get("SwapTotal", 0))
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _said(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
