"""One picture of one sample: its maps from token to token, or what CLS sees of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo_core.diagnose.flow import cls_map, rollout
from zoo_core.diagnose.maps import attention_map
from zoo_core.diagnose.pictures import draw_maps, draw_on_image
from zoo_core.fidelity import preparing
from zoo_core.fidelity.samples import encode
from zoo_core.fidelity.sources import read
from zoo_core.fidelity.training import to_device
from zoo_core.hosts import unwrap
from zoo_core.plan import Layers


def illustrate(
    model: Any,
    data: Any,
    path: str | Path,
    *,
    layers: Layers | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    column: str | None = None,
    seed: int = 0,
) -> list[Path]:
    """Draw one sample of `data`; gives the files written, see `draw_maps`.

    A text: the map of each layer, heads averaged, with its words. An image: the rollout of all
    layers from the class token, over the image. The other arguments: as in `measure`.
    """
    host = unwrap(model)
    source = read(data, column=column, limit=1, seed=seed)
    if tokenizer is None and isinstance(source.items[0].value, str):
        tokenizer = preparing.tokenizer_of(host)
    samples = encode(source, host, tokenizer=tokenizer, max_length=max_length, minimum=1)
    batch = to_device(samples.batch([0]), next(host.parameters()).device)
    if "pixel_values" in batch:
        maps = attention_map(host, batch["pixel_values"], layers)
        labels = next(iter(maps.labels.values()))
        heat = cls_map(rollout(maps), labels)[0]
        return draw_on_image(heat, path, image=batch["pixel_values"][0])
    maps = attention_map(host, batch, layers)
    ids = batch["input_ids"][0].tolist()
    named = getattr(tokenizer, "convert_ids_to_tokens", None)
    return draw_maps(maps, path, tokens=[str(one) for one in (named(ids) if named else ids)])
