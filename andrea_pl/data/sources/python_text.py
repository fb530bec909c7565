"""The text in every Python installation. Nothing is downloaded or imported for it.

There are three kinds: questions and answers (docstrings), long prose (the topics of the language reference),
and list-shaped Markdown (READMEs of installed distributions).
"""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from andrea_pl.data.sources.records import Document

PythonPart = Literal["all", "docstrings", "topics", "readmes"]

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
_SHORTEST_DOCSTRING = 40


@lru_cache(maxsize=4)
def python_documents(part: PythonPart) -> tuple[Document, ...]:
    """Return the documents of one part, or of all, in a fixed order."""
    readers = {"docstrings": _docstrings, "topics": _topics, "readmes": _readmes}
    chosen = readers.values() if part == "all" else [readers[part]]
    return tuple(document for reader in chosen for document in reader())


def python_fingerprint() -> list[Any]:
    """Return values that the text depends on: the Python release and the installed distributions."""
    return [sys.version, sorted({f"{each.name}=={each.version}" for each in metadata.distributions()})]


def _docstrings() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).parts
        if _SKIPPED_FOLDERS.isdisjoint(parts):
            yield from _docstrings_of(file, ".".join((*parts[:-1], file.stem)).removesuffix(".__init__"))


def _docstrings_of(file: Path, module: str) -> Iterator[Document]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return  # the standard library ships a few files that are broken on purpose, for its own tests
    yield from _walk(tree, module, str(file))


def _walk(node: ast.AST, name: str, origin: str) -> Iterator[Document]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) >= _SHORTEST_DOCSTRING:
            line = getattr(node, "lineno", 1)
            text = f"Question: What is {name}?\nAnswer: {docstring}\n"
            yield Document(text=text, origin=origin, line=line, identity=docstring)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            continue  # no definition stands inside an expression
        inner = getattr(child, "name", None) if isinstance(child, ast.ClassDef | ast.FunctionDef) else None
        yield from _walk(child, f"{name}.{inner}" if inner else name, origin)


def _topics() -> Iterator[Document]:
    file = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    for node in ast.walk(ast.parse(file.read_bytes())):
        if not isinstance(node, ast.Dict):
            continue
        for value in node.values:
            text = ast.literal_eval(value)
            if isinstance(text, str) and text.strip():
                yield Document(text=text, origin=str(file), line=value.lineno)


def _readmes() -> Iterator[Document]:
    found = {each.name: each for each in metadata.distributions() if each.name}
    for name in sorted(found, key=str.lower):
        description = found[name].metadata.json.get("description")
        if isinstance(description, str) and description.strip():
            yield Document(text=description, origin=f"README of {name} {found[name].version}", line=1)
