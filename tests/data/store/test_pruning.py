"""Pruning: which stores no run needs any more."""

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest

from andrea_pl.data.store.preparation import open_prepared, prepare
from andrea_pl.data.store.pruning import prune
from andrea_pl.data.store.versions import all_versions, keepers
from andrea_pl.network import TransformerConfig
from tests.support.runs import data_module, train
from tests.support.texts import TEXTS, preparation, write

pytestmark = pytest.mark.filterwarnings("ignore:the text gave")

SHAPE = TransformerConfig(vocab_size=300, block_size=64, d_model=16, n_heads=2, n_layers=1)


DAYS_AGO = time.time() - 10 * 24 * 3600


class TestPruning:
    """What keeps a store, and what goes."""

    def stores(self, tmp_path: Path) -> tuple[Any, list[Path]]:
        """Prepare three contents of a source, long ago; return the stores, the one in use first."""
        todo = preparation(tmp_path / "text.jsonl", tmp_path / "cache")
        for count in (60, 50, 40):
            write(tmp_path, TEXTS[:count])
            prepare(todo)
        stores = all_versions(todo.folder)["s"]
        for each in stores:
            os.utime(each / "manifest.json", (DAYS_AGO, DAYS_AGO))
        assert len(stores) == 3
        return todo, stores

    def test_what_nothing_keeps_goes(self, tmp_path: Path) -> None:
        todo, stores = self.stores(tmp_path)
        (todo.cache_dir / "tokenizer-0123.json").write_text("{}")
        (todo.cache_dir / "something else").mkdir()
        removed = prune(todo.cache_dir)
        assert {each.path for each in removed} == set(stores[1:])
        assert all(each.size > 1000 for each in removed)
        assert all_versions(todo.folder) == {"s": stores[:1]}
        assert (todo.cache_dir / "something else").is_dir()
        assert prune(todo.cache_dir) == []
        assert len(open_prepared(todo).stores["s"].records) == 40

    def test_a_run_keeps_its_text(self, tmp_path: Path) -> None:
        """As long as its folder of checkpoints exists."""
        path, cache = write(tmp_path), tmp_path / "cache"
        train(path, cache, 2)
        write(tmp_path, TEXTS[:10])
        data_module(path, cache).prepare_data()
        (settings,) = [each for each in cache.iterdir() if each.is_dir()]
        current, old = all_versions(settings)["readmes"]
        assert keepers(old) == [str(tmp_path / "checkpoints")]
        os.utime(old / "manifest.json", (DAYS_AGO, DAYS_AGO))
        assert prune(cache) == []
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        gc.collect()  # the run of this process
        assert [each.path for each in prune(cache)] == [old]
        assert current.is_dir()

    def test_an_open_store_stays(self, tmp_path: Path) -> None:
        from andrea_pl.data.store.token_store import TokenStore

        todo, stores = self.stores(tmp_path)
        opened = TokenStore(stores[1])
        assert [each.path for each in prune(todo.cache_dir)] == [stores[2]]
        del opened
        assert [each.path for each in prune(todo.cache_dir)] == [stores[1]]

    def test_a_store_that_was_just_used_stays(self, tmp_path: Path) -> None:
        todo, stores = self.stores(tmp_path)
        os.utime(stores[1] / "manifest.json")
        assert [each.path for each in prune(todo.cache_dir)] == [stores[2]]
