"""Scored samples from the model. They reveal a collapse to a few words, which the loss does not."""

import warnings
from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
import torch
from typing_extensions import override

from andrea_callbacks.forensics.coherence_score import Coherence, score_coherence
from andrea_callbacks.forensics.replay import undisturbed
from andrea_callbacks.hooks.events import RunEvent, publish_event
from andrea_callbacks.hooks.protocols import GeneratesText, KnowsWords
from andrea_callbacks.hooks.reports import finalize_updates
from andrea_callbacks.hooks.scalars import ScalarCallback, add_text
from andrea_callbacks.hooks.terminal import say, warn
from andrea_callbacks.numerics.gradient_norm import is_sharded

Action = Literal["warn", "stop"]
GenerateFunction = Callable[[pl.LightningModule, list[str], int, torch.Generator], list[str]]
"""Takes module, prompts, `max_new_tokens` and a generator on the module's device; returns continuations."""


class IncoherenceWarning(UserWarning):
    """Samples of the model are not text."""


class CoherenceGate(ScalarCallback):
    """Samples from the model at intervals, scores the samples, and warns or stops when they are not text.

    The model continues the same prompts with the same seed each time. The run's random state and training
    mode do not change. `score_coherence` scores every sample, and the mean decides. Known words come from
    `known`, or else from the datamodule's `known_words()`. Without either, the score uses its other parts
    and may take noise for variety; a warning says so once. Samples go to loggers that accept text.

    Rank zero samples while the other ranks wait. With sharded parameters all ranks sample together. Under
    `stop` the run ends after the current update, as with `trainer.should_stop`.

    Args:
        every: Updates between two samples.
        start: Updates before the first sample. An untrained model does not write text.
        threshold: Scores below this are too low.
        patience: Consecutive low samples before the callback acts.
        action: `warn` or `stop`.
        prompts: Texts to continue. An empty text starts a document.
        max_new_tokens: Length of each sample.
        seed: Seed for sampling.
        generate: Writes the continuations. The default is the module's
            `generate(prompts, max_new_tokens, generator)`.
        known: Words of the training text, as `known_units` returns them.
        name: Tells instances in the same trainer apart.

    Raises:
        ValueError: If an option is out of range; the message names it.

    Metrics recorded:
        coherence/score: Score, at most 100.
        coherence/bigrams, /trigrams, /words, /characters: Its parts, at most 35, 35, 20 and 10.
    """

    def __init__(
        self,
        every: int = 100,
        start: int = 500,
        threshold: float = 30.0,
        patience: int = 3,
        action: Action = "warn",
        prompts: list[str] | None = None,
        max_new_tokens: int = 100,
        seed: int = 0,
        generate: GenerateFunction | None = None,
        known: Collection[str] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        least = {"every": (every, 1), "start": (start, 0), "patience": (patience, 1)}
        least["max_new_tokens"] = (max_new_tokens, 1)
        for name, (value, minimum) in least.items():
            if value < minimum:
                raise ValueError(f"CoherenceGate: {name} must be at least {minimum}, got {value}")
        if not 0 <= threshold <= 100:
            raise ValueError(f"CoherenceGate: threshold must lie in [0, 100], got {threshold}")
        if action not in get_args(Action):
            raise ValueError(f"CoherenceGate: action must be 'warn' or 'stop', got {action!r}")
        if prompts is not None and not prompts:
            raise ValueError("CoherenceGate: prompts must not be empty; [''] starts a document")
        self.every = every
        self.start = start
        self.threshold = threshold
        self.patience = patience
        self.action: Action = action
        self.prompts = ["", "", ""] if prompts is None else list(prompts)
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.generate = generate
        self.known = None if known is None else frozenset(known)
        self.reset()

    @override
    def reset(self) -> None:
        """Reset what an earlier fit left."""
        self._words: frozenset[str] | None = None
        self._failures = 0
        self.low: int = 0
        """Consecutive samples so far that were too low."""
        self.last: float | None = None
        """The last score."""
        self._is_able = True
        self._seen = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look up the known words, and check that the module can generate."""
        self._seen = trainer.global_step
        self._is_able = self.generate is not None or isinstance(pl_module, GeneratesText)
        if not self._is_able:
            warnings.warn(
                f"CoherenceGate: {type(pl_module).__name__} has no generate(prompts, max_new_tokens, "
                "generator) and no generate= was given, so that nothing is sampled",
                category=IncoherenceWarning,
                stacklevel=2,
            )
            return
        self._words = None if self.known is None else frozenset(self.known)
        if self._words is None:
            datamodule = cast(Any, trainer).datamodule
            if isinstance(datamodule, KnowsWords):
                self._words = frozenset(datamodule.known_words()) or None
            if self._words is None:
                say(
                    "CoherenceGate: no known words (known=, or the datamodule's known_words()); the score "
                    "takes noise for variety"
                )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sample when an update is due for it."""
        before, self._seen = self._seen, trainer.global_step
        is_time = before // self.every != self._seen // self.every  # several optimizers step over multiples
        if self._is_able and is_time and self._seen >= self.start:
            finalize_updates(pl_module)
            self._sample(trainer, pl_module, self._seen)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the number of consecutive low samples."""
        return {"low": self.low, "last": self.last}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self.low, self.last = state_dict["low"], state_dict["last"]

    def _sample(self, trainer: pl.Trainer, pl_module: pl.LightningModule, update: int) -> None:
        texts: list[str] = []
        parts: list[Coherence] = []
        fault = ""
        if trainer.is_global_zero or any(map(is_sharded, pl_module.parameters())):
            generator = torch.Generator(pl_module.device).manual_seed(self.seed)
            generate = self.generate or _generate
            try:
                with undisturbed(trainer, pl_module), torch.no_grad():
                    texts = generate(pl_module, list(self.prompts), self.max_new_tokens, generator)
                parts = [score_coherence(text, self._words) for text in _checked(texts, len(self.prompts))]
            except Exception as error:  # a generate that means something else, no tokenizer: the run goes on
                fault = f"{type(error).__name__}: {error}"
        score = sum(part.score for part in parts) / len(parts) if parts else 0.0
        score, fault = trainer.strategy.broadcast((score, fault))
        if fault:
            self._fail(trainer, update, fault)
            return
        self._failures = 0
        self.last = score
        if parts:
            means = {
                name: sum(asdict(part)[name] or 0.0 for part in parts) / len(parts)
                for name in ("bigrams", "trigrams", "words", "characters")
                if name != "words" or self._words is not None
            }
            named = {f"coherence/{name}": value for name, value in means.items()}
            self.record(trainer, update, {"coherence/score": score} | named)
            shown = [
                f"{part.score:.0f}\n\n> {prompt}{text}"
                for part, prompt, text in zip(parts, self.prompts, texts, strict=True)
            ]
            add_text(trainer, "coherence", "\n\n".join(shown), update)
        self.low = self.low + 1 if score < self.threshold else 0
        if self.low >= self.patience:
            self._alarm(trainer, update, texts[0] if texts else "")

    def _fail(self, trainer: pl.Trainer, update: int, fault: str) -> None:
        """Warn that there is no sample; stop asking after `patience` failures in a row."""
        self._failures += 1
        self._is_able = self._failures < self.patience
        message = f"update {update}: CoherenceGate has no sample, since generate failed ({fault})"
        if not self._is_able:
            message += "; nothing is sampled any more"
        warn(message, category=IncoherenceWarning)
        publish_event(trainer, RunEvent(kind="coherence", update=update, message=message))

    def _alarm(self, trainer: pl.Trainer, update: int, sample: str) -> None:
        message = (
            f"update {update}: the model's samples scored {self.last:.0f} of 100, under {self.threshold:g} "
            f"{self.low} times in a row, and are no text: {sample[:80]!r}"
        )
        if self.action == "stop":
            message += "; the run stops"
            trainer.should_stop = True
        if self.action == "stop" or self.low == self.patience:
            warn(message, category=IncoherenceWarning)
        details = {"score": self.last, "low": self.low, "stops": self.action == "stop", "sample": sample}
        publish_event(trainer, RunEvent(kind="coherence", update=update, message=message, details=details))


def _checked(texts: Any, count: int) -> list[str]:
    """Return texts unchanged if they are a list of the expected length.

    Raises:
        TypeError: If they are anything else.
    """
    kind = type(cast(object, texts)).__name__
    given = cast("list[Any]", texts) if kind == "list" else []
    if len(given) != count or not all(isinstance(each, str) for each in given):
        raise TypeError(f"generate must return a list of {count} texts, got {kind}")
    return given


def _generate(
    module: pl.LightningModule, prompts: list[str], max_new_tokens: int, generator: torch.Generator
) -> list[str]:
    return cast(GeneratesText, module).generate(prompts, max_new_tokens, generator)
