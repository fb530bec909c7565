"""RunReport: what is said at the end of a run."""

import logging
from typing import Any

import pytest
import torch

from andrea_callbacks import RunReport
from tests.support.toy import A, ListLoader, RowLogger, ToyU, build_trainer, window


class Writer(ToyU):
    def generate(self, prompts: list[str], max_new_tokens: int, generator: Any = None) -> list[str]:
        assert generator is not None
        return [
            f"{prompt}:{max_new_tokens}:{torch.randint(100, (1,), generator=generator).item()}"
            for prompt in prompts
        ]


def test_report_shows_a_sample(caplog: pytest.LogCaptureFixture) -> None:
    texts: list[Any] = []

    class TextLogger(RowLogger):
        @property
        def experiment(self) -> Any:
            return self

        def add_text(self, *args: Any) -> None:
            texts.append(args)

    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer = build_trainer(callbacks=[RunReport(["Once"], 5)], logger=TextLogger())
        trainer.fit(Writer(), ListLoader([window(A)]))
    assert torch.equal(torch.get_rng_state(), state)
    assert "1 updates done" in caplog.text
    assert "sample: OnceOnce:5:" in caplog.text
    assert texts[0][0] == "sample"
    assert texts[0][2] == 1


def test_report_without_a_tokenizer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(Writer):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("no tokenizer is known")

    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer = build_trainer(callbacks=[RunReport()])
        trainer.fit(Silent(), ListLoader([window(A)]))
    assert "no sample: no tokenizer is known" in caplog.text
