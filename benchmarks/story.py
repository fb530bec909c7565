"""Does ANDREA's story hold? Recipes v1 and v2 at the size of andrea-mini, each single change between them.

    pip install "andrea-pl[story]"
    bash benchmarks/corpora.sh
    python benchmarks/story.py [--folder story] [--seeds 2] [--workers 2] [--updates N] [--only-report]

Trained are v1, v2, and v1 with one of clip, warm-up, weight decay, curriculum warm-up and reward guard, each
with every seed, on the same corpora, one thread a run. Finished runs are kept: started again, it goes on with
what is missing, or was made by another command or configuration. A run that a NaN stops is a result, too. In
the folder it writes `table.md` and the pictures

    switches.svg    norm before clipping, by the updates since weights switched, over the median inside phases
    clipped.svg     share of the updates whose norm was over the bound of 1, clipped or not
    validation.svg  loss of each source over label tokens, by recipe
    coherence.svg   coherence over updates
    moments.svg     share of the first moment that a spike still is, by the norms that entered it

A spike is here an update whose norm is over 3 times the median of the 50 updates after it, and the largest of
the 25 to either side.

Losses are compared at equal label tokens: those of the run that saw fewest, between two validations linearly.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from andrea_callbacks import read_journal

CONFIGS = Path(__file__).parents[1] / "configs"
SOURCES = ("novels", "documentation", "questions")
BOUND = 1.0
SETTLED = 100
"""Updates at the start that norms are not compared in: they fall for another reason."""
AFTER_SWITCH = 3
"""Updates of a phase that count as around its switch."""
BETA1 = 0.9
"""Decay of the first moment in both configurations."""
SPIKE, AFTER, APART = 3.0, 50, 25
"""Norm over the median of the updates after it from which on an update is a spike; how many these are; the
updates to either side in which it is the largest."""
FOLLOWED = 60
"""Updates over which a spike is followed in the first moment."""
GONE = 0.1
"""A spike is gone when it is less than this share of the first moment."""

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": ("v1", {}),
    "v1 + clip": ("v1", {"model.max_norm": BOUND}),
    "v1 + warm-up": ("v1", {"model.warmup_updates": 50}),
    "v1 + weight decay": ("v1", {"model.weight_decay": 0.1}),
    "v1 + curriculum": (
        "v1",
        {
            "data.curriculum.warmup_updates": 100,
            "data.curriculum.warmup_sources": "[novels, questions]",
        },
    ),
    "v1 + guard": (
        "v1",
        {"data.curriculum.hard_clip": 0.5, "data.curriculum.repetition_penalty": 1.0},
    ),
    "v2": ("v2", {}),
}
"""By name the configuration and what differs from it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe with a seed."""

    recipe: str
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        """Where the run writes."""
        return self.folder / f"{self.recipe.replace(' + ', '-').replace(' ', '_')}-seed{self.seed}"

    def command(self, updates: int | None) -> list[str]:
        """Return the command that trains it."""
        config, changes = RECIPES[self.recipe]
        options: dict[str, Any] = {
            "config": CONFIGS / f"andrea-mini-{config}.yaml",
            "seed_everything": self.seed,
            "data.seed": self.seed,
            "trainer.logger.init_args.save_dir": self.log.parent,
            "trainer.logger.init_args.name": self.log.name,
            "trainer.logger.init_args.version": "run",
            "trainer.enable_progress_bar": "false",
            **changes,
        }
        if updates is not None:
            options["trainer.max_steps"] = updates
        flags = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "andrea_pl", "fit", *flags]

    def mark(self, updates: int | None) -> dict[str, Any]:
        """Return what a finished run must have been made by."""
        config, changes = RECIPES[self.recipe]
        text = (CONFIGS / f"andrea-mini-{config}.yaml").read_text(encoding="utf-8")
        return {"config": text, "changes": changes, "seed": self.seed, "updates": updates}

    def is_done(self, updates: int | None) -> bool:
        """Whether the run is finished, by this very command and configuration."""
        file = self.log / "done.json"
        return file.exists() and json.loads(file.read_text())["mark"] == self.mark(updates)

    def train(self, updates: int | None) -> str:
        """Train it from the start, unless it is finished; say how it went."""
        if self.is_done(updates):
            return "kept"
        shutil.rmtree(self.log, ignore_errors=True)
        self.log.mkdir(parents=True)
        began = time.perf_counter()
        with (self.log / "output.txt").open("wb") as output:
            done = subprocess.run(
                self.command(updates),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=False,
            )
        seconds = time.perf_counter() - began
        last = (self.log / "output.txt").read_text(errors="replace").splitlines()[-5:]
        if done.returncode and "is not finite" not in " ".join(last):
            raise RuntimeError("\n".join([f"{self.recipe}, seed {self.seed}: exit {done.returncode}", *last]))
        (self.log / "done.json").write_text(json.dumps({"mark": self.mark(updates), "seconds": seconds}))
        return f"{seconds:.0f} s" + (f", stopped: {last[-1]}" if done.returncode else "")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run left behind."""

    recipe: str
    seed: int
    norms: list[float]
    """Before clipping, of every update."""
    since_switch: list[int]
    """Updates since the phase began, 0 for its first."""
    tokens: list[int]
    """Label tokens up to and including every update."""
    shares: dict[str, float]
    """Of the label tokens, by source."""
    validations: list[tuple[int, dict[str, float]]]
    """Update, and loss by source, with `all` for all text."""
    coherence: list[tuple[int, float]]
    is_clipped: bool
    shifts: list[float]
    """How far weights moved at each switch, from 0 to 1 (total variation)."""

    @property
    def lives(self) -> list[list[float]]:
        """Of every spike the share of the first moment that it is, update by update from its own."""
        entered = [min(norm, BOUND) if self.is_clipped else norm for norm in self.norms]
        return [follow(spike, entered) for spike in spikes_of(self.norms)]

    @property
    def settled_norms(self) -> tuple[list[float], list[float]]:
        """Norms around switches and inside phases, once training has settled."""
        around: list[float] = []
        inside: list[float] = []
        for norm, since in zip(self.norms[SETTLED:], self.since_switch[SETTLED:], strict=True):
            (around if since < AFTER_SWITCH else inside).append(norm)
        return around, inside

    def loss_at(self, source: str, tokens: int) -> float:
        """Return a validation loss after so many label tokens, linear between validations."""
        places = [self.tokens[update - 1] for update, _ in self.validations]
        return float(np.interp(tokens, places, [losses[source] for _, losses in self.validations]))


def read_run(job: Job) -> Run:
    """Read journal and curves of a finished run."""
    rows = read_journal(job.log / "run" / "journal.jsonl")
    updates = [row for row in rows if row["kind"] == "update" and row["outcome"] == "applied"]
    starts = {row["update"] for row in rows if row["kind"] == "phase"}
    since: list[int] = []
    for row in updates:
        since.append(0 if row["update"] in starts else since[-1] + 1)
    totals = np.sum([row["source_tokens"] for row in updates], axis=0)
    validations: list[tuple[int, dict[str, float]]] = []
    for row in rows:
        if row["kind"] == "validation":
            metrics = row["metrics"]
            losses = {source: float(metrics[f"val/{source}/loss"]) for source in SOURCES}
            validations.append((row["update"], {**losses, "all": float(metrics["val/loss"])}))
    return Run(
        recipe=job.recipe,
        seed=job.seed,
        norms=[float(row["grad_norm"]) for row in updates],
        since_switch=since,
        tokens=np.cumsum([row["tokens"] for row in updates]).tolist(),
        shares=dict(zip(SOURCES, (totals / totals.sum()).tolist(), strict=True)),
        validations=validations,
        coherence=read_curve(job.log / "run", "coherence/score"),
        shifts=[
            sum(abs(after["weights"][name] - before["weights"][name]) for name in SOURCES) / 2
            for before, after in pairwise(row for row in rows if row["kind"] == "phase")
        ],
        is_clipped=any(row["clip_coefficient"] < 1 for row in updates),
    )


def spikes_of(norms: Sequence[float]) -> list[int]:
    """Return the places of spikes, from 0."""
    found: list[int] = []
    for place, norm in enumerate(norms[:-AFTER]):
        near = norms[max(0, place - APART) : place + APART + 1]
        if norm > SPIKE * median(norms[place + 1 : place + 1 + AFTER]) and norm == max(near):
            found.append(place)
    return found


def follow(spike: int, entered: Sequence[float]) -> list[float]:
    """Return what share of Adam's first moment a spike is, by the norms that entered it.

    An upper estimate of the moment's own norm: gradients count as if all had one direction.
    """
    moment = sum(norm * BETA1 ** (spike - place) for place, norm in enumerate(entered[: spike + 1]))
    part = entered[spike]
    life = [part / moment]
    for norm in entered[spike + 1 : spike + FOLLOWED]:
        moment, part = BETA1 * moment + norm, BETA1 * part
        life.append(part / moment)
    return life


def read_curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return a scalar that TensorBoard has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(each.step, each.value) for each in events.Scalars(name)]


def updates_until_gone(runs: Sequence[Run]) -> list[int]:
    """Return for every spike after how many updates it is less than `GONE` of the first moment."""
    lives = (life for run in runs for life in run.lives)
    return [next((age for age, share in enumerate(life) if share < GONE), len(life)) for life in lives]


COLUMNS: dict[str, Callable[[list[Run], int], str]] = {
    "weights moved at a switch": lambda runs, _: spread([mean(run.shifts) for run in runs], percent=True),
    "norm after a switch / inside": lambda runs, _: spread(
        [median(around) / median(inside) for around, inside in (run.settled_norms for run in runs)]
    ),
    "largest norm / median": lambda runs, _: spread(
        [max(run.norms[SETTLED:]) / median(run.norms[SETTLED:]) for run in runs]
    ),
    "norm over 1": lambda runs, _: spread([share_over(run) for run in runs], percent=True),
    **{
        f"val, {source}": lambda runs, tokens, source=source: spread(
            [run.loss_at(source, tokens) for run in runs]
        )
        for source in ("all", *SOURCES)
    },
    "tokens from lists": lambda runs, _: spread([run.shares["documentation"] for run in runs], percent=True),
    "coherence at the end": lambda runs, _: spread([run.coherence[-1][1] for run in runs], digits=0),
    "first 100 updates, largest norm": lambda runs, _: spread(
        [max(run.norms[:SETTLED]) for run in runs], digits=1
    ),
    "spikes": lambda runs, _: spread([len(run.lives) for run in runs], digits=0),
    "share of the first moment": lambda runs, _: optional(
        [life[0] for run in runs for life in run.lives], lambda values: f"{median(values):.0%}"
    ),
    "updates until gone": lambda runs, _: optional(
        updates_until_gone(runs), lambda values: f"{median(values):g}"
    ),
}


def optional(values: Sequence[float], spell: Callable[[Sequence[float]], str]) -> str:
    """Return a figure, or a dash where there is nothing to make it of."""
    return spell(values) if values else "–"


def share_over(run: Run) -> float:
    """Return the share of updates whose norm was over the bound."""
    return mean(norm > BOUND for norm in run.norms)


def spread(values: Sequence[float], digits: int = 2, percent: bool = False) -> str:
    """Return the mean of the seeds and their range."""
    spell = (lambda value: f"{value:.0%}") if percent else (lambda value: f"{value:.{digits}f}")
    ends = [spell(min(values)), spell(max(values))]
    return spell(mean(values)) + (f" [{ends[0]}, {ends[1]}]" if ends[0] != ends[1] else "")


def write_table(runs: Sequence[Run], file: Path) -> str:
    """Write and return the table, a recipe a row."""
    tokens = min(run.tokens[-1] for run in runs)
    seeds = len({run.seed for run in runs})
    lines = [
        f"Mean [least, most] of {seeds} seeds, {len(runs[0].norms):,} updates; losses in nats per label "
        f"token, after {tokens:,} label tokens.",
        "",
        f"| recipe | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for recipe in RECIPES:
        own = [run for run in runs if run.recipe == recipe]
        if own:
            lines.append(f"| {recipe} | {' | '.join(column(own, tokens) for column in COLUMNS.values())} |")
    file.write_text("\n".join(lines) + "\n")
    return "\n".join(lines)


def draw(runs: Sequence[Run], folder: Path) -> None:
    """Draw the pictures."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    colours = {recipe: f"C{number}" for number, recipe in enumerate(RECIPES)}

    def save(name: str, title: str, across: str, up: str) -> None:
        pyplot.title(title)
        pyplot.xlabel(across)
        pyplot.ylabel(up)
        pyplot.legend(fontsize="small")
        pyplot.tight_layout()
        pyplot.savefig(folder / f"{name}.svg")
        pyplot.close()

    ages = range(14)
    for recipe in RECIPES:
        own = [run for run in runs if run.recipe == recipe]
        by_age = [[norm for run in own for norm in norms_of_age(run, age)] for age in ages]
        if all(by_age):
            pyplot.plot(ages, [median(each) for each in by_age], color=colours[recipe], label=recipe)
    save(
        "switches",
        "Norm around a switch of sources",
        "updates since the switch",
        "norm / median inside phases",
    )

    names = [recipe for recipe in RECIPES if any(run.recipe == recipe for run in runs)]
    shares = [mean(share_over(run) for run in runs if run.recipe == name) for name in names]
    pyplot.barh(names, shares, label="updates over 1")
    save("clipped", "Updates whose norm was over 1", "share", "")

    figure, panels = pyplot.subplots(1, len(SOURCES), figsize=(12, 4))
    for panel, source in zip(panels, SOURCES, strict=True):
        for run in runs:
            places = [run.tokens[update - 1] / 1e6 for update, _ in run.validations]
            label = run.recipe if run.seed == 0 else None
            losses = [losses[source] for _, losses in run.validations]
            panel.plot(places, losses, color=colours[run.recipe], label=label, linewidth=1)
        panel.set(title=source, xlabel="million label tokens", ylabel="nats per token")
    panels[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(folder / "validation.svg")
    pyplot.close(figure)

    for run in runs:
        label = run.recipe if run.seed == 0 else None
        pyplot.plot(*zip(*run.coherence, strict=True), color=colours[run.recipe], label=label)
    pyplot.axhline(30, color="grey", linestyle=":")
    save("coherence", "Coherence of samples", "update", "of 100; the alarm is at 30")

    for recipe in RECIPES:
        lives = [life for run in runs if run.recipe == recipe for life in run.lives]
        curve = [
            median(each)
            for age in range(FOLLOWED)
            if (each := [life[age] for life in lives if len(life) > age])
        ]
        if curve:
            pyplot.plot(
                range(len(curve)), curve, color=colours[recipe], label=f"{recipe}, {len(lives)} spikes"
            )
    save("moments", "A spike in Adam's first moment", "updates since the spike", "share of the first moment")


def norms_of_age(run: Run, age: int) -> list[float]:
    """Return norms so many updates after a switch, over the median inside phases."""
    inside = median(run.settled_norms[1])
    pairs = zip(run.norms[SETTLED:], run.since_switch[SETTLED:], strict=True)
    return [norm / inside for norm, since in pairs if since == age]


def main() -> None:
    """Train what is missing, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("story"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=None)
    parser.add_argument("--only-report", action="store_true")
    options = parser.parse_args()
    # seed by seed, so that a run broken off has whole comparisons
    jobs = [
        Job(recipe=recipe, seed=seed, folder=options.folder)
        for seed in range(options.seeds)
        for recipe in RECIPES
    ]
    if not options.only_report:
        prepared = [*jobs[0].command(options.updates)]
        prepared[prepared.index("fit")] = "prepare"
        subprocess.run(prepared, check=True)  # once, not by two runs at a time
        with ThreadPoolExecutor(options.workers) as pool:
            trained = [pool.submit(job.train, options.updates) for job in jobs]
            try:
                for job, each in zip(jobs, trained, strict=True):
                    print(f"{job.recipe}, seed {job.seed}: {each.result()}", flush=True)
            except RuntimeError as error:
                pool.shutdown(cancel_futures=True)
                raise SystemExit(str(error)) from error
    runs = [read_run(job) for job in jobs if job.is_done(options.updates)]
    if not runs:
        raise SystemExit(f"no finished run in {options.folder}")
    print(write_table(runs, options.folder / "table.md"))
    draw(runs, options.folder)
    (options.folder / "runs.json").write_text(
        json.dumps({f"{run.recipe}/{run.seed}": {"lives": run.lives, "shares": run.shares} for run in runs})
    )


if __name__ == "__main__":
    main()
