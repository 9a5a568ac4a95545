"""Write README's generated tables anew: mechanisms, their speed, how they heal, the quickstart's.

python examples/readme.py            # all; the quickstart runs for some minutes
python examples/readme.py --quick    # without the quickstart; the others are what is kept in files
python examples/readme.py --check    # exit 1 if a quick one is stale
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import zoo_core as zoo
from zoo_core import bench
from zoo_core.bench.measured import FILE
from zoo_core.bench.tables import headline
from zoo_core.words import markdown_table

README = Path(__file__).parents[1] / "README.md"


def _year(paper: zoo.Paper) -> str:
    """The year of a paper, linked where it can be read."""
    return f"[{paper.year}]({paper.link})" if paper.link else str(paper.year)


def mechanisms_table() -> str:
    """One row per first-party mechanism, from its record."""
    rows = []
    for record in zoo.mechanisms(distribution="zoo-core"):
        promises = ("key_padding", "causal", "cross", "bias", "weights")
        supports = ", ".join(name for name in promises if getattr(record.supports, name))
        paper = _year(record.paper) if record.paper else ""
        time = f"`{record.time}`"
        rows.append((f"`{record.name}`", record.family, time, supports, record.swap, paper))
    return markdown_table(("name", "family", "time", "supports", "swap", "paper"), rows)


def speed_tables(*, native: bool) -> str:
    """What examples/benchmarks.py measured, the machine, and the command.

    native: with native kernels, or without.
    """
    kept = bench.load(FILE)
    rows = [row for row in kept.rows if row.case.native == native]
    return f"{bench.markdown(rows)}\n\n{headline(kept.machine)}; `{kept.command}`."


def healed_table() -> str:
    """What examples/fidelity.py has measured."""
    import fidelity

    return markdown_table(fidelity.HEADINGS, fidelity.rows())


def healed_images_table() -> str:
    """What examples/fidelity_vit.py has measured."""
    import fidelity_vit

    return markdown_table(fidelity_vit.HEADINGS, fidelity_vit.rows(fidelity_vit.kept()))


def quickstart_table() -> str:
    """What examples/quickstart.py measures on this machine."""
    import quickstart
    from rich.console import Console

    batches = quickstart.make_batches(32, 256)
    rows = [row.cells() for row in quickstart.measure(batches, Console(stderr=True))]
    return markdown_table(quickstart.HEADINGS, rows)


def replace_block(text: str, name: str, table: str) -> str:
    """Put `table` between the markers of block `name`."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{table}\n{found[2]}", text, flags=re.DOTALL)


def main() -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument("--quick", action="store_true", help="leave the quickstart out")
    chosen = parser.parse_args()
    before = README.read_text()
    after = replace_block(before, "mechanisms", mechanisms_table())
    after = replace_block(after, "speed", speed_tables(native=False))
    after = replace_block(after, "speed-native", speed_tables(native=True))
    after = replace_block(after, "healed", healed_table())
    after = replace_block(after, "healed-images", healed_images_table())
    if chosen.check:
        stale = "README is stale: run examples/readme.py --quick"
        raise SystemExit(0 if after == before else stale)
    if not chosen.quick:
        after = replace_block(after, "quickstart", quickstart_table())
    README.write_text(after)


if __name__ == "__main__":
    main()
