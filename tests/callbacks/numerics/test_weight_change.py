"""How far an update moved the weights."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from andrea_callbacks import MomentMonitor, PreClipNorm
from tests.support.projects import Given, gradients
from tests.support.toy import ListLoader, RowLogger, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]


def test_actual_update_and_its_ratio_to_the_weights() -> None:
    logger, seen = RowLogger(), []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.before = [each.detach().double().clone() for each in (pl_module.w, pl_module.v)]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            after = [each.detach().double() for each in (pl_module.w, pl_module.v)]
            seen.append(
                [(float(b.norm()), float((a - b).norm())) for a, b in zip(after, self.before, strict=True)]
            )

    callbacks = [Keep(), MomentMonitor(every=5), PreClipNorm(every=5)]
    build_trainer(callbacks=callbacks, logger=logger).fit(Given(), ListLoader(gradients(count=12)))
    for place, group in enumerate(("matrices", "1")):
        moved = logger.series(f"moments/update/{group}")
        assert [step for step, _ in moved] == [1, 6, 11]
        assert [value for _, value in moved] == pytest.approx(
            [seen[at][place][1] for at in (0, 5, 10)], rel=1e-4
        )
        ratios = [value for _, value in logger.series(f"update_ratio/{group}")]
        right = [seen[at][place][1] / seen[at][place][0] for at in (0, 5, 10)]
        assert ratios == pytest.approx(right, rel=1e-4)


def test_other_optimizers_have_their_update_recorded() -> None:
    logger = RowLogger()
    module = Given(lambda groups: torch.optim.SGD(groups, lr=0.1))
    build_trainer(callbacks=[MomentMonitor(every=4)], logger=logger).fit(
        module, ListLoader(gradients(count=8))
    )
    assert [step for step, _ in logger.series("moments/update/matrices")] == [1, 5]
    assert logger.series("moments/first/matrices") == []
