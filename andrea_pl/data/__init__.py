"""From text to windows.

text ── documents ──> tokenizer ──> token store ──> TokenizedDataset      (prepare, once)
                                                          │
sampler: sequences of update k ── shard_window ── DynamicPaddingCollator ──> Window   (every update)
"""

from andrea_pl.data.dataset import IGNORED as IGNORED
from andrea_pl.data.dataset import DynamicPaddingCollator as DynamicPaddingCollator
from andrea_pl.data.dataset import TokenizedDataset as TokenizedDataset
from andrea_pl.data.dataset import count_labels as count_labels
from andrea_pl.data.documents import TextSource as TextSource
from andrea_pl.data.module import TextDataModule as TextDataModule
from andrea_pl.data.tokenizer import TextTokenizer as TextTokenizer
from andrea_pl.data.windows import Window as Window
from andrea_pl.data.windows import WindowLoader as WindowLoader
