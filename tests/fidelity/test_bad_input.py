"""Data, settings and models as users have them, odd or broken: read right, or refused in words."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fidelity_lab as lab
import numpy
import pandas
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from torch.utils.data import DataLoader
from transformers import ViTImageProcessor

import zoo_core as zoo
from zoo_core.cli import calibrate, evaluate
from zoo_core.errors import CheckpointError, OptionError
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


class TestLabelsBeside:
    """Labels that lie beside the data are those of the same place, whatever an index says."""

    frame = pandas.DataFrame({"text": TEXTS, "other": TEXTS[::-1], "label": range(20)})
    shuffled = frame.sample(frac=1, random_state=0)

    @pytest.mark.parametrize(
        ("frame", "choose", "column"),
        [
            (shuffled, "text", None),
            (frame[5:], "text", None),
            (shuffled, ["text"], None),
            (shuffled, ["other", "text"], "text"),
        ],
        ids=["shuffled series", "filtered series", "frame", "column"],
    )
    def test_of_pandas(self, frame, choose, column) -> None:
        found = read(frame[choose], column=column, limit=99, labels=frame["label"]).items
        expected = list(zip(frame["text"], frame["label"], strict=True))
        assert [tuple(item) for item in found] == expected

    def test_a_draw_keeps_pairs_together(self) -> None:
        for data in (TEXTS, pandas.Series(TEXTS, index=range(20, 0, -1))):
            drawn = read(data, limit=7, seed=1, labels=range(20)).items
            assert len(drawn) == 7
            assert all(TEXTS[item.label] == item.value for item in drawn)

    @pytest.mark.parametrize(
        ("data", "labels", "message"),
        [
            ({"text": TEXTS}, [0], "dict is no data"),
            (iter(TEXTS), range(20), "an iterable may give pairs"),
            (TEXTS, range(19), "19 labels for 20 samples"),
            (TEXTS, pandas.Series([0, None] * 10), "10 of the 20 labels are None"),
        ],
        ids=["mapping", "stream", "count", "missing"],
    )
    def test_what_is_refused(self, data, labels, message: str) -> None:
        with pytest.raises(zoo.ZooError, match=message):
            read(data, limit=99, labels=labels)

    def test_a_probe_that_was_asked_for_is_not_left_out(self) -> None:
        with pytest.raises(zoo.ZooError, match="one plain value for each sample"):
            zoo.retention(lab.bert(), None, lab.tokens(8), labels=[[0, 1]] * 8)


class TestBlankItems:
    """Blank items leave as many others in the draw as were asked for."""

    blanks = tuple(one for text in TEXTS for one in (text, "", None))

    def test_the_draw_is_of_what_is_not_blank(self) -> None:
        drawn = [item.value for item in read(self.blanks, limit=15, seed=3).items]
        assert len(drawn) == 15
        assert drawn == sorted(drawn, key=TEXTS.index)
        assert drawn == [item.value for item in read(self.blanks, limit=15, seed=3).items]
        assert drawn != [item.value for item in read(self.blanks, limit=15, seed=4).items]
        assert len(read(self.blanks, limit=60).items) == 20

    def test_labels_stay_with_their_items(self) -> None:
        drawn = read(self.blanks, limit=15, labels=range(60)).items
        assert all(self.blanks[item.label] == item.value for item in drawn)

    def test_without_blank_items_the_draw_is_that_of_random(self) -> None:
        expected = sorted(random.Random(5).sample(range(20), 7))
        assert [item.value for item in read(TEXTS, limit=7, seed=5).items] == [
            TEXTS[place] for place in expected
        ]

    def test_enough_is_left_to_train_on(self) -> None:
        how = {**SHORT, "held_out": 4}  # it asks for 16
        report = zoo.calibrate(lab.bert(), self.blanks, tokenizer=lab.Letters(), **how)
        assert "12 samples" in report.data


class TestTextFiles:
    def test_labels_of_lines_may_count_the_blank_ones_or_not(self, tmp_path) -> None:
        path = tmp_path / "texts.txt"
        path.write_text("\n".join([*TEXTS[:3], "", *TEXTS[3:8]]))
        of_lines, of_texts = [0, 1, 0, 7, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0, 1]
        for labels in (of_lines, of_texts):
            found = read(path, limit=99, labels=labels)
            assert [tuple(item) for item in found.items] == list(
                zip(TEXTS[:8], of_texts, strict=True)
            )
            assert found.description == "texts.txt"
        with pytest.raises(zoo.ZooError, match="5 labels for 9 samples, 1 of them blank"):
            read(path, limit=99, labels=[0] * 5)

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
        report = SimpleNamespace(text=lambda width: "done")
        monkeypatch.setattr(retaining, "retention", lambda *_, **how: given.update(how) or report)
        path = tmp_path / "labels.txt"
        path.write_bytes("\ufeffgood\u2028\nbad\n".encode())
        arguments = [str(tmp_path), "texts.txt", "--labels", str(path)]
        result = CliRunner().invoke(evaluate.command, arguments)
        assert result.exit_code == 0, result.output
        assert given["labels"] == ["good\u2028", "bad"]


def hf_vit(**how: Any) -> Any:
    return zoo.build("hf_vit", "linformer", seed=0, **{**lab.tiny("hf_vit"), **how})


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

    @pytest.mark.parametrize("family", ["vit", "hf_vit"])
    @pytest.mark.parametrize("verb", ["calibrate", "retention"])
    def test_tensors_of_a_size_that_a_model_does_not_take(self, family: str, verb: str) -> None:
        host = lab.vit(family="vit") if family == "vit" else hf_vit()
        data = list(torch.randn(32, 3, 48, 48))
        before = lab.state(host)
        message = r"the model cannot .*\(1, 3, 48, 48\); it takes images of \(3, 32, 32\)"
        run = {
            "calibrate": lambda: zoo.calibrate(host, data, **SHORT),
            "retention": lambda: zoo.retention(host, None, data),
        }[verb]
        with pytest.raises(zoo.ZooError, match=message):
            run()
        assert not lab.changed(host, before)

    def test_models_of_one_channel_see_grey(self, tmp_path) -> None:
        places = [tmp_path / f"{n}.png" for n in range(4)]
        for place in places:
            Image.new("RGB", (40, 40), (255, 0, 0)).save(place)
        processor = ViTImageProcessor(
            size={"height": 32, "width": 32}, image_mean=[0.5], image_std=[0.5]
        )
        for host, how in (
            (lab.vit(in_chans=1), {}),
            (hf_vit(num_channels=1), {"tokenizer": processor}),
        ):
            pixels = encoded(tmp_path, host, **how).batch([0, 1])["pixel_values"]
            assert pixels.shape == (2, 1, 32, 32)
            zoo.retention(host, None, tmp_path, resamples=5, **how)
        with pytest.raises(zoo.ZooError, match="1 or 3 channels, the model takes 5"):
            encoded(tmp_path, lab.vit(in_chans=5)).batch([0])

    @pytest.mark.parametrize(
        ("kind", "white"),
        [("uint16", 65535), ("int32", 65535), ("int32", 255), ("float32", 1), ("float32", 255)],
    )
    def test_grey_of_more_bits_is_scaled(self, kind: str, white: int) -> None:
        ramp = numpy.linspace(0, white, 32 * 32).reshape(32, 32)
        plain = Image.fromarray((ramp * (255 / white)).round().astype("uint8"))
        deep = Image.fromarray(ramp.astype(kind))
        assert deep.mode in ("I;16", "I", "F")
        prepare = preparing.transform(lab.vit(), None)
        torch.testing.assert_close(prepare(deep), prepare(plain), atol=0.04, rtol=0)
        assert prepare(deep).std() > 0.5

    def test_grey_of_which_white_is_not_known_is_refused(self) -> None:
        prepare = preparing.transform(lab.vit(), None)
        for values in ([0.0, 300.0], [-1.0, 1.0], [0.0, float("nan")]):
            picture = Image.fromarray(numpy.array([values], dtype="float32"))
            with pytest.raises(zoo.ZooError, match=r"mode F, go from .* is not known"):
                prepare(picture)

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

    def test_what_is_no_tokenizer_is_named(self) -> None:
        with pytest.raises(zoo.ZooError, match="has no pad_token_id, so that it is no tokenizer"):
            encoded(TEXTS, tokenizer=lambda texts, **how: {"input_ids": [[1]] * len(texts)})
        with pytest.raises(zoo.ZooError, match="Letters is a tokenizer; images need"):
            encoded([Image.new("L", (9, 9))] * 4, lab.vit(), tokenizer=lab.Letters())

    def test_a_tokenizer_that_gives_no_mask_gets_one(self) -> None:
        class Maskless(lab.Letters):
            def __call__(self, *args: Any, **how: Any) -> dict[str, Any]:
                return {"input_ids": super().__call__(*args, **how)["input_ids"]}

        batch = encoded(["abc", *TEXTS], tokenizer=Maskless()).batch([0, 1])
        assert batch["attention_mask"].sum(-1).tolist() == [5, len(TEXTS[0]) + 2]

    def test_a_length_leaves_room_for_more_than_special_tokens(self) -> None:
        class Special(lab.Letters):
            def num_special_tokens_to_add(self) -> int:
                return 2

        assert encoded(TEXTS, tokenizer=Special(), max_length=3).length(0) == 3
        for length in (1, 2):
            with pytest.raises(zoo.ZooError, match=f"max_length={length} leaves no room.*pass 3"):
                encoded(TEXTS, tokenizer=Special(), max_length=length)

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


def test_half_weights_are_refused_before_training() -> None:
    message = r"is float16.*model\.float\(\), and pass bf16=True"
    with pytest.raises(zoo.ZooError, match=message):
        zoo.calibrate(lab.bert().half(), lab.tokens(), **SHORT)
    with pytest.raises(zoo.ZooError, match=message):
        zoo.distil(lab.vit().half(), lab.vit(), lab.images(), **SHORT)


def test_a_file_in_the_place_of_a_checkpoint_is_told_before_training(tmp_path) -> None:
    file, told = tmp_path / "file", []
    file.touch()
    for place in (file, file / "inside"):
        with pytest.raises(CheckpointError, match="file is a file, no directory"):
            zoo.calibrate(lab.bert(), lab.tokens(), checkpoint=place, on_step=told.append, **SHORT)
    assert not told


@pytest.mark.parametrize(
    "how", ["--steps=0", "--learning-rate=nan", "--mask-share=2"], ids=lambda one: one[2:]
)
def test_the_command_calls_a_number_out_of_bounds_misuse(how: str, tmp_path) -> None:
    arguments = [str(tmp_path), "texts.txt", "-o", str(tmp_path / "target"), how]
    result = CliRunner().invoke(calibrate.command, arguments)
    assert result.exit_code == 2
    assert f"option {how[2:].partition('=')[0].replace('-', '_')}=" in result.output


def test_a_seed_that_torch_cannot_take_is_named() -> None:
    with pytest.raises(OptionError, match=f"option seed={2**70} is above"):
        zoo.calibrate(lab.bert(), lab.tokens(), seed=2**70, **SHORT)
    with pytest.raises(OptionError, match=f"option seed={2**70} is above"):
        zoo.retention(lab.bert(), None, lab.tokens(8), seed=2**70)


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
