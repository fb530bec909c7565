"""The configuration that is saved beside the logs."""

import pytest
import yaml
from lightning.pytorch.cli import LightningArgumentParser

from andrea_pl import TextDataModule
from andrea_pl.cli.saved_configuration import _plain

pytestmark = pytest.mark.system


def test_sources_are_saved_as_the_parser_would() -> None:
    """What a checkpoint has of a configuration is what the parser's own dump says."""
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(TextDataModule, "data")
    sources = [{"name": "a", "paths": ["x.txt"], "min_weight": 0.5}, {"name": "b", "kind": "python"}]
    config = parser.parse_object({"data": {"sources": sources, "vocab_size": 300}})
    dumped = yaml.safe_load(parser.dump(config, skip_unset=False, skip_validation=True))
    assert _plain(parser, config) == dumped
    assert dumped["data"]["sources"][0]["min_weight"] == 0.5
    defaults = parser.get_defaults(skip_validation=True)
    assert _plain(parser, defaults) == yaml.safe_load(
        parser.dump(defaults, skip_unset=False, skip_validation=True)
    )
