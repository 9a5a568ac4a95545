"""Run a pickled probe in a process that has imported nothing but torch.

Importing torch takes seconds, so one server imports it and forks for every request.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from zoo_core.testing.cases import Call, Probe

_SERVER = """
import os, sys, traceback
import torch

def answer(folder):
    try:
        probe, arguments = torch.load(folder + "/request", weights_only=False)
        torch.save(probe(*arguments).detach(), folder + "/answer")
    except BaseException:
        with open(folder + "/error", "w") as file:
            file.write(traceback.format_exc())

# What a plugin prints goes to stderr, so that it cannot pass for an answer.
done = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    child = os.fork() if hasattr(os, "fork") else None
    if not child:
        answer(line.rstrip("\\n"))
        if child == 0:
            os._exit(0)
    else:
        os.waitpid(child, 0)
    print("done", file=done, flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    server.communicate()


def run_in_fresh_process(probe: Probe, call: Call) -> Tensor:
    """The output of a pickled probe, run by a process that knows neither zoo_core nor the plugin.

    Raises RuntimeError with that process's traceback.
    """
    server = _server()
    if server.stdin is None or server.stdout is None:
        raise RuntimeError("the fresh process has no pipes")
    with tempfile.TemporaryDirectory() as folder:
        torch.save((probe, (call.q, call.k, call.v, call.ctx)), Path(folder, "request"))
        server.stdin.write(f"{folder}\n")
        server.stdin.flush()
        server.stdout.readline()
        answer, error = Path(folder, "answer"), Path(folder, "error")
        if not answer.exists():
            trace = error.read_text() if error.exists() else "the process died"
            raise RuntimeError(f"in a fresh process: {trace}")
        out: Tensor = torch.load(answer)
        return out
