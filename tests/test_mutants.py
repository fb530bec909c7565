"""The mutants still fit the source, and every guarantee has tests and mutants."""

import ast
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant

TESTS = Path(__file__).parent


def marked() -> set[str]:
    """Return the guarantees that tests are marked with."""
    found: set[str] = set()
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.guarantee":
                found.add(ast.literal_eval(node.args[0]))
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.guarantee}: {mutant.new:.30}")
def test_it_fits_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


@pytest.mark.system
def test_every_guarantee_is_tried() -> None:
    assert {mutant.guarantee for mutant in MUTANTS} == marked()
    assert len(MUTANTS) >= 25
