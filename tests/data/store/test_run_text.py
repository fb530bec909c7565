"""Prepared text is kept by its content: what a resume uses, which changes are noticed, what is pruned."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_pl import LanguageModule, UserError
from tests.support.runs import SHAPE, data_module, train
from tests.support.texts import TEXTS, said, write
from tests.support.toy import build_trainer

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")  # small texts give few merges, on purpose


class TestResume:
    """A run goes on with the text that it began with."""

    @pytest.mark.system
    @pytest.mark.parametrize("change", ["grown", "gone", "other"])
    def test_whatever_became_of_the_files(
        self, change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The weights are those of a run whose text never changed, and one line says what did."""
        path, cache = write(tmp_path), tmp_path / "cache"
        _, straight = train(path, tmp_path / "undisturbed" / "cache", 8)
        train(path, cache, 4)
        if change == "gone":
            path.unlink()
        else:
            more = [f"another text of number {n}" for n in range(41)]
            write(tmp_path, TEXTS + more if change == "grown" else [f"{text}!" for text in TEXTS])
        if change != "gone":
            data_module(path, cache).prepare_data()  # somebody prepares the new text meanwhile
        caplog.clear()
        with caplog.at_level("INFO"):
            _, resumed = train(path, cache, 8, str(tmp_path / "checkpoints" / "update-000004.ckpt"))
        expected = {
            "grown": "readmes: 41 documents more; this run keeps the text it started with",
            "gone": "readmes: cannot be read any more (",
            "other": "readmes: 60 documents new, 60 gone; this run keeps the text it started with",
        }
        assert expected[change] in said(caplog)
        for one, two in zip(straight.parameters(), resumed.parameters(), strict=True):
            assert one.equal(two)

    def test_unchanged_text_is_not_talked_of(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write(tmp_path)
        train(path, tmp_path / "cache", 4)
        caplog.clear()
        with caplog.at_level("INFO"):
            train(path, tmp_path / "cache", 6, str(tmp_path / "checkpoints" / "update-000004.ckpt"))
        assert "this run keeps" not in said(caplog)
        assert "preparing source" not in said(caplog)

    def test_a_store_that_is_gone(self, tmp_path: Path) -> None:
        """Made again where the text is what it was; otherwise refused before anything is restored."""
        path, cache = write(tmp_path), tmp_path / "cache"
        train(path, cache, 4)
        shutil.rmtree(cache)
        checkpoint = str(tmp_path / "checkpoints" / "update-000004.ckpt")
        train(path, cache, 6, checkpoint)
        shutil.rmtree(cache)
        write(tmp_path, [f"{text}!" for text in TEXTS])
        before = LanguageModule(SHAPE, schedule="constant")
        weights = [each.clone() for each in before.parameters()]
        trainer = build_trainer(max_steps=8, max_epochs=-1)
        with pytest.raises(UserError, match=r"the text of readmes changed.*put the text back.*`init_from`"):
            trainer.fit(before, datamodule=data_module(path, cache), ckpt_path=checkpoint)
        assert all(one.equal(two) for one, two in zip(weights, before.parameters(), strict=True))

    @pytest.mark.parametrize("edit", [{"stores": {}}, {"stores": {"readmes": {"content": 1}}}, {"stores": 7}])
    def test_an_edited_record_is_none(self, edit: dict[str, Any], tmp_path: Path) -> None:
        """Then the text is compared by a checksum, as for a checkpoint of an earlier version."""
        path, cache = write(tmp_path), tmp_path / "cache"
        train(path, cache, 4)
        file = tmp_path / "checkpoints" / "update-000004.ckpt"
        checkpoint = torch.load(file, weights_only=True)
        checkpoint["TextDataModule"] |= edit
        torch.save(checkpoint, tmp_path / "edited.ckpt")
        train(path, cache, 6, str(tmp_path / "edited.ckpt"))
        write(tmp_path, TEXTS[:50])
        train(path, cache, 6, str(tmp_path / "edited.ckpt"))  # the store is still there
        shutil.rmtree(cache)
        with pytest.raises(UserError, match="the text changed since this run began"):
            train(path, cache, 6, str(tmp_path / "edited.ckpt"))

    def test_a_fresh_fit_takes_the_text_as_it_is_now(self, tmp_path: Path) -> None:
        path, cache = write(tmp_path), tmp_path / "cache"
        data = data_module(path, cache)
        data.prepare_data()
        write(tmp_path, TEXTS[:10])
        again = data_module(path, cache)
        again.prepare_data()
        again.setup()
        data.setup()
        assert len(again.corpus.stores["readmes"].records) == 10
        assert len(data.corpus.stores["readmes"].records) == 60
