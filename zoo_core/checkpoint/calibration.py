"""The result of a calibration, which travels with the model and its checkpoints. Imports no torch.

A model keeps it as `zoo_calibration`, together with the attention it belongs to: patched anew, the
model is no longer the one that was calibrated. That the host's own weights were trained stays true
whatever is patched or calibrated later, and is kept apart as `zoo_trained`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo_core.fidelity.reports import SCORES

_ATTENTION = "attention"
_LONGEST_NOTE = 400


def keep(host: Any, attention: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    """Put a result on a host model whose attention block is `attention`."""
    host.zoo_calibration = {_ATTENTION: [dict(entry) for entry in attention], **result}
    keep_trained(host, trained_by(result))


def is_undone(result: Mapping[str, Any]) -> bool:
    """Whether training made the model worse, so that its weights are as they were before."""
    return result.get("undone") is True


def trained_by(result: Mapping[str, Any]) -> Any:
    """What of a model a calibration left trained; None where it tells of nothing."""
    return None if is_undone(result) else result.get("train")


def keep_trained(host: Any, train: Any) -> None:
    """Remember what a calibration trained of a host's own weights; nothing forgets it."""
    if isinstance(train, str) and train != "mechanism":
        host.zoo_trained = train


def result_of(host: Any, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The result on a host model; None where there is none, or where it is of other attention."""
    kept: Mapping[str, Any] | None = getattr(host, "zoo_calibration", None)
    if kept is None or kept[_ATTENTION] != [dict(entry) for entry in attention]:
        return None
    return {key: value for key, value in kept.items() if key != _ATTENTION}


def trained_host(host: Any) -> str | None:
    """What a calibration, the last or an earlier one, trained of a host's own weights, if any."""
    train: str | None = getattr(host, "zoo_trained", None)
    return train


def sentence(result: Mapping[str, Any]) -> str:
    """What was done, in words. The result may come from a manifest that anyone wrote."""
    facts = [_text(result.get("data"), "on "), _text(result.get("train"), "train=")]
    for name, unit in (("steps", "steps"), ("seconds", "s")):
        if (number := _number(result.get(name))) is not None:
            facts.append(f"{number:g} {unit}")
    done = f"calibrated {', '.join(filter(None, facts))}".rstrip()
    return f"{done}; that was undone, since it made the model worse" if is_undone(result) else done


def notes(result: Mapping[str, Any]) -> list[str]:
    """What the user should know, in words."""
    found = result.get("notes")
    return [_text(one, "", _LONGEST_NOTE) for one in found] if isinstance(found, list) else []


def metrics(result: Mapping[str, Any]) -> list[tuple[str, str, float, float | None]]:
    """(name, label, value after, value of uniform attention) of each score that is known here."""
    after, floor = (_table(result, name) for name in ("after", "floor"))
    rows = ((name, label, _number(after.get(name))) for name, (label, _) in SCORES.items())
    return [
        (name, label, value, _number(floor.get(name)))
        for name, label, value in rows
        if value is not None
    ]


def scores(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(label, before, after, with uniform attention) of each score that is known here, as text."""
    before = _table(result, "before")
    rows = []
    for name, label, after, floor in metrics(result):
        numbers = (_number(before.get(name)), after, floor)
        if numbers[0] is not None:
            shown = ["-" if number is None else f"{number:.3f}" for number in numbers]
            rows.append((label, shown[0], shown[1], shown[2]))
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    """A section for a card."""
    lines = [f"The attention was {sentence(result)}.", ""]
    lines += [line for note in notes(result) if note for line in (f"Note, {note}.", "")]
    rows = [] if is_undone(result) else scores(result)
    if rows:
        lines += ["| score | before | after | uniform attention |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines).rstrip()


def _table(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = result.get(name)
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any, before: str, longest: int = 80) -> str:
    """A short text on one line, with nothing that Markdown or HTML would read."""
    if not isinstance(value, str):
        return ""
    plain = "".join(c for c in value if c.isalnum() or c in " .,;=()-_/")
    return f"{before}{' '.join(plain.split())[:longest]}"
