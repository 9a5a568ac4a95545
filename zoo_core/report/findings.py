"""What a report warns of and what it concludes, in plain words. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from zoo_core import registry, words
from zoo_core.checkpoint.calibration import is_undone
from zoo_core.fidelity.reports import Estimate
from zoo_core.report.records import NOT_ASKED, STOCK, Report

#: Where on the way from the floor (0) to the stock model (1) a swap counts as lost, and as hurt.
LOST, HURT = 0.1, 0.6
FEW = 32
HIGH_FLOOR = 0.9


def warnings(report: Report) -> list[str]:
    """Everything to look at, the gravest first."""
    return [
        *_about_retention(report),
        *_about_attention(report),
        *_about_speed(report),
        *(report.diagnosis.warnings if report.diagnosis else ()),
        *_about_measuring(report),
    ]


def verdict(report: Report) -> list[str]:
    """The answer in a few sentences."""
    return [*_kept(report), *_fast(report), *_counted(report)]


def way(score: Estimate) -> float | None:
    """How far a score is on the way from uniform attention (0) to the stock model (1)."""
    span = score.stock - score.floor
    return (score.value - score.floor) / span if abs(span) > 1e-6 else None


def main_score(report: Report) -> Estimate | None:
    """The score that a model is judged by: the cosine of its embeddings to the original's."""
    return report.retention.scores.get("embedding_cosine") if report.retention else None


def _kept(report: Report) -> Iterator[str]:
    score = main_score(report)
    if score is None:
        yield from _absent(report, "retention", "How much of the original is kept")
        return
    yield (
        f"Its embeddings have a cosine of {words.number(score.value)} to the original's (95 % "
        f"interval {words.interval(score.low, score.high)}); with uniform attention, the floor, it "
        f"would be {words.number(score.floor)}."
    )


def _fast(report: Report) -> Iterator[str]:
    speed = report.speed
    if speed is None:
        yield from _absent(report, "speed", "How fast it is")
        return
    longest = speed.lengths[-1]
    ratio = speed.ratio(longest)
    if ratio is None:
        yield f"Speed at {longest} tokens could not be measured."
        return
    memory = speed.memory(longest)
    yield (
        f"A forward of {longest} tokens takes {words.times(ratio.value)} the time of the stock "
        f"model{'' if memory is None else f' and {words.times(memory)} its working memory'}."
    )


def _counted(report: Report) -> Iterator[str]:
    found = len(report.warnings)
    if found:
        yield f"There {'is' if found == 1 else 'are'} {words.plural(found, 'warning')} below."


def _absent(report: Report, part: str, question: str) -> Iterator[str]:
    """That a question stays open, where somebody asked it."""
    reason = report.missing.get(part, "no reason is known")
    if reason != NOT_ASKED:
        yield f"{question} was not measured: {reason}."


def _about_retention(report: Report) -> Iterator[str]:
    score = main_score(report)
    if score is None:
        return
    kept = way(score)
    remedy = "" if _is_calibrated(report) else "; zoo.calibrate may win much of it back"
    if kept is not None and kept < LOST:
        yield (
            "the swap lost what attention did: the embeddings are no closer to the original's than "
            f"with uniform attention{remedy}"
        )
    elif kept is not None and kept < HURT:
        yield (
            f"much is lost: on the way from uniform attention to the original the embeddings are "
            f"at {words.percent(kept)}{remedy}"
        )
    if score.floor > HIGH_FLOOR and score.floor < score.stock - 1e-6:
        yield (
            f"on this data even uniform attention reaches {words.number(score.floor)}, so that a "
            "high score says little; take longer or more varied data"
        )


def _is_calibrated(report: Report) -> bool:
    """Whether a calibration holds, and was not undone."""
    calibration = report.model.calibration
    return calibration is not None and not is_undone(calibration)


def _about_attention(report: Report) -> Iterator[str]:
    sites = report.model.sites
    for name in report.mechanisms:
        if name == STOCK or _is_calibrated(report):
            continue
        if registry.owners(name) and registry.mechanism(name).swap == "needs-training":
            yield f"{name} needs training: before it, the model's answers mean little"
    ignored: dict[tuple[str, ...], list[str]] = {}
    for site in sites:
        if site.unused:
            ignored.setdefault(site.unused, []).append(site.path)
    for unused, paths in ignored.items():
        projections = f"{' and '.join(unused)} projection{'s' * (len(unused) > 1)}"
        which = words.plural(len(paths), "layer") if len(paths) < len(sites) else "all layers"
        verb = "ignores its" if len(paths) == 1 and which != "all layers" else "ignore their"
        yield f"{which} {verb} {projections}, whose weights are dead"
    yield from (note for note in report.model.notes if " ignores its " not in note)


def _about_speed(report: Report) -> Iterator[str]:
    speed = report.speed
    if speed is None:
        return
    lengths = speed.lengths
    if all(speed.order(length) == "slower" for length in lengths):
        span = "" if len(lengths) == 1 else f"{lengths[0]} to "
        yield f"it is slower than the stock model at {span}{lengths[-1]} tokens on this machine"
    yield from (row.refused for row in speed.rows if row.refused)


def _about_measuring(report: Report) -> Iterator[str]:
    if report.samples < FEW:
        yield f"only {report.samples} samples were measured; the intervals are wide"
    for part, reason in report.missing.items():
        if reason != NOT_ASKED:
            yield f"{part} could not be measured: {reason}"
