"""From text to windows.

text ── documents ──> tokenizer ──> token store ──> TokenizedDataset      (prepare, once)
                                                          │
sampler: sequences of update k ── shard_window ── DynamicPaddingCollator ──> Window   (every update)
   └── EpochSampler: all, once an epoch;  CurriculumSampler: by the weights of a mixture <── losses by source
"""

from andrea_pl.data.mixing.curriculum import Curriculum as Curriculum
from andrea_pl.data.mixing.mixtures import Arm as Arm
from andrea_pl.data.mixing.mixtures import Exp3 as Exp3
from andrea_pl.data.mixing.mixtures import Fixed as Fixed
from andrea_pl.data.mixing.mixtures import Mixture as Mixture
from andrea_pl.data.mixing.mixtures import Observation as Observation
from andrea_pl.data.mixing.mixtures import Proportional as Proportional
from andrea_pl.data.mixing.mixtures import Ucb1 as Ucb1
from andrea_pl.data.module import TextDataModule as TextDataModule
from andrea_pl.data.sources.documents import TextSource as TextSource
from andrea_pl.data.store.tokenizer import TextTokenizer as TextTokenizer
from andrea_pl.data.windows.dataset import IGNORED as IGNORED
from andrea_pl.data.windows.dataset import DynamicPaddingCollator as DynamicPaddingCollator
from andrea_pl.data.windows.dataset import TokenizedDataset as TokenizedDataset
from andrea_pl.data.windows.dataset import count_labels as count_labels
from andrea_pl.data.windows.window import Window as Window
from andrea_pl.data.windows.window import WindowLoader as WindowLoader
