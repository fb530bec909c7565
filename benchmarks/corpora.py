"""Turns the unpacked packages of corpora.sh into JSONL, written to the standard output.

    python benchmarks/corpora.py {novels,documentation,questions} PACKAGES

PACKAGES holds a folder per Debian package, under the package's name.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

CHAPTER = re.compile(r"^(?:VOLUME [IVX]+\n+)?CHAPTER (?:[IVXLC]+|\d+)$", re.IGNORECASE | re.MULTILINE)
POD_HEADING = re.compile(r"^(?=(?:  )?\S)", re.MULTILINE)
# What to ask for the words of a synset, joined by "or".
WORDNET_QUESTIONS = {
    "noun": "What is {}?",
    "verb": "What does it mean to {}?",
    "adj": "What does the adjective {} mean?",
    "adv": "What does the adverb {} mean?",
}


def novels(packages: Path) -> Iterator[dict[str, str]]:
    """Yield the chapters; what precedes the first belongs to it, what follows the last to that."""
    data = "usr/lib/R/site-library/janeaustenr/data"
    (index_file,) = _files(packages / "r-cran-janeaustenr", f"{data}/Rdata.rdx")
    index = _r_value(index_file.read_bytes())
    database = index_file.with_suffix(".rdb").read_bytes()
    for _, (start, length) in sorted(index["variables"].items()):
        # A lazy-load entry is its inflated size in four bytes, then a zlib stream of R's serialisation.
        lines = _r_value(zlib.decompress(database[start + 4 : start + length]))
        text = "\n".join(lines)
        starts = [chapter.start() for chapter in CHAPTER.finditer(text)]
        for begin, end in pairwise([0, *starts[1:], len(text)]):
            yield {"text": text[begin:end].strip("\n")}


def documentation(packages: Path) -> Iterator[dict[str, str]]:
    """Yield the files, as they stand."""
    for file in _files(packages / "python3.11-doc", "usr/share/doc/python3.11/html/_sources/**/*.rst.txt"):
        text = file.read_text(encoding="utf-8")
        if text.strip():
            yield {"text": text}


def questions(packages: Path) -> Iterator[dict[str, str]]:
    """Yield WordNet's synsets, then the questions of Perl's FAQ."""
    for part_of_speech, question in WORDNET_QUESTIONS.items():
        (file,) = _files(packages / "wordnet-base", f"usr/share/wordnet/data.{part_of_speech}")
        yield from _synsets(file, question)
    for file in _files(packages / "perl-doc", "usr/share/perl/*/pod/perlfaq[1-9].pod"):
        yield from _pod_questions(file)


def _synsets(file: Path, question: str) -> Iterator[dict[str, str]]:
    """Read lines of `offset file type count (word id)… pointers | gloss`, with a hexadecimal count."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):  # the licence
            continue
        fields, _, gloss = line.partition(" | ")
        fields = fields.split(" ")
        words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
        # Adjectives may end with where they can stand: galore(ip), "immediately postnominal".
        names = [re.sub(r"\((?:a|p|ip)\)$", "", word).replace("_", " ") for word in words]
        yield {"question": question.format(" or ".join(names)), "answer": gloss.strip()}


def _pod_questions(file: Path) -> Iterator[dict[str, str]]:
    """Render a pod as text, where =head1 is not indented, =head2 by two columns, and all else by more."""
    text = subprocess.run(
        ["pod2text", "--utf8", str(file)], check=True, stdout=subprocess.PIPE, encoding="utf-8"
    ).stdout
    for section in POD_HEADING.split(text):
        heading, _, body = section.partition("\n")
        answer = dedent(body).strip()
        if heading.startswith("  ") and answer:
            yield {"question": heading.strip(), "answer": answer}


def _r_value(serialised: bytes) -> Any:
    import rdata  # here, since only the novels need it

    return rdata.read_rds(io.BytesIO(serialised))


def _files(package: Path, pattern: str) -> list[Path]:
    files = sorted(package.glob(pattern))
    if not files:
        sys.exit(f"corpora.py: the package {package.name} has no {pattern}: its layout is not Debian 12's")
    return files


def main() -> None:
    """Write the corpus that the arguments name."""
    corpora = {"novels": novels, "documentation": documentation, "questions": questions}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", choices=corpora)
    parser.add_argument("packages", type=Path)
    arguments = parser.parse_args()
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # whatever the locale
    for document in corpora[arguments.corpus](arguments.packages):
        print(json.dumps(document, ensure_ascii=False))


if __name__ == "__main__":
    main()
