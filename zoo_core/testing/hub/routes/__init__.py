"""The calls of the Hub's protocol, one module for each part of it."""

from __future__ import annotations

from zoo_core.testing.hub.routes import chunks, commits, files, large, refs, repos
from zoo_core.testing.hub.wire import Router

router = Router(
    [
        route
        for module in (repos, files, large, chunks, commits, refs)
        for route in module.router.routes
    ]
)
