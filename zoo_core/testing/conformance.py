"""What a conformance check is, how it fails, and how checks are run without pytest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zoo_core.architecture import Architecture
from zoo_core.errors import ZooError
from zoo_core.mechanism import Mechanism

Subject = TypeVar("Subject", Mechanism, Architecture)


class ConformanceFailure(AssertionError):
    """A rule that a plugin breaks. `str()` is the report for its author.

    where: the input, in words, with shapes. expected, got: what the rule asks and what came.
    subject, check: the record's qualified name and the check, filled in by the check itself.
    """

    def __init__(self, where: str, expected: str, got: str) -> None:
        super().__init__(where, expected, got)
        self.where, self.expected, self.got = where, expected, got
        self.subject = ""
        self.check: Check[Any] | None = None

    def __str__(self) -> str:
        lines = [f"  where:    {self.where}"] if self.where else []
        lines += [f"  expected: {self.expected}", f"  got:      {self.got}"]
        if self.check is not None:
            heading = f"{self.subject} breaks {self.check.rule} ({self.check.name})"
            lines = [heading, *lines, f"  the rule: {self.check.summary}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """One rule, callable with a record; raises ConformanceFailure where the record breaks it.

    name: what is checked, in snake_case. summary: the rule in one sentence.
    rule: "rule1" to "rule10", "promises" for what a record says of itself, or "combination" for
        one mechanism in one architecture.
    quick: part of the subset that takes seconds; the others compile, spawn or differentiate.
    applies: whether the record promises anything that this check could test.
    """

    name: str
    rule: str
    summary: str
    function: Callable[[Subject], None]
    quick: bool
    applies: Callable[[Subject], bool]

    @property
    def id(self) -> str:
        """The test id, such as "rule2-truncation"."""
        return f"{self.rule}-{self.name}"

    def __call__(self, record: Subject) -> None:
        """Run the check. Any other exception than ConformanceFailure is turned into one."""
        try:
            self.function(record)
        except ConformanceFailure as failure:
            failure.subject, failure.check = record.qualified, self
            raise
        except Exception as error:
            raised = ConformanceFailure("", "no exception", f"{type(error).__name__}: {error}")
            raised.subject, raised.check = record.qualified, self
            raise raised from error


def always(_: Any) -> bool:
    """Applies to every record."""
    return True


def rule(
    number: int | None, *, quick: bool = True, applies: Callable[[Mechanism], bool] = always
) -> Callable[[Callable[[Mechanism], None]], Check[Mechanism]]:
    """Make a function `check_<name>` a Check of rule `number`, None for a promise of the record.

    The first line of its docstring is the rule in one sentence.
    """
    name = "promises" if number is None else f"rule{number}"
    return lambda function: _check(function, name, quick=quick, applies=applies)


def architecture_rule(function: Callable[[Architecture], None]) -> Check[Architecture]:
    """Make a function `check_<name>` a Check of architectures, as `rule` does for mechanisms."""
    return _check(function, "promises", quick=True, applies=always)


def _check(
    function: Callable[[Subject], None],
    rule: str,
    *,
    quick: bool,
    applies: Callable[[Subject], bool],
) -> Check[Subject]:
    return Check(
        name=function.__name__.removeprefix("check_"),
        rule=rule,
        summary=(function.__doc__ or "").partition("\n")[0],
        function=function,
        quick=quick,
        applies=applies,
    )


def checks_in(*modules: Any) -> tuple[Check[Any], ...]:
    """Every Check defined in `modules`, in the order of definition."""
    return tuple(
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, Check) and value.function.__module__ == module.__name__
    )


@dataclass(frozen=True)
class Outcome:
    """One check of one record. `failure` is None where it passed."""

    subject: str
    check: Check[Any]
    failure: ConformanceFailure | None
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        failure = self.failure
        return {
            "subject": self.subject,
            "rule": self.check.rule,
            "check": self.check.name,
            "passed": failure is None,
            "seconds": round(self.seconds, 3),
            "where": failure.where if failure else None,
            "expected": failure.expected if failure else None,
            "got": failure.got if failure else None,
        }


def run_checks(record: Subject, checks: Iterable[Check[Subject]]) -> Iterator[Outcome]:
    """Run checks one after the other; a failure stops none of the others."""
    for check in checks:
        start = time.perf_counter()
        failure = None
        try:
            check(record)
        except ConformanceFailure as caught:
            failure = caught
        yield Outcome(record.qualified, check, failure, time.perf_counter() - start)


def select_checks(
    record: Subject, checks: Sequence[Check[Subject]], *, quick: bool
) -> list[Check[Subject]]:
    """Those of `checks` that apply to a record; with `quick` only the fast ones."""
    return [check for check in checks if check.applies(record) and (check.quick or not quick)]


def refused(call: Callable[[], object]) -> ZooError | None:
    """The ZooError that `call` raises, None if it returns."""
    try:
        call()
    except ZooError as error:
        return error
    return None
