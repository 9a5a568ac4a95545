"""Who may do what: every route asks here for its repository and revision.

As on the real Hub, a repository that the caller may not see does not exist: 404 for a signed-in
caller, 401 for an anonymous one.
"""

from __future__ import annotations

from zoo_core.testing.hub.accounts import Account, Accounts
from zoo_core.testing.hub.repository import Commit, Repository
from zoo_core.testing.hub.wire import Call, Refusal


def identify(accounts: Accounts, token: str | None) -> Account | None:
    """Return the account of a token, None for nobody; a token of nobody is refused."""
    if token is None:
        return None
    account = accounts.find(token)
    if account is None:
        raise Refusal(401, "Invalid credentials in Authorization header")
    return account


def signed_in(call: Call) -> Account:
    """Return the caller, refusing an anonymous one."""
    if call.account is None:
        raise Refusal(401, "sign in: this needs a token")
    return call.account


def writer(call: Call) -> Account:
    """Return the caller, refusing one whose token only reads."""
    account = signed_in(call)
    if account.role != "write":
        raise Refusal(403, f"the token {account.name!r} may only read")
    return account


def namespace(call: Call, owner: str) -> Account:
    """Return the caller if they may create, delete and move repositories of `owner`."""
    account = writer(call)
    if not account.owns(owner):
        raise Refusal(403, f"{account.user!r} has no rights in the namespace {owner!r}")
    return account


def visible(call: Call) -> Repository:
    """Return the repository of the path, if the caller may know of it."""
    kind, repo_id = call.args["kind"], call.args["repo"]
    moved = call.store.successor(kind, repo_id)
    if moved is not None and call.store.get(kind, repo_id) is None:
        lookup(call, kind, moved.id)
        _redirect(call, moved)
    return lookup(call, kind, repo_id)


def lookup(call: Call, kind: str, repo_id: str) -> Repository:
    """Return the repository of this very id, if the caller may know of it."""
    repo = call.store.get(kind, repo_id)
    if repo is None or (repo.private and not _member(call.account, repo)):
        status = 401 if call.account is None else 404
        raise Refusal(status, f"there is no {kind[:-1]} {repo_id!r} for you", "RepoNotFound")
    return repo


def readable(call: Call) -> Repository:
    """Return the repository of the path, if the caller may have its files."""
    repo = visible(call)
    granted = call.account is not None and call.account.user in repo.granted
    if repo.gated and not granted and not _member(call.account, repo):
        status = 401 if call.account is None else 403
        raise Refusal(status, f"access to {repo.id!r} is restricted: ask its owner", "GatedRepo")
    return repo


def writable(call: Call) -> Repository:
    """Return the repository of the path, if the caller may change it."""
    repo = visible(call)
    if not writer(call).owns(repo.owner):
        raise Refusal(403, f"you have no write access to {repo.id!r}: open a pull request")
    return repo


def open_to(call: Call, *, proposal: bool) -> Repository:
    """Return the repository of the path for an upload, which others may make in a pull request."""
    if proposal:
        writer(call)
        return visible(call)
    return writable(call)


def at_revision(call: Call, repo: Repository) -> Commit:
    """Return the commit that the `rev` of the path names."""
    commit = repo.resolve(call.args["rev"])
    if commit is None:
        raise no_revision(repo, call.args["rev"])
    return commit


def no_revision(repo: Repository, name: str) -> Refusal:
    """Return the refusal of a revision that does not exist."""
    return Refusal(404, f"{repo.id!r} has no revision {name!r}", "RevisionNotFound")


def no_entry(repo: Repository, commit: Commit, path: str) -> Refusal:
    """Return the refusal of a path that does not exist; the commit lets clients remember it."""
    message = f"{path!r} does not exist in {repo.id!r} at {commit.oid}"
    return Refusal(404, message, "EntryNotFound", {"X-Repo-Commit": commit.oid})


def _member(account: Account | None, repo: Repository) -> bool:
    return account is not None and account.owns(repo.owner)


def _redirect(call: Call, repo: Repository) -> None:
    """Send the client to the same place in a repository that has moved."""
    path = call.request.scope["raw_path"].decode("latin-1")
    query = call.request.url.query
    location = path.replace(call.args["repo"], repo.id, 1) + (f"?{query}" if query else "")
    raise Refusal(307, f"{call.args['repo']!r} is now {repo.id!r}", None, {"Location": location})
