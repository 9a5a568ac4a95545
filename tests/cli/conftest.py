from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from zoo_core.cli import main

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass
class Run:
    code: int
    out: str
    err: str


@pytest.fixture
def zoo(live_site, capsys, monkeypatch) -> Callable[..., Run]:
    """Run the command in this process, on an 80 column terminal, with no plugins but ours."""
    monkeypatch.setenv("COLUMNS", "80")

    def zoo(*arguments: str) -> Run:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        out, err = capsys.readouterr()
        return Run(stop.value.code or 0, out, err)

    return zoo


@pytest.fixture
def small_bert() -> dict[str, int]:
    """The config of a BERT over the vocabulary of `letters`."""
    return {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 30,
        "max_position_embeddings": 32,
    }


@pytest.fixture
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are the letters a to l."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["[PAD]", "[UNK]", *"abcdefghijkl"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
