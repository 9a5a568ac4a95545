"""Where mechanisms run: a model family (Architecture) and the bridge to its library (adapter)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from zoo_core.errors import RecordError
from zoo_core.mechanism import API, check_choice, check_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from zoo_core.attention import Site

Library = Literal["transformers", "timm"]


class ArchitectureAdapter(Protocol):
    """The bridge between one model family and its library.

    Instances are stateless and picklable: a patched model keeps a reference to its adapter.
    """

    def create(
        self,
        ref: str | None,
        *,
        pretrained: bool | str = False,
        task: str | None = None,
        max_length: int | None = None,
        skeleton: bool = False,
        **kwargs: Any,
    ) -> nn.Module:
        """Build the stock model.

        ref: the variant (`"vit_tiny_patch16_224"`), None for the family's default.
        pretrained: False, True (the default weights), a directory, or `owner/name@revision`.
        skeleton: on the meta device and without weights, to learn its sites; downloads no weights.
        kwargs: overrides of the host's config; an unknown one is refused with a suggestion.
        """
        ...

    def tiny(self) -> dict[str, Any]:
        """Arguments of `create` for the smallest useful model, for tests and trials."""
        ...

    def owns(self, model: nn.Module) -> bool:
        """Whether `model` (not a wrapper of it) belongs to this family."""
        ...

    def sites(self, model: nn.Module) -> Sequence[Site]:
        """The attention layers in order of execution."""
        ...

    def install(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module | None],
        attention: Sequence[Mapping[str, Any]],
    ) -> Callable[[], None]:
        """Put each module at its site (None: stock attention there) on a stock model.

        modules: one entry for every site of the model, by path.
        attention: the manifest's attention block, for hosts that have a config to keep it in.
        Returns the exact inverse, a picklable callable that survives deepcopy with the model.
        """
        ...

    def installed(self, model: nn.Module) -> Mapping[str, nn.Module | None]:
        """What really runs at each site now (None: stock), read from the model itself."""
        ...

    def config(self, model: nn.Module) -> dict[str, Any]:
        """What `create(..., **config)` needs to build this model again; JSON values only."""
        ...

    def convert(self, state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
        """Rename a foreign checkpoint's keys to this family's.

        source: where the keys come from, "transformers" or "timm".
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model family. `default` is the variant that is built when none is named."""

    name: str
    aliases: tuple[str, ...] = ()
    library: Library
    summary: str
    default: str
    adapter: Callable[[], ArchitectureAdapter] = field(repr=False)
    api: int = API
    distribution: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        check_names("architecture", self.name, self.aliases)
        check_choice(f"{self.name}: library", self.library, get_args(Library))
        for attribute in ("summary", "default"):
            if not isinstance(getattr(self, attribute), str):
                raise RecordError(f"{self.name}: {attribute} must be a string")
        if not callable(self.adapter):
            raise RecordError(f"{self.name}: adapter must be callable")

    @property
    def qualified(self) -> str:
        """`distribution/name`: unambiguous, and what manifests store."""
        return f"{self.distribution}/{self.name}" if self.distribution else self.name
