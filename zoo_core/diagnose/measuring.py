"""`zoo.diagnose.measure`: every measurement of one model on some data, in one report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from zoo_core.diagnose.depth import advise
from zoo_core.diagnose.heads import Tally, separators_in
from zoo_core.diagnose.maps import numbered
from zoo_core.diagnose.rank import rank_collapse
from zoo_core.diagnose.reports import (
    AttentionScore,
    Collapse,
    DepthAdvice,
    Diagnosis,
    LipschitzScore,
    Part,
    Sensitivity,
)
from zoo_core.diagnose.smoothness import lipschitz_by_layer, sensitivity
from zoo_core.diagnose.watching import Call, chosen_sites, watched
from zoo_core.errors import OptionError, ZooError
from zoo_core.fidelity import preparing
from zoo_core.fidelity.observing import observe
from zoo_core.fidelity.samples import Samples, encode
from zoo_core.fidelity.sources import Source, read
from zoo_core.fidelity.training import to_device
from zoo_core.hosts import unwrap
from zoo_core.plan import Layers
from zoo_core.telling import Progress, silent, told

PARTS: tuple[Part, ...] = get_args(Part)


def measure(
    model: Any,
    data: Any,
    *,
    parts: Iterable[Part] = PARTS,
    layers: Layers | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    column: str | None = None,
    separators: Iterable[int] | None = None,
    limit: int = 16,
    batch_size: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diagnosis:
    """Measure a model on at most `limit` samples; it is the same afterwards, hooks and modes too.

    data, tokenizer, max_length, column: as in `zoo.calibrate`.
    parts: "attention" (every head), "rank" (collapse by depth), "lipschitz" (Jacobian norms),
        "depth" (rank of the embedding, suggested depth), "sensitivity" (to the parameters).
    layers: which attention layers the first part looks at, as in `zoo.build`.
    separators: token ids; by default the tokenizer's separator.
    progress: told in words what is done; by default a terminal's stderr is.
    Interrupted by Ctrl-C it returns what it has, of the part at work too, and names the rest.
    Raises ZooError for data that cannot be used, OptionError for an unknown part.
    """
    chosen = _checked(parts)
    host = unwrap(model)
    source = read(data, column=column, limit=limit, seed=seed)
    tokenizer = tokenizer or _own_tokenizer(host, source)
    samples = encode(source, host, tokenizer=tokenizer, max_length=max_length, minimum=1)
    job = _Job(host, samples, layers, _separators(tokenizer, separators), batch_size, seed)
    report = Diagnosis(type(host).__name__, samples.description, len(samples))
    with told("diagnosing", progress) as job.tell:
        for number, part in enumerate(chosen):
            try:
                found = getattr(job, part)()
            except KeyboardInterrupt:
                begun = job.begun(part)
                if number == 0 and not begun:
                    raise
                return replace(report, **begun, unfinished=tuple(chosen[number:]))
            report = replace(report, **{part: found})
    return report


class _Job:
    """One measurement; a method for each part."""

    def __init__(
        self,
        host: nn.Module,
        samples: Samples,
        layers: Layers | None,
        separators: list[int],
        batch_size: int,
        seed: int,
    ) -> None:
        self.host, self.samples, self.layers = host, samples, layers
        self.separators, self.batch_size, self.seed = separators, batch_size, seed
        self.tell: Progress = silent
        self.tallies: dict[str, Tally] = {}
        self.norms: list[LipschitzScore] = []

    def begun(self, part: Part) -> dict[str, Any]:
        """What there is of a part that was cut off: a field of the report, or nothing."""
        kept: dict[Part, tuple[Any, ...]] = {
            "attention": tuple(tally.score() for tally in self.tallies.values()),
            "lipschitz": tuple(self.norms),
        }
        return {part: kept[part]} if kept.get(part) else {}

    @torch.no_grad()
    def attention(self) -> tuple[AttentionScore, ...]:
        """Every head of the chosen layers, over all samples."""
        sites = chosen_sites(self.host, self.layers)
        batches = self.samples.batches(self.batch_size)
        for number, indices in enumerate(batches):
            batch = self._batch(indices)
            separators = separators_in(batch, self.separators)
            with watched(self.host, sites) as watch:
                observe(self.host, batch)
                watch.stop()
                for path, call in numbered(watch.calls).items():
                    self.tell(f"batch {number + 1} of {len(batches)}, {call.where}")
                    tally = self.tallies.get(path) or Tally(path, call.mechanism)
                    _add(tally, call, separators, half=number == 0)
                    self.tallies[path] = tally
        return tuple(tally.score() for tally in self.tallies.values())

    def rank(self) -> Collapse:
        """The residual ratio by depth, on one batch."""
        self.tell("rank by depth")
        return rank_collapse(self.host, self._first())

    def lipschitz(self) -> tuple[LipschitzScore, ...]:
        """Jacobian norms, on one sample."""
        scores = lipschitz_by_layer(self.host, self._first(1), seed=self.seed, progress=self.tell)
        for score in scores:
            self.norms.append(score)
        return tuple(self.norms)

    def depth(self) -> DepthAdvice:
        """The rank of the embedding, and the depth to match."""
        self.tell("rank of the embedding")
        return advise(self.host)

    def sensitivity(self) -> Sensitivity:
        """How much a change of the parameters changes, on one batch."""
        self.tell("sensitivity to the parameters")
        return sensitivity(self.host, self._first(), seed=self.seed)

    def _first(self, most: int | None = None) -> dict[str, Tensor]:
        # Batches go by length; the longest says the most.
        return self._batch(self.samples.batches(self.batch_size)[-1][-(most or self.batch_size) :])

    def _batch(self, indices: list[int]) -> dict[str, Tensor]:
        batch = to_device(self.samples.batch(indices), next(self.host.parameters()).device)
        return {name: tensor for name, tensor in batch.items() if name != "labels"}


def _add(tally: Tally, call: Call, separators: Tensor | None, *, half: bool) -> None:
    try:
        tally.add(call, separators, half=half)
    except ZooError:
        raise
    except Exception as error:  # Whatever a mechanism makes of being run again.
        raise ZooError(f"{call.where} cannot be measured: {error}") from error


def _checked(parts: Iterable[Part]) -> list[Part]:
    """The parts in the order of the report."""
    wanted = set(parts)
    if unknown := sorted(wanted - set(PARTS)):
        raise OptionError(f"there is no part {unknown[0]!r} (has: {', '.join(PARTS)})")
    if not wanted:
        raise OptionError(f"which parts? choose of {', '.join(PARTS)}")
    return [part for part in PARTS if part in wanted]


def _own_tokenizer(host: nn.Module, source: Source) -> Any:
    """The tokenizer of the model's own directory, for texts; data of another kind needs none."""
    return preparing.tokenizer_of(host) if isinstance(source.items[0].value, str) else None


def _separators(tokenizer: Any, given: Iterable[int] | None) -> list[int]:
    if given is not None:
        return list(given)
    found = getattr(tokenizer, "sep_token_id", None)
    return [] if found is None else [found]
