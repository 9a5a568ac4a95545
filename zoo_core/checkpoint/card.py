"""A short model card for a directory that has none."""

from __future__ import annotations

from zoo_core.checkpoint import calibration
from zoo_core.checkpoint.manifest import Manifest, mechanism_name


def card(manifest: Manifest) -> str:
    """The text of README.md, with the metadata block that the Hub reads."""
    names = list(dict.fromkeys(entry["mechanism"] for entry in manifest.attention))
    plugins = {entry["distribution"] for entry in manifest.attention} - {""}
    packages = " ".join(sorted({"zoo-core", *plugins}))
    layers = "".join(
        f"- {mechanism_name(entry)}, layers {', '.join(map(str, entry['layers']))}"
        f"{_options(entry['options'])}\n"
        for entry in manifest.attention
    )
    tags = "".join(f"- {tag}\n" for tag in ("zoo-core", "attention", *names))
    return (
        f"---\nlibrary_name: zoo-core\ntags:\n{tags}---\n\n"
        f"# {manifest.title}\n\n"
        f"{layers or 'The attention is that of the stock model.' + chr(10)}\n"
        f"{_calibration(manifest)}"
        f"```bash\npip install {packages}\n```\n\n"
        "```python\nimport zoo_core as zoo\n\n"
        'model = zoo.load("path/to/this/directory")\n```\n'
    )


def _calibration(manifest: Manifest) -> str:
    if manifest.calibration is None:
        return ""
    return f"{calibration.markdown(manifest.calibration)}\n\n"


def _options(options: object) -> str:
    if not isinstance(options, dict) or not options:
        return ""
    return f" ({', '.join(f'{name}={value}' for name, value in options.items())})"
