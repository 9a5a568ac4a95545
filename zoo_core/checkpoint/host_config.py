"""config.json, which stock tools read: what of it is written, believed, and compared with zoo.json.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo_core.checkpoint import checks, layout, strict_json
from zoo_core.errors import CheckpointError

if TYPE_CHECKING:
    from zoo_core.checkpoint.manifest import Manifest

# What transformers calls the attention of a patched model; stock loading refuses the name.
ATTENTION = "zoo"
# Before the architecture's name in the pretrained_cfg of a patched model: what timm saves of it
# (save_for_hf, push_to_hf_hub) is then an unknown model to stock timm, never softmax in silence.
TIMM_MARK = "zoo:"
# Entries of timm's pretrained_cfg that say how images are prepared and what classes mean; no
# locations. A model may be built with others than its variant's.
TIMM_DATA = frozenset(
    "input_size test_input_size interpolation crop_pct test_crop_pct crop_mode mean std "
    "label_names label_descriptions".split()
)
# Said by the class and by the weights themselves.
DERIVED = frozenset({"architectures", "model_type", "dtype", "torch_dtype"})
# Entries that select code, kernels or sources: no checkpoint decides those, and the patch sets the
# attention itself. Each with whatever a version of transformers puts behind it.
_CODE = tuple(
    "_attn_implementation attn_implementation _experts_implementation experts_implementation "
    "auto_map trust_remote_code quantization_config custom_pipelines use_kernels kernel_config "
    "_name_or_path name_or_path".split()
)
_NOT_THE_HOSTS = frozenset({"transformers_version", "zoo"})
# An argument of the model's class that transformers keeps out of its config.
_UNWRITTEN = frozenset({"add_pooling_layer"})
_SHOWN = 3

_Entries = dict[str, Any]


def is_safe(key: str) -> bool:
    """Whether an entry is the host's own, and selects no code, no kernel and no source."""
    return key not in _NOT_THE_HOSTS and not key.startswith(_CODE)


def safe(config: Mapping[str, Any]) -> dict[str, Any]:
    """A host config without the entries that choose code, kernels or sources."""
    return {key: value for key, value in config.items() if is_safe(key)}


def read(directory: Path, *, root: Path | None = None) -> Mapping[str, Any]:
    """What config.json says; nothing where there is none. root: see `layout.find`."""
    path = layout.find(directory, layout.CONFIG, root=root)
    found = {} if path is None else strict_json.read(path, layout.CONFIG_LIMIT)
    config: Mapping[str, Any] = checks.typed(str(path), found, dict)
    return config


def tells_of_a_patch(directory: Path) -> bool:
    """Whether save_pretrained or Trainer wrote a patched transformers model here."""
    try:
        return "zoo" in read(directory)
    except CheckpointError:
        return False


def contradiction(directory: Path, manifest: Manifest, *, root: Path | None = None) -> str | None:
    """How config.json is missing or differs from the manifest, in words; None if it agrees.

    Stock tools would build another model by it, or run other attention in silence.
    """
    step = "restore it, or write it anew: zoo.save(zoo.load(directory), directory)"
    if manifest.attention:
        step += f" (`zoo build {directory} -o ANOTHER`)"
    try:
        path = layout.require(directory, layout.CONFIG, root=root)
        config = read(directory, root=root)
    except (CheckpointError, OSError) as error:
        return f"{error}; {step}"
    found = list(_differences(config, manifest))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    told = f"{'; '.join(found[:_SHOWN])}{more}"
    return f"{path} disagrees with {layout.MANIFEST}: {told}; {step}" if found else None


def _differences(config: Mapping[str, Any], manifest: Manifest) -> Iterator[str]:
    said, expected = (_timm if manifest.library == "timm" else _transformers)(config, manifest)
    for key in dict.fromkeys([*expected, *said]):
        here, there = said.get(key), expected.get(key)
        if here != there:
            yield f"{key} is {_shown(here)}, must be {_shown(there)}"


def _transformers(config: Mapping[str, Any], manifest: Manifest) -> tuple[_Entries, _Entries]:
    """The entries of both that have to be equal."""
    block = [dict(entry) for entry in manifest.attention] or None
    marks = {
        "architectures": [manifest.model_class],
        "attn_implementation": ATTENTION if block else None,
        "zoo": block,
    }
    said = {key: value for key, value in safe(config).items() if key not in DERIVED}
    expected = {key: value for key, value in manifest.config.items() if key not in _UNWRITTEN}
    return said | {key: config.get(key) for key in marks}, marks | expected


def _timm(config: Mapping[str, Any], manifest: Manifest) -> tuple[_Entries, _Entries]:
    name = str(manifest.config.get("variant")).partition(".")[0]
    expected = {
        "architecture": f"{TIMM_MARK}{name}" if manifest.attention else name,
        "model_args": timm_arguments(manifest),
    }
    return {key: config.get(key) for key in expected}, expected


def timm_arguments(manifest: Manifest) -> dict[str, Any]:
    """What timm's own format keeps as model_args."""
    apart = ("variant", "pretrained_cfg_overlay")
    return {key: value for key, value in manifest.config.items() if key not in apart}


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]
