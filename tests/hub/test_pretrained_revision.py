"""Stock weights from the Hub by `owner/name@revision`, at that revision and no other."""

from __future__ import annotations

from collections.abc import Callable

BUILD = """
import torch, transformers, zoo_core as zoo
from huggingface_hub import HfApi

config = transformers.BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2,
                                 num_attention_heads=2, intermediate_size=64)
first, second = (transformers.BertModel(config).eval() for _ in range(2))
first.push_to_hub("zoo/stock")
commit = HfApi().model_info("zoo/stock").sha
second.push_to_hub("zoo/stock")

ids = torch.randint(5, 99, (2, 9))
for ref, stock in ((f"zoo/stock@{commit}", first), ("zoo/stock", second)):
    model = zoo.build("bert", "softmax", pretrained=ref).eval()
    assert torch.equal(model(ids)[0], stock(ids)[0])
    assert zoo.inspect(model).loaded["source"] == ref

for ref, says in (("zoo/none", "zoo/none"), (f"zoo/stock@{'0' * 40}", "0" * 40)):
    try:
        zoo.build("bert", "softmax", pretrained=ref)
    except zoo.ZooError as error:
        assert says in str(error), error
    else:
        raise SystemExit(f"{ref} was not refused")
print("right")
"""


def test_weights_come_from_the_revision_that_was_named(python: Callable[..., str]) -> None:
    assert python(BUILD).endswith("right")
