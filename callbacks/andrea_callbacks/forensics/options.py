"""Options of callbacks that write reports: replay, names, texts, a folder."""

from andrea_callbacks.forensics.replay import ReplayFunction
from andrea_callbacks.forensics.sample_identity import DecodeFunction, NameFunction


class ReportOptions:
    """The options that `FiniteGuard` and `SpikeForensics` share, as their attributes."""

    replay: ReplayFunction | None
    """Runs a micro-batch again."""
    identify: NameFunction | None
    """Names the rows of a micro-batch."""
    decode: DecodeFunction | None
    """Turns ids into text."""
    folder: str | None
    """Folder for reports, in place of the log folder."""

    def _set_report_options(
        self,
        replay: ReplayFunction | None,
        identify: NameFunction | None,
        decode: DecodeFunction | None,
        folder: str | None,
    ) -> None:
        self.replay, self.identify = replay, identify
        self.decode, self.folder = decode, folder
