"""Data, settings and models as users have them, odd or broken: read right, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fidelity_lab as lab
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.utils.data import DataLoader

import zoo_core as zoo
from zoo_core.cli import evaluate
from zoo_core.errors import OptionError
from zoo_core.fidelity import masking, preparing, probe, retaining
from zoo_core.fidelity.samples import Samples, encode
from zoo_core.fidelity.selection import select
from zoo_core.fidelity.sources import lines, read

TEXTS = [f"a text of its own, number {n}" for n in range(20)]
SHORT: dict[str, Any] = {"steps": 2, "batch_size": 4, "progress": False}


def encoded(data: Any, host: Any = None, **how: Any) -> Samples:
    return encode(read(data, limit=99), lab.bert() if host is None else host, minimum=4, **how)


def of_batch(batch: Any) -> DataLoader:
    return DataLoader([0], collate_fn=lambda _: batch)


class TestLoaders:
    @pytest.mark.parametrize("labels", [range(20), [f"class {n}" for n in range(20)]])
    def test_texts_and_labels_of_the_default_collate(self, labels) -> None:
        loader = DataLoader(list(zip(TEXTS, labels, strict=True)), batch_size=3)
        items = read(loader, limit=99).items
        assert [item.value for item in items] == TEXTS
        assert [str(getattr(item.label, "item", lambda x=item.label: x)()) for item in items] == [
            str(label) for label in labels
        ]

    def test_labels_in_a_plain_list_are_kept(self) -> None:
        batch = {"input_ids": torch.ones(4, 3).long(), "labels": [0, 1, 0, 1]}
        assert encoded(of_batch(batch)).labels == [0, 1, 0, 1]

    def test_what_is_of_the_whole_batch_is_passed_over(self) -> None:
        batch = {"loss": torch.tensor(1.0), "input_ids": torch.ones(4, 3).long(), "step": 3}
        assert len(read(of_batch(batch), limit=9).items) == 4

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            ({"input_ids": torch.ones(4, 3), "labels": [0]}, "input_ids: 4, labels: 1"),
            ({"step": 3}, "no tensors or lists"),
            ((torch.ones(4, 3), torch.ones(3)), "as many labels"),
        ],
        ids=["lengths", "nothing", "labels"],
    )
    def test_parts_that_do_not_go_together(self, batch, message: str) -> None:
        with pytest.raises(zoo.ZooError, match=message):
            read(of_batch(batch), limit=9)


class TestLabels:
    def test_labels_of_some_samples_are_told_of(self) -> None:
        rows = [{"text": text, "label": None if n < 5 else n % 2} for n, text in enumerate(TEXTS)]
        samples = encoded(rows, tokenizer=lab.Letters())
        assert samples.labels is None
        assert "(5 of 20 without a label, so that none is used)" in samples.description
        with pytest.raises(zoo.ZooError, match="1 of the 20 labels are None"):
            zoo.retention(lab.bert(), None, TEXTS, labels=[*range(19), None])

    def test_pairs_of_texts_are_refused(self) -> None:
        pairs = [(text, f"its answer, number {n}") for n, text in enumerate(TEXTS)]
        for data in (pairs, DataLoader(pairs, batch_size=4)):
            with pytest.raises(zoo.ZooError, match=r"'its answer, number 0'\. Pairs of texts are"):
                encoded(data, tokenizer=lab.Letters())
        named = [(text, f"class {n % 5}") for n, text in enumerate(TEXTS)]
        assert len(set(encoded(named, tokenizer=lab.Letters()).labels)) == 5

    def test_a_long_list_of_classes_is_cut(self) -> None:
        why = probe.obstacle(["often", "often", *map(str, range(40))])
        assert why.endswith("got 'often': 2, '0': 1, '1': 1, '2': 1, '3': 1 and 36 more")

    def test_labels_without_a_probe_stop_only_who_asked_for_it(self) -> None:
        pairs = [(row["input_ids"], n) for n, row in enumerate(lab.tokens(8))]
        rows = [{"input_ids": ids, "label": label} for ids, label in pairs]
        report = zoo.retention(lab.bert(), None, rows, resamples=5)
        assert report.probe is None
        assert "(no probe: a probe needs at least two classes" in report.data


class TestTextFiles:
    def test_labels_of_lines_may_count_the_blank_ones_or_not(self, tmp_path) -> None:
        path = tmp_path / "texts.txt"
        path.write_text("\n".join([*TEXTS[:3], "", *TEXTS[3:8]]))
        of_lines, of_texts = [0, 1, 0, 7, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0, 1]
        for labels in (of_lines, of_texts):
            found = read(retaining._labelled(path, labels, None), limit=99).items
            assert [tuple(item) for item in found] == list(zip(TEXTS[:8], of_texts, strict=True))
        with pytest.raises(zoo.ZooError, match="5 labels for 9 samples, 1 of them blank"):
            retaining._labelled(path, [0] * 5, None)

    def test_only_ends_of_lines_end_them(self, tmp_path) -> None:
        path = tmp_path / "texts.txt"
        path.write_bytes("\ufeffone\u2028same\r\ntwo\x0csame\n\nfour\n".encode())
        assert lines(path) == ["one\u2028same", "two\x0csame", "", "four"]
        assert [item.value for item in read(path, limit=9).items] == [
            "one\u2028same",
            "two\x0csame",
            "four",
        ]

    def test_the_command_reads_labels_alike(self, tmp_path, monkeypatch) -> None:
        given = {}
        monkeypatch.setattr(evaluate, "opened", lambda *_: (None, None))
        monkeypatch.setattr(evaluate, "teacher_of", lambda *_: None)
        monkeypatch.setattr(retaining, "retention", lambda *_, **how: given.update(how) or "done")
        path = tmp_path / "labels.txt"
        path.write_bytes("\ufeffgood\u2028\nbad\n".encode())
        arguments = [str(tmp_path), "texts.txt", "--labels", str(path)]
        result = CliRunner().invoke(evaluate.command, arguments)
        assert result.exit_code == 0, result.output
        assert given["labels"] == ["good\u2028", "bad"]


def damaged(path: Path) -> Path:
    """A PNG half of whose pixels are overwritten, which Pillow calls a SyntaxError."""
    Image.new("L", (40, 40), 90).save(path)
    whole = path.read_bytes()
    start = whole.index(b"IDAT")
    path.write_bytes(whole[: start - 4] + b"\0\0\0\5" + whole[start:])
    return path


class TestImages:
    def test_a_damaged_file_is_named(self, tmp_path) -> None:
        path = damaged(tmp_path / "bad.png")
        samples = encoded([path] * 4, lab.vit())
        with pytest.raises(zoo.ZooError, match=r"bad\.png cannot be read as an image: broken PNG"):
            samples.batch([0])

    @pytest.mark.parametrize(
        ("image", "message"),
        [
            (torch.zeros(1, 32, 32), r"tensor \(1, 32, 32\) .*takes \(3, H, W\)"),
            (torch.zeros(32, 32), r"tensor \(32, 32\)"),
            (torch.zeros(3, 32, 32).byte(), "torch.uint8; .* in floating point"),
            (torch.zeros(3, 40, 32), r"of 2 sizes \(\(3, 32, 32\), \(3, 40, 32\)\)"),
        ],
        ids=["grey", "flat", "bytes", "sizes"],
    )
    def test_tensors_that_are_no_images(self, image, message: str) -> None:
        for host in (lab.vit(), zoo.build("hf_vit", **lab.tiny("hf_vit"))):
            with pytest.raises(zoo.ZooError, match=message):
                encoded([*lab.images(3), image], host)

    def test_pictures_that_stay_of_different_sizes(self) -> None:
        samples = Samples(
            inputs=[Image.new("L", (n, 9)) for n in (8, 9)],
            labels=None,
            description="two",
            prepare=lambda image: torch.zeros(3, *image.size),
        )
        with pytest.raises(zoo.ZooError, match="two: images are of 2 sizes"):
            samples.batch([0, 1])

    def test_sub_folders_are_classes(self, tmp_path) -> None:
        for name in ("cat", "dog/small"):
            (tmp_path / name).mkdir(parents=True)
            for n in range(4):
                Image.new("L", (40, 40), 60 * n).save(tmp_path / name / f"{n}.png")
        found = read(tmp_path, limit=99).items
        assert [(item.value.parts[len(tmp_path.parts)], item.label) for item in found] == [
            *[("cat", 0)] * 4,
            *[("dog", 1)] * 4,
        ]
        assert zoo.retention(lab.vit(), None, tmp_path, resamples=5).probe is not None
        Image.new("L", (40, 40)).save(tmp_path / "loose.png")
        assert {item.label for item in read(tmp_path, limit=99).items} == {None}

    def test_no_length_in_tokens(self) -> None:
        with pytest.raises(zoo.ZooError, match="max_length=7 is for texts"):
            encoded(lab.images(4), lab.vit(), max_length=7)


class TestTokens:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"input_ids": [5, 99]}, "from 5 to 99 .* knows 99 tokens"),
            ({"input_ids": [5, -1]}, "from -1 to"),
            ({"input_ids": [5.0, 6.0]}, r"tensor \(2,\) of torch.float32"),
            ({"input_ids": [[5, 6]]}, r"tensor \(1, 2\)"),
            ({"input_ids": ["a", "b"]}, "are no numbers"),
            ({"input_ids": [5, 6], "attention_mask": [1]}, r"attention_mask of a sample is \(1,\)"),
            (
                {"input_ids": [5, 6], "token_type_ids": [0, 0]},
                "only 1 of 5 samples have token_type",
            ),
        ],
        ids=["vocabulary", "negative", "floats", "2-D", "texts", "mask", "types"],
    )
    @pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
    def test_what_a_model_cannot_take(self, change: dict, message: str, first: bool) -> None:
        rows = [{"input_ids": [5, 6]}] * 4
        with pytest.raises(zoo.ZooError, match=message):
            encoded([change, *rows] if first else [*rows, change])

    def test_a_tokenizer_may_be_named(self, monkeypatch) -> None:
        asked = []
        monkeypatch.setattr(
            preparing, "_from", lambda kind, place: asked.append((kind, place)) or lab.Letters()
        )
        assert encoded(TEXTS, tokenizer="a/place").length(0) == len(TEXTS[0]) + 2
        assert masking.Masking.of("a/place", 0.1).mask_id == 3
        assert asked == [("AutoTokenizer", "a/place")] * 2
        with pytest.raises(zoo.ZooError, match="tokenizer=3 is neither"):
            encoded(TEXTS, tokenizer=3)

    def test_a_place_without_a_tokenizer(self, tmp_path) -> None:
        with pytest.raises(zoo.ZooError, match="has no tokenizer"):
            encoded(TEXTS, tokenizer=str(tmp_path))


class TestMatches:
    @pytest.mark.parametrize("task", ["sequence-classification", None], ids=["classifier", "base"])
    def test_hidden_tokens_need_a_model_that_tells_them(self, task: str | None) -> None:
        host = lab.bert(task=task)
        with pytest.raises(OptionError, match=f"{type(host).__name__} does not tell tokens"):
            zoo.calibrate(host, TEXTS, tokenizer=lab.Letters(), match="masked-lm", **SHORT)

    def test_nor_do_images_tell_tokens(self) -> None:
        with pytest.raises(OptionError, match="VisionTransformer does not tell tokens"):
            zoo.calibrate(lab.vit(), lab.images(), match="masked-lm", **SHORT)

    @pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert", "modernbert"])
    def test_models_that_tell_tokens(self, family: str) -> None:
        masking.check_host(zoo.build(family, task="masked-lm", **lab.tiny(family)))

    @pytest.mark.parametrize("classes", [2, 3])
    def test_classes_must_be_those_of_the_teacher(self, classes: int) -> None:
        host, teacher = (
            lab.bert(task="sequence-classification", num_labels=n) for n in (classes, 2)
        )
        before = lab.state(host)
        if classes == 2:
            zoo.calibrate(host, lab.tokens(), teacher=teacher, **SHORT)
            assert lab.changed(host, before)
            return
        with pytest.raises(OptionError, match=r"are \[3\] in the model and \[2\] in the teacher"):
            zoo.calibrate(host, lab.tokens(), teacher=teacher, **SHORT)
        assert not lab.changed(host, before)


def test_weights_made_in_inference_mode_are_told_before_anything_else() -> None:
    with torch.inference_mode():
        host = lab.bert()
    with pytest.raises(zoo.ZooError, match=r"was made under torch\.inference_mode\(\)"):
        zoo.calibrate(host, lab.tokens(), **SHORT)


@pytest.mark.parametrize(
    "how",
    [{"batch_size": 0}, {"resamples": 0}, {"limit": -3}, {"limit": 2}, {"pooling": "max"}],
    ids=str,
)
def test_retention_names_a_number_out_of_bounds(how: dict[str, Any]) -> None:
    (name, value) = next(iter(how.items()))
    with pytest.raises(OptionError, match=f"option {name}={value!r}"):
        zoo.retention(lab.bert(), None, lab.tokens(8), **how)


class TestFrozen:
    def test_what_the_user_froze_stays_as_it_is(self) -> None:
        model = lab.bert()
        model.embeddings.requires_grad_(False)
        model.encoder.layer[0].requires_grad_(False)
        before = lab.state(model)
        zoo.calibrate(model, lab.tokens(), train="all", **SHORT)
        names = lab.changed(model, before)
        assert names
        assert all(name.startswith(("encoder.layer.1.", "pooler.")) for name in names)

    def test_a_frozen_host_still_heals_its_mechanism(self) -> None:
        model = lab.bert("softmax")
        zoo.patching.stack_of(model).clear()
        model.requires_grad_(False)
        zoo.patch(model, "linformer", options={"rank": 4}, seed=0)
        before = lab.state(model)
        zoo.calibrate(model, lab.tokens(), **SHORT)
        assert all(".zoo." in name for name in lab.changed(model, before))
        assert all(p.requires_grad == (".zoo." in name) for name, p in model.named_parameters())

    @pytest.mark.parametrize("train", ["mechanism", "attention", "all"])
    def test_nothing_left_to_train_is_told(self, train: str) -> None:
        model = lab.bert().requires_grad_(False)
        with pytest.raises(zoo.ZooError, match=f"train='{train}' .* frozen; thaw"):
            select(model, train)
