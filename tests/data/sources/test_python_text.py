"""Documents made of Python source."""

import pytest

from andrea_pl.data.sources import python_text
from andrea_pl.data.sources.python_text import python_documents
from andrea_pl.data.sources.records import Document


@pytest.fixture(scope="module")
def questions() -> tuple[Document, ...]:
    """The docstrings of the standard library, which takes seconds to parse."""
    return python_documents("docstrings")


@pytest.mark.system
def test_python_source_has_three_natures(
    questions: tuple[Document, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(questions) > 3000
    assert all(document.text.startswith("Question: What is ") for document in questions)
    assert any("What is json.dumps?" in document.text for document in questions)
    prose = python_documents("topics")
    assert len(prose) > 60
    assert sum(len(document.text) for document in prose) > 300_000
    lists = python_documents("readmes")
    assert any(document.origin.startswith("README of torch ") for document in lists)
    monkeypatch.setattr(python_text, "_docstrings", lambda: iter(questions))
    assert python_documents("all") == (*questions, *prose, *lists)
    assert all(document.line >= 1 for document in questions)


@pytest.mark.system
def test_a_docstring_under_two_names_is_one_content(questions: tuple[Document, ...]) -> None:
    """The question is ours; what is held out must not be trained on under another name."""
    by_content: dict[bytes, set[str]] = {}
    for document in questions:
        assert document.content.decode() in document.text
        by_content.setdefault(document.content, set()).add(document.text)
    assert any(len(texts) > 1 for texts in by_content.values())
