"""What preparing one large text file takes, peak memory above the process and time; and many sources.

    python benchmarks/preparing.py [--megabytes 5 50 300] [--sources 200 2000] [--folder FOLDER]

Each figure comes from a process of its own, which reads one generated file without a separator: words of
random letters, drawn by Zipf's law, in lines. Learning and encoding are measured apart; the memory is the
peak of the resident set (VmHWM) less what the process had before it began. "one run" is a megabyte of random
letters without a single space, the worst case of huggingface/tokenizers#1313. Sources are counted in one
configuration: the time is that of `andrea fit` from its imports to the look for a checkpoint, which is after
all classes are made. Linux only.
"""

import argparse
import contextlib
import io
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from andrea_pl.data.sources.documents import TextSource
from andrea_pl.data.store.preparation import prepare
from andrea_pl.data.store.settings import Preparation
from andrea_pl.data.store.tokenizer import TextTokenizer
from saving import resident, start_peak

VOCABULARY = 2305
WORDS = 200_000
BLOCK_WORDS = 100_000
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", dtype=np.uint8)


def write_text(file: Path, megabytes: int) -> None:
    """Write so many megabytes of lines of random words, the n-th of which is drawn with a weight of 1 / n."""
    draw = np.random.default_rng(0)
    words = [draw.choice(LETTERS, draw.integers(1, 11)).tobytes() for _ in range(WORDS)]
    shares = 1 / np.arange(1, WORDS + 1)
    remaining = megabytes * 1_000_000
    with file.open("wb") as text:
        while remaining > 0:
            chosen = draw.choice(WORDS, BLOCK_WORDS, p=shares / shares.sum())
            rows = np.split(chosen, BLOCK_WORDS // 10)
            block = b"".join(b" ".join(words[word] for word in row) + b".\n" for row in rows)
            remaining -= text.write(block[:remaining])


def write_run(file: Path) -> None:
    """Write a megabyte of random letters without a space."""
    file.write_bytes(np.random.default_rng(0).choice(LETTERS, 1_000_000).tobytes())


def build_preparation(file: Path, cache: Path, tokenizer: Path | None) -> Preparation:
    """Return what prepares one file for training, by a given tokenizer or one that is learnt."""
    return Preparation(
        sources=[TextSource(name="text", paths=[str(file)], split="train")],
        vocab_size=VOCABULARY,
        tokenizer=None if tokenizer is None else str(tokenizer),
        val_fraction=0.0,
        test_fraction=0.0,
        on_error="raise",
        cache_dir=cache,
    )


def write_sources(file: Path, count: int) -> None:
    """Write a configuration with so many sources, each a file with a weight."""
    text = file.with_name("line.txt")
    text.write_text("one line\n")
    sources = "".join(f"    - {{name: s{n}, paths: ['{text}'], weight: {n}.5}}\n" for n in range(count))
    network = "  network: {d_model: 16, n_heads: 2, n_layers: 1}\n"
    file.write_text(f"data:\n  sources:\n{sources}model:\n{network}trainer: {{max_steps: 1}}\n")


def measure_start(file: Path) -> None:
    """Start the command with a checkpoint that is not there, and print the seconds until it says so."""
    from andrea_pl.cli.main import main as andrea

    began = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = andrea(["fit", "--config", str(file), "--ckpt_path", "none.ckpt"])
    seconds = time.perf_counter() - began
    assert code == 1, said.getvalue()
    assert "none.ckpt: no such" in said.getvalue(), said.getvalue()
    print(json.dumps({"seconds": seconds}))


def measure(task: str, file: Path, tokenizer: Path) -> None:
    """Learn or encode, and print megabytes above the process, and seconds."""
    if task == "learning":
        from andrea_pl.data.store.learning import learn_tokenizer

        preparation = build_preparation(file, file.parent / "unused", None)
        before, began = start_peak(), time.perf_counter()
        tokenizer.write_text(learn_tokenizer(preparation).definition, encoding="utf-8")
    else:
        with tempfile.TemporaryDirectory(dir=file.parent) as cache:
            preparation = build_preparation(file, Path(cache), tokenizer)
            TextTokenizer.load(tokenizer).encode_pieces(["warm up " * 1000])
            before, began = start_peak(), time.perf_counter()
            prepare(preparation)
    seconds = time.perf_counter() - began
    print(json.dumps({"megabytes": (resident("VmHWM") - before) / 1e6, "seconds": seconds}))


def measure_apart(task: str, file: Path, tokenizer: Path) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--task", task, "--file", str(file), "--tokenizer", str(tokenizer)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="*", default=[5, 50, 300])
    parser.add_argument("--sources", type=int, nargs="*", default=[200, 2000])
    parser.add_argument("--folder", type=Path, help="where files are written; the working folder if left out")
    for name, kind in (("--task", str), ("--file", Path), ("--tokenizer", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.task == "start":
        measure_start(options.file)
        return
    if options.task:
        measure(options.task, options.file, options.tokenizer)
        return
    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd()) as place:
        file, tokenizer = Path(place) / "text.txt", Path(place) / "tokenizer.json"
        for size in [*options.megabytes, None]:
            write_run(file) if size is None else write_text(file, size)
            name = "one run" if size is None else f"{size} MB"
            for task in ("learning", "encoding"):
                found = measure_apart(task, file, tokenizer)
                print(f"{name:8} {task}: {found['megabytes']:7.0f} MB, {found['seconds']:6.1f} s", flush=True)
        for count in options.sources:
            write_sources(file := Path(place) / "many.yaml", count)
            print(f"{count} sources: {measure_apart('start', file, tokenizer)['seconds']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
