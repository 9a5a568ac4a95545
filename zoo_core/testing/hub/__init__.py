"""A small Hugging Face Hub on the loopback interface, for tests and for labs without internet.

It serves the unmodified huggingface_hub client, through classic LFS and through hf-xet, and what
stands on that client: transformers, PEFT, timm, the `hf` command.

    with Hub() as hub:                       # in a test
        HfApi(endpoint=hub.endpoint, token=hub.tokens.write).create_repo("zoo/model")

    serve("hub-directory", port=8000)        # then HF_ENDPOINT=http://127.0.0.1:8000

Nothing outside this machine can reach it. Inside, whoever holds a token is trusted with the disk
space, and whoever knows the sha256 of a large file may commit it: private repositories are not a
vault. Needs the extra `test` (starlette, uvicorn).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zoo_core.errors import ZooError

if TYPE_CHECKING:
    from zoo_core.testing.hub.server import Hub as Hub
    from zoo_core.testing.hub.server import serve as serve

__all__ = ["Hub", "serve"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from zoo_core.testing.hub import server
    except ModuleNotFoundError as error:
        raise ZooError(
            f"the loopback Hub needs {error.name}: pip install 'zoo-core[test]'"
        ) from error
    return getattr(server, name)
