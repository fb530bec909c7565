"""Exports checkpoints for Hugging Face's transformers: weights, configuration, tokenizer, generation.

norm: rms,   activation: swiglu  ->  the layout of Llama
norm: layer, activation: gelu    ->  the layout of GPT-NeoX, without parallel residuals, whole heads rotated
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from tokenizers import Tokenizer, processors
from torch import Tensor

from andrea_pl.data.store.tokenizer import END_OF_DOCUMENT, TextTokenizer
from andrea_pl.errors import UserError
from andrea_pl.language.model_spec import ModelBlock, read_block, read_weights, refuse_nonfinite
from andrea_pl.network.config import TransformerConfig
from andrea_pl.network.transformer import LAYER_NORM_EPS, RMS_NORM_EPS
from andrea_pl.runs.checkpoint_io import read_checkpoint

State = Mapping[str, Tensor]


def export_model(ckpt_path: str, output: str) -> None:
    """Write a checkpoint's model for transformers: `AutoModelForCausalLM.from_pretrained(output)` reads it.

    Args:
        ckpt_path: A checkpoint that `andrea fit` wrote.
        output: Folder to write. It must be new or empty.

    Raises:
        UserError: If the checkpoint cannot be used, the folder is not empty, or transformers has no layout
            for this architecture.
        NonFiniteError: If a weight is NaN or infinite.
    """
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{output} is there already; give a folder that is new or empty")
    checkpoint = read_checkpoint(ckpt_path)
    block = read_block(checkpoint, ckpt_path)
    state = read_weights(checkpoint, block, ckpt_path)
    refuse_nonfinite(state, ckpt_path)
    tensors, described = convert(block.network, state)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            _write(temporary, tensors, described, block)
            folder.mkdir(exist_ok=True)
            for each in sorted(temporary.iterdir()):
                each.replace(folder / each.name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{output} could not be written: {error.strerror or error}") from error
    print(f"{described['architectures'][0]}: {output}")


def convert(config: TransformerConfig, state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights under the names of a layout of transformers, and its config.json.

    Args:
        config: The network's shape.
        state: Its weights, by the names of `RoPELanguageModel`.

    Raises:
        UserError: If transformers has no layout for this architecture.
    """
    if (config.norm, config.activation) == ("rms", "swiglu"):
        tensors, described = _llama(config, state), _llama_config(config)
    elif (config.norm, config.activation) == ("layer", "gelu"):
        tensors, described = _neox(config, state), _neox_config(config)
    else:
        raise UserError(
            f"transformers has no layout for norm: {config.norm} with activation: {config.activation}; "
            "there is one for rms with swiglu (Llama) and one for layer with gelu (GPT-NeoX)"
        )
    described |= {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.feed_forward_width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "max_position_embeddings": config.block_size,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_output,
        "attention_bias": config.bias,
        "attention_dropout": config.dropout,
        "torch_dtype": str(state["embedding.weight"].dtype).removeprefix("torch."),
    }
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, described


def _llama(config: TransformerConfig, state: State) -> dict[str, Tensor]:
    tensors = {
        "model.embed_tokens.weight": state["embedding.weight"],
        "model.norm.weight": _scale(config, state, "final_norm"),
    }
    if not config.tie_output:
        tensors["lm_head.weight"] = state["output.weight"]
    for layer in range(config.n_layers):
        here, there = f"blocks.{layer}.", f"model.layers.{layer}."
        tensors[f"{there}input_layernorm.weight"] = _scale(config, state, f"{here}attention_norm")
        tensors[f"{there}post_attention_layernorm.weight"] = _scale(config, state, f"{here}feed_forward_norm")
        for kind in ("weight", "bias") if config.bias else ("weight",):
            for name, part in zip("qkv", state[f"{here}attention.qkv.{kind}"].chunk(3), strict=True):
                tensors[f"{there}self_attn.{name}_proj.{kind}"] = part
            gate, up = state[f"{here}feed_forward.expand.{kind}"].chunk(2)
            tensors |= {
                f"{there}self_attn.o_proj.{kind}": state[f"{here}attention.out.{kind}"],
                f"{there}mlp.gate_proj.{kind}": gate,
                f"{there}mlp.up_proj.{kind}": up,
                f"{there}mlp.down_proj.{kind}": state[f"{here}feed_forward.contract.{kind}"],
            }
    return tensors


def _llama_config(config: TransformerConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_key_value_heads": config.n_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": config.rope_theta,
        "mlp_bias": config.bias,
    }


def _neox(config: TransformerConfig, state: State) -> dict[str, Tensor]:
    tensors = {
        "gpt_neox.embed_in.weight": state["embedding.weight"],
        "embed_out.weight": state["output.weight"],
        **_layer_norm(config, state, "final_norm", "gpt_neox.final_layer_norm"),
    }
    if config.tie_output:
        del tensors["embed_out.weight"]
    for layer in range(config.n_layers):
        here, there = f"blocks.{layer}.", f"gpt_neox.layers.{layer}."
        tensors |= _layer_norm(config, state, f"{here}attention_norm", f"{there}input_layernorm")
        tensors |= _layer_norm(config, state, f"{here}feed_forward_norm", f"{there}post_attention_layernorm")
        for kind in ("weight", "bias"):
            names = {
                "attention.dense": "attention.out",
                "mlp.dense_h_to_4h": "feed_forward.expand",
                "mlp.dense_4h_to_h": "feed_forward.contract",
            }
            for theirs, ours in names.items():
                is_optional = theirs.startswith("attention")  # its bias can be left out there
                if f"{here}{ours}.{kind}" in state:
                    tensors[f"{there}{theirs}.{kind}"] = state[f"{here}{ours}.{kind}"]
                elif not is_optional:
                    width = len(state[f"{here}{ours}.weight"])
                    tensors[f"{there}{theirs}.{kind}"] = torch.zeros(width)
            if f"{here}attention.qkv.{kind}" in state:  # by part and head here, by head and part there
                rows = cast(
                    Tensor, state[f"{here}attention.qkv.{kind}"].unflatten(0, (3, config.n_heads, -1))
                )
                tensors[f"{there}attention.query_key_value.{kind}"] = rows.transpose(0, 1).flatten(0, 2)
    return tensors


def _neox_config(config: TransformerConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_act": "gelu",
        "layer_norm_eps": LAYER_NORM_EPS,
        "rotary_pct": 1.0,
        "rotary_emb_base": config.rope_theta,
        "rope_theta": config.rope_theta,
        "use_parallel_residual": False,
        "hidden_dropout": config.dropout,
    }


def _scale(config: TransformerConfig, state: State, norm: str) -> Tensor:
    """Return a norm's scale, or ones if it has none."""
    like = state["embedding.weight"]
    return state[f"{norm}.weight"] if config.norm_weight else torch.ones(config.d_model, dtype=like.dtype)


def _layer_norm(config: TransformerConfig, state: State, ours: str, theirs: str) -> dict[str, Tensor]:
    scale = _scale(config, state, ours)
    shift = state.get(f"{ours}.bias", torch.zeros_like(scale))
    return {f"{theirs}.weight": scale, f"{theirs}.bias": shift}


def _write(folder: Path, tensors: dict[str, Tensor], described: dict[str, Any], block: ModelBlock) -> None:
    tokenizer = block.tokenizer
    if tokenizer is not None:
        ends = {f"{kind}_token_id": tokenizer.end_id for kind in ("bos", "eos", "pad")}
        described |= ends
        vocab_size, block_size = block.network.sizes
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{kind}_token": END_OF_DOCUMENT for kind in ("bos", "eos", "pad")},
            "model_max_length": block_size,
            "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,  # text that spells a special token is text here
        }
        generation: dict[str, Any] = dict(ends)
        if tokenizer.vocab_size < vocab_size:  # rows that no token has, which are never drawn here
            generation["suppress_tokens"] = list(range(tokenizer.vocab_size, vocab_size))
        (folder / "tokenizer.json").write_text(_begin_documents(tokenizer), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", settings)
        _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "config.json", described)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _begin_documents(tokenizer: TextTokenizer) -> str:
    """Return a tokenizer.json that puts the end-of-document token before a text, as prompts here begin.

    The tokenizer's own template, which training does not use, is replaced.
    """
    exported = Tokenizer.from_str(tokenizer.definition)
    exported.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_DOCUMENT}:0 $A:0",
        pair=f"{END_OF_DOCUMENT}:0 $A:0 $B:0",
        special_tokens=[(END_OF_DOCUMENT, tokenizer.end_id)],
    )
    return exported.to_str()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
