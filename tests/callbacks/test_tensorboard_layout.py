"""TensorBoardLayout: custom charts, and hyperparameters."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from andrea_callbacks import PreClipNorm, TensorBoardLayout, UpdateLog
from andrea_pl import LanguageModule, TransformerConfig
from tests.callbacks.test_throughput import text_windows
from tests.support.toy import ListLoader, build_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore::andrea_callbacks.ClipWarning"),
]

SHAPE = TransformerConfig(vocab_size=40, block_size=8, d_model=16, n_heads=2, n_layers=2)


class Data(pl.LightningDataModule):
    source_names = ("prose", "lists")

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return {"block": 8}

    def train_dataloader(self) -> Any:
        return ListLoader(text_windows(6))


def test_layout_and_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2

    logger = TensorBoardLogger(tmp_path)
    module = LanguageModule(SHAPE, schedule="constant", lr=3e-4)
    callbacks = [TensorBoardLayout({"tag": "trial"}), UpdateLog(), PreClipNorm()]
    build_trainer(callbacks=callbacks, logger=logger).fit(module, datamodule=Data())
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    text = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    layout = layout_pb2.Layout.FromString(text)
    charts = {
        (part.title, chart.title): list(chart.multiline.tag)
        for part in layout.category
        for chart in part.chart
    }
    assert charts["update", "loss"] == ["train/loss", "val/loss"]
    assert charts["update", "norm"] == ["train/grad_norm", "train/grad_norm_clipped", "train/clip_threshold"]
    assert charts["sources", "loss"] == ["data/prose/loss", "data/lists/loss"]
    assert charts["sources", "weight"] == ["data/prose/weight", "data/lists/weight"]
    assert events.Scalars("train/clip_threshold")[0].value == 1.0
    final = events.Scalars("final/train_loss")
    assert [each.step for each in final] == [6]
    assert final[0].value == pytest.approx(events.Scalars("train/loss")[-1].value)
    data = plugin_data_pb2.HParamsPluginData()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    data.ParseFromString(content)
    options = dict(data.session_start_info.hparams.items())
    assert options["tag"].string_value == "trial"
    assert options["block"].number_value == 8
    assert options["lr"].number_value == pytest.approx(3e-4)
    assert options["network.d_model"].number_value == 16
    assert options["optimizer"].string_value == "AdamW"
