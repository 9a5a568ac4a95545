from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zoo_core.bench import yardsticks
from zoo_core.bench.cases import Case
from zoo_core.bench.contest import Effort
from zoo_core.bench.rows import Ratio, Row

#: Two rounds of one call each: these tests read no clock.
QUICK = Effort(rounds=2, seconds=1e-9)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Effort:
    """The least effort, with small yardsticks."""
    monkeypatch.setattr(yardsticks, "SIZE_ON_CPU", 8)
    monkeypatch.setattr(yardsticks, "COPIED_BYTES", 64)
    return QUICK


@pytest.fixture
def row() -> Callable[..., Row]:
    """Make a row; arguments of the case, of the row, or ratios as numbers."""

    def make(name: str = "linear", length: int = 512, **values: Any) -> Row:
        case = {key: values.pop(key) for key in list(values) if key in Case.__dataclass_fields__}
        ratios = {
            key: Ratio(value=value, error=0.001)
            for key, value in values.pop("ratios", {"sdpa": 1.0}).items()
        }
        known = {"role": "mechanism", "seconds": 1e-3, "spread": 1e-5, "rounds": 5, "peak": 10**6}
        return Row(case=Case(length=length, **case), name=name, ratios=ratios, **known | values)

    return make
