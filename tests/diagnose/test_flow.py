"""Labels, rollout, CLS maps and pictures."""

from __future__ import annotations

import pytest
import torch

import zoo_core as zoo
from zoo_core import registry
from zoo_core.diagnose.pictures import grouped

MASK = torch.tensor([[1] * 20, [0] * 14 + [1] * 6])
IDS = torch.randint(5, 99, (2, 20), generator=torch.Generator().manual_seed(0))


def text_model(attention="softmax"):
    tiny = registry.architecture("bert").adapter().tiny()
    return zoo.build("bert", attention, seed=0, **tiny).eval()


def image_model(family, attention="softmax"):
    tiny = registry.architecture(family).adapter().tiny()
    return zoo.build(family, attention, seed=0, **tiny).eval()


@pytest.fixture
def maps():
    return zoo.attention_map(text_model(), {"input_ids": IDS, "attention_mask": MASK})


def test_prefix_and_padding_are_labelled(maps):
    labels = maps.labels["encoder.layer.0.attention.self"]
    assert labels.words(0) == ["prefix"] + ["token"] * 19
    assert labels.words(1) == ["padding"] * 14 + ["prefix"] + ["token"] * 5
    assert labels.grid is None


def test_rollout_is_the_product_of_half_maps(maps):
    found = zoo.diagnose.rollout(maps)
    first, second = (one.mean(1)[0] for one in maps.values())
    one = torch.eye(20)
    torch.testing.assert_close(found[0], (0.5 * second + 0.5 * one) @ (0.5 * first + 0.5 * one))
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 20))
    assert not found[1, 14:, :14].any()


def test_rollout_refuses_what_it_cannot_multiply(maps):
    path = next(iter(maps))
    maps[path] = maps[path][..., :5]
    with pytest.raises(zoo.ZooError, match=f"{path}: a map of 20 queries and 5 keys"):
        zoo.diagnose.rollout(maps)
    maps.clear()
    with pytest.raises(zoo.ZooError, match="there are none"):
        zoo.diagnose.rollout(maps)


@pytest.mark.parametrize("family", ["vit", "deit", "hf_vit"])
def test_cls_map_lies_on_the_grid(family):
    model = image_model(family)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    maps = zoo.attention_map(model, images)
    path, weights = list(maps.items())[-1]
    labels = maps.labels[path]
    prefix = int(labels.prefix[0].sum())
    assert prefix >= 1
    found = zoo.diagnose.cls_map(weights, labels)
    rows, columns = labels.grid
    assert found.shape == (2, rows, columns)
    torch.testing.assert_close(found.flatten(1), weights.mean(1)[:, 0, prefix:])
    with pytest.raises(zoo.ZooError, match=r"do not fill the grid \(3, 3\)"):
        zoo.diagnose.cls_map(weights, labels, grid=(3, 3))
    with pytest.raises(zoo.ZooError, match="no prefix token"):
        zoo.diagnose.cls_map(weights, labels, token=prefix)


def test_long_maps_are_drawn_in_groups():
    weights = torch.rand(200, 4096, generator=torch.Generator().manual_seed(0))
    small = grouped(weights, 64)
    assert small.shape == (50, 64)
    torch.testing.assert_close(small[3, 5], weights[12:16, 320:384].mean())
    torch.testing.assert_close(grouped(weights[:5, :7], 64), weights[:5, :7])
    # Uniform attention looks uniform, whatever the last group's length.
    assert grouped(torch.ones(3, 131), 64).std() < 1e-6


def test_too_many_panels_are_refused(maps, tmp_path):
    path = next(iter(maps))
    maps[path] = maps[path].repeat(1, 40, 1, 1)
    with pytest.raises(zoo.ZooError, match="82 maps do not fit"):
        zoo.diagnose.draw_maps(maps, tmp_path / "maps", heads="all")


@pytest.mark.parametrize("heads", ["mean", "all"])
def test_maps_are_drawn_as_png_and_svg(maps, tmp_path, heads):
    words = [f"w{n}" for n in range(20)]
    files = zoo.diagnose.draw_maps(maps, tmp_path / "maps", sample=1, tokens=words, heads=heads)
    assert [file.name for file in files] == ["maps.png", "maps.svg"]
    svg = files[1].read_text()
    # The words of the padding are cut off with it.
    assert "<!-- w14 -->" in svg
    assert "<!-- w13 -->" not in svg
    assert svg.count("encoder.layer.1") == (1 if heads == "mean" else 2)


def test_maps_are_drawn_over_the_image(tmp_path):
    image = torch.rand(3, 32, 32)
    files = zoo.diagnose.draw_on_image(torch.rand(4, 4), tmp_path / "cls.png", image=image)
    assert [file.name for file in files] == ["cls.png"]
    assert files[0].stat().st_size > 1000
    with pytest.raises(zoo.ZooError, match="must end with"):
        zoo.diagnose.draw_on_image(torch.rand(4, 4), tmp_path / "cls.gif")
    with pytest.raises(zoo.ZooError, match="could not be written"):
        zoo.diagnose.draw_on_image(torch.rand(4, 4), tmp_path / "no" / "cls.png")
