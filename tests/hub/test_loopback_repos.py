"""The loopback Hub and the real client: repositories as a whole, and who may do what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from zoo_core.testing.hub import Hub


def as_(hub: Hub, name: str | None) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=getattr(hub.tokens, name) if name else False)


def status(error: pytest.ExceptionInfo[HfHubHTTPError]) -> int:
    return error.value.response.status_code


def test_whoami_names_user_role_and_organisation(hub: Hub, api: HfApi) -> None:
    me = as_(hub, "read").whoami()
    assert me["name"] == "zoo"
    assert me["auth"]["accessToken"]["role"] == "read"
    assert [org["name"] for org in me["orgs"]] == ["lab"]
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        as_(hub, "unknown").whoami()


def test_create_twice_is_409_unless_it_may_exist(hub: Hub, api: HfApi) -> None:
    url = api.create_repo("zoo/model", private=True)
    assert (url.repo_id, url.repo_type, str(url)) == (
        "zoo/model",
        "model",
        f"{hub.endpoint}/zoo/model",
    )
    assert api.model_info("zoo/model").private is True
    with pytest.raises(HfHubHTTPError) as error:
        api.create_repo("zoo/model")
    assert status(error) == 409
    assert api.create_repo("zoo/model", exist_ok=True).repo_id == "zoo/model"
    assert api.model_info("zoo/model").private is True, "exist_ok must not change it"


@pytest.mark.parametrize("kind", ["model", "dataset", "space"])
def test_kinds_are_apart(api: HfApi, kind: str) -> None:
    sdk = "static" if kind == "space" else None
    url = api.create_repo("lab/thing", repo_type=kind, space_sdk=sdk)
    assert (url.repo_id, url.repo_type) == ("lab/thing", kind)
    api.upload_file(
        repo_id="lab/thing", repo_type=kind, path_or_fileobj=b"x", path_in_repo="a/b.txt"
    )
    assert api.file_exists("lab/thing", "a/b.txt", repo_type=kind)
    others = {"model", "dataset", "space"} - {kind}
    assert not any(api.repo_exists("lab/thing", repo_type=other) for other in others)


@pytest.mark.parametrize("name", ["zoo/..", "zoo/a--b", "zoo/" + "x" * 97, "../etc/passwd", "zoo"])
def test_names_that_are_no_names_are_refused(hub: Hub, api: HfApi, name: str) -> None:
    owner, _, rest = name.partition("/")
    answer = _post(hub, "/api/repos/create", {"organization": owner, "name": rest})
    assert answer in (400, 403)
    assert not list((hub.store.directory).glob("**/passwd*"))


def _post(hub: Hub, path: str, body: object) -> int:
    import httpx2

    headers = {"Authorization": f"Bearer {hub.tokens.write}"}
    with httpx2.Client(trust_env=False) as client:
        return client.post(hub.endpoint + path, json=body, headers=headers).status_code


def test_delete_and_missing(hub: Hub, api: HfApi) -> None:
    api.create_repo("zoo/model")
    api.delete_repo("zoo/model")
    assert not api.repo_exists("zoo/model")
    with pytest.raises(RepositoryNotFoundError):
        api.delete_repo("zoo/model")
    api.delete_repo("zoo/model", missing_ok=True)


def test_move_redirects_the_old_name(hub: Hub, api: HfApi) -> None:
    hub.create("zoo/old", {"config.json": b"{}"})
    api.move_repo("zoo/old", "lab/new")
    assert api.model_info("lab/new").id == "lab/new"
    assert api.model_info("zoo/old").id == "lab/new"
    assert hf_hub_download("zoo/old", "config.json", token=hub.tokens.read)
    api.create_repo("zoo/old")
    assert api.model_info("zoo/old").id == "zoo/old", "a new repository takes the name back"
    with pytest.raises(HfHubHTTPError) as error:
        api.move_repo("zoo/old", "lab/new")
    assert status(error) == 409
    with pytest.raises(HfHubHTTPError) as error:
        api.move_repo("zoo/old", "guest/new")
    assert status(error) == 403


def test_settings_change_visibility_and_gating(hub: Hub, api: HfApi) -> None:
    hub.create("zoo/model")
    api.update_repo_settings("zoo/model", private=True, gated="manual")
    info = api.model_info("zoo/model")
    assert (info.private, info.gated) == (True, "manual")
    api.update_repo_settings("zoo/model", private=False, gated=False)
    info = api.model_info("zoo/model")
    assert (info.private, info.gated) == (False, False)


@pytest.mark.parametrize("name", [None, "guest", "unknown"])
def test_a_private_repository_does_not_exist_for_others(
    hub: Hub, api: HfApi, name: str | None
) -> None:
    hub.create("zoo/secret", {"config.json": b"{}"}, private=True)
    stranger = as_(hub, name)
    expected = HfHubHTTPError if name == "unknown" else RepositoryNotFoundError
    with pytest.raises(expected) as error:
        stranger.model_info("zoo/secret")
    assert status(error) == (404 if name == "guest" else 401)
    with pytest.raises((HfHubHTTPError, OSError)):
        hf_hub_download("zoo/secret", "config.json", token=stranger.token)
    assert as_(hub, "read").model_info("zoo/secret").id == "zoo/secret"
    assert "zoo/secret" not in str(
        [] if name == "unknown" else list(stranger.list_models(author="zoo"))
    )


def test_a_missing_repository_looks_like_a_private_one(hub: Hub, api: HfApi) -> None:
    hub.create("zoo/secret", private=True)
    for name in ("zoo/secret", "zoo/missing"):
        with pytest.raises(RepositoryNotFoundError) as error:
            as_(hub, "guest").model_info(name)
        assert error.value.server_message == f"there is no model '{name}' for you"


@pytest.mark.parametrize(
    ("name", "expected"), [(None, 401), ("read", 403), ("guest", 403), ("write", 200)]
)
def test_who_may_write(hub: Hub, api: HfApi, name: str | None, expected: int) -> None:
    hub.create("zoo/model")
    caller = as_(hub, name)
    attempts = [
        lambda: caller.upload_file(repo_id="zoo/model", path_or_fileobj=b"x", path_in_repo="a.txt"),
        lambda: caller.create_tag("zoo/model", tag="v1"),
        lambda: caller.create_branch("zoo/model", branch="dev"),
        lambda: caller.update_repo_settings("zoo/model", private=False),
        lambda: caller.auth_check("zoo/model", write=True),
        lambda: caller.create_repo("zoo/other"),
        lambda: caller.delete_repo("zoo/model"),
    ]
    for attempt in attempts:
        if expected == 200:
            attempt()
            continue
        with pytest.raises(HfHubHTTPError) as error:
            attempt()
        assert status(error) == expected
    assert api.repo_exists("zoo/model") == (expected != 200)


def test_a_gated_repository_is_known_but_closed(hub: Hub, api: HfApi) -> None:
    hub.create("zoo/gated", {"config.json": b"{}"}, gated="auto")
    guest, nobody = as_(hub, "guest"), as_(hub, None)
    assert nobody.model_info("zoo/gated").gated == "auto"
    for caller, code in ((nobody, 401), (guest, 403)):
        with pytest.raises(GatedRepoError) as error:
            hf_hub_download("zoo/gated", "config.json", token=caller.token)
        assert status(error) == code
        with pytest.raises(GatedRepoError):
            caller.auth_check("zoo/gated")
    api.grant_access("zoo/gated", "guest")
    guest.auth_check("zoo/gated")
    assert hf_hub_download("zoo/gated", "config.json", token=guest.token)


def test_a_revoked_token_is_refused(hub: Hub, api: HfApi) -> None:
    hub.create("zoo/model")
    hub.accounts.revoke(hub.tokens.write)
    with pytest.raises(HfHubHTTPError, match="Invalid credentials") as error:
        api.model_info("zoo/model")
    assert status(error) == 401
    assert hub.log.find("*/zoo/model")[-1].auth == "unknown"


def test_listing_filters_sorts_and_pages(api: HfApi, hub: Hub) -> None:
    card = b"---\nlibrary_name: zoo\npipeline_tag: fill-mask\ntags: [attention]\n---\n# A\n"
    for number in range(5):
        hub.create(f"zoo/bert-{number}", {"README.md": card} if number % 2 else {})
    hub.create("lab/bert-9")
    assert [info.id for info in api.list_models(author="zoo", search="BERT")] == [
        f"zoo/bert-{number}" for number in range(5)
    ]
    tagged = list(api.list_models(filter=["zoo", "attention"]))
    assert [info.id for info in tagged] == ["zoo/bert-1", "zoo/bert-3"]
    assert tagged[0].pipeline_tag == "fill-mask"
    assert len(list(api.list_models(limit=2))) == 2


def test_listing_in_pages(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Hub(page=2) as hub:
        for number in range(5):
            hub.create(f"zoo/m{number}")
        found = list(HfApi(endpoint=hub.endpoint, token=False).list_models(author="zoo"))
        assert [info.id for info in found] == [f"zoo/m{number}" for number in range(5)]
        assert len(hub.log.find("/api/models")) == 3


def test_card_round_trip(hub: Hub, api: HfApi, python: Callable[..., str]) -> None:
    hub.create("zoo/model")
    python(
        "from huggingface_hub import ModelCard, ModelCardData, metadata_update\n"
        "data = ModelCardData(license='mit', tags=['zoo'], base_model='google/x')\n"
        "ModelCard('---\\n' + data.to_yaml() + '\\n---\\n# Hello').push_to_hub('zoo/model')\n"
        "assert ModelCard.load('zoo/model').data.base_model == 'google/x'\n"
        "metadata_update('zoo/model', {'pipeline_tag': 'fill-mask'})\n"
    )
    info = api.model_info("zoo/model")
    assert info.card_data is not None
    assert info.card_data.license == "mit"
    assert {"zoo", "fill-mask", "license:mit", "base_model:google/x"} <= set(info.tags or [])


@pytest.mark.parametrize(
    ("yaml", "complaint"),
    [
        ("tags: [a", "not YAML"),
        ("- a", "must be a mapping"),
        ("tags: [1]", "list of strings"),
        ("tags: one", "list of strings"),
        ("base_model: 3", "base_model"),
        ("model-index: [{results: []}]", "name"),
        ("model-index: [{name: a, results: [{task: {type: x}}]}]", "dataset"),
    ],
    ids=["syntax", "list", "tags", "tag", "base", "index-name", "index-result"],
)
def test_a_malformed_card_is_refused(hub: Hub, api: HfApi, yaml: str, complaint: str) -> None:
    hub.create("zoo/model")
    before = hub.head("zoo/model")
    with pytest.raises(ValueError, match=complaint):
        api.upload_file(
            repo_id="zoo/model",
            path_in_repo="README.md",
            path_or_fileobj=f"---\n{yaml}\n---\n".encode(),
        )
    assert hub.head("zoo/model") == before


def test_unknown_places_are_json_404(hub: Hub, api: HfApi) -> None:
    assert _post(hub, "/api/nowhere", {}) == 404
    assert _post(hub, "/api/models/zoo/none/commit/main", {}) == 404
