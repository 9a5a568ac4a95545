"""Write README's generated tables anew: the list of mechanisms, and what the quickstart measures.

python examples/readme.py            # both
python examples/readme.py --check    # exit 1 if the list of mechanisms is stale
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import zoo_core as zoo

README = Path(__file__).parents[1] / "README.md"


def markdown(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def mechanisms_table() -> str:
    """One row per first-party mechanism, from its record."""
    rows = []
    for record in zoo.mechanisms(distribution="zoo-core"):
        promises = ("key_padding", "causal", "cross", "bias", "weights")
        supports = ", ".join(name for name in promises if getattr(record.supports, name))
        paper = f"[{record.paper.year}]({record.paper.link})" if record.paper else ""
        time = f"`{record.time}`"
        rows.append((f"`{record.name}`", record.family, time, supports, record.swap, paper))
    return markdown(("name", "family", "time", "supports", "swap", "paper"), rows)


def quickstart_table() -> str:
    """What examples/quickstart.py measures on this machine."""
    import quickstart
    from rich.console import Console

    batches = quickstart.make_batches(32, 256)
    rows = [row.cells() for row in quickstart.measure(batches, Console(stderr=True))]
    return markdown(quickstart.HEADINGS, rows)


def replace_block(text: str, name: str, table: str) -> str:
    """Put `table` between the markers of block `name`."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)


def main() -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    before = README.read_text()
    after = replace_block(before, "mechanisms", mechanisms_table())
    if check:
        raise SystemExit(0 if after == before else "README is stale: run examples/readme.py")
    README.write_text(replace_block(after, "quickstart", quickstart_table()))


if __name__ == "__main__":
    main()
