"""torch.compile: of the whole module, of its network in place, and of its network in a wrapper.

Every test that stands for a public report names it.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn

from andrea_pl import LanguageModule, NonFiniteError, TransformerConfig, Window
from tests.support.toy import ListLoader, RowLogger, ToyU, build_trainer, window

SHAPE = TransformerConfig(vocab_size=11, block_size=4, d_model=8, n_heads=2, n_layers=1)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),  # dynamo
]


class Counting:
    """A backend that runs graphs as they are and keeps those that take part in training."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def has(self, name: str) -> bool:
        """Say whether a graph calls a function of this name."""
        return any(name in str(node.target) for graph in self.graphs for node in graph.graph.nodes)


@pytest.fixture
def backend() -> Iterator[Counting]:
    """Return a backend, and forget what it compiled."""
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def tokens() -> dict[str, Any]:
    rows = torch.tensor([[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]])
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:], "num_tokens": 8}


def language(**options: Any) -> LanguageModule:
    torch.manual_seed(3)
    return LanguageModule(SHAPE, lr=1e-2, **options)


def compiled(kind: str, backend: Any, **options: Any) -> tuple[Any, LanguageModule]:
    """Return what is given to the trainer, and the module in it."""
    module = language(**options)
    if kind == "module":
        return torch.compile(module, backend=backend), module
    if kind == "in place":
        module.network.compile(backend=backend)
    elif kind == "wrapped":
        module.network = torch.compile(module.network, backend=backend)
    return module, module


def train(given: Any, **options: Any) -> Any:
    windows = [Window([tokens(), tokens()])] * 3
    trainer = build_trainer(**options)
    trainer.fit(given, ListLoader(windows), ListLoader([tokens()]))
    return trainer


KINDS = ["module", "in place", "wrapped"]


@pytest.mark.system
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_compiled_and_the_update_is_not(kind: str, backend: Counting) -> None:
    """Lightning#16432: 'AdamW' object has no attribute 'grad_scale', or nothing compiled at all."""
    given, module = compiled(kind, backend)
    logger = RowLogger()
    train(given, logger=logger)
    assert backend.has("scaled_dot_product_attention")
    assert not any(backend.has(name) for name in ("grad_scale", "fused_adamw", "clip"))
    if kind == "module":
        assert backend.has("cross_entropy")
    plain, other = RowLogger(), language()
    train(other, logger=plain)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name))
    for key in ("train/loss", "train/lr", "train/clip_coefficient", "val/loss"):
        assert dict(logger.series(key)) == pytest.approx(dict(plain.series(key)))
    assert module.updates_applied == 3


@pytest.mark.parametrize("kind", KINDS)
def test_training_alone_is_compiled(kind: str, backend: Counting) -> None:
    """Without a validation, whose network Lightning calls outside the update."""
    given, _ = compiled(kind, backend)
    build_trainer().fit(given, ListLoader([Window([tokens()])] * 2))
    assert backend.has("scaled_dot_product_attention")


@pytest.mark.parametrize("kind", ["module", "wrapped"])
def test_checkpoints_have_plain_names(kind: str, backend: Counting, tmp_path: Path) -> None:
    """Lightning#20233: `_orig_mod.` in no checkpoint, whatever wrote it."""
    given, module = compiled(kind, backend)
    trainer = build_trainer()
    trainer.fit(given, ListLoader([tokens()]))
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    state = torch.load(tmp_path / "kept.ckpt", weights_only=True)["state_dict"]
    assert list(state) == list(language().state_dict())
    loaded = LanguageModule.load_from_checkpoint(tmp_path / "kept.ckpt")
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))


@pytest.mark.parametrize(("wrote", "reads"), [("wrapped", "plain"), ("plain", "wrapped")])
def test_resume_from_one_kind_to_another(wrote: str, reads: str, backend: Counting, tmp_path: Path) -> None:
    """The resumed run is that of a module that was never compiled."""

    def fit(kind: str, path: Path | None = None) -> LanguageModule:
        class Saves(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if path is None and trainer.global_step == 2:
                    trainer.save_checkpoint(tmp_path / f"{kind}.ckpt")

        given, module = compiled(kind, backend)
        build_trainer(callbacks=[Saves()]).fit(given, ListLoader([tokens()] * 4), ckpt_path=path)
        return module

    ends = [fit(wrote), fit(reads, tmp_path / f"{wrote}.ckpt"), fit("plain")]
    assert [module.updates_applied for module in ends] == [4, 4, 4]
    for name, parameter in ends[2].named_parameters():
        for module in ends[:2]:
            torch.testing.assert_close(module.get_parameter(name), parameter)


@pytest.mark.parametrize("reads", ["plain", "wrapped"])
def test_states_of_earlier_versions_load(reads: str, backend: Counting) -> None:
    """Both spellings load into both kinds of module, strictly."""
    _, module = compiled(reads, backend)
    state = {name: value + 1 for name, value in language().state_dict().items()}
    wrapped = {name.replace("network.", "network._orig_mod.", 1): value for name, value in state.items()}
    for each in (state, wrapped):
        nn.Module.load_state_dict(module, {name: value * 0 for name, value in state.items()})
        assert str(module.load_state_dict(each)) == "<All keys matched successfully>"
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, state[name])


def test_a_wrong_key_is_still_reported(backend: Counting) -> None:
    _, module = compiled("wrapped", backend)
    state = module.state_dict()
    state["network.other.weight"] = state.pop("network.output.weight")
    with pytest.raises(RuntimeError, match=r"network\.other\.weight"):
        module.load_state_dict(state)


class Deep(ToyU):
    """Toy U beside a wrapped part with buffers, and a list of parts of which one is wrapped."""

    def __init__(self, backend: Any = None, **options: Any) -> None:
        super().__init__(**options)
        wrap = (lambda part: part) if backend is None else (lambda part: torch.compile(part, backend=backend))
        self.norm = wrap(nn.Sequential(nn.BatchNorm1d(2)))
        self.parts = nn.ModuleList([nn.Linear(2, 2), wrap(nn.Linear(2, 2))])

    def loss_sum(self, micro_batch: Any) -> torch.Tensor:
        rows = self.b.expand(4, 2) + torch.arange(8.0).reshape(4, 2)
        for part in (self.norm, *self.parts):
            rows = part(rows)
        return super().loss_sum(micro_batch) + rows.square().sum()


def test_any_module_of_ours(backend: Counting) -> None:
    """Parts at any depth, buffers too; names are plain for whoever asks."""
    torch.manual_seed(1)
    module = Deep(backend)
    train_toy(module)
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    assert not any("_orig_mod" in name for name in (*names, *module.state_dict()))
    plain = Deep()
    plain.load_state_dict(module.state_dict())
    again = Deep(backend)
    again.load_state_dict(plain.state_dict())
    for twin in (plain, again, copy.deepcopy(module)):
        for name, value in module.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value)
    assert module.state_dict()._metadata.keys() >= {"norm.0", "parts.1"}


def train_toy(module: Any) -> None:
    build_trainer().fit(module, ListLoader([window([0], [1, 1])] * 2))


@pytest.mark.filterwarnings("ignore::andrea_callbacks.NonFiniteWarning")
def test_reports_have_plain_names(backend: Counting) -> None:
    """The parameter whose gradient is not finite is called what it is called uncompiled."""
    module = Deep(backend)
    module.parts[1].weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NonFiniteError, match=r"gradient of parts\.1\.weight"):
        train_toy(module)


def test_the_wrapper_of_a_whole_module_loads_its_own_state(backend: Counting) -> None:
    """torch's own wrapper keeps its own spelling around ours."""
    outer = torch.compile(language(), backend=backend)
    state = outer.state_dict()
    assert all(name.startswith("_orig_mod.") for name in state)
    outer.load_state_dict(state)


class TestForward:
    """The network's loss goes through `__call__`, which compile() and forward hooks act on."""

    def test_options_pick_places(self) -> None:
        network = language().network
        ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
        mask = torch.tensor([[True, True, True], [True, True, False]])
        whole = network(ids, mask)
        assert whole.shape == (2, 3, 11)
        index = torch.tensor([0, 1, 2, 3, 4])
        torch.testing.assert_close(network(ids, token_index=index), whole.flatten(0, 1)[index])
        chosen = torch.tensor([1, 4])
        torch.testing.assert_close(network(ids, mask, chosen=chosen), whole.flatten(0, 1)[chosen])
        picked = network(ids, token_index=index, chosen=chosen)
        torch.testing.assert_close(picked, whole.flatten(0, 1)[chosen])

    def test_a_forward_hook_sees_the_training(self) -> None:
        module = language()
        seen: list[torch.Size] = []
        module.network.register_forward_hook(lambda part, given, logits: seen.append(logits.shape))
        module.loss_sum(tokens())
        assert seen == [torch.Size([2, 4, 11])]


class TestNames:
    """The hooks rename what is the module's own, and nothing of a larger module that holds it."""

    def test_within_a_larger_module(self) -> None:
        larger = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1), ToyU())
        assert list(larger.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.b"]
        larger.load_state_dict(larger.state_dict())

    def test_within_an_average(self) -> None:
        """Checkpoints under EMAWeightAveraging lost `n_averaged`, and could not be loaded."""
        averaged = torch.optim.swa_utils.AveragedModel(ToyU())
        assert set(averaged.state_dict()) == {"n_averaged", "module.b"}

    def test_resume_under_an_average(self, tmp_path: Path) -> None:
        def run(resume: Path | None, **options: Any) -> Any:
            saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
            callbacks = [EMAWeightAveraging(decay=0.5), saving]
            trainer = build_trainer(callbacks=callbacks, enable_checkpointing=True, **options)
            module = ToyU()
            trainer.fit(module, ListLoader([window([0])] * 4), ckpt_path=resume)
            return module.b.detach()

        straight = run(None)
        stored = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
        assert list(stored["state_dict"]) == ["b"]
        assert torch.equal(run(tmp_path / "step=2.ckpt"), straight)
