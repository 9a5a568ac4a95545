"""Train a BERT whose attention is swapped in two processes, each with half of the layers.

torch.distributed.pipelining passes micro-batches from one process to the other. Each process keeps
its own layers of the model as it is, so that any mechanism will do which needs nothing but its own
layer. Run it so, on CPUs with gloo:

    torchrun --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --mechanism nystromformer --layers 4 --steps 20
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import zoo_core as zoo
from zoo_core import registry

TOKENS, CLASSES = 32, 4


class Part(nn.Module):
    """Some consecutive layers of a patched BERT classifier, which keep their names.

    The first part also embeds the tokens, the last one also classifies. Not cut by torch's tracer:
    torch.export makes a submodule of each block without autocast, and loses its inputs.
    """

    def __init__(self, host: Any, mine: range) -> None:
        super().__init__()
        layers = host.bert.encoder.layer
        self.is_first, self.is_last = mine.start == 0, mine.stop == len(layers)
        for other in set(range(len(layers))) - set(mine):
            layers[other] = Skipped()
        if not self.is_first:
            host.bert.embeddings = Embedded()
        if not self.is_last:
            host.bert.pooler = host.classifier = None
        self.host = host

    def forward(self, given: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids (B, N), or hidden states of the part before -> hidden states, or logits."""
        source = {"input_ids" if self.is_first else "inputs_embeds": given}
        if self.is_last:
            return self.host(**source, attention_mask=attention_mask).logits
        return self.host.bert(**source, attention_mask=attention_mask).last_hidden_state


class Skipped(nn.Module):
    """In the place of a layer that another process has."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Hand on what came."""
        return hidden


class Embedded(nn.Module):
    """In the place of the embeddings, where what comes has been embedded."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        """Hand on what came."""
        return inputs_embeds


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


def build(mechanism: str, layers: int) -> nn.Module:
    """The same model in every process; no dropout, which the halves would draw differently."""
    return zoo.build(
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


def check(mechanism: str, host: nn.Module) -> None:
    """Raise SystemExit where layers give one another, or the loss, more than hidden states."""
    why = ""
    if "carry" in registry.mechanism(mechanism).supports.needs:
        why = "hands state from layer to layer"
    elif any(hasattr(module, "auxiliary_loss") for module in host.modules()):
        why = "adds a loss of its own in every layer"
    if why:
        raise SystemExit(
            f"{mechanism} {why}, and only hidden states pass from one process to the next: train "
            "it in one process, or under DDP or FSDP"
        )


def train(mechanism: str, layers: int, steps: int, rate: float) -> dict[str, Tensor]:
    """Train this process's half and return its weights; the last one also prints its loss."""
    rank, processes, pieces = dist.get_rank(), dist.get_world_size(), 4
    if layers < processes:
        raise SystemExit(f"--layers {layers} is less than one for each of {processes} processes")
    host = build(mechanism, layers)
    check(mechanism, host)
    mine = range(rank * layers // processes, (rank + 1) * layers // processes)
    part = Part(host, mine)
    stage = PipelineStage(part, rank, processes, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=pieces, loss_fn=F.cross_entropy)
    weights = dict(part.host.named_parameters())
    optimizer = torch.optim.SGD(weights.values(), lr=rate)
    for step in range(steps):
        data = Data.draw(8, seed=step)
        optimizer.zero_grad()
        # Every process draws the masks itself; what is not trained need not be passed on.
        given = [data.input_ids] if part.is_first else []
        losses: list[Tensor] = []
        wanted = {"target": data.labels, "losses": losses} if part.is_last else {}
        schedule.step(*given, attention_mask=data.attention_mask, **wanted)
        if part.is_last:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}")
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the processes' group, train, stop it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanism", nargs="+", default=["linformer"], help="one after the other")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.1, help="of plain SGD")
    parser.add_argument("--quick", action="store_true", help="two steps of two layers")
    parser.add_argument("--weights", help="write each process's weights to WEIGHTS.<rank>")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.layers, chosen.steps = 2, 2
    dist.init_process_group("gloo")
    try:
        found = {
            name: train(name, chosen.layers, chosen.steps, chosen.rate) for name in chosen.mechanism
        }
        if chosen.weights:
            torch.save(found, f"{chosen.weights}.{dist.get_rank()}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
