"""Several calls of the command in one fork: what each printed, and its exit code."""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import run_python

TINY = """
seed_everything: 1
trainer:
  accelerator: cpu
  max_steps: 2
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: .
data:
  sources: [{name: lines, paths: [text.txt], document_separator: "\\n"}]
  vocab_size: 300
  block_size: 32
  sequences_per_update: 8
  val_fraction: 0.0
  cache_dir: cache
model:
  network: {d_model: 16, n_heads: 2, n_layers: 1}
"""

SCRIPT = """
import contextlib, io, json, socket, sys, traceback
from andrea_pl.cli.main import main

looked_up = []
socket.getaddrinfo = lambda host, *rest, **options: looked_up.append(str(host)) or []
socket.socket.connect = lambda self, address: looked_up.append(str(address))
answers = []
calls = json.loads(sys.argv[1])
sys.argv = ["andrea"]
for arguments in calls:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
            code = 99
    answers.append([code, stdout.getvalue(), stderr.getvalue()])
print(json.dumps([answers, looked_up]))
"""


@dataclass(frozen=True)
class Answer:
    """What came of one call."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines of the standard error that are no log."""
        return [line for line in self.stderr.splitlines() if line.strip() and not line.startswith("Seed set")]


def ask(*calls: list[str], **environment: str) -> tuple[list[Answer], list[str]]:
    """Make the calls one after the other; return their answers, and every host that one looked up."""
    result = run_python(SCRIPT, json.dumps(calls), **environment)
    assert result.returncode == 0, result.stderr
    answers, looked_up = json.loads(result.stdout.splitlines()[-1])
    return [Answer(*each) for each in answers], looked_up


def write_tiny() -> Path:
    """Write a configuration over 40 short documents into the working folder."""
    Path("text.txt").write_text("\n".join(f"line {n} says {n * n} and {n + 1} again" for n in range(40)))
    Path("tiny.yaml").write_text(TINY)
    return Path("tiny.yaml")
