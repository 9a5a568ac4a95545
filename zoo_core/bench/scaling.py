"""How costs grow with N, beside what the records declare; and from which N a mechanism pays."""

from __future__ import annotations

import ast
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zoo_core import registry
from zoo_core.bench.cases import Case
from zoo_core.bench.rows import Row
from zoo_core.errors import BenchError, ZooError

#: How far a fitted exponent may lie from the declared one.
TOLERANCE = 0.15

#: Two points always lie on a line.
FEWEST_POINTS = 3

#: Below this length fixed costs hide how a cost grows.
GROWING = 512

_UNKNOWN_SIZE = 64.0


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """One fitted cost: a quantity of one competitor grows like n ** exponent.

    case: of the shortest length; the other axes hold for all. quantity: "time" or "memory".
    of: the mechanism that a public implementation implements.
    error: standard error of the exponent. formula: what the record declares, "" for others.
    declared: the exponent of that formula over the same lengths.
    """

    case: Case
    name: str
    quantity: str
    lengths: tuple[int, ...]
    of: str = ""
    exponent: float
    error: float
    formula: str = ""
    declared: float | None = None

    @property
    def off(self) -> bool:
        """Whether it lies farther from the declared exponent than it may."""
        return self.declared is not None and abs(self.exponent - self.declared) > TOLERANCE

    @property
    def sure(self) -> bool:
        """Whether it is off by more than its own error."""
        return self.off and abs(self.exponent - (self.declared or 0)) > TOLERANCE + self.error

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object."""
        whole = asdict(self)
        case = whole.pop("case")
        case.pop("length")
        return {**case, **whole, "off": self.off, "sure": self.sure}


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """From which N on a mechanism is faster than fused softmax, or its model than the stock one.

    length: interpolated; None where it is slower at the longest length measured.
    at_most: it is faster at every length measured, the shortest of which this is.
    measured: the shortest and the longest length.
    """

    case: Case
    name: str
    length: float | None
    at_most: bool
    measured: tuple[int, int]

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object; length: as in the tables, such as "> 4096"."""
        case = asdict(self.case)
        case.pop("length")
        return {**case, "name": self.name, "length": str(self)}

    def __str__(self) -> str:
        if self.length is None:
            return f"> {self.measured[1]}"
        return f"<= {self.measured[0]}" if self.at_most else f"{self.length:.0f}"


def fit(lengths: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The exponent p of values ~ lengths ** p by least squares in logarithms, and its error."""
    x, y = [math.log(n) for n in lengths], [math.log(value) for value in values]
    slope, intercept = statistics.linear_regression(x, y)
    spread = sum((a - statistics.fmean(x)) ** 2 for a in x)
    rest = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
    freedom = len(x) - 2
    return slope, math.sqrt(rest / freedom / spread) if freedom > 0 else math.inf


def scalings(rows: Iterable[Row]) -> list[Scaling]:
    """Fits of time and of peak memory for everything measured at FEWEST_POINTS lengths or more.

    Of those from GROWING on, where they are enough.
    """
    found = []
    for group in _by_length(rows):
        first = group[0]
        long = [row for row in group if row.case.length >= GROWING]
        group = long if len(long) >= FEWEST_POINTS else group
        for quantity, values in (
            ("time", [row.seconds for row in group]),
            ("memory", [row.peak for row in group]),
        ):
            points = [(row, float(v)) for row, v in zip(group, values, strict=True) if v]
            lengths = tuple(row.case.length for row, _ in points)
            if len(set(lengths)) < FEWEST_POINTS:
                continue
            exponent, error = fit(lengths, [value for _, value in points])
            formula, declared = _declared([row for row, _ in points], quantity)
            found.append(
                Scaling(
                    case=first.case,
                    name=first.name,
                    quantity=quantity,
                    lengths=lengths,
                    of=first.of,
                    exponent=exponent,
                    error=error,
                    formula=formula,
                    declared=declared,
                )
            )
    return found


def break_evens(rows: Iterable[Row]) -> list[BreakEven]:
    """Of every mechanism at two lengths or more, against fused softmax or the stock model."""
    found = []
    for group in _by_length(rows):
        to = "stock" if group[0].model else "sdpa"
        points = [(r.case.length, r.ratios[to].value) for r in group if to in r.ratios]
        if group[0].role == "mechanism" and len(points) > 1:
            length, at_most = break_even(points)
            found.append(
                BreakEven(
                    case=group[0].case,
                    name=group[0].name,
                    length=length,
                    at_most=at_most,
                    measured=(points[0][0], points[-1][0]),
                )
            )
    return found


def break_even(points: Sequence[tuple[int, float]]) -> tuple[float | None, bool]:
    """Where a ratio, falling with N, stays below 1 from; and whether that is the first point.

    points: (N, ratio) by growing N. Between two of them a power law is assumed.
    """
    below = len(points)
    while below and points[below - 1][1] < 1:
        below -= 1
    if below == len(points):
        return None, False
    if below == 0:
        return float(points[0][0]), True
    (short, high), (long, low) = points[below - 1], points[below]
    share = math.log(high) / (math.log(high) - math.log(low))
    return short * (long / short) ** share, False


def growth_between(formula: str, short: int, long: int, sizes: Mapping[str, Any]) -> float:
    """How many times more a declared cost is at one length than at another; n**2 if unreadable."""
    try:
        return evaluate(formula, {**sizes, "n": long}) / evaluate(formula, {**sizes, "n": short})
    except (BenchError, ZeroDivisionError):
        return (long / short) ** 2


def evaluate(formula: str, sizes: Mapping[str, Any]) -> float:
    """The value of a declared cost such as "n*(window + d)".

    sizes: the numbers behind the names; one that is not among them counts as 64.
    Raises BenchError for a formula that cannot be read.
    """
    try:
        tree = ast.parse(formula.replace("^", "**"), mode="eval")
        value = _value(tree.body, sizes)
    except (SyntaxError, ArithmeticError, ValueError, TypeError) as error:
        raise BenchError(f"the declared cost {formula!r} cannot be read: {error}") from None
    return value


def _by_length(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that differ in nothing but the length and what is clamped to it, by growing length."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if not row.refused:
            key = (row.model, row.name, row.role, row.of, replace(row.case, length=1))
            groups.setdefault(key, []).append(row)
    return [sorted(group, key=lambda row: row.case.length) for group in groups.values()]


def _declared(rows: Sequence[Row], quantity: str) -> tuple[str, float | None]:
    """The formula of a record, and its exponent over the lengths of these rows.

    Only a bare mechanism has one; of a whole model attention is a part. Its time is declared for a
    forward, its memory for forward and backward together.
    """
    if rows[0].role != "mechanism" or rows[0].model:
        return "", None
    if (quantity == "memory") != (rows[0].case.mode == "backward"):
        return "", None
    try:
        record = registry.mechanism(rows[0].name)
        formula = record.time if quantity == "time" else record.memory
        return formula, fit(
            [row.case.length for row in rows],
            [
                evaluate(
                    formula,
                    {**row.options, "n": row.case.length, "d": row.case.width, "h": row.case.heads},
                )
                for row in rows
            ],
        )[0]
    except (ZooError, ValueError):  # unknown here, unreadable, or not positive
        return "", None


_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "min": min,
    "max": max,
}


def _value(node: ast.AST, sizes: Mapping[str, Any]) -> float:
    """Numbers, names, + - * / **, and a few functions; nothing else is evaluated."""
    match node:
        case ast.Constant(value=int() | float()):
            return float(node.value)  # type: ignore[arg-type]
        case ast.Name(id=name):
            size = sizes.get(name)
            known = isinstance(size, int | float) and not isinstance(size, bool)
            return float(size) if known else _UNKNOWN_SIZE  # type: ignore[arg-type]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(argument, sizes) for argument in args))
    raise ValueError(f"{ast.unparse(node)} is neither a number, a name nor a product of them")
