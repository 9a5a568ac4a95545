"""Train a BERT whose attention is swapped in two processes, each with half of the layers.

torch.distributed.pipelining cuts the traced model at a layer and passes micro-batches from one
process to the other. Run it so, on CPUs with gloo:

    torchrun --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --mechanism nystromformer --layers 4 --steps 20
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

import zoo_core as zoo

TOKENS, CLASSES = 32, 4


class Classifier(nn.Module):
    """A patched BERT that takes tensors in order and gives logits, as pipelines want it."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids and mask, (B, N) each -> (B, classes)."""
        return self.host(input_ids=input_ids, attention_mask=attention_mask).logits


@dataclass
class Data:
    """A task that can be learned: the class is the quarter of the vocabulary of the first word."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    @classmethod
    def draw(cls, count: int, seed: int) -> Data:
        """Random tokens of random lengths, padded."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, 100, (count, TOKENS), generator=generator)
        lengths = torch.randint(8, TOKENS + 1, (count, 1), generator=generator)
        mask = torch.arange(TOKENS) < lengths
        return cls(ids * mask, mask.long(), (ids[:, 1] - 4) // 24)


def build(mechanism: str, layers: int) -> Classifier:
    """The same model in every process; no dropout, which the halves would draw differently."""
    host = zoo.build(
        "bert",
        mechanism,
        task="sequence-classification",
        seed=0,
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=TOKENS,
        num_labels=CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Classifier(host)


def train(mechanism: str, layers: int, steps: int, rate: float = 1e-3) -> dict[str, Tensor]:
    """Train this process's half and return its weights; the last one also prints its loss."""
    rank, processes, pieces = dist.get_rank(), dist.get_world_size(), 4
    model = build(mechanism, layers)
    example = Data.draw(8, seed=0)
    micro = (example.input_ids[:2], example.attention_mask[:2])
    cuts = {
        f"host.bert.encoder.layer.{n * layers // processes}": SplitPoint.BEGINNING
        for n in range(1, processes)
    }
    traced = pipeline(model, mb_args=micro, split_spec=cuts)
    stage = traced.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=pieces, loss_fn=F.cross_entropy)
    weights = dict(stage.submod.named_parameters())
    optimizer = torch.optim.SGD(weights.values(), lr=rate)
    for step in range(steps):
        data = Data.draw(8, seed=step)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(data.input_ids, data.attention_mask)
        else:
            losses: list[Tensor] = []
            schedule.step(target=data.labels, losses=losses)
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def main() -> None:
    """Start the processes' group, train, stop it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanism", default="linformer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two steps of two layers")
    parser.add_argument("--weights", help="write each process's weights to WEIGHTS.<rank>")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.layers, chosen.steps = 2, 2
    dist.init_process_group("gloo")
    try:
        found = train(chosen.mechanism, chosen.layers, chosen.steps)
        if chosen.weights:
            torch.save(found, f"{chosen.weights}.{dist.get_rank()}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
