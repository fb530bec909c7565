"""Rebuilding a module from a checkpoint alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_pl import (
    LanguageModule,
    TransformerConfig,
    UserError,
)
from tests.support.runs import micro_batch
from tests.support.toy import ListLoader, build_trainer, fit

SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=1)


class TestLoading:
    """Lightning#19281: the arguments of Lightning's own load_from_checkpoint, and strict_loading."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Return a checkpoint of two updates, without the output matrix."""
        trainer, _ = fit(LanguageModule(SHAPE), [micro_batch()] * 2)
        trainer.save_checkpoint(tmp_path / "whole.ckpt")
        kept = torch.load(tmp_path / "whole.ckpt", weights_only=True)
        del kept["state_dict"]["network.output.weight"]
        torch.save(kept, tmp_path / "part.ckpt")
        return tmp_path / "part.ckpt"

    def test_not_strict(self, path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"network\.output\.weight"):
            LanguageModule.load_from_checkpoint(path)
        with pytest.raises(RuntimeError, match=r"network\.output\.weight"):
            LanguageModule.load_from_checkpoint(path, strict=True)
        with pytest.warns(
            UserWarning, match=r"not in the file: \['network\.output\.weight'\], not in .*none"
        ):
            loaded = LanguageModule.load_from_checkpoint(path, strict=False)
        kept = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in kept.items())

    def test_arguments_that_change_nothing(self, path: Path) -> None:
        whole = path.with_name("whole.ckpt")
        loaded = LanguageModule.load_from_checkpoint(
            whole, map_location="cpu", hparams_file=None, strict=None, weights_only=True, lr=1e-2
        )
        assert loaded._lr == 1e-2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"hparams_file": "hparams.yaml"}, r"hparams_file='hparams\.yaml' is not read"),
            ({"weights_only": False}, "weights_only=False would run code"),
        ],
    )
    def test_arguments_without_a_meaning(self, path: Path, options: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            LanguageModule.load_from_checkpoint(path.with_name("whole.ckpt"), **options)

    def test_a_module_that_is_not_strict(self, path: Path) -> None:
        """Both ways to go on from a checkpoint without some weights: loading, and a resume."""

        class Lenient(LanguageModule):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.strict_loading = False

        with pytest.warns(UserWarning, match="loaded without strict"):
            Lenient.load_from_checkpoint(path)
        module = Lenient(SHAPE)
        build_trainer(max_epochs=2).fit(module, ListLoader([micro_batch()] * 2), ckpt_path=path)
        assert module.updates_applied == 4
