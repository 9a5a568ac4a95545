"""zoo.load: bring a model back from a checkpoint directory: strict, no pickle, no code."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import nn

from zoo_core.checkpoint import adopting, calibration, layout, tensors
from zoo_core.checkpoint.manifest import Manifest
from zoo_core.checkpoint.rebuilding import rebuild, require_plugins
from zoo_core.checkpoint.weights import WeightFile, entries_of, open_all
from zoo_core.errors import CheckpointError
from zoo_core.names import REPOSITORY
from zoo_core.patching import attention_block

_SHOWN = 5


def load(ref: str | Path) -> nn.Module:
    """The model of a checkpoint directory, on the CPU, in evaluation mode.

    ref: what zoo.save wrote; or what save_pretrained, Trainer or push_to_hub wrote of a patched
        transformers model. Where there is no such directory, "owner/name@revision" goes to
        zoo.pull.
    Raises UnknownName that says what to install for a plugin that is missing, CheckpointError
    naming file and tensor for everything else that is not as the checkpoint says.
    """
    directory = Path(ref)
    if not directory.exists() and REPOSITORY.fullmatch(str(ref).partition("@")[0]):
        from zoo_core.hub.pulling import pull  # the client is only needed here

        return pull(str(ref))
    return load_directory(directory)


def load_directory(
    directory: Path, *, root: Path | None = None, base: nn.Module | None = None
) -> nn.Module:
    """Load a checkpoint directory; see `load`.

    root: the folder that links may not leave, for caches that link to files outside the directory.
    base: the stock model that a checkpoint of only "attention" belongs on; it is patched in place.
    """
    try:
        with ExitStack() as stack:
            manifest, files = _open(directory, root, stack)
            return _load(directory, manifest, files, base)
    except OSError as error:
        raise CheckpointError(f"{directory} could not be read: {error}") from error


def _open(
    directory: Path, root: Path | None, stack: ExitStack
) -> tuple[Manifest, list[WeightFile]]:
    """The manifest and its open weight files, once all plugins that it needs are known."""
    manifest = adopting.read(directory, root=root)
    require_plugins(manifest, directory)
    if records := manifest.files.items():
        paths = [(layout.require(directory, name, root=root), record) for name, record in records]
        return manifest, open_all(paths, stack)
    files = open_all([(p, None) for p in adopting.weight_paths(directory, root=root)], stack)
    return adopting.fit(manifest, entries_of(files)), files


def _load(
    directory: Path, manifest: Manifest, files: list[WeightFile], base: nn.Module | None
) -> nn.Module:
    own_only = manifest.holds == "attention"
    if own_only and base is None and manifest.base is not None:
        raise CheckpointError(
            f"{directory} holds only what the mechanisms added to {manifest.base.repo} at "
            f"{manifest.base.commit}; zoo.pull fetches that model too"
        )
    stored = entries_of(files)
    if own_only:
        model = rebuild(manifest, directory, base=base)
    else:
        model = rebuild(manifest, directory, stored=stored)
    if manifest.attention and not any(map(tensors.is_own, stored)):
        stored.pop(tensors.MARKER, None)
    if not manifest.files:
        manifest = replace(manifest, tied=tensors.ties_of(model, stored))
    if problems := tensors.mismatches(model, stored, manifest.tied, own_only=own_only):
        for file in files:
            file.check_digest()  # A damaged header is better told by its hash.
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{directory} does not fill {manifest.model_class}: "
            f"{'; '.join(problems[:_SHOWN])}{more}"
        )
    tensors.cast_buffers(model, manifest.buffers, directory)
    values = {name: value for file in files for name, value in file.read().items()}
    tensors.fill(model, {name: values[name] for name in stored}, manifest.tied)
    if manifest.calibration is not None:
        calibration.keep(model, attention_block(model), manifest.calibration)
    calibration.keep_trained(model, manifest.trained)
    return model
