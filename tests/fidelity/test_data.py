"""What may be given as data, and what is told of data that cannot be used."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import fidelity_lab as lab
import pandas
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import zoo_core as zoo
from zoo_core.fidelity.order import Order
from zoo_core.fidelity.samples import Samples, encode
from zoo_core.fidelity.sources import Source, read

TEXTS = [f"a text of its own, number {n}" for n in range(20)]


def texts_of(source: Source) -> list[str]:
    return [item.value for item in source.items]


def rows() -> datasets.Dataset:
    columns = {"id": range(20), "text": TEXTS, "label": [n % 2 for n in range(20)]}
    return datasets.Dataset.from_dict({name: list(column) for name, column in columns.items()})


class TestSources:
    def test_texts_files_and_streams_give_the_same(self, tmp_path) -> None:
        path = tmp_path / "texts.txt"
        path.write_text("\n\n".join(TEXTS))
        for data in (TEXTS, tuple(TEXTS), iter(TEXTS), path, str(path)):
            assert texts_of(read(data, limit=99)) == TEXTS
        assert texts_of(read(DataLoader(TEXTS, batch_size=3), limit=99)) == TEXTS

    def test_a_limit_draws_from_a_list_and_stops_a_stream(self) -> None:
        def endless():
            while True:
                yield "again"

        assert len(read(endless(), limit=7).items) == 7
        drawn = texts_of(read(TEXTS, limit=7, seed=1))
        assert len(set(drawn)) == 7
        assert drawn != TEXTS[:7]
        assert drawn == texts_of(read(TEXTS, limit=7, seed=1))

    def test_mappings(self) -> None:
        rows = [{"text": text, "label": n} for n, text in enumerate(TEXTS)]
        items = read(rows, limit=99).items
        assert [tuple(item) for item in items] == list(zip(TEXTS, range(20), strict=True))

    def test_a_column_of_mappings(self) -> None:
        rows = [{"id": n, "review": text} for n, text in enumerate(TEXTS)]
        for data in (rows, iter(rows), DataLoader(rows, batch_size=3)):
            assert texts_of(read(data, column="review", limit=99)) == TEXTS
        with pytest.raises(zoo.ZooError, match=r"no column 'body' \(has: id, review\)"):
            read(rows, column="body", limit=9)
        with pytest.raises(zoo.ZooError, match="these samples have no columns"):
            read(TEXTS, column="body", limit=9)

    def test_data_frames_of_pandas(self) -> None:
        frame = pandas.DataFrame({"text": [None, *TEXTS], "label": range(21)})[1:]
        frame.loc[5, "text"] = None
        found = read(frame, limit=99)
        assert texts_of(found) == TEXTS[:4] + TEXTS[5:]
        assert [item.label for item in found.items] == [1, 2, 3, 4, *range(6, 21)]
        assert found.description == "a DataFrame of 20 rows (1 without a value left out)"
        assert texts_of(read(frame["text"], limit=99)) == texts_of(found)

    def test_datasets_of_torch(self) -> None:
        pixels = torch.stack(lab.images(4))
        items = read(TensorDataset(pixels, torch.arange(4)), limit=9).items
        assert [int(item.label) for item in items] == [0, 1, 2, 3]
        assert torch.equal(read(TensorDataset(pixels), limit=9).items[3].value, pixels[3])

    def test_labels(self) -> None:
        assert [item.label for item in read(rows(), limit=3, seed=0).items] != [None] * 3
        pairs = DataLoader([(image, 3) for image in lab.images(4)], batch_size=2)
        assert [int(item.label) for item in read(pairs, limit=9).items] == [3] * 4

    def test_a_loader_of_padded_batches_loses_its_padding(self) -> None:
        batch = {
            "input_ids": torch.tensor([[7, 8, 0], [0, 5, 6]]),
            "attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1]]),
        }
        items = read(DataLoader([0], collate_fn=lambda _: batch), limit=9).items
        assert [item.value["input_ids"].tolist() for item in items] == [[7, 8], [5, 6]]

    def test_a_loader_of_rows_of_texts(self) -> None:
        items = read(DataLoader(rows(), batch_size=3), limit=99).items
        assert [(text, int(label)) for text, label in items] == [
            (text, n % 2) for n, text in enumerate(TEXTS)
        ]

    def test_labels_of_single_tokens_are_none_of_the_sample(self) -> None:
        batch = {"input_ids": torch.ones(4, 3).long(), "labels": torch.ones(4, 3).long()}
        source = read(DataLoader([0], collate_fn=lambda _: batch), limit=9)
        assert encode(source, lab.bert(), minimum=4).labels is None

    def test_a_name_without_the_library(self, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(zoo.ZooError, match="neither a file nor a folder"):
            read("owner/name", limit=99)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda path: path / "missing.txt", "no file or folder"),
            (lambda path: f"{path.name}/missing.csv", "no file or folder"),
            (lambda path: path, "holds no images"),
            (lambda path: {"a": 1}, "dict is no data"),
            (lambda path: ["", "  "], "no samples"),
            (lambda path: "a text by itself " * 30, "goes into a list"),
            (lambda path: DataLoader([None], collate_fn=lambda _: 3), "a batch of type int"),
        ],
        ids=[
            "missing",
            "no dataset's name",
            "empty folder",
            "mapping",
            "blank",
            "one text",
            "odd loader",
        ],
    )
    def test_what_cannot_be_read(self, make, message: str, tmp_path) -> None:
        with pytest.raises(zoo.ZooError, match=message):
            read(make(tmp_path), limit=9)


def written(path: Path, columns: dict[str, list[Any]]) -> Path:
    """A file of a table, in the form that its suffix says; None: nothing there."""
    if path.suffix == ".parquet":
        pandas.DataFrame(columns).to_parquet(path)
        return path
    table = list(zip(*columns.values(), strict=True))
    with path.open("w", newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            file.writelines(
                json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in table
            )
        else:
            separator = "\t" if path.suffix == ".tsv" else ","
            csv.writer(file, delimiter=separator).writerows([list(columns), *table])
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
class TestTables:
    """Files of rows and columns."""

    def test_the_column_of_texts_is_found_and_told(self, suffix: str, tmp_path) -> None:
        texts = [f'{text}, with a\n"line" of its own' for text in TEXTS]
        columns = {"id": list(range(20)), "label": [n % 2 for n in range(20)], "text": texts}
        found = read(written(tmp_path / f"a{suffix}", columns), limit=99)
        assert texts_of(found) == texts
        assert [item.label for item in found.items] == columns["label"]
        assert found.description == f"a{suffix}, column 'text'"

    def test_which_of_several_texts_is_asked(self, suffix: str, tmp_path) -> None:
        path = written(tmp_path / f"a{suffix}", {"title": ["a"] * 20, "body": TEXTS})
        with pytest.raises(zoo.ZooError, match=r"pass column= \(has: title, body\)"):
            read(path, limit=99)
        with pytest.raises(zoo.ZooError, match=r"no column 'text' \(has: title, body\)"):
            read(path, column="text", limit=99)
        assert texts_of(read(path, column="body", limit=99)) == TEXTS

    def test_missing_values_are_left_out_and_counted(self, suffix: str, tmp_path) -> None:
        texts, labels = ["one", None, " ", "four"], [1, 0, 1, None]
        found = read(written(tmp_path / f"a{suffix}", {"text": texts, "label": labels}), limit=99)
        assert [tuple(item) for item in found.items] == [("one", 1), ("four", None)]
        assert "1 without a value left out" in found.description
        path = written(tmp_path / f"none{suffix}", {"text": [None, None], "label": [0, 1]})
        with pytest.raises(zoo.ZooError, match=r"no samples in none.*: 2 are blank or missing"):
            read(path, limit=99)

    def test_numbers_are_no_texts(self, suffix: str, tmp_path) -> None:
        source = read(written(tmp_path / f"a{suffix}", {"text": [1, 2], "id": [3, 4]}), limit=99)
        with pytest.raises(zoo.ZooError, match=f"a{suffix}, column 'text': a sample of type int"):
            encode(source, lab.bert(), minimum=2)

    def test_a_table_without_rows(self, suffix: str, tmp_path) -> None:
        path = written(tmp_path / f"a{suffix}", {"text": [], "label": []})
        with pytest.raises(zoo.ZooError, match=rf"no samples in .*a\{suffix}: "):
            read(path, limit=99)


@pytest.mark.usefixtures("cache")
class TestDatasets:
    """What the `datasets` library has and reads, without a network."""

    def test_its_objects(self) -> None:
        unnamed = datasets.IterableDataset.from_generator(lambda: iter(rows()))
        assert unnamed.column_names is None
        for data in (rows(), rows().to_iterable_dataset(), unnamed):
            items = read(data, limit=99).items
            assert [item.value for item in items] == TEXTS
            assert [item.label for item in items] == [n % 2 for n in range(20)]
        assert texts_of(read(rows()["text"], limit=99)) == TEXTS
        assert len(read(rows().to_iterable_dataset(), limit=3).items) == 3

    def test_tokens_and_images(self) -> None:
        ids = [one["input_ids"].tolist() for one in lab.tokens(3)]
        made = datasets.Dataset.from_dict({"text": ["a"] * 3, "input_ids": ids})
        samples = encode(read(made, limit=9), lab.bert(), minimum=2)
        assert samples.length(1) == len(ids[1])
        picture = [Image.new("L", (40, 40), 60 * n) for n in range(3)]
        made = datasets.Dataset.from_dict({"image": picture, "label": [0, 1, 2]})
        made = made.cast_column("image", datasets.Image())
        samples = encode(read(made, limit=9), lab.vit(), minimum=2)
        assert samples.batch([0, 1])["pixel_values"].shape == (2, 3, 32, 32)

    def test_folders(self, tmp_path) -> None:
        folder = tmp_path / "files"
        folder.mkdir()
        written(folder / "train.jsonl", {"text": TEXTS, "label": [1] * 20})
        rows().save_to_disk(tmp_path / "saved")
        for place in ("files", "saved"):
            items = read(tmp_path / place, limit=99).items
            assert [item.value for item in items] == TEXTS, place
            assert all(item.label is not None for item in items)

    def test_what_cannot_be_read(self, tmp_path) -> None:
        with pytest.raises(zoo.ZooError, match=r"several splits, pass one of them \('a', 'b'\)"):
            read(datasets.DatasetDict(a=rows(), b=rows()), limit=9)
        with pytest.raises(zoo.ZooError, match=r"no column 'body' \(has: id, text, label\)"):
            read(rows(), column="body", limit=9)
        with pytest.raises(zoo.ZooError, match="pass column="):
            read(rows().remove_columns("text"), limit=9)
        with pytest.raises(zoo.ZooError, match="no samples in a dataset of 0 rows"):
            read(rows().select([]), limit=9)
        (tmp_path / "bad.csv").write_bytes("text\ncaf\xe9".encode("latin-1"))
        with pytest.raises(zoo.ZooError, match=r"bad\.csv' could not be loaded: 'utf-8' codec"):
            read(tmp_path / "bad.csv", limit=9)


class TestSamples:
    def encoded(self, data, **how) -> Samples:
        return encode(read(data, limit=99), lab.bert(), minimum=2, **how)

    def test_batches_are_padded_and_masked(self) -> None:
        samples = self.encoded(["abc", "a", "abcdefgh"], tokenizer=lab.Letters())
        batch = samples.batch([0, 1])
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
        assert batch["input_ids"][1, 3:].tolist() == [0, 0]

    def test_long_texts_are_cut_to_what_the_model_sees(self) -> None:
        assert self.encoded(["a" * 200] * 2, tokenizer=lab.Letters()).length(0) == 64
        cut = self.encoded(["a" * 200] * 2, tokenizer=lab.Letters(), max_length=9)
        assert cut.length(0) == 9

    def test_packed_texts_fill_their_rows(self) -> None:
        texts = ["abcdefgh", "ij", "klmnop"]
        samples = self.encoded(texts, tokenizer=lab.Letters(), max_length=5, packed=True)
        line = [i for one in lab.Letters()(texts)["input_ids"] for i in one]
        assert len(samples) == len(line) // 5 == 4
        batch = samples.batch(range(4))
        assert batch["input_ids"].flatten().tolist() == line[:20]
        assert batch["attention_mask"].all()
        made = self.encoded(lab.tokens(8), max_length=16, packed=True)
        assert {made.length(n) for n in range(len(made))} == {16}

    def test_what_is_too_little_is_told(self) -> None:
        with pytest.raises(zoo.ZooError, match="packed into 64 tokens these are 0 samples, too"):
            self.encoded(["ab"] * 3, tokenizer=lab.Letters(), packed=True)
        with pytest.raises(zoo.ZooError, match="1 of 2 samples have no tokens"):
            self.encoded([{"input_ids": [4, 5]}, {"input_ids": []}])

    def test_a_folder_of_images_goes_through_the_models_transform(self, tmp_path) -> None:
        (tmp_path / "sub").mkdir()
        for n in range(3):
            Image.new("L", (50, 40), 60 * n).save(tmp_path / "sub" / f"{n}.png")
        samples = encode(read(tmp_path, limit=9), lab.vit(), minimum=2)
        assert samples.batch([0, 1])["pixel_values"].shape == (2, 3, 32, 32)

    def test_mixtures_are_refused(self) -> None:
        with pytest.raises(zoo.ZooError, match="mixes images and texts"):
            self.encoded(["a text", lab.images(1)[0]])

    def test_what_is_no_sample_is_named(self) -> None:
        with pytest.raises(zoo.ZooError, match=r"which column .* \(has: ids, length\)"):
            self.encoded([{"ids": [1], "length": 1}] * 2)
        with pytest.raises(zoo.ZooError, match="a list of 2: a sample of type int is neither"):
            self.encoded([{"text": 3}] * 2)


class TestOrder:
    def test_every_epoch_sees_every_sample_once(self) -> None:
        order = Order([3, 1, 2] * 16, per_step=6, seed=0)  # an epoch is 8 steps
        seen = [sample for step in range(16) for sample in order.step(step)]
        assert sorted(seen) == sorted([*range(48), *range(48)])

    def test_steps_of_a_small_set_are_not_copies_of_one_sample(self) -> None:
        order = Order([5] * 30, per_step=12, seed=0)
        for number in range(40):
            step = order.step(number)
            # Twice only where one epoch ends and the next begins.
            assert max(step.count(sample) for sample in step) <= 2

    def test_steps_have_similar_lengths_and_depend_on_the_seed_only(self) -> None:
        lengths = torch.randint(1, 100, (512,), generator=torch.Generator().manual_seed(0)).tolist()
        order, again = Order(lengths, 8, 3), Order(lengths, 8, 3)
        spread = [max(s) - min(s) for s in ([lengths[i] for i in order.step(n)] for n in range(16))]
        assert sum(spread) / len(spread) < 15
        assert order.step(37) == again.step(37)
        assert Order(lengths, 8, 4).step(37) != order.step(37)
