"""The bridge to timm: VisionTransformer, its distilled DeiT form, and NaFlexVit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import timm
from timm.layers import Attention
from timm.models.naflexvit import NaFlexVitCfg
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zoo_architectures import _timm_config as config
from zoo_architectures import _timm_weights as weights
from zoo_architectures._timm_attention import KNOWN_CHILDREN, BeginForward, Frame, ZooAttention
from zoo_architectures._timm_convert import from_transformers
from zoo_core.attention import Site
from zoo_core.errors import CheckpointError, DoesNotFit, OptionError, PatchError
from zoo_core.hosts import plain_name
from zoo_core.nn import auxiliary


@dataclass(frozen=True)
class TimmAdapter:
    """Builds, describes and patches the vision transformers of timm.

    family: the row of the zoo, which `_timm_config.family_of` tells from timm's name.
    default: timm's name of the model to build where none is given.
    """

    family: str
    default: str

    def create(
        self,
        ref: str | None = None,
        *,
        pretrained: bool | str = False,
        task: str | None = None,
        max_length: int | None = None,
        skeleton: bool = False,
        variant: str | None = None,
        **arguments: Any,
    ) -> nn.Module:
        """See ArchitectureAdapter.create. `variant` says the same as `ref`, for manifests."""
        if task is not None:
            raise OptionError(f"task={task!r} is for text models; give {self.family} num_classes=")
        if max_length is not None:
            raise OptionError(f"{self.family} has no max_length; its length follows from img_size=")
        if ref is not None and variant is not None and ref != variant:
            raise OptionError(f"two variants are named: {ref!r} and {variant!r}")
        name = ref or variant
        config.check_arguments(arguments)
        if not isinstance(pretrained, bool):
            return self._from_checkpoint(name, str(pretrained), arguments, skeleton)
        name = name or self.default
        config.check_variant(name, self.family)
        return config.construct(name, arguments, skeleton=skeleton, pretrained=pretrained)

    def _from_checkpoint(
        self, name: str | None, source: str, arguments: dict[str, Any], skeleton: bool
    ) -> nn.Module:
        stored = weights.read(source)
        config.check_variant(stored.variant, self.family)
        if name is not None and name.partition(".")[0] != stored.variant.partition(".")[0]:
            raise CheckpointError(f"{source} holds {stored.variant}, not {name}")
        merged = {**stored.arguments, **arguments}
        model = config.construct(stored.variant, merged, skeleton=skeleton)
        if not skeleton:
            twin = config.construct(stored.variant, stored.arguments, skeleton=True)
            model.zoo_loaded = weights.fill(model, stored, twin)
        return model

    def tiny(self) -> dict[str, Any]:
        """See ArchitectureAdapter.tiny."""
        return {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 32, "patch_size": 8}

    def owns(self, model: nn.Module) -> bool:
        """Whether the model is one of timm's classes, and of this family by its name."""
        return (
            isinstance(model, config.CLASSES)
            and config.family_of(config.variant_of(model)) == self.family
        )

    def sites(self, model: nn.Module) -> list[Site]:
        """One site for each attention module of the blocks, in order."""
        places = [
            place
            for index, block in enumerate(model.blocks)
            for place in _attention_in(f"blocks.{index}", block)
        ]
        grid, max_len = _layout(model)
        sites = []
        for layer, (path, module) in enumerate(places):
            where = {"path": path, "layer": layer, "layers": len(places), "dim": model.embed_dim}
            obstacle = _obstacle(path, module)
            if obstacle is None:
                where |= {
                    "heads": module.num_heads,
                    "head_dim": module.head_dim,
                    # What the fused kernel takes by itself; D ** -0.5 differs in the last bit.
                    "scale": 1 / module.head_dim**0.5,
                    "dropout": module.attn_drop.p,
                }
            prefix = model.num_prefix_tokens
            sites.append(
                Site(**where, max_len=max_len, grid=grid, prefix=prefix, obstacle=obstacle)
            )
        return sites

    def install(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module | None],
        attention: Sequence[Mapping[str, Any]],
    ) -> Restore:
        """See ArchitectureAdapter.install."""
        sites = [site for site in self.sites(model) if modules[site.path] is not None]
        supports = [modules[site.path].zoo_supports for site in sites]
        if any("times" in promised.needs for promised in supports):
            raise DoesNotFit("this mechanism reads the time of each token, and images have none")
        on_grid = any(site.grid is not None for site in sites)
        begin = BeginForward(
            model,
            Frame(),
            grid=on_grid and any(promised.grid != "ignored" for promised in supports),
            carry=any("carry" in promised.needs for promised in supports),
        )
        restore = Restore(model, [_attention_at(model, site.path) for site in sites], _cfg(model))
        embed = model.patch_embed if hasattr(model, "patch_embed") else model.embeds
        if begin.grid or begin.carry:
            restore.hooks.append(embed.register_forward_pre_hook(begin))
        if (losses := auxiliary.BeginForward(modules[site.path] for site in sites)).losses:
            restore.hooks.append(embed.register_forward_pre_hook(losses))
        for site, host in zip(sites, restore.hosts, strict=True):
            host.__class__ = ZooAttention
            host.zoo, host.zoo_site, host.zoo_frame = modules[site.path], site, begin.frame
        _mark(model, attention)
        return restore

    def installed(self, model: nn.Module) -> dict[str, nn.Module | None]:
        """See ArchitectureAdapter.installed."""
        hosts = {site.path: _attention_at(model, site.path) for site in self.sites(model)}
        return {
            path: host.zoo if isinstance(host, ZooAttention) else None
            for path, host in hosts.items()
        }

    def config(self, model: nn.Module) -> dict[str, Any]:
        """See ArchitectureAdapter.config."""
        return config.describe(model)

    def convert(self, state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
        """See ArchitectureAdapter.convert."""
        if source == "timm":
            return dict(state)
        if source == "transformers":
            return from_transformers(state)
        raise CheckpointError(f"{self.family} reads keys of timm and transformers, not {source!r}")


@dataclass(eq=False)
class Restore:
    """The inverse of one install; deepcopy and pickle carry it over together with the model."""

    model: nn.Module
    hosts: list[nn.Module]
    cfg: dict[str, Any]
    hooks: list[RemovableHandle] = field(default_factory=list)

    def __call__(self) -> None:
        """Give every attention module its class back, and the model its pretrained_cfg."""
        if changed := [type(h).__name__ for h in self.hosts if type(h) is not ZooAttention]:
            raise PatchError(
                f"attention modules became {', '.join(sorted(set(changed)))} after the patch; "
                "undo that first"
            )
        for host in self.hosts:
            host.__class__ = Attention
            del host.zoo, host.zoo_site, host.zoo_frame
        for hook in self.hooks:
            hook.remove()
        for name, value in self.cfg.items():
            setattr(self.model, name, value)


def _attention_at(model: nn.Module, path: str) -> nn.Module:
    """The attention module itself, also where it is compiled: its class is what counts."""
    found = model.get_submodule(path)
    return getattr(found, "_orig_mod", found)


def _attention_in(path: str, block: nn.Module) -> list[tuple[str, nn.Module]]:
    """The attention modules of one block; the block itself where there is none."""
    plain = [
        (plain_name(f"{path}.{name}"), module)
        for name, module in block.named_modules()
        if isinstance(module, Attention)
    ]
    other = [(f"{path}.attn", block.attn)] if hasattr(block, "attn") else [(path, block)]
    return plain or other


def _obstacle(path: str, module: nn.Module) -> str | None:
    """Why attention here cannot be replaced, in words, or None."""
    if type(module) not in (Attention, ZooAttention):
        return f"{path} is a {type(module).__name__}; only timm's plain Attention can be replaced"
    names = {name for name, _ in module.named_children()} - {"zoo"}
    if unknown := names - KNOWN_CHILDREN:
        return (
            f"{path} has {', '.join(sorted(unknown))}, which this bridge does not know in the "
            f"Attention of timm {timm.__version__}"
        )
    return None


def _layout(model: nn.Module) -> tuple[tuple[int, int] | None, int]:
    """The grid of patches, None if it varies within a batch, and the number of tokens."""
    if hasattr(model, "patch_embed"):
        rows, cols = grid = tuple(model.patch_embed.grid_size)
        return grid, rows * cols + model.num_prefix_tokens
    rows, cols = model.embeds.pos_embed_grid_size or NaFlexVitCfg.pos_embed_grid_size
    return None, rows * cols + model.num_prefix_tokens


def _cfg(model: nn.Module) -> dict[str, Any]:
    """The two names under which timm keeps a model's pretrained_cfg; none on a bare class."""
    names = ("pretrained_cfg", "default_cfg")
    return {name: getattr(model, name) for name in names if hasattr(model, name)}


def _mark(model: nn.Module, attention: Sequence[Mapping[str, Any]]) -> None:
    """Make what timm saves of a patched model unreadable to stock timm, see _timm_config.MARK."""
    for name, cfg in _cfg(model).items():
        marked = config.MARK + str(cfg.get("architecture"))
        setattr(model, name, {**cfg, "architecture": marked, "zoo": [dict(a) for a in attention]})
