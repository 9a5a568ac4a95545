"""The kit under the tools of its users: an author's own pytest, and programs without pytest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import toys

from zoo_core import registry
from zoo_core.errors import UnknownName
from zoo_core.testing import (
    architecture_checks,
    mechanism_checks,
    parametrize_architectures,
    parametrize_mechanisms,
    run_checks,
)

AUTHORS_TEST = """
from zoo_core.testing import parametrize_mechanisms

@parametrize_mechanisms("zoo-core/unif*", quick=True, combinations=False)
def test_conformance(mechanism, check):
    check(mechanism)
"""

WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None
from zoo_core import registry
from zoo_core.testing import mechanism_checks, run_checks
checks = mechanism_checks(registry.mechanism("uniform"), quick=True)[:3]
for outcome in run_checks(registry.mechanism("uniform"), checks):
    print(outcome.check.id, outcome.failure is None)
"""


def ids(mark: pytest.MarkDecorator) -> list[str]:
    return [case.id for case in mark.args[1]]


def python(*arguments: str, **how) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **how)


def test_under_an_authors_pytest(tmp_path) -> None:
    (tmp_path / "test_mine.py").write_text(AUTHORS_TEST)
    some = ("-k", "truncation or prefix")  # test_mechanisms.py has all of them
    done = python("-m", "pytest", "-v", "-p", "no:cacheprovider", *some, cwd=tmp_path)
    assert "test_conformance[uniform-rule2-truncation] PASSED" in done.stdout
    assert done.returncode == 0


def test_without_pytest() -> None:
    done = python("-c", WITHOUT_PYTEST)
    assert done.stdout.splitlines() == [
        "rule1-all_padding True",
        "rule1-long_padding True",
        "rule2-padding_content True",
    ], done.stderr


def test_the_package_loads_no_torch() -> None:
    code = "import sys, zoo_core.testing; print('torch' in sys.modules)"
    assert python("-c", code).stdout.strip() == "False"


def test_ids_are_readable_and_quick_leaves_out_the_slow() -> None:
    every, quick = (
        ids(parametrize_mechanisms("uniform")),
        ids(parametrize_mechanisms("uniform", quick=True)),
    )
    assert {"uniform-rule7-compile", "uniform-combination-in_bert"} <= set(every) - set(quick)
    assert "uniform-rule2-truncation" in quick
    assert "bert-promises-restore" in ids(parametrize_architectures("bert", quick=True))


def test_combinations_are_one_check_each() -> None:
    bert, uniform = registry.architecture("bert"), registry.mechanism("uniform")
    assert "with_uniform" in {check.name for check in architecture_checks(bert)}
    assert "in_bert" in {check.name for check in mechanism_checks(uniform)}
    assert not [c for c in mechanism_checks(toys.record()) if c.rule == "combination"]


def test_a_record_that_is_not_installed_can_be_checked() -> None:
    assert "toy-rule2-truncation" in ids(parametrize_mechanisms(toys.record()))


def test_promises_decide_which_checks_apply() -> None:
    names = {check.name for check in mechanism_checks(toys.inexact())}
    assert "truncation" in names
    assert not names & {"causal", "cross", "bias", "weights", "exact_limit"}


def test_expected_failures_are_strict_and_must_name_a_test() -> None:
    reasons = {"uniform-rule8-dropout": "there is nothing to drop"}
    mark = parametrize_mechanisms("uniform", expected_failures=reasons)
    [case] = [case for case in mark.args[1] if case.id in reasons]
    assert case.marks[0].name == "xfail"
    assert case.marks[0].kwargs == {"reason": "there is nothing to drop", "strict": True}
    with pytest.raises(UnknownName, match="uniform-rule8-drpout"):
        parametrize_mechanisms("uniform", expected_failures={"uniform-rule8-drpout": "?"})


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UnknownName, match="unifrom"):
        parametrize_mechanisms("unifrom")


def test_outcomes_are_json() -> None:
    broken = toys.inexact(toys.ValueWidthOfKeys)
    checks = [check for check in mechanism_checks(broken) if check.name in ("shapes", "lengths")]
    lengths, shapes = (outcome.as_dict() for outcome in run_checks(broken, checks))
    json.dumps([lengths, shapes], allow_nan=False)
    assert lengths["passed"]
    assert not shapes["passed"]
    assert shapes["rule"] == "rule5"
    assert shapes["got"] == "(2, 2, 9, 8)"
