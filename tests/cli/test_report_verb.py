"""`zoo report`: the page, and what is printed instead of it."""

from __future__ import annotations

import json

import pytest

import zoo_core


@pytest.fixture
def directories(tmp_path, small_bert, letters):
    for name in ("local", "uniform"):
        zoo_core.save(
            zoo_core.build("bert", name, seed=0, **small_bert), tmp_path / name, tokenizer=letters
        )
    return tmp_path


@pytest.fixture
def texts(tmp_path):
    lines = [" ".join("abcdefghijkl"[(n * k) % 12] for k in range(3 + n % 7)) for n in range(12)]
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(lines))
    return path


def test_the_page_of_one_model(zoo, directories, texts):
    target = directories / "page.html"
    parts = ("--part", "retention", "--part", "maps")
    run = zoo("report", str(directories / "local"), "--data", str(texts), "-o", str(target), *parts)
    assert run.code == 0, run.err
    assert "Its embeddings have a cosine of" in run.out
    assert "written to" in run.out
    page = target.read_text(encoding="utf-8")
    assert "<title>local</title>" in page
    assert page.count("Not measured: not asked for.") == 2
    assert "texts.txt" in page


def test_several_models_are_compared(zoo, directories, texts):
    folders = [str(directories / name) for name in ("local", "uniform")]
    run = zoo("report", *folders, "--data", str(texts), "--part", "retention", "--json")
    assert run.code == 0, run.err
    answer = json.loads(run.out)
    assert [model["name"] for model in answer["models"]] == ["local", "uniform"]
    assert answer["models"][0]["missing"]["speed"] == "not asked for"


def test_markdown_for_the_card(zoo, directories, texts):
    model = str(directories / "local")
    run = zoo("report", model, "--data", str(texts), "--part", "retention", "--markdown")
    assert run.code == 0, run.err
    assert run.out.startswith("## local")
    assert "| cosine of embeddings |" in run.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--part", "beauty"), 2, "'beauty' is not one of"),
        (("--json", "--markdown"), 2, "cannot both be printed"),
        (("-o", "report.pdf"), 2, "must end with one of .html"),
    ],
    ids=["part", "both", "suffix"],
)
def test_misuse(zoo, directories, texts, arguments, code, message):
    run = zoo("report", str(directories / "local"), "--data", str(texts), *arguments)
    assert run.code == code
    assert message in run.err
