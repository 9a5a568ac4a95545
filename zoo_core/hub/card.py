"""The model card of a repository: written where there is none, and only completed where there is.

The metadata follows the Hub's conventions, so that its search and its "how to use" work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CardData, RepoCard

from zoo_core.checkpoint import calibration
from zoo_core.checkpoint.manifest import Manifest, mechanism_name
from zoo_core.errors import HubError

_PIPELINES = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
}


def metadata(
    manifest: Manifest, *, license: str | None = None, base_model: str | None = None
) -> dict[str, Any]:
    """What the Hub reads of a card, in its order."""
    mechanisms = dict.fromkeys(entry["mechanism"] for entry in manifest.attention)
    family = manifest.architecture.rpartition("/")[2]
    tags = list(dict.fromkeys(["zoo-core", "attention", *mechanisms, family]))
    found: dict[str, Any] = {"library_name": "zoo-core", "tags": tags}
    found["pipeline_tag"] = pipeline_tag(manifest)
    if license is not None:
        found["license"] = license
    if base_model is not None:
        found |= {"base_model": base_model, "base_model_relation": "finetune"}
    if results := _results(manifest):
        found["model-index"] = [{"name": manifest.title, "results": [results]}]
    return found


def _results(manifest: Manifest) -> dict[str, Any] | None:
    """What a calibration measured, as an entry of the Hub's model-index, the floor beside it."""
    measured = calibration.metrics(manifest.calibration or {})
    if not measured:
        return None
    metrics = [
        metric
        for name, label, value, floor in measured
        for metric in (
            {"type": name, "name": f"{label}, to the stock model", "value": value},
            {"type": f"{name}_floor", "name": f"{label}, uniform attention", "value": floor},
        )
        if metric["value"] is not None
    ]
    data = {"name": "held-out part of the calibration data", "type": "custom"}
    return {"task": {"type": pipeline_tag(manifest)}, "dataset": data, "metrics": metrics}


def pipeline_tag(manifest: Manifest) -> str:
    """The Hub's name of what the model does."""
    for ending, tag in _PIPELINES.items():
        if manifest.model_class.endswith(ending):
            return tag
    if manifest.library == "timm":
        classifies = manifest.config.get("num_classes", 1000) != 0
        return "image-classification" if classifies else "image-feature-extraction"
    return "image-feature-extraction" if "image_size" in manifest.config else "feature-extraction"


def card(
    manifest: Manifest,
    repo: str,
    about: Mapping[str, Any],
    companions: set[str],
    speed: str | None = None,
) -> str:
    """The whole text for a repository that has no card.

    about: its metadata. companions: the tokenizer or processor files that are published with it.
    speed: a section about speed, see `speed_section`.
    """
    parts = [
        f"---\n{CardData(**about).to_yaml()}\n---",
        f"# {manifest.title}",
        _layers(manifest),
        *([] if manifest.calibration is None else [calibration.markdown(manifest.calibration)]),
        _installing(manifest),
        f"```python\n{_loading(manifest, repo, companions)}\n```",
    ]
    if manifest.attention and manifest.library == "transformers":
        parts.append(
            '`AutoModel` and `SentenceTransformer` refuse it (`attn_implementation="zoo"` is not '
            "supported), since they would run softmax attention in its place; `pipeline` takes "
            "the model that `zoo.pull` returns."
        )
    if manifest.base is not None and manifest.holds == "attention":
        parts.append(
            "Only what the attention added is stored here; `zoo.pull` fetches "
            f"`{manifest.base.repo}` at commit `{manifest.base.commit}` and adds it."
        )
    if speed is not None:
        parts.append(speed)
    return "\n\n".join(parts) + "\n"


def speed_section(path: Path) -> str:
    """The table of a file that `zoo bench --save` wrote. Raises BenchError for any other file."""
    from zoo_core import bench

    measured = bench.load(path)
    facts = [str(measured.machine.get(key, "")) for key in ("processor", "device", "torch")]
    machine = f"{', '.join(filter(None, facts))}, {measured.machine.get('threads')} threads"
    return f"## Speed\n\n{bench.markdown(measured.rows)}\n\nMeasured on {machine}."


def completed(existing: str, about: Mapping[str, Any], where: str) -> str:
    """An existing card with the metadata that it lacks; what it says stays as it is.

    Raises HubError where its metadata cannot be read.
    """
    try:
        found = RepoCard(existing)
        have: dict[str, Any] = found.data.to_dict()  # type: ignore[no-untyped-call]
        missing = {key: value for key, value in about.items() if key not in have}
        tags = have.get("tags")
        if isinstance(tags, list):
            missing["tags"] = [*tags, *(tag for tag in about["tags"] if tag not in tags)]
            if missing["tags"] == tags:
                del missing["tags"]
        if not missing:
            return existing
        for key, value in missing.items():
            found.data[key] = value
        return str(found.content)
    except Exception as error:  # Whatever a YAML parser makes of what people write.
        raise HubError(f"the metadata of {where} cannot be read, correct it: {error}") from error


def _layers(manifest: Manifest) -> str:
    if not manifest.attention:
        return "The attention is that of the stock model."
    rows = [
        f"| {', '.join(map(str, entry['layers']))} | {mechanism_name(entry)} | "
        f"{', '.join(f'{k}={v}' for k, v in entry['options'].items()) or 'none'} |"
        for entry in manifest.attention
    ]
    return "\n".join(["| layers | attention | options |", "|---|---|---|", *rows])


def _installing(manifest: Manifest) -> str:
    plugins = {entry["distribution"] for entry in manifest.attention} - {""}
    packages = " ".join(sorted({"zoo-core", *plugins}))
    unowned = [entry["mechanism"] for entry in manifest.attention if not entry["distribution"]]
    text = f"```bash\npip install {packages}\n```"
    if unowned:
        text += (
            f"\n\n{' and '.join(dict.fromkeys(unowned))} belongs to no distribution; register it "
            "with `zoo.register` before loading."
        )
    return text


def _loading(manifest: Manifest, repo: str, companions: set[str]) -> str:
    imports = ["import zoo_core as zoo"]
    lines = [f'model = zoo.pull("{repo}")']
    if manifest.library == "timm":
        imports.insert(0, "import timm")
        lines.append("data = timm.data.resolve_model_data_config(model)")
    elif any("token" in name or "vocab" in name for name in companions):
        imports.append("from transformers import AutoTokenizer")
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{repo}")')
    elif companions:
        imports.append("from transformers import AutoImageProcessor")
        lines.append(f'processor = AutoImageProcessor.from_pretrained("{repo}")')
    return "\n".join([*imports, "", *lines])
