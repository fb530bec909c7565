"""The network: configuration, transformer, generation. Imports nothing of training."""

from andrea_pl.network.config import TransformerConfig as TransformerConfig
from andrea_pl.network.generation import Sampling as Sampling
from andrea_pl.network.generation import generate as generate
from andrea_pl.network.transformer import FeedForward as FeedForward
from andrea_pl.network.transformer import RoPELanguageModel as RoPELanguageModel
