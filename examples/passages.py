"""Real English text that every Python installation has: the language reference behind help()."""

from __future__ import annotations

import re
from pydoc_data.topics import topics


def passages(count: int, *, words: int) -> list[str]:
    """Return `count` consecutive passages of `words` words each, prose without its markup."""
    prose = []
    for name in sorted(topics):
        paragraphs = re.split(r"\n\s*\n", topics[name])
        prose += [p for p in paragraphs if len(p.split()) > 20 and not p.startswith(" " * 6)]
    stream = re.sub(r"[*`\"]+", "", " ".join(prose)).split()
    if len(stream) < count * words:
        raise SystemExit(f"only {len(stream)} words of text here, {count * words} are needed")
    return [" ".join(stream[i * words : (i + 1) * words]) for i in range(count)]
