"""Real text from package registries: labelled sentences, and definitions with their examples.

The sentences are those that VADER was measured on (10,604 movie-review snippets, and Amazon
reviews, NYT editorials and tweets), in the source archive of `vaderSentiment` on PyPI. The
definitions are WordNet's, in Debian's `wordnet-base`. Both are fetched once into a folder of the
user's cache, by pip and by apt-get.
"""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zoo-core-examples"
WORDNET = Path("/usr/share/wordnet")
SENTENCES = {
    "movies": "movieReviewSnippets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
    "tweets": "tweets",
}


@dataclass(frozen=True)
class Synset:
    """One meaning: its words, its definition and an example sentence ("" if it has none)."""

    words: tuple[str, ...]
    definition: str
    example: str


def sentences(name: str) -> list[tuple[str, bool]]:
    """Sentences of one of SENTENCES, each with whether its mean rating is positive.

    Those that people found neutral (between -0.5 and 0.5 on a scale of 4) are left out.
    """
    lines = _archive().extractfile(f"hutto_ICWSM_2014/{SENTENCES[name]}_GroundTruth.txt")
    if lines is None:
        raise SystemExit(f"the archive of vaderSentiment has no {name}")
    rows = [line.decode("utf-8", "replace").strip().split("\t") for line in lines]
    rated = [(text, float(rating)) for _, rating, text in rows]
    return [(text, rating > 0) for text, rating in rated if abs(rating) > 0.5]


def synsets() -> list[Synset]:
    """WordNet's nouns and verbs, in the order of its files, where neighbours are related."""
    return [found for part in ("noun", "verb") for found in _read(part)]


def paragraphs(meanings: list[Synset], words: int) -> list[str]:
    """Definitions and examples of consecutive meanings, joined to texts of about that length."""
    texts, text = [], ""
    for meaning in meanings:
        text += f"{meaning.words[0]}: {meaning.definition}. {meaning.example} ".replace(" . ", " ")
        if len(text.split()) >= words:
            texts.append(" ".join(text.split()[:words]))
            text = ""
    return texts


def mixture(meanings: list[Synset], sentences: list[str], words: int, seed: int = 0) -> list[str]:
    """What a sentence encoder reads: texts of `words` words, of a quarter of it, and sentences.

    As many of each of four kinds as there are of the rarest, shuffled: long texts (twice), short
    texts, definitions or examples, and the given sentences.
    """
    draw = random.Random(seed)
    glosses = [text for one in meanings for text in (one.definition, one.example) if text]
    kinds = [paragraphs(meanings, words), paragraphs(meanings, words // 4), glosses, [*sentences]]
    for kind in kinds:
        draw.shuffle(kind)
    number = min(len(kinds[0]) // 2, *map(len, kinds[1:]))
    texts = kinds[0][: 2 * number] + [text for kind in kinds[1:] for text in kind[:number]]
    draw.shuffle(texts)
    return texts


def split(items: list, share: float, seed: int = 0) -> tuple[list, list]:
    """Cut a list into two disjoint parts, in runs of 50, so that neighbours stay together."""
    runs = [items[i : i + 50] for i in range(0, len(items), 50)]
    random.Random(seed).shuffle(runs)
    cut = int(share * len(runs))
    return [x for run in runs[:cut] for x in run], [x for run in runs[cut:] for x in run]


@cache
def _archive() -> tarfile.TarFile:
    """The archive of ratings inside the source archive."""
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--no-binary", ":all:"]
    folder = _folder("vader", [*pip, "--dest", ".", "vaderSentiment==3.3.2"])
    with tarfile.open(folder / "vaderSentiment-3.3.2.tar.gz") as outer:
        inner = outer.extractfile(
            "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
        )
        if inner is None:
            raise SystemExit("the source archive of vaderSentiment lacks its ratings")
        return tarfile.open(fileobj=io.BytesIO(inner.read()))


@cache
def _wordnet() -> Path:
    """The folder of WordNet's data files: where Debian installs them, else unpacked here."""
    if (WORDNET / "data.noun").exists():
        return WORDNET
    folder = _folder("wordnet", ["apt-get", "download", "wordnet-base"])
    if not (folder / "data").exists():
        [package] = folder.glob("wordnet-base_*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, folder / "data"], check=True)
    return folder / "data" / "usr" / "share" / "wordnet"


def _folder(name: str, command: list[str]) -> Path:
    """A folder of the cache, filled by a command that runs in it the first time."""
    folder = CACHE / name
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def _read(part: str) -> Iterator[Synset]:
    for line in (_wordnet() / f"data.{part}").read_text(encoding="latin-1").splitlines():
        if line.startswith("  "):  # the license
            continue
        fields, _, gloss = line.partition(" | ")
        columns = fields.split()
        count = int(columns[3], 16)
        words = tuple(columns[4 + 2 * i].replace("_", " ") for i in range(count))
        examples = re.findall(r'"([^"]+)"', gloss)
        definition = gloss.partition('; "')[0].strip().rstrip(";")
        yield Synset(words, definition, examples[0] if examples else "")
