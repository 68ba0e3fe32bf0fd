"""Round trips of URIs, and the errors of invalid ones."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.errors import ConfigError
from stoker_watch.storage.uri import StorageUri, expand_variables, is_uri, parse_uri

names = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs", "Cc"]), min_size=1).filter(
    lambda name: name not in (".", "..")
)
buckets = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,20}", fullmatch=True)


@given(st.sampled_from(["gs", "s3", "https", "http"]), buckets, st.lists(names, max_size=4))
def test_uri_round_trip(scheme: str, bucket: str, parts: list[str]) -> None:
    uri = StorageUri(scheme, bucket, "/".join(parts))
    assert is_uri(str(uri))
    assert parse_uri(str(uri)) == uri
    assert uri.child("x").parent == uri
    assert uri.child("x").name == "x"
    assert uri.name == (parts[-1] if parts else bucket)


def test_a_slash_at_the_end_is_dropped() -> None:
    assert parse_uri("s3://b/data/") == StorageUri("s3", "b", "data")
    assert parse_uri("gs://b/") == parse_uri("gs://b") == StorageUri("gs", "b", "")


def test_percent_codes_are_decoded_for_http_only() -> None:
    assert parse_uri("https://h:8/a%20b").key == "a b"
    assert parse_uri("s3://b/a%20b").key == "a%20b"


@pytest.mark.parametrize("text", ["data", "/data/x", "./a:b", "C:/data", "s3", "x:/y", "~/data"])
def test_paths_are_not_uris(text: str) -> None:
    assert not is_uri(text)
    with pytest.raises(ConfigError, match="This is not a URI"):
        parse_uri(text)


REFUSED = {
    "s3:/bucket/x": """The URI has one slash after its scheme instead of two.
  where:  s3:/bucket/x
  fix:    Write s3://bucket/x.""",
    "gcs://bucket/x": """gcs:// is not supported.
  where:  gcs://bucket/x
  valid:  gs://, s3://, https://, http://
  fix:    Write gs://bucket/x.""",
    "azure://bucket/x": """azure:// is not supported.
  where:  azure://bucket/x
  valid:  gs://, s3://, https://, http://
  fix:    For example s3://my-bucket/data or gs://my-bucket/data.""",
    "gs:///x": """The URI has no bucket.
  where:  gs:///x
  fix:    For example gs://my-bucket/data.""",
    "file:///data/x": """file:// is not supported.
  where:  file:///data/x
  fix:    Write the path: /data/x""",
    "s3://bucket//x": """A part of the URI is empty, . or ..
  where:  s3://bucket//x
  fix:    Separate names by single slashes.""",
    "https://host/x?signature=secret": """The URI has a query (?…) or a fragment (#…), which stoker does not send.
  where:  https://host/x
  fix:    Use the URI of the plain file; for a private bucket, its gs:// or s3:// URI.""",
    "https://me:secret@host/x": """The URI contains a user name or a password.
  where:  https://…@host
  fix:    Remove the part before the @: stoker reads credentials from the environment.""",
}


@pytest.mark.parametrize("text", REFUSED)
def test_errors_of_invalid_uris(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_uri(text)
    assert str(caught.value) == REFUSED[text]


def test_variables_and_the_home_folder_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "s3://bucket")
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_variables("$PLACE/a/${PLACE}x") == "s3://bucket/a/s3://bucketx"
    assert expand_variables("~/data") == str(Path("/home/me/data"))
    assert expand_variables("cost in $ and 5$") == "cost in $ and 5$"
    assert expand_variables("gs://b/~x") == "gs://b/~x"


def test_an_unset_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_DATA", "/data")
    monkeypatch.setenv("EMPTY_VARIABLE", "")
    with pytest.raises(ConfigError) as caught:
        expand_variables("$TRAINING_DATTA/x")
    assert str(caught.value) == (
        "The environment variable TRAINING_DATTA is not set.\n  where:  $TRAINING_DATTA/x\n"
        "  fix:    Did you mean $TRAINING_DATA? Otherwise: export TRAINING_DATTA=…"
    )
    with pytest.raises(ConfigError, match="EMPTY_VARIABLE is set, but empty"):
        expand_variables("${EMPTY_VARIABLE}/x")
