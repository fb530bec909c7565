"""Runs the command `andrea` in processes of its own, forked from one that has imported everything.

A command spends seconds on imports before it does anything. Here one process imports once, and forks a
child for each command, and for each script of tests: what a child does to itself ends with it.
"""

import atexit
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[2]

Result = subprocess.CompletedProcess[str]
RankResults = dict[str, dict[str, Any]]


def andrea(*arguments: str, timeout: int = 240, **environment: str) -> Result:
    """Run the command in the working folder, by a fork."""
    return Nursery.shared().run(list(arguments), environment)


def andrea_from_scratch(*arguments: str, timeout: int = 240, **environment: str) -> Result:
    """Run the command in the working folder as a shell would."""
    return subprocess.run(
        [sys.executable, "-m", "andrea_pl", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def run_python(script: str, *arguments: str, **environment: str) -> Result:
    """Run a script by a fork; it can import what tests can, and fork in turn."""
    return Nursery.shared().run(list(arguments), environment, script)


RANKS = """
import os, runpy, signal, socket, sys, traceback

path, ranks = sys.argv[1], int(sys.argv[2])
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
children = []
for rank in range(ranks):
    child = os.fork()
    if child:
        children.append(child)
        continue
    if ranks > 1:
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        places |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "tests"}
        places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in places.items()})
    sys.argv = sys.argv[1:]
    code = 1
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
failed = 0
while children:
    child, status = os.wait()
    children.remove(child)
    if status and not failed:
        failed = os.waitstatus_to_exitcode(status)
        for each in children:
            os.kill(each, signal.SIGKILL)
sys.exit(abs(failed))
"""


def run_ranks(path: Path, ranks: int, *arguments: str, **environment: str) -> Result:
    """Run a script on so many ranks as torchrun would, by forks; the first that fails ends the others.

    Its arguments are the number of ranks and those given.
    """
    return run_python(RANKS, str(path), str(ranks), *arguments, **environment)


def run_script(name: str, ranks: int, folder: Path) -> list[RankResults]:
    """Run a script of this folder on so many ranks and return what each of them wrote."""
    import torch  # not at the top: this file forks a process that imports everything once

    folder.mkdir()
    done = run_ranks(Path(__file__).with_name(name), ranks, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def run_python_from_scratch(script: str, *arguments: str, timeout: int = 240) -> Result:
    """Run a script in a process that ends as any other."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


class Nursery:
    """The process that has imported everything, seen from the tests."""

    _shared: "Nursery | None" = None

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        atexit.register(self.process.terminate)

    @classmethod
    def shared(cls) -> "Nursery":
        """Return the one of this test process."""
        if cls._shared is None or cls._shared.process.poll() is not None:
            cls._shared = cls()
        return cls._shared

    def run(self, arguments: list[str], environment: dict[str, str], script: str | None = None) -> Result:
        """Have a child run the command, or a script, and return what came of it."""
        with tempfile.TemporaryDirectory() as folder:
            outputs = [str(Path(folder) / name) for name in ("stdout", "stderr")]
            request = {
                "arguments": arguments,
                "script": script,
                "folder": str(Path.cwd()),
                "environment": {**os.environ, "OMP_NUM_THREADS": "1", **environment},
                "outputs": outputs,
            }
            assert self.process.stdin
            assert self.process.stdout
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
            assert answer, "the process that commands are forked from has ended; its words are above"
            code = int(answer)
            texts = [Path(each).read_text(encoding="utf-8", errors="replace") for each in outputs]
        return Result(["andrea", *arguments], code, *texts)


def serve() -> None:
    """Import everything, then fork a child for every request on the standard input."""
    importlib.import_module("andrea_pl.cli.main")
    gc.collect()
    gc.freeze()  # children would copy all of it when they collect garbage

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            live(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def live(request: dict[str, Any]) -> None:
    """Be the command."""
    from andrea_pl.cli.main import main

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    for number, path in enumerate(request["outputs"], start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    arguments = cast("list[str]", request["arguments"])
    script = cast("str | None", request["script"])
    sys.argv = ["andrea" if script is None else "-c", *arguments]
    code: Any = 1
    try:
        if script is None:
            code = main(arguments)
        else:
            exec(script, {"__name__": "__main__"})
            code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve()
