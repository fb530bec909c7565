"""A module whose network has no sizes of its own: built from the data, or from a checkpoint."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor

from andrea_pl import LanguageModule, TextDataModule, TextSource, TransformerConfig, UserError
from andrea_pl.language.unbuilt import UnbuiltNetwork
from tests.support.toy import build_trainer

WIDTHS: dict[str, Any] = {"d_model": 16, "n_heads": 2, "n_layers": 1}


def data(**options: Any) -> TextDataModule:
    rows = [[1 + n % 30, 2, 3, n % 40, 5] for n in range(12)]
    sources = [
        TextSource(name="t", kind="tokens", documents=rows),
        TextSource(name="v", kind="tokens", documents=rows[:3], split="val"),
    ]
    defaults: dict[str, Any] = {"vocab_size": 40, "block_size": 8, "sequences_per_update": 3}
    return TextDataModule(sources, **(defaults | options))


def module(**sizes: int) -> LanguageModule:
    return LanguageModule(TransformerConfig(**sizes, **WIDTHS), schedule="constant", lr=1e-2)


def fitted(made: LanguageModule, **options: Any) -> dict[str, Tensor]:
    build_trainer(**({"max_epochs": 2} | options)).fit(made, datamodule=data())
    return {name: each.detach().clone() for name, each in made.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run(callback: Callable[[], Any] | None, **sizes: int) -> dict[str, Tensor]:
    torch.manual_seed(4)
    return fitted(module(**sizes), callbacks=[] if callback is None else [callback()])


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.parametrize(
    "callback",
    [
        None,
        lambda: EMAWeightAveraging(decay=0.5),  # calls configure_model by itself, before the trainer does
        lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1),  # copies the module before that
    ],
)
def test_trains_as_if_sizes_had_been_given(callback: Any) -> None:
    given = run(callback, vocab_size=40, block_size=8)
    assert same(run(callback), given)
    assert same(run(callback, vocab_size=40), given)
    assert same(run(callback, block_size=8), given)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_other_types(precision: Any) -> None:
    ends = []
    for sizes in ({"vocab_size": 40, "block_size": 8}, {}):
        torch.manual_seed(4)
        ends.append(fitted(module(**sizes), precision=precision))
    assert same(*ends)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
def test_compiled() -> None:
    torch.manual_seed(4)
    plain = fitted(module(vocab_size=40, block_size=8))
    torch.manual_seed(4)
    made = module()
    build_trainer(max_epochs=2).fit(torch.compile(made, backend="eager"), datamodule=data())
    assert made.state_dict().keys() == plain.keys()
    for name, each in made.state_dict().items():
        torch.testing.assert_close(each, plain[name], msg=name)


def test_configuring_twice_does_nothing_the_second_time() -> None:
    made = module()
    fitted(made)
    network, weights = made.network, copy.deepcopy(made.state_dict())
    made.configure_model()
    made.build_network(data())
    assert made.network is network
    assert same(made.state_dict(), weights)


def test_a_size_that_is_too_small_for_the_data() -> None:
    """Both are named, also where the network was built from other data before."""
    with pytest.raises(UserError, match=r"`network.vocab_size` is 30 and `vocab_size` is 40"):
        fitted(module(vocab_size=30))
    with pytest.raises(UserError, match=r"`network.block_size` is 4 and `block_size` is 8"):
        fitted(module(vocab_size=40, block_size=4))
    made = module()
    fitted(made)
    with pytest.raises(UserError, match=r"`network.vocab_size` is 40 and `vocab_size` is 50"):
        build_trainer().fit(made, datamodule=data(vocab_size=50))
    fitted(module(vocab_size=64, block_size=16))  # larger holds the data, with rows to spare


def test_data_that_learns_its_size_in_setup() -> None:
    class Late(TextDataModule):
        def setup(self, stage: str | None = None) -> None:
            self.found = 40
            super().setup(stage)

        @property
        def vocab_size(self) -> int:
            return self.found

        @vocab_size.setter
        def vocab_size(self, value: int) -> None:
            if hasattr(self, "found"):
                self.found = value

    late = Late(data().preparation.sources, block_size=8, sequences_per_update=3)
    made = module()
    build_trainer().fit(made, datamodule=late)
    assert made.network.config.sizes == (40, 8)


@pytest.mark.parametrize(
    "use",
    [
        lambda made: made(torch.tensor([[1]])),
        lambda made: made.generate([""], 1),
        lambda made: made.state_dict(),
        lambda made: made.load_state_dict({}),
        lambda made: made.configure_optimizers(),
        lambda made: made.configure_model(),
        lambda made: made.build_network(),
        lambda made: made.network.compile(),
        lambda made: made.network.count_parameters(),
        lambda made: made.hyperparameters,
        lambda made: build_trainer().fit(made, data_loader()),
    ],
)
def test_used_before_it_is_built(use: Any) -> None:
    with pytest.raises(UserError, match=r"vocab_size=…, block_size=….*TextDataModule"):
        use(module())
    with pytest.raises(UserError, match=r"\(TransformerConfig\(block_size=…, …\)"):
        use(module(vocab_size=40))


def data_loader() -> Any:
    part = data()
    part.prepare_data()
    part.setup()
    return part.train_dataloader()


def test_flops_need_sizes() -> None:
    with pytest.raises(UserError, match="vocab_size and block_size must be given"):
        _ = module().flops_per_token


def test_a_wrapper_around_nothing_is_told() -> None:
    made = module()
    made.network = torch.compile(made.network, backend="eager")
    with pytest.raises(UserError, match="not built yet"):
        fitted(made)


def test_copies_and_pickles() -> None:
    for made in (copy.deepcopy(module()), pickle.loads(pickle.dumps(module()))):
        assert isinstance(made.network, UnbuiltNetwork)
        fitted(made)


class TestCheckpoint:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        trainer = build_trainer(max_steps=2)
        trainer.fit(module(), datamodule=data())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return tmp_path / "a.ckpt"

    def test_loaded_from_the_file_alone(self, path: Path) -> None:
        loaded = LanguageModule.load_from_checkpoint(path)
        kept = torch.load(path, weights_only=True)["state_dict"]
        assert loaded.network.config.sizes == (40, 8)
        assert same(dict(loaded.state_dict()), kept)

    def test_evaluated_with_loaders_alone(self, path: Path) -> None:
        """There is no datamodule: the sizes are the checkpoint's."""
        part = data()
        part.prepare_data()
        part.setup("validate")
        part.trainer = None
        made = module()
        build_trainer().validate(made, part._held_out("val"), ckpt_path=path, verbose=False)
        assert same(dict(made.state_dict()), torch.load(path, weights_only=True)["state_dict"])

    def test_resumed(self, path: Path) -> None:
        made = module()
        build_trainer(max_steps=3).fit(made, datamodule=data(), ckpt_path=path)
        assert made.updates_applied == 3

    def test_of_other_sizes_than_the_data(self, path: Path) -> None:
        with pytest.raises(UserError, match="vocab_size: checkpoint 40, here 50"):
            build_trainer(max_steps=3).fit(module(), datamodule=data(vocab_size=50), ckpt_path=path)


def test_no_memory_is_asked_for_a_network_that_cannot_fit() -> None:
    with pytest.raises(UserError, match=r"GiB of that by vocab_size 1,000,000,000,000, and this machine has"):
        build_trainer().fit(module(vocab_size=10**12), datamodule=data())
    with pytest.raises(UserError, match=r"GiB of that by block_size 1,000,000,000,000, and this machine has"):
        module(vocab_size=40, block_size=10**12)
