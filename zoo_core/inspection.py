"""What is really in a model's attention layers, whatever its config says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from zoo_core import registry
from zoo_core.attention import Site
from zoo_core.checkpoint.calibration import result_of
from zoo_core.errors import PatchError
from zoo_core.hosts import adapter_of, unwrap
from zoo_core.patching import stack_of


@dataclass(frozen=True)
class SiteReport:
    """One attention layer: what runs there and what it holds.

    mechanism: qualified name, or "stock". options: as built, after clamping.
    parameters, trainable: numbers of the mechanism's own parameters.
    unused: projections whose results the mechanism ignores.
    """

    path: str
    layer: int
    kind: str
    mechanism: str
    options: dict[str, Any]
    parameters: int
    trainable: int
    unused: tuple[str, ...]


@dataclass(frozen=True)
class ModelReport:
    """The report of `zoo.inspect`. `notes` are things the user should know, in words.

    source: where zoo.pull had the model from: endpoint, repo, commit, sha256 of its files.
    calibration: what zoo.calibrate did to this attention: data, steps, scores before and after.
    """

    architecture: str
    model: str
    wrapper: str | None
    patches: int
    sites: tuple[SiteReport, ...]
    loaded: dict[str, Any] | None
    notes: tuple[str, ...]
    source: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def inspect(model: Any) -> ModelReport:
    """Report what runs in each attention layer, read from the modules themselves.

    model: a host model, patched or not, or a wrapper of one.
    Raises PatchError where the modules and the patches disagree, for instance after
    `model.set_attn_implementation("eager")` on a patched model, which switches the patch off.
    """
    host = unwrap(model)
    architecture, adapter = adapter_of(host)
    stack = stack_of(host)
    actual = adapter.installed(host)
    if stack:
        stack.adopt(actual)
    expected = stack.in_force() if stack else {}
    entries = _by_layer(stack.attention() if stack else [])
    sites, notes = [], []
    for site in adapter.sites(host):
        found, wanted = actual[site.path], expected.get(site.path)
        if not _same(found, wanted):
            raise PatchError(
                f"{site.path} runs {_name(found)}, but its patch says {_name(wanted)}; something "
                "changed the model after zoo.patch (set_attn_implementation does): patch it again"
            )
        entry = entries.get((site.kind, site.layer), {})
        sites.append(_report(site.path, site.layer, site.kind, found, entry))
    frozen = sum(report.parameters - report.trainable for report in sites)
    if frozen and hasattr(model, "peft_config"):
        notes.append(
            f"{frozen} parameters of the mechanism are frozen by LoRA; "
            'modules_to_save=["zoo"] trains them'
        )
    for report in sites:
        if report.unused:
            notes.append(f"{report.path} ignores its {' and '.join(report.unused)} projection")
    notes += _slower_than_softmax(sites, adapter.sites(host))
    loaded = getattr(host, "zoo_loaded", None)
    source = getattr(host, "zoo_source", None)
    return ModelReport(
        architecture=architecture.qualified,
        model=type(host).__name__,
        wrapper=type(model).__name__ if model is not host else None,
        patches=len(stack.patches) if stack else 0,
        sites=tuple(sites),
        loaded=asdict(loaded) if loaded is not None else None,
        notes=tuple(notes),
        source=asdict(source) if source is not None else None,
        calibration=result_of(host, stack.attention()) if stack else None,
    )


def _slower_than_softmax(reports: Sequence[SiteReport], sites: Sequence[Site]) -> list[str]:
    """A note for each mechanism that was measured to be slower than softmax at every input."""
    from zoo_core.bench.measured import as_measured, verdict

    longest = max(site.max_len for site in sites)
    records = {}
    for report, site in zip(reports, sites, strict=True):
        if registry.owners(report.mechanism):
            record = registry.mechanism(report.mechanism)
            if as_measured(record, report.options, site):
                records[report.mechanism] = record
    known = filter(None, map(verdict, records.values()))
    return [one.note(longest) for one in known if not one.pays(longest)]


def _by_layer(block: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(e.get("kind", "self"), layer): e for e in block for layer in e["layers"]}


def _same(found: nn.Module | None, wanted: nn.Module | None) -> bool:
    """Whether `found` is `wanted`, possibly inside a wrapper such as PEFT's modules_to_save."""
    if found is None or wanted is None:
        return found is wanted
    return any(module is wanted for module in found.modules())


def _name(module: nn.Module | None) -> str:
    return "stock attention" if module is None else type(module).__name__


def _report(
    path: str, layer: int, kind: str, module: nn.Module | None, entry: dict[str, Any]
) -> SiteReport:
    own = list(module.parameters()) if module is not None else []
    name = f"{entry['distribution']}/{entry['mechanism']}".lstrip("/") if entry else "stock"
    return SiteReport(
        path=path,
        layer=layer,
        kind=kind,
        mechanism=name,
        options=entry.get("options", {}),
        parameters=sum(p.numel() for p in own),
        trainable=sum(p.numel() for p in own if p.requires_grad),
        unused=tuple(sorted(getattr(module, "unused", frozenset()))),
    )
