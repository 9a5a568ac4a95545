"""Stock models of transformers with the same mechanism, at the sizes of a BERT-like host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo_core.bench.cases import Case
from zoo_core.bench.libraries import Options, building, check_nystrom, check_yoso, imported
from zoo_core.errors import BenchError

Settings = dict[str, Any]

#: Sizes of a host's config that the stock models have under the same name.
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)


@dataclass(frozen=True)
class ModelPeer:
    """A model class of transformers: `<stem>Model` and `<stem>Config`.

    settings: what its config needs besides the host's sizes.
    """

    mechanism: str
    name: str
    stem: str
    settings: Callable[[Case, Options], Settings]

    def model(self, host: nn.Module, case: Case, options: Options) -> nn.Module:
        """One with random weights. Raises BenchError in words that start with its name."""
        config = getattr(host, "config", None)
        if not all(hasattr(config, name) for name in _SIZES):
            raise BenchError(f"{self.name}: is compared on BERT and models like it only")
        if host is not getattr(host, "base_model", None):
            raise BenchError(f"{self.name}: is compared without a task's head only")
        sizes = {name: getattr(config, name) for name in _SIZES}
        library = imported("transformers", self.name, "pip install transformers")
        with building(self.name):
            settings = {**sizes, **self.settings(case, options)}
            made = getattr(library, f"{self.stem}Config")(**settings)
            model: nn.Module = getattr(library, f"{self.stem}Model")(made)
        return model


def model_peers_of(mechanism: str) -> list[ModelPeer]:
    """The stock models with this mechanism."""
    return [peer for peer in MODEL_PEERS if peer.mechanism == mechanism]


def _nystromformer(case: Case, options: Options) -> Settings:
    check_nystrom(case.length, options)
    return {
        "conv_kernel_size": options["conv"] or 1,  # it cannot do without; 1 token is the least
        "num_landmarks": options["landmarks"],
        "segment_means_seq_len": case.length,
        "max_position_embeddings": case.length,
    }


def _longformer(case: Case, options: Options) -> Settings:
    return {"attention_window": 2 * options["window"], "max_position_embeddings": case.length + 2}


def _bigbird(case: Case, options: Options) -> Settings:
    if options["window"] != 1:
        raise BenchError(f"sees 1 block to each side, the mechanism {options['window']}")
    dense_up_to = (5 + 2 * options["random"]) * options["block"]
    if case.length <= dense_up_to:
        raise BenchError(f"is plain softmax up to {dense_up_to} tokens")
    return {
        "attention_type": "block_sparse",
        "block_size": options["block"],
        "num_random_blocks": options["random"],
        "max_position_embeddings": case.length,
    }


def _yoso(case: Case, options: Options) -> Settings:
    check_yoso(options)
    return {
        "use_expectation": True,
        "hash_code_len": options["bits"],
        "max_position_embeddings": case.length + 2,
    }


MODEL_PEERS = (
    ModelPeer("nystromformer", "transformers nystromformer", "Nystromformer", _nystromformer),
    ModelPeer("local", "transformers longformer", "Longformer", _longformer),
    ModelPeer("bigbird", "transformers bigbird", "BigBird", _bigbird),
    ModelPeer("yoso", "transformers yoso", "Yoso", _yoso),
)
