"""How much of a model is kept when its attention is swapped, beside the floor and the stock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core.checkpoint.calibration import trained_host
from zoo_core.errors import OptionError, ZooError
from zoo_core.fidelity import metrics, preparing, twins
from zoo_core.fidelity.fitting import taking
from zoo_core.fidelity.layers import layer_errors
from zoo_core.fidelity.losses import divergence, token_mean
from zoo_core.fidelity.observing import POOLINGS, Observed, mask_for, observe
from zoo_core.fidelity.probe import obstacle, probe_correct
from zoo_core.fidelity.reports import SCORES, Estimate, LayerScore, Retention
from zoo_core.fidelity.samples import Samples, encode
from zoo_core.fidelity.settings import LARGEST_SEED
from zoo_core.fidelity.sources import read
from zoo_core.fidelity.training import to_device
from zoo_core.hosts import unwrap
from zoo_core.mechanism import Options, option
from zoo_core.modes import evaluating

MINIMUM = 4
_NEIGHBOURS = 5


@dataclass(frozen=True, kw_only=True)
class _Choices(Options):
    """What `retention` can be told, within its bounds."""

    batch_size: int = option(8, low=1)
    limit: int = option(256, low=MINIMUM)
    resamples: int = option(1000, low=1)
    pooling: str = option("mean", choices=POOLINGS)
    seed: int = option(0, low=0, high=LARGEST_SEED)


def retention(
    model: Any,
    teacher: Any,
    data: Any,
    *,
    labels: Sequence[Any] | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    batch_size: int = 8,
    limit: int = 256,
    column: str | None = None,
    pooling: str | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> Retention:
    """Measure how much of `teacher` a patched model keeps, on at most `limit` samples.

    teacher: the original, or None for the model itself without its patches.
    data, tokenizer, max_length, column: as in `zoo.calibrate`.
    pooling: "mean" or "cls". A SentenceTransformer's own tokenizer, max_seq_length and pooling are
        used where none are given; for other models it is "mean".
    labels: one for each sample of `data` (of a file each line, or each that is not blank), which
        asks for the probe; data may bring its own, of which a probe is made where one can be.
        They belong to the data by place, whatever the index of pandas says.
    Raises ZooError for data that cannot be used; and for a model whose own weights a calibration
    trained, where no teacher is given, since its unpatched self is no longer the original.
    """
    host = unwrap(model)
    original = teacher_host(host, teacher)
    reading = preparing.reading_of(
        model, tokenizer=tokenizer, max_length=max_length, pooling=pooling, teacher=original
    )
    _Choices(
        batch_size=batch_size,
        limit=limit,
        resamples=resamples,
        pooling=reading.pooling,
        seed=seed,
    )
    source = read(data, column=column, limit=limit, seed=seed, labels=labels)
    samples = encode(
        source,
        host,
        teacher=original,
        tokenizer=reading.tokenizer,
        max_length=reading.max_length,
        minimum=MINIMUM,
    )
    samples = _probed(samples, asked=labels is not None)
    with evaluating(host):
        scale = Scale(
            host,
            twins.stock_twin(original),
            samples,
            batch_size=batch_size,
            pooling=reading.pooling,
            resamples=resamples,
            seed=seed,
        )
        return scale.measure(probe=samples.labels is not None)


def teacher_host(host: nn.Module, teacher: Any) -> nn.Module:
    """The host model to learn from; the model itself where none is given."""
    if teacher is not None:
        return unwrap(teacher)
    train = trained_host(host)
    if train is not None:
        raise ZooError(
            f"a calibration trained this model's own weights (train={train!r}), so that "
            "without its patches it is not the original; pass the original as teacher"
        )
    return host


class Scale:
    """The two ends that a patched model is measured between, on one set of samples.

    host: the model to measure, as it is at each call. stock: a `stock_twin` of its teacher.
    The uniform floor is measured once.
    """

    def __init__(
        self,
        host: nn.Module,
        stock: nn.Module,
        samples: Samples,
        *,
        batch_size: int,
        pooling: str,
        resamples: int,
        seed: int,
    ) -> None:
        self.host, self.stock, self.samples = host, stock, samples
        self.batch_size, self.pooling = batch_size, pooling
        self.resamples, self.seed = resamples, seed
        patched = twins.patched_paths(host)
        comparable = twins.alike(host, stock)
        self.paths = patched if comparable else []
        self.floor_model = twins.uniform_twin(stock if comparable else host, patched)
        self.device = next(host.parameters()).device
        self._apart: tuple[list[int], list[int]] | None = None
        self._floor: Tally | None = None
        self._stock_embeddings: Tensor | None = None

    @torch.no_grad()
    def measure(self, *, probe: bool = False) -> Retention:
        """Measure the host in full. probe: the samples' labels too.

        Raises ZooError where host or teacher cannot take the samples.
        """
        if self._floor is None:
            self._try_one()
        ours, floor = Tally(len(self.samples)), self._floor or Tally(len(self.samples))
        measured = {self.host: ours} if self._floor else {self.host: ours, self.floor_model: floor}
        stock = Tally(len(self.samples))
        for indices, batch in self._batches():
            wanted = observe(self.stock, batch, paths=self.paths, pooling=self.pooling)
            stock.add(indices, {"embedding": wanted.embedding})
            for model, tally in measured.items():
                tally.add(indices, self._compare(model, wanted, batch))
        self._floor = floor
        self._stock_embeddings = stock["embedding"]
        return Retention(
            samples=len(self.samples),
            data=self.samples.description,
            scores=self._scores(ours, floor, stock),
            layers=self._layers(ours, floor),
            probe=self._probe(ours, floor, stock) if probe else None,
        )

    def check_logits(self) -> None:
        """Raise OptionError where logits were measured that are of another shape in the teacher."""
        if self._apart is not None:
            ours, theirs = self._apart
            raise OptionError(
                f"the logits of a sample are {ours} in the model and {theirs} in the teacher, and "
                "cannot be matched; pass match='embedding', or a teacher with the same classes"
            )

    @torch.no_grad()
    def cosine(self) -> float:
        """The mean cosine of the host's embeddings to the stock ones, a quick look."""
        if self._stock_embeddings is None:
            self._stock_embeddings = self._embeddings(self.stock)
        return metrics.cosine(self._embeddings(self.host), self._stock_embeddings)

    def _try_one(self) -> None:
        """Raise ZooError where a model cannot take a sample, such as the longest."""
        longest = max(range(len(self.samples)), key=self.samples.length)
        batch = to_device(self.samples.batch([longest]), self.device)
        for who, model in (("the model", self.host), ("the teacher", self.stock)):
            with taking(who, model, batch):
                observe(model, batch, pooling=self.pooling)

    def _embeddings(self, model: nn.Module) -> Tensor:
        tally = Tally(len(self.samples))
        for indices, batch in self._batches():
            seen = observe(model, batch, pooling=self.pooling)
            tally.add(indices, {"embedding": seen.embedding})
        return tally["embedding"]

    def _batches(self) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        for indices in self.samples.batches(self.batch_size):
            yield indices, to_device(self.samples.batch(indices), self.device)

    def _compare(
        self, model: nn.Module, wanted: Observed, batch: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Everything measured of each sample of one batch, by name."""
        seen = observe(model, batch, paths=self.paths, pooling=self.pooling)
        found = {"embedding": seen.embedding}
        if seen.tokens.shape == wanted.tokens.shape:
            found["token_cosine"] = _token_cosine(seen.tokens, wanted.tokens, wanted.mask)
        ours, theirs = seen.logits, wanted.logits
        if ours is not None and theirs is not None and ours.shape != theirs.shape:
            self._apart = list(ours.shape[1:]), list(theirs.shape[1:])
        elif ours is not None and theirs is not None:
            found["logits_divergence"] = divergence(ours, theirs, wanted.mask)
            same = (ours.argmax(-1) == theirs.argmax(-1)).float()
            found["top1_agreement"] = token_mean(same, wanted.mask) if same.dim() == 2 else same
        if self.paths:
            errors = layer_errors(model, self.stock, self.paths, batch, states=wanted.states)
            found["layer_error"] = torch.stack(errors, -1).sqrt()
            states = zip(seen.states, wanted.states, strict=True)
            cosines = [_token_cosine(a, b, mask_for(a, wanted.mask)) for a, b in states]
            found["layer_cosine"] = torch.stack(cosines, -1)
        return found

    def _scores(self, ours: Tally, floor: Tally, stock: Tally) -> dict[str, Estimate]:
        theirs = stock["embedding"]
        scores = {}
        if ours["embedding"].shape == theirs.shape:
            scores = self._embedding_scores(ours["embedding"], floor["embedding"], theirs)
        for name in ("token_cosine", "logits_divergence", "top1_agreement"):
            if name in ours:
                scores[name] = self._estimate(ours[name], floor[name], SCORES[name][1])
        return scores

    def _embedding_scores(self, ours: Tensor, floor: Tensor, theirs: Tensor) -> dict[str, Estimate]:
        cosines = [F.cosine_similarity(one, theirs, dim=-1) for one in (ours, floor)]
        k = max(1, min(_NEIGHBOURS, (len(ours) - 1) // 2))
        near = [metrics.neighbours_kept_of_each(one, theirs, k=k) for one in (ours, floor)]
        low, high = metrics.resampled_correlation(
            ours, theirs, resamples=self.resamples, seed=self.seed
        )
        pairs = [metrics.similarity_correlation(one, theirs) for one in (ours, floor)]
        return {
            "embedding_cosine": self._estimate(cosines[0], cosines[1], 1.0),
            "similarity_correlation": Estimate(pairs[0], low, high, pairs[1], 1.0),
            "neighbours_kept": self._estimate(near[0], near[1], 1.0),
        }

    def _layers(self, ours: Tally, floor: Tally) -> tuple[LayerScore, ...]:
        if not self.paths:
            return ()
        names = self._names(ours["layer_error"].shape[1])
        return tuple(
            LayerScore(
                name,
                self._estimate(ours["layer_error"][:, n], floor["layer_error"][:, n], 0.0),
                self._estimate(ours["layer_cosine"][:, n], floor["layer_cosine"][:, n], 1.0),
            )
            for n, name in enumerate(names)
        )

    def _names(self, calls: int) -> list[str]:
        """One name for each call; ALBERT calls its one module once for every layer."""
        if calls == len(self.paths):
            return self.paths
        return [f"{self.paths[n % len(self.paths)]} #{n // len(self.paths)}" for n in range(calls)]

    def _probe(self, ours: Tally, floor: Tally, stock: Tally) -> Estimate:
        labels = self.samples.labels or ()
        correct = [probe_correct(one["embedding"], labels) for one in (ours, floor, stock)]
        return self._estimate(correct[0], correct[1], correct[2].mean().item())

    def _estimate(self, ours: Tensor, floor: Tensor, stock: float) -> Estimate:
        low, high = metrics.resampled_mean(ours, resamples=self.resamples, seed=self.seed)
        return Estimate(ours.mean().item(), low, high, floor.mean().item(), stock)


class Tally:
    """Values of each sample, collected batch by batch and kept on the CPU: name -> (n, ...)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._values: dict[str, Tensor] = {}

    def add(self, indices: list[int], values: Mapping[str, Tensor]) -> None:
        """Put the values of one batch in their places."""
        for name, value in values.items():
            whole = self._values.setdefault(name, torch.zeros(self.samples, *value.shape[1:]))
            whole[indices] = value.float().cpu()

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values


def _token_cosine(ours: Tensor, theirs: Tensor, mask: Tensor) -> Tensor:
    """Mean over the real tokens: (B, N, dim) each -> (B,)."""
    return token_mean(F.cosine_similarity(ours.float(), theirs.float(), dim=-1), mask)


def _probed(samples: Samples, *, asked: bool) -> Samples:
    """Leave out labels of which no probe can be made. Raises ZooError if the user asked for it."""
    if asked and samples.labels is None:
        raise ZooError("labels= takes one plain value for each sample")
    why = None if samples.labels is None else obstacle(samples.labels)
    if why is None:
        return samples
    if asked:
        raise ZooError(why)
    return replace(samples, labels=None, description=f"{samples.description} (no probe: {why})")
