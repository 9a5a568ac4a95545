from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import close_session, constants

from zoo_core.cli import main
from zoo_core.testing.hub import Hub

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
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that --endpoint may name."""
    with Hub() as running:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
        monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.setenv("ZOO_HUB_TOKEN", running.tokens.write)
        close_session()
        yield running
    close_session()


@pytest.fixture
def default_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A Hub that is used where none is named: what HF_ENDPOINT and HF_TOKEN do for a process."""
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", hub.tokens.read)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # keeps an endpoint
    return hub


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
