"""What zoo.push publishes is at home in the ecosystem: tokenizers, PEFT, pooling, xet, offline.

Each script is a user's, in a process of its own: these libraries read HF_ENDPOINT at import.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from zoo_core.testing.hub import Hub

HERE = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"

PUSH = """
from pathlib import Path
import hub_models as models, zoo_core as zoo
print(zoo.push(models.bert(), "zoo/text", tokenizer=models.tokenizer(Path("words"))))
"""

EMBED = """
import torch, zoo_core as zoo
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoTokenizer

model = zoo.pull("zoo/text")
batch = AutoTokenizer.from_pretrained("zoo/text")(
    ["a plain word", "word"], padding=True, return_tensors="pt"
)
tokens = model(**batch).last_hidden_state
pooled = Pooling(tokens.shape[-1])(
    {"token_embeddings": tokens, "attention_mask": batch["attention_mask"]}
)["sentence_embedding"]
mask = batch["attention_mask"][..., None]
torch.testing.assert_close(pooled, (tokens * mask).sum(1) / mask.sum(1))
print(pooled.double().sum().item())
"""

STOCK = """
from pathlib import Path

from huggingface_hub import hf_hub_download
from sentence_transformers import SentenceTransformer
from zoo_core import ZooError

folder = Path(hf_hub_download("zoo/text", "config.json", local_files_only=True)).parent
for where in ("zoo/text", str(folder)):
    try:
        SentenceTransformer(where).encode("a text")
    except (ValueError, ZooError) as error:  # where zoo_core runs, its attention refuses instead
        assert '"zoo"` is not supported' in str(error) or "zoo.load" in str(error), error
    else:
        raise AssertionError("softmax attention would run in silence")
"""

PEFT = """
import torch, zoo_core as zoo
from peft import LoraConfig, PeftModel, get_peft_model

def adapted():
    config = LoraConfig(target_modules=["query"], modules_to_save=["zoo"])
    return get_peft_model(zoo.pull("zoo/text"), config)

ids = torch.arange(3, 8)[None]
stock = zoo.pull("zoo/text")(ids)[0]
model = adapted().train()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
for _ in range(2):  # LoRA's first half has no gradient until its second half left zero
    optimizer.zero_grad()
    model(input_ids=ids)[0][..., 0].sum().backward()
    optimizer.step()
trained = model.eval()(input_ids=ids)[0]
assert not torch.allclose(trained, stock)
model.push_to_hub("zoo/adapter")
model.save_pretrained("adapter")
for place in ("zoo/adapter", "adapter"):
    back = PeftModel.from_pretrained(zoo.pull("zoo/text"), place).eval()
    torch.testing.assert_close(back(input_ids=ids)[0], trained, rtol=0, atol=0)
merged = back.merge_and_unload()
zoo.save(merged, "merged")
torch.testing.assert_close(zoo.load("merged")(ids)[0], trained, rtol=1e-5, atol=1e-5)
"""

IMAGES = """
import numpy, torch, zoo_core as zoo
from transformers import AutoImageProcessor, ViTImageProcessor
from zoo_core import registry

tiny = registry.architecture("hf_vit").adapter().tiny()
model = zoo.build("hf_vit", "linear", seed=0, **tiny).eval()
size = model.config.image_size
processor = ViTImageProcessor(size={"height": size, "width": size}, image_mean=[0.1, 0.2, 0.3])
zoo.push(model, "zoo/images", tokenizer=processor)
again, found = AutoImageProcessor.from_pretrained("zoo/images"), zoo.pull("zoo/images")
image = numpy.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=numpy.uint8)
pixels = again(image, return_tensors="pt").pixel_values
torch.testing.assert_close(pixels, processor(image, return_tensors="pt").pixel_values)
torch.testing.assert_close(found(pixels)[0], model(pixels)[0], rtol=0, atol=0)
"""


@pytest.mark.slow
def test_text_with_its_tokenizer_and_pooling_and_offline(
    hub: Hub, python: Callable[..., str]
) -> None:
    ref, online = python(HERE + PUSH + EMBED + STOCK).splitlines()
    assert ref == f"zoo/text@{hub.head('zoo/text')}"
    before = len(list(hub.log))
    assert python("import os; os.environ['HF_HUB_OFFLINE'] = '1'\n" + EMBED) == online
    assert len(list(hub.log)) == before


@pytest.mark.slow
def test_through_xet(hub: Hub, python: Callable[..., str]) -> None:
    python(HERE + PUSH + "models.assert_same(models.bert(), zoo.pull('zoo/text'))", xet=True)
    assert hub.log.find("*/xet-write-token/*")
    assert hub.log.find("*/xet-read-token/*")


@pytest.mark.slow
def test_adapters_trained_on_a_pulled_model(python: Callable[..., str]) -> None:
    python(HERE + PUSH + PEFT)


@pytest.mark.slow
def test_images_with_their_processor(python: Callable[..., str], api: HfApi) -> None:
    python(IMAGES)
    assert "preprocessor_config.json" in api.list_repo_files("zoo/images")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_hub_of_a_lab_outlives_its_server(tmp_path: Path) -> None:
    zoo = [sys.executable, "-c", "from zoo_core.cli import main; main()"]

    def serve() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [*zoo, "hub", "serve", "lab"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        assert process.stdout is not None
        name, _, endpoint = process.stdout.readline().strip().partition("=")
        assert name == "HF_ENDPOINT"
        return process, endpoint

    def stop(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0, "Ctrl-C is a normal end"
        assert process.stdout is not None
        process.stdout.close()

    process, endpoint = serve()
    accounts = json.loads((tmp_path / "lab" / "hub.json").read_text())["accounts"]
    [token] = [account["token"] for account in accounts if account["name"] == "write"]
    HfApi(endpoint=endpoint, token=token).create_repo("zoo/kept", private=True)
    stop(process)
    process, endpoint = serve()
    assert HfApi(endpoint=endpoint, token=token).model_info("zoo/kept").private
    stop(process)
