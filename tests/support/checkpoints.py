"""Checkpoints for tests, and what can befall them."""

from pathlib import Path
from typing import Any

import torch

from andrea_pl import DurableCheckpointIO, LanguageModule, TransformerConfig
from andrea_pl.data.store.tokenizer import TextTokenizer
from andrea_pl.language.model_spec import ModelBlock
from andrea_pl.runs.manifest import manifest_path


def save(path: Path, **options: Any) -> LanguageModule:
    """Write a checkpoint of a random model and a tokenizer, and return the model."""
    tokenizer = TextTokenizer.train(["a text of words, and words of a text " * 3], 270)
    config = TransformerConfig(
        **{"vocab_size": 280, "block_size": 32, "d_model": 32, "n_heads": 4, "n_layers": 2} | options
    )
    module = LanguageModule(config)
    with torch.no_grad():
        for each in module.parameters():  # far from their first values, norms and biases too
            each.normal_(0.5 if each.ndim == 1 else 0.0, 0.2)
    checkpoint = {
        "global_step": 1,
        "state_dict": module.state_dict(),
        "andrea_pl": ModelBlock(network=config, tokenizer=tokenizer).to_dict(),
    }
    DurableCheckpointIO().save_checkpoint(checkpoint, path)
    return module.eval()


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "one byte": lambda path: path.write_bytes(path.read_bytes()[:1]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "all but one byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: flip(path, path.stat().st_size // 2 * 8 + 3),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "removed": lambda path: path.unlink(),
    "no manifest": lambda path: manifest_path(path).unlink(),
    "torn manifest": lambda path: manifest_path(path).write_text("{"),
}


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


class Evil:
    """Pickled, it is a call that makes a file."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("witness"),)


def checkpoint(update: int, size: int = 1000) -> dict[str, Any]:
    weights = {"w": torch.full((size,), float(update))}
    return {"global_step": update, "state_dict": weights, "optimizer_states": []}


LAYOUTS = {
    "LlamaForCausalLM": {"norm": "rms", "activation": "swiglu"},
    "GPTNeoXForCausalLM": {"norm": "layer", "activation": "gelu"},
}
