"""A checkpoint that the code wrote before its modules were put into rooms: it loads, generates and resumes.

It holds update 10 of a run over two sources under a bandit, with options by their old names, every callback
that has state, and the optimizer's groups without names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_callbacks import CoherenceGate, MomentMonitor, RunJournal, SpikeForensics
from andrea_pl import (
    Curriculum,
    DurableCheckpoint,
    LanguageModule,
    TextDataModule,
    TextSource,
    TransformerConfig,
    Ucb1,
)
from tests.support.toy import build_trainer

OLD = Path(__file__).parent / "checkpoints" / "before_the_rooms.ckpt"

NORMS = {
    "network.embedding.weight": 3.612425,
    "network.blocks.0.attention_norm.weight": 2.081466,
    "network.blocks.0.attention.qkv.weight": 0.4194633,
    "network.blocks.0.attention.out.weight": 0.3297071,
    "network.blocks.0.feed_forward_norm.weight": 2.13094,
    "network.blocks.0.feed_forward.expand.weight": 0.6192481,
    "network.blocks.0.feed_forward.contract.weight": 0.6193745,
    "network.final_norm.weight": 2.208946,
    "network.output.weight": 3.612425,
}
"""L2 norms of the weights after update 20, by the code that wrote the checkpoint."""


def text() -> TextDataModule:
    """Return the run's text: of the old options only the names differ."""
    prose = [f"the cat sat on the mat {n} times and then it ran" for n in range(30)]
    lists = [f"- {n}: one\n- {n + 1}: two" for n in range(30)]
    for name, documents in (("prose", prose), ("lists", lists)):
        Path(f"{name}.txt").write_text("\n\n".join(documents))
    sources = [
        TextSource(name=name, paths=[f"{name}.txt"], document_separator="\n\n", min_weight=0.1)
        for name in ("prose", "lists")
    ]
    curriculum = Curriculum(
        mixture=Ucb1(reward_scale=10.0),
        phases=[3, 5],
        reward_lag=2,
        weight_unit="tokens",
        min_clip_coefficient=0.25,
    )
    return TextDataModule(
        sources,
        vocab_size=258,
        block_size=32,
        sequences_per_update=8,
        micro_batch_tokens=128,
        val_fraction=0.1,
        curriculum=curriculum,
        cache_dir="cache",
    )


def keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names of everything in nested states; places in lists are left out."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from keys(part, f"{prefix}.{name}")
    elif isinstance(value, list):
        for part in value:
            yield from keys(part, f"{prefix}[]")
    else:
        yield prefix


def test_it_is_small() -> None:
    assert OLD.stat().st_size < 60_000


def test_it_generates() -> None:
    module = LanguageModule.load_from_checkpoint(OLD)
    assert module.network.config.d_model == 4
    written = module.generate(["the cat"], 5, torch.Generator().manual_seed(0))
    assert isinstance(written[0], str)
    assert torch.equal(
        module.network.embedding.weight,
        torch.load(OLD, weights_only=True)["state_dict"]["network.embedding.weight"],
    )


@pytest.mark.system
def test_it_resumes(tmp_path: Path) -> None:
    """To the weights that the code which wrote it came to; what is saved then has the same keys."""
    shape = TransformerConfig(
        vocab_size=258, block_size=32, d_model=4, n_heads=2, n_layers=1, tie_output=True
    )
    module = LanguageModule(shape, lr=1e-2, warmup_updates=3, min_lr_ratio=0.1)
    saving = DurableCheckpoint(every=10, keep=0, dirpath=str(tmp_path / "saved"))
    watching = [MomentMonitor(), SpikeForensics(), RunJournal(), CoherenceGate(start=10**6)]
    trainer = build_trainer(
        max_steps=20,
        limit_val_batches=1,
        val_check_interval=5,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
        callbacks=[saving, *watching],
    )
    trainer.fit(module, datamodule=text(), ckpt_path=str(OLD))
    assert trainer.global_step == module.updates_applied == 20
    found = {name: float(each.double().norm()) for name, each in module.state_dict().items()}
    assert found == pytest.approx(NORMS, rel=1e-4)
    assert [group["name"] for group in trainer.optimizers[0].param_groups] == ["decay", "no_decay"]
    old, new = (torch.load(each, weights_only=True) for each in (OLD, saving.last_path))
    before, after = (
        set(keys({name: part for name, part in each.items() if name != "loops"})) for each in (old, new)
    )
    assert before - after == set()
    assert after - before == {".optimizer_states[].param_groups[].name"}
