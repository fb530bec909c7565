"""A library that somebody else could have written is not loaded."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from andrea_pl.optim import ExtensionError, build_extension, clipping, extension, ownership
from andrea_pl.optim.extension import load_extension
from andrea_pl.optim.ownership import PlantedError, refuse_others


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a library that a compiler of the user's made, in a folder of the user's."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(extension, "_loaded", set())
    monkeypatch.setattr(extension, "_is_defined", lambda name: False)
    monkeypatch.setattr(clipping, "_told", set())
    compiler = tmp_path / "quick"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return build_extension("cpu")


def test_a_library_that_others_can_write(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, its folder, the cache: one line with the remedy, before anything is loaded."""
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("it was loaded"))
    cache = library.parents[1]
    for place in (library, library.parent, cache):
        mode = place.stat().st_mode
        place.chmod(mode | 0o002)
        with pytest.raises(ExtensionError, match=rf"^{place} can be written by everybody; remove") as error:
            load_extension(torch.device("cpu"))
        assert "TORCH_EXTENSIONS_DIR" in str(error.value)
        place.chmod(mode)
    cache.chmod(0o1777)  # as /tmp is: others cannot replace what is there
    assert build_extension("cpu") == library


def test_a_planted_library_in_a_folder_of_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder is still to be made in it, and where a link leads there."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for cache in (shared, shared / "mine", tmp_path / "link"):
        if cache.name == "link":
            cache.symlink_to(shared)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache))
        with pytest.raises(ExtensionError, match=rf"^{shared} can be written by everybody"):
            build_extension("cpu")


def test_another_user(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's and one's own are taken, another user's are not: file, folder or link."""
    real = Path.stat
    odd = library

    def stat(path: Path, **options: bool) -> os.stat_result:
        values = list(real(path, **options))
        values[4] = 4711 if path == odd else values[4]
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(
        PlantedError, match=f"{library} belongs to the user of number 4711, and is not loaded"
    ):
        refuse_others(library)
    odd = library.parent
    with pytest.raises(ExtensionError, match=f"{library.parent} belongs to the user of number 4711"):
        build_extension("cpu")


def test_groups(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of this user alone may write, as home folders are often set up; another may not."""
    library.chmod(0o775)
    monkeypatch.setattr(ownership, "_is_own_group", lambda gid: True)
    refuse_others(library)
    monkeypatch.setattr(ownership, "_is_own_group", lambda gid: False)
    with pytest.raises(PlantedError, match="can be written by its group"):
        refuse_others(library)


def test_what_is_built_is_nobody_elses(library: Path) -> None:
    """Whatever the umask is."""
    shutil.rmtree(library.parent)
    before = os.umask(0)
    try:
        rebuilt = build_extension("cpu")
    finally:
        os.umask(before)
    assert rebuilt.stat().st_mode & 0o022 == 0
    assert rebuilt.parent.stat().st_mode & 0o022 == 0
