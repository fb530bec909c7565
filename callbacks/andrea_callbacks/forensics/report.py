"""A report on disk: a folder with figures, tensors, texts and a picture."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor

from andrea_callbacks.hooks.terminal import warn

LARGEST_TENSOR = 64 * 2**20
"""Largest tensor that a report contains, in bytes."""


@dataclass(slots=True, kw_only=True)
class Bundle:
    """The contents of a report."""

    figures: Mapping[str, Any]
    """Contents of report.json."""
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Contents of tensors.safetensors."""
    texts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Headings and texts of sequences.txt."""
    picture: str | None = None
    """Contents of picture.svg."""

    def write(self, folder: Path) -> Path:
        """Write everything into a new folder. If it exists, append a number to its name.

        Raises:
            OSError: If the folder or a file cannot be written.
        """
        chosen, number = folder, 1
        while chosen.exists():
            number += 1
            chosen = folder.with_name(f"{folder.name}-{number}")
        chosen.mkdir(parents=True)
        small = {name: each for name, each in self.tensors.items() if each.nbytes <= LARGEST_TENSOR}
        figures = dict(self.figures)
        if len(small) < len(self.tensors):
            figures["tensors_left_out"] = sorted(set(self.tensors) - set(small))
        if small:
            safetensors = cast(Any, import_module("safetensors.torch"))  # where there is something to save
            safetensors.save_file(
                {name: each.detach().cpu().contiguous().clone() for name, each in small.items()},
                chosen / "tensors.safetensors",
            )
        if self.texts:
            blocks = [f"== {heading}\n{text}\n" for heading, text in self.texts]
            (chosen / "sequences.txt").write_text("\n".join(blocks), encoding="utf-8")
        if self.picture is not None:
            (chosen / "picture.svg").write_text(self.picture, encoding="utf-8")
        (chosen / "report.json").write_text(to_json(figures, indent=1) + "\n", encoding="utf-8")
        return chosen


def write_bundle(trainer: pl.Trainer, folder: str | None, name: str, bundle: Bundle) -> str | None:
    """Write a report on rank zero, and return its folder. A failure is only a warning: the run matters more.

    Args:
        trainer: Reports go to `reports` in its log folder. All ranks must call this together.
        folder: Another folder for reports.
        name: Name of this report's own folder.
        bundle: The contents.
    """
    home = trainer.log_dir if folder is None else folder  # all ranks must ask
    if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
        return None
    place = (Path(home or trainer.default_root_dir) / "reports" if folder is None else Path(folder)) / name
    try:
        return str(bundle.write(place))
    except Exception as error:  # whatever it is, the run goes on
        warn(f"the report {place} could not be written: {error}")
        return None


def to_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON: NaN and Inf become the strings "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(each) for each in cast("list[Any]", value)]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


def bar_chart(title: str, bars: Sequence[tuple[str, float]], unit: str = "") -> str:
    """Return an SVG picture of labelled bars that fits the longest label and value.

    Args:
        title: Title above the bars.
        bars: Labels and values; negative bars point left.
        unit: Unit after each value.
    """
    row, label_width, bar_width = 22, 8 * max([len(label) for label, _ in bars] + [10]), 420
    low = min([value for _, value in bars] + [0.0])
    high = max([value for _, value in bars] + [0.0])
    span = (high - low) or 1.0
    zero = label_width + bar_width * -low / span
    height = row * (len(bars) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{label_width + bar_width + 120}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (label, value) in enumerate(bars, start=1):
        y = row * number + 8
        width = bar_width * abs(value) / span
        x = zero if value >= 0 else zero - width
        color = "#c44" if number == 1 else "#47a"
        lines += [
            f'<text x="8" y="{y + 14}">{escape(label)}</text>',
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{row - 4}" fill="{color}"/>',
            f'<text x="{max(x + width, zero) + 4:.1f}" y="{y + 14}">{value:.3g}{escape(unit)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
