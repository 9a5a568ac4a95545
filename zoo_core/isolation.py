"""Run foreign code so that whatever it raises is caught, described, and ends nothing else.

What cannot be contained inside one process is named here too: `os._exit`, a crash of the
interpreter, and a loop that never returns. ZOO_BLOCK keeps such a plugin from being imported.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import pluggy

T = TypeVar("T")

LONGEST = 300
_MACHINERY = tuple(
    f"{Path(module).parent}{os.sep}" for module in (__file__, pluggy.__file__, importlib.__file__)
)


class ForeignError(Exception):
    """What is wrong with foreign code, in one line; `__cause__` is what it raised, if it did.

    Raised as well by checks inside an attempt, and handed on as it is.
    """


class Isolation:
    """A context in which `attempt` runs foreign code.

    While it lasts, stdout goes to stderr, and in the main thread a Ctrl-C is told apart from a
    KeyboardInterrupt that the code raises itself: only the first one stops us.
    """

    def __init__(self) -> None:
        self._interrupted = False
        self._previous: Any = None
        self._stdout = _stdout_to_stderr()

    def __enter__(self) -> Self:
        self._stdout.__enter__()
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous) and threading.current_thread() is threading.main_thread():
            self._previous = previous
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        self._stdout.__exit__(kind, error, trace)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        self._previous(number, frame)

    def attempt(self, call: Callable[[], T]) -> T:
        """Return `call()`. Raises ForeignError for whatever it raises, except for a Ctrl-C."""
        try:
            result = call()
        except BaseException as error:
            if self._interrupted:
                raise KeyboardInterrupt from None
            if isinstance(error, ForeignError):
                raise
            raise ForeignError(describe(error)) from error
        if self._interrupted:  # and the code swallowed it
            raise KeyboardInterrupt
        return result


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect what Python code prints, and what the programs that it starts do."""
    with redirect_stdout(sys.stderr):
        _flush()
        try:
            os.fstat(2)
            saved = os.dup(1)
        except OSError:  # one of them is closed
            yield
            return
        try:
            os.dup2(2, 1)
            yield
        finally:
            _flush()
            os.dup2(saved, 1)
            os.close(saved)


def _flush() -> None:
    if sys.__stdout__ is not None:
        with suppress(OSError, ValueError):  # a closed pipe, a closed file
            sys.__stdout__.flush()


def describe(error: BaseException) -> str:
    """One printable line: the exception's kind and text, and the foreign line that raised it."""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be printed)"
    kind = type(error).__name__
    return one_line(f"{kind}: {text}" if text else kind) + _place(error.__traceback__)


def one_line(text: str, longest: int = LONGEST) -> str:
    """`text` without line breaks, control characters and lone surrogates, cut to `longest`."""
    start = text[: 4 * longest]
    clean = " ".join("".join(c if c.isprintable() else " " for c in start).split())
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def _place(trace: TracebackType | None) -> str:
    """The file and line of the deepest frame outside zoo_core, pluggy and the import system."""
    place = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(("<", *_MACHINERY)):
            place = one_line(f" ({Path(file).name}:{trace.tb_lineno})")
        trace = trace.tb_next
    return f" {place}" if place else ""
