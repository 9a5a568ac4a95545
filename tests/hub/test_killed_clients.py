"""kill -9 at any moment of a push or a pull: the repository and the cache hold whole commits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hub_models as models
import pytest
import torch
from huggingface_hub import HfApi, close_session, constants
from killing import forked

import zoo_core as zoo
from zoo_core.testing.hub import Hub

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

REPO = "zoo/tiny"
KILLS = 20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # A forked process has no thread pool.
    yield
    torch.set_num_threads(threads)


def killed(hub: Hub, work: Callable[[], object], *, requests: int, delay: float) -> bool:
    """Run `work` in a fork and kill it `delay` seconds after it made that many requests.

    Returns False if it was done before.
    """
    before = len(list(hub.log))

    def fresh() -> None:
        close_session()
        work()

    process = forked(fresh)
    while len(list(hub.log)) - before < requests:
        if os.waitpid(process, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    time.sleep(delay)
    os.kill(process, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


def count(hub: Hub, work: Callable[[], object]) -> int:
    """How many requests it takes."""
    before = len(list(hub.log))
    work()
    return len(list(hub.log)) - before


def moments(requests: int) -> list[tuple[int, float]]:
    """Twenty points, spread over all requests, each at a random time before the next one."""
    chance = random.Random(0)
    return [(1 + i * requests // KILLS, 0.01 * chance.random()) for i in range(KILLS)]


def kill(number: int) -> str:
    """What the table of faults calls it."""
    return f"kill -9, {number + 1:02} of {KILLS}"


def test_a_push(
    hub: Hub,
    api: HfApi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    twins = [models.bert(seed=0), models.bert(seed=1)]

    def push(model: torch.nn.Module) -> object:
        return zoo.push(model, REPO, token=hub.tokens.write, endpoint=hub.endpoint)

    push(twins[1])
    requests = count(hub, lambda: push(twins[0]))
    hits = 0
    for number, (reached, delay) in enumerate(moments(requests)):
        old, new = twins[number % 2], twins[1 - number % 2]
        head = hub.head(REPO)
        hits += killed(hub, lambda: push(new), requests=reached, delay=delay)  # noqa: B023
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / f"cache{number}"))
        found = zoo.pull(REPO, token=hub.tokens.read, endpoint=hub.endpoint)
        models.assert_same(old if hub.head(REPO) == head else new, found)
        push(new)  # goes on, or finds it done
        again = zoo.pull(REPO, token=hub.tokens.read, endpoint=hub.endpoint)
        models.assert_same(new, again)
        when = f"{1000 * delay:.1f} ms after request {reached} of {requests}"
        fault("push", f"a whole commit is there, the next push finishes: {when}", kill(number))
    assert hits > KILLS // 2


def test_a_pull(
    hub: Hub,
    api: HfApi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., None],
) -> None:
    ref = zoo.push(models.bert(), REPO, token=hub.tokens.write, endpoint=hub.endpoint)

    def pull() -> torch.nn.Module:
        return zoo.pull(ref, token=hub.tokens.read, endpoint=hub.endpoint)

    def cache(name: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / name))

    cache("counted")
    requests = count(hub, pull)
    hits = 0
    for number, (reached, delay) in enumerate(moments(requests)):
        cache(f"cache{number}")
        hits += killed(hub, pull, requests=reached, delay=delay)
        models.assert_same(models.bert(), pull())
        when = f"{1000 * delay:.1f} ms after request {reached} of {requests}"
        fault("pull", f"the next pull finishes: {when}", kill(number))
    assert hits > KILLS // 2
