"""Peak memory of a patched linear-time model grows linearly in N, padded batches included."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from zoo_core import registry

ATTENTIONS = ("linear", "linformer", "local")
# Each mechanism in a fork, whose peak begins at what all of them have imported, once.
MEASURE = """
import json, os, resource, sys, torch, zoo_core as zoo
import transformers.models.bert.modeling_bert
torch.set_num_threads(1)
for attention in sys.argv[1:]:
    if not os.fork():
        break
    if os.wait()[1]:
        sys.exit(f"{attention} failed")
else:
    sys.exit()
model = zoo.build("bert", attention, num_hidden_layers=2, hidden_size=64, num_attention_heads=2,
                  intermediate_size=128, vocab_size=99, max_position_embeddings=16384).eval()
def run(n):
    ids = torch.randint(5, 99, (2, n))
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, n // 3 :] = 0
    with torch.inference_mode():
        model(ids, attention_mask=mask)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
start = run(64)
print(json.dumps([run(n) - start for n in (4096, 8192, 16384)]))
"""


def peaks_in_mebibytes() -> dict[str, list[float]]:
    """Peak resident memory of one forward at 4k, 8k and 16k tokens above a run at 64."""
    command = [sys.executable, "-c", MEASURE, *ATTENTIONS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(ATTENTIONS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_memory_is_linear_in_length() -> None:
    for attention, sizes in peaks_in_mebibytes().items():
        assert "n**2" not in registry.mechanism(attention).memory
        one_mask = 2 * 16384**2 / 2**20  # bool (B, 1, N, N) at 16k: 512 MiB
        assert sizes[2] < one_mask / 2, attention
        # Doubling N doubles linear memory and quadruples quadratic memory.
        # Below 32 MiB the peak of the imports hides it.
        assert sizes[2] - sizes[1] < 3 * max(sizes[1] - sizes[0], 32), attention
