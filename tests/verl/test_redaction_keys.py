"""Which keys of the host's own configuration are credentials."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from verl_profiler.events.redaction import is_secret


def folder_of(package):
    """Return where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    return Path(next(iter(spec.submodule_search_locations)))


def keys_of(node, prefix=""):
    """Yield the dotted keys of a configuration."""
    if isinstance(node, dict):
        for key, each in node.items():
            yield f"{prefix}{key}"
            yield from keys_of(each, f"{prefix}{key}.")


def test_of_verls_keys_only_one_looks_like_a_credential():
    """Two thousand keys with `token`, `key`, `pass` and `auth` in many of them stay readable."""
    found = set()
    for file in folder_of("verl").rglob("*.yaml"):
        found |= set(keys_of(yaml.safe_load(file.read_text())))

    assert len(found) > 1000
    # A teacher model's name; `key` alone may be a credential.
    assert {"key"} == {key.rpartition(".")[2] for key in found if is_secret(key)}


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_of_sglangs_options_the_credentials_are_recognized():
    """And the thirty that have `token` in their names are none."""
    text = (folder_of("sglang") / "srt" / "server_args.py").read_text()
    options = set(re.findall(r'"(--[a-z0-9-]+)"', text))

    assert len([option for option in options if "token" in option]) > 20
    assert (
        {"--api-key", "--admin-api-key", "--ssl-keyfile-password"}
        >= {option for option in options if is_secret(option)}
        >= {"--api-key"}
    )
