"""Base rates that a resume changes: schedules follow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from andrea_pl import TransformerConfig, UserError
from andrea_pl.optim.rates import change_base_rate
from tests.support.runs import Saves, language, rates, tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch"
)

SHAPE = TransformerConfig(vocab_size=11, block_size=4, d_model=8, n_heads=2, n_layers=1)


LINEAR = {
    "cosine": "cosine",
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4], 0.5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.2, total_iters=5),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 12),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
}


OTHERS: dict[str, Any] = {
    "ReduceLROnPlateau": schedulers.ReduceLROnPlateau,
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.01, total_steps=24),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.01, 4, cycle_momentum=False),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9)], o),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 12, eta_min=1e-4),
}


class TestChangedRate:
    """Lightning#19865: a resume with another rate."""

    def run(
        self, folder: Path, lr: float, schedule: Any, path: Path | None = None, optimizer: Any = None
    ) -> list[float]:
        build = optimizer or (lambda p, lr=lr: torch.optim.SGD(p, lr=lr))
        module = language(optimizer=build, schedule=schedule)
        saving = Saves(folder, at=7)
        return rates(module, [tokens()] * 10, path, callbacks=[saving], max_steps=10)

    @pytest.mark.parametrize("name", ["cosine", "LambdaLR", "StepLR"])
    def test_a_linear_schedule_follows(self, name: str, tmp_path: Path) -> None:
        straight = self.run(tmp_path / "a", 1e-2, LINEAR[name])
        resumed = self.run(tmp_path / "c", 2e-2, LINEAR[name], tmp_path / "a" / "step=7.ckpt")
        assert resumed == pytest.approx([2 * each for each in straight[7:]], rel=1e-9)

    @pytest.mark.parametrize("name", sorted(LINEAR.keys() - {"cosine"}))
    def test_all_that_are_linear(self, name: str) -> None:
        """The rates from here on are twice those of the base rate before, at every later step."""
        optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2) for _ in range(2)]
        pair = [LINEAR[name](optimizer) for optimizer in optimizers]

        def step() -> list[float]:
            for optimizer, scheduler in zip(optimizers, pair, strict=True):
                optimizer.step()
                scheduler.step()
            return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

        for _ in range(3):
            step()
        change_base_rate(optimizers[1], pair[1], 0, 1e-2, 2e-2)
        assert pair[1].get_last_lr() == [optimizers[1].param_groups[0]["lr"]]
        for _ in range(8):
            single, doubled = step()
            assert doubled == pytest.approx(2 * single, rel=1e-9)

    @pytest.mark.parametrize("name", sorted(OTHERS))
    def test_all_others(self, name: str) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)
        with pytest.raises(UserError, match=f"lr 0.01 and this run has lr 0.02, which {name} cannot follow"):
            change_base_rate(optimizer, OTHERS[name](optimizer), 0, 1e-2, 2e-2)

    @pytest.mark.parametrize("name", ["OneCycleLR", "SequentialLR"])
    def test_any_other_stops_before_the_first_update(self, name: str, tmp_path: Path) -> None:
        """OneCycleLR went on at 0.0199, SequentialLR by an AttributeError."""
        straight = self.run(tmp_path / "a", 1e-2, OTHERS[name])
        path = tmp_path / "a" / "step=7.ckpt"
        with pytest.raises(UserError) as stopped:
            self.run(tmp_path / "b", 2e-2, OTHERS[name], path)
        assert "\n" not in str(stopped.value)
        for part in (name, "lr 0.01", "lr 0.02", "`init_from`"):
            assert part in str(stopped.value)
        assert self.run(tmp_path / "c", 1e-2, OTHERS[name], path) == straight[7:]

    def test_the_same_rate_is_exact(self, tmp_path: Path) -> None:
        """OneCycleLR(max_lr 0.01): update 8 at 0.00994."""
        schedule = OTHERS["OneCycleLR"]
        straight = self.run(tmp_path / "a", 1e-2, schedule)
        resumed = self.run(tmp_path / "b", 1e-2, schedule, tmp_path / "a" / "step=7.ckpt")
        assert resumed == straight[7:]
        assert resumed[0] == pytest.approx(0.00994, abs=1e-5)

    @pytest.mark.parametrize("name", ["cosine", "LambdaLR", "StepLR"])
    def test_from_a_rate_of_zero(self, name: str, tmp_path: Path) -> None:
        """There is no factor in a rate of 0; it comes from the schedule."""
        wanted = self.run(tmp_path / "a", 1e-2, LINEAR[name])
        self.run(tmp_path / "b", 0.0, LINEAR[name])
        resumed = self.run(tmp_path / "c", 1e-2, LINEAR[name], tmp_path / "b" / "step=7.ckpt")
        assert resumed[0] == pytest.approx(wanted[7])

    def test_a_rate_that_is_a_tensor(self, tmp_path: Path) -> None:
        def run(place: str, lr: float, path: Path | None = None) -> list[float]:
            def build(parameters: Any) -> Any:
                return torch.optim.AdamW(parameters, lr=torch.tensor(lr), fused=False)

            return self.run(tmp_path / place, lr, "cosine", path, build)

        straight = run("a", 1e-2)
        resumed = run("b", 2e-2, tmp_path / "a" / "step=7.ckpt")
        assert resumed == pytest.approx([2 * each for each in straight[7:]])

    @pytest.mark.parametrize(("betas", "stops"), [((0.8, 0.999), True), ((0.9, 0.95), False)])
    def test_betas_that_one_cycle_moves(self, betas: Any, stops: bool, tmp_path: Path) -> None:
        """OneCycleLR cycles the first beta: a change of it stops, and one of the second leaves the first."""

        def run(place: str, betas: Any, path: Path | None = None) -> Any:
            seen: list[Any] = []

            def build(parameters: Any) -> Any:
                optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=betas)
                optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["betas"]))
                return optimizer

            self.run(tmp_path / place, 1e-2, OTHERS["OneCycleLR"], path, build)
            return seen

        straight = run("a", (0.9, 0.999))
        path = tmp_path / "a" / "step=7.ckpt"
        if stops:
            with pytest.raises(
                UserError, match=r"betas \[0\.9, 0\.999\].*betas \[0\.8, 0\.999\].*OneCycleLR"
            ):
                run("b", betas, path)
        else:
            assert run("b", betas, path) == [(first, 0.95) for first, _ in straight[7:]]
