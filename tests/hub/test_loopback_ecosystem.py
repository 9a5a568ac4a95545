"""What stands on the client works with the loopback Hub: transformers, PEFT, timm, mixin, `hf`.

Each test is a script of a user, in a process of its own: all of these read HF_ENDPOINT at import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from zoo_core.testing.hub import Hub

TRANSFORMERS = """
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM
from transformers import BertTokenizer, pipeline

words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "zebras", "eat", "grass"]
open("vocab.txt", "w").write("\\n".join(words))
torch.manual_seed(0)
config = BertConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=16, max_position_embeddings=16)
model = BertForMaskedLM(config).eval()
tokenizer = BertTokenizer(vocab_file="vocab.txt", vocab="vocab.txt")
model.push_to_hub("zoo/bert", private=True)
tokenizer.push_to_hub("zoo/bert")

loaded = AutoModelForMaskedLM.from_pretrained("zoo/bert").eval()
again = AutoTokenizer.from_pretrained("zoo/bert")
batch = again("zebras eat [MASK]", return_tensors="pt")
assert again.get_vocab() == tokenizer.get_vocab()
torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits, atol=0, rtol=0)
print(pipeline("fill-mask", "zoo/bert")("zebras eat [MASK]")[0]["token_str"])

from peft import LoraConfig, PeftModel, get_peft_model

adapted = get_peft_model(loaded, LoraConfig(target_modules=["query"], init_lora_weights=False))
expected = adapted.eval()(**batch).logits
adapted.push_to_hub("zoo/adapter")
base = AutoModelForMaskedLM.from_pretrained("zoo/bert").eval()
back = PeftModel.from_pretrained(base, "zoo/adapter").eval()
torch.testing.assert_close(back(**batch).logits, expected, atol=1e-6, rtol=0)
"""

MIXIN = """
import torch
from huggingface_hub import PyTorchModelHubMixin

class Net(torch.nn.Module, PyTorchModelHubMixin, library_name="zoo", license="mit"):
    def __init__(self, width: int = 3):
        super().__init__()
        self.line = torch.nn.Linear(width, 2)

net = Net(width=5)
net.push_to_hub("zoo/net")
back = Net.from_pretrained("zoo/net")
assert back.line.weight.shape == (2, 5)
torch.testing.assert_close(back.line.weight, net.line.weight, atol=0, rtol=0)
"""

TIMM = """
import timm, torch

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", num_classes=4, depth=1).eval()
timm.models.push_to_hf_hub(model, "zoo/vit", model_config={"label_names": list("abcd")},
                           model_args={"depth": 1}, safe_serialization=True)
back = timm.create_model("hf-hub:zoo/vit", pretrained=True).eval()
image = torch.randn(1, 3, 224, 224)
torch.testing.assert_close(back(image), model(image), atol=0, rtol=0)
assert timm.data.resolve_data_config(model=back)["input_size"] == (3, 224, 224)
"""


@pytest.mark.slow
def test_transformers_and_peft_push_and_load(
    hub: Hub, python: Callable[..., str], api: HfApi
) -> None:
    python(TRANSFORMERS)
    info = api.model_info("zoo/bert")
    assert info.private is True
    names = {sibling.rfilename for sibling in info.siblings or []}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "adapter_config.json" in api.list_repo_files("zoo/adapter")
    assert {each.auth for each in hub.log} == {"write", None}
    assert not {each.auth for each in hub.log if each.host.startswith("localhost")} - {None}


@pytest.mark.slow
def test_the_model_mixin_pushes_and_loads(python: Callable[..., str], api: HfApi) -> None:
    python(MIXIN)
    info = api.model_info("zoo/net")
    assert {"zoo", "pytorch_model_hub_mixin", "license:mit"} <= set(info.tags or [])


@pytest.mark.slow
def test_timm_pushes_and_loads(python: Callable[..., str], api: HfApi) -> None:
    python(TIMM)
    assert {"config.json", "model.safetensors"} <= set(api.list_repo_files("zoo/vit"))


def test_the_hf_command(hub: Hub, tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("hf")
    if not command.exists():
        pytest.skip("the hf command is not installed")

    def hf(*words: str) -> str:
        environment = {**os.environ, **hub.env(home=tmp_path / "home")}
        done = subprocess.run(
            [str(command), *words], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    folder = tmp_path / "up"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "sub/notes.txt").write_bytes(b"notes")
    hf("upload", "zoo/cli", "up", ".", "--private", "--commit-message", "from the command line")
    assert hub.repository("zoo/cli").private
    hf("download", "zoo/cli", "--local-dir", "down")
    assert (tmp_path / "down/model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "down/sub/notes.txt").read_bytes() == b"notes"
    assert "zoo" in hf("auth", "whoami")
