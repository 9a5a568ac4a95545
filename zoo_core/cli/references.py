"""What a verb is pointed at: a directory, or a repository on the Hub; a checkpoint, or its like."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo_core import registry
from zoo_core.cli import output
from zoo_core.errors import HubError, UnknownName, ZooError
from zoo_core.hub.places import asking_the_hub, find_place
from zoo_core.hub.reference import look_up, parse

if TYPE_CHECKING:
    from torch import nn


def checkpoint(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """A callback for a directory that is there, or what may be on the Hub: only a request can tell.

    Raises BadParameter saying why a text is neither.
    """
    return _checked(value, look_up)


def checkpoints(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Like `checkpoint` for several, and the names in the catalogue will not do."""
    return tuple(_checked(value, parse) for value in values)


def place(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Like `checkpoint` for an option, of what need not be one: catalogue names will not do."""
    return None if value is None else _checked(value, parse)


def _checked(value: str, resolve: Callable[[str], object]) -> str:
    if Path(value).is_dir():
        return value
    if Path(value).exists():
        raise click.BadParameter(f"{value} is a file, not a directory")
    try:
        resolve(value)
    except UnknownName as error:
        raise click.BadParameter(f"there is no directory {value!r}; {error}") from error
    except HubError as error:
        raise click.BadParameter(
            f"there is no directory {value!r}; one on the Hub is written owner/name or "
            "owner/name@revision"
        ) from error
    return value


def is_here(reference: str) -> bool:
    """Whether a reference is a directory; else it is one of the Hub."""
    return Path(reference).is_dir()


def is_patched(name: str) -> bool:
    """Whether `name` is a directory of a patched model and means no architecture or preset."""
    from zoo_core.checkpoint import adopting

    if not is_here(name) or _means_an_architecture(name) or not find_place(name).is_checkpoint:
        return False
    return bool(adopting.read(Path(name)).attention)


def opened(reference: str, tokenizer: str | None) -> tuple[nn.Module, Any]:
    """The model of a checkpoint, and what prepares its inputs: from `tokenizer`, or its own.

    Raises ZooError where `tokenizer` holds neither a tokenizer nor an image processor.
    """
    needed = tokenizer is not None
    if is_here(reference):
        from zoo_core.checkpoint import load

        return load(reference), tokenizer_of(tokenizer or reference, needed=needed)
    from zoo_core.fidelity.preparing import place_of
    from zoo_core.hub.pulling import pull

    with asking_the_hub(reference):
        model = pull(reference)
    return model, tokenizer_of(tokenizer or place_of(model), needed=needed)


def tokenizer_of(reference: str, *, needed: bool) -> Any:
    """The tokenizer or image processor of a directory or a repository; None where it has none.

    Raises ZooError where one is needed.
    """
    from zoo_core.fidelity.preparing import from_directory
    from zoo_core.hub.listing import COMPANIONS

    found = from_directory(find_place(reference, COMPANIONS).directory)
    if found is None and needed:
        raise ZooError(f"{reference} holds neither a tokenizer nor an image processor")
    return found


def tokenizer_beside(model: nn.Module) -> Any:
    """The tokenizer or image processor of the place that a model's stock weights came from.

    None where there is none; said where it cannot be read, since the weights could.
    """
    from zoo_core.fidelity.preparing import place_of

    source = place_of(model)
    try:
        return tokenizer_of(source, needed=False) if source else None
    except ZooError as error:
        output.warn(f"the tokenizer of {source} is left out: {error}")
        return None


def host(name: str) -> tuple[str, str | None]:
    """The architecture to build, and the stock weights, where `name` is a place that has some.

    name: what zoo.build takes; else a directory or a repository, of which only config.json is read
        here.
    Raises UnknownName for neither, ZooError where no installed architecture takes the weights.
    """
    try:
        _check_architecture(name)
    except UnknownName as error:
        if not _may_be_a_place(name):
            if os.sep in name:
                kind = "is a file, not a" if Path(name).exists() else "is no"
                raise UnknownName(f"{name} {kind} directory; {error}") from error
            raise
        try:
            return _family_of(name), name
        except HubError as unanswered:
            raise UnknownName(f"{error} {unanswered}") from unanswered
    return name, None


def _check_architecture(name: str) -> None:
    """Raise UnknownName for what is neither an architecture nor a preset."""
    if registry.preset(name) is None:
        registry.architecture(name.partition(":")[0])


def _means_an_architecture(name: str) -> bool:
    try:
        _check_architecture(name)
    except UnknownName:
        return False
    return True


def _may_be_a_place(name: str) -> bool:
    try:
        parse(name)
    except HubError:
        return is_here(name)
    return True


def _family_of(reference: str) -> str:
    """The installed architecture whose stock weights are there."""
    kind = find_place(reference).config().get("model_type")
    library = "transformers" if kind else "timm"  # which names the variant, and no type
    for architecture in registry.architectures():
        if architecture.library != library:
            continue
        try:
            adapter = architecture.adapter()
            how = adapter.tiny() if kind else {"pretrained": reference}
            sketch: Any = adapter.create(None, skeleton=True, **how)
        except Exception:  # Weights of another family, or another plugin's trouble.
            continue
        if not kind or sketch.config.model_type == kind:
            return architecture.qualified
    why = f"its model_type is {str(kind)!r:.80}" if kind else "no model_type is in a config.json"
    known = ", ".join(one.name for one in registry.architectures())
    raise ZooError(f"no installed architecture takes {reference}: {why} (there are: {known})")
