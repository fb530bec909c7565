"""Lightning's strategies with the clip hook: norms are computed once, and fused steps apply the clip.

Importing this package registers their names for `Trainer(strategy=…)`.
"""

from andrea_pl.strategies.clip_mixin import ClipHook as ClipHook
from andrea_pl.strategies.parallel import ClipDDPStrategy as ClipDDPStrategy
from andrea_pl.strategies.parallel import ClipModelParallelStrategy as ClipModelParallelStrategy
from andrea_pl.strategies.single import ClipSingleDeviceStrategy as ClipSingleDeviceStrategy
from andrea_pl.strategies.synchronization import only_last_synchronizes as only_last_synchronizes
