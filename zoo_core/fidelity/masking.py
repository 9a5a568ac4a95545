"""Hide some tokens of a batch, as BERT's masked language modelling does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo_core.errors import OptionError, ZooError
from zoo_core.fidelity import preparing

_IGNORED = -100


def check_host(host: Any) -> None:
    """Raise OptionError for a model that does not tell tokens, and so cannot tell hidden ones."""
    head = getattr(host, "get_output_embeddings", lambda: None)()
    if head is None:
        raise OptionError(
            f"match='masked-lm', but {type(host).__name__} does not tell tokens; build the model "
            "with task='masked-lm', or choose another match="
        )


@dataclass(frozen=True)
class Masking:
    """Which token hides others, and which are never hidden."""

    mask_id: int
    special: frozenset[int]
    vocabulary: int
    share: float

    @classmethod
    def of(cls, tokenizer: Any, share: float) -> Masking:
        """Read the ids off a tokenizer, or that of a place.

        Raises ZooError for one without a mask token.
        """
        tokenizer = preparing.loaded(tokenizer)
        mask_id = getattr(tokenizer, "mask_token_id", None)
        if mask_id is None:
            raise ZooError("match='masked-lm' needs a tokenizer= with a mask token")
        special: Iterable[int] = tokenizer.all_special_ids
        return cls(mask_id, frozenset(special), len(tokenizer), share)

    def hide(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """The batch with some tokens hidden, and what they were: (B, N), -100 elsewhere.

        Of the tokens drawn 80 % become the mask token, 10 % a random one, 10 % stay as they are.
        Draws from torch's global generator.
        """
        ids = batch["input_ids"]
        special = torch.tensor(sorted(self.special), device=ids.device)
        drawn = (torch.rand(ids.shape) < self.share).to(ids.device)
        drawn &= batch["attention_mask"].bool() & ~torch.isin(ids, special)
        fate = torch.rand(ids.shape).to(ids.device)
        anything = torch.randint(self.vocabulary, ids.shape).to(ids.device)
        hidden = ids.masked_fill(drawn & (fate < 0.8), self.mask_id)
        hidden = torch.where(drawn & (fate >= 0.9), anything, hidden)
        return {**batch, "input_ids": hidden}, ids.masked_fill(~drawn, _IGNORED)
