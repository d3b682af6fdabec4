"""Secrets are hidden in whatever form they come, and ordinary text stays as it is."""

from __future__ import annotations

import base64
import json
import shlex
import string
from pathlib import Path
from urllib.parse import quote

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2kit.files.redaction import cleaned, without_secrets

SECRET = "Zq9vX2mLk8TrW4bN"
BASIC = base64.b64encode(b"user:Zq9vX2mLk8TrW4bN").decode()


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@host/x",
        f"memory://user:{SECRET}@bucket/run",
        f"s3://user:p/{SECRET}@host.org/x",
        f"https://user:p@{SECRET}@example.com/x",
        f"http://user:p@{SECRET}/w@example.com:8000/x",
        f"http://:{SECRET}@localhost:8000",
        f"https://{SECRET}@github.com/x/y.git",
        f"https:\\/\\/user:{SECRET}@host\\/x",
        f"git+https://user:{SECRET}@github.com/x/y@v1.0",
        f"https://host/x?token={SECRET}",
        f"https://host/x?a=1&access_token={SECRET}&b=2",
        f"https://b.s3.amazonaws.com/k?X-Amz-Credential={SECRET}%2F20260101&X-Amz-Date=2026",
        f"https://b.s3.amazonaws.com/k?X-Amz-Date=2026&X-Amz-Signature={SECRET}",
        f"https://b.s3.amazonaws.com/k?AWSAccessKeyId={SECRET}&Signature=abc%2F",
        f"https://a.blob.core.windows.net/c/x?sv=2020&sig={SECRET}%3D",
        f"https://host/x?key={SECRET}",
        f"https://host/x?a=1&amp;token={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"{{'authorization': 'Bearer {SECRET}'}}",
        f"curl -H 'Authorization: Basic {BASIC}'",
        f"Bearer {SECRET} was refused",
        f'"api_key": "{SECRET}"',
        json.dumps(json.dumps({"api_key": SECRET})),
        json.dumps(json.dumps(json.dumps({"client_secret": SECRET}))),
        f"{{'secret': '{SECRET}', 'key': 'x'}}",
        f"storage_options={{'token': '{SECRET}'}}",
        f"api_key={SECRET}",
        f"OPENAI_API_KEY={SECRET} python x.py",
        f"password = '{SECRET}'",
        f"db_password={SECRET}",
        f"HF_TOKEN={SECRET}",
        f"--api-key {SECRET}",
        f"--hf-token={SECRET}",
        f"aws_secret_access_key: {SECRET}",
        f"AccountKey={SECRET}==;EndpointSuffix=core.windows.net",
        f"x hf_{SECRET}{SECRET} y",
        f"sk-proj-{SECRET}{SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_secrets_are_hidden(text: str) -> None:
    found = without_secrets(text)
    assert "***" in found
    assert SECRET not in found
    assert BASIC not in found
    assert SECRET.swapcase() not in found
    assert without_secrets(found) == found


@pytest.mark.parametrize(
    "text",
    [
        "/models/llama@2024/config.json",
        "s3://bucket/key=value/day=2026-01-01/part-0.parquet",
        "s3://bucket/a@b/c",
        "hf://datasets/user/repo@main/data",
        "http://127.0.0.1:8000/v1/a@b",
        "http://127.0.0.1:8000 and 10.0.0.1:29500 at a@b.org",
        "abfss://container@account.dfs.core.windows.net/runs",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "the token: it has no end; a token is 1,024 tokens",
        "tokens=1024 input_tokens=3 data.format=tokens token=3",
        "data.format=tokens",
        'eos_token = "<|im_end|>", "pad_token": "<pad>", bos_token="<s>", "eos_token": "</s>", unk_token=[UNK]',
        "eos_token_id=128009, model.tokenizer=demo/tokenizer",
        '"eos_token": {"content": "<|eot_id|>"}',
        "basic training, Basic tokenizer, bearer of bad news, Bearer authentication is not supported",
        "?tokens=5&limit=3",
        "num_key_value_heads = 5",
        "key=value, keys: 3, key: a",
        "password: none was given; the secret of it; password: required here, credentials: incorrect",
        "secret = 7",
        "wandb: no login: set WANDB_API_KEY",
        "task-classification-sk-learn-model-for-everyone",
        "hf_to_dcp, hf_config_with_a_long_name",
        "2026-01-01T10:00:00 rank 0 on host, step 3",
        "https://docs.pytorch.org/docs/stable/fsdp.html#token=",
        "token_type_ids: [0, 0, 1]",
        "secret = ***",
        "C:\\Users\\me@home",
        "loss 2.3456  tokens/s 12,345  lr 1e-4",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert without_secrets(text) == text


def test_only_the_secret_goes() -> None:
    assert without_secrets("https://me:pass@host/x s3://bucket/y") == "https://***@host/x s3://bucket/y"
    assert without_secrets("https://h/x?a=1&token=abc&b=2#c") == "https://h/x?a=1&token=***&b=2#c"
    assert without_secrets("git+https://me:pw@github.com/x/y@v1") == "git+https://***@github.com/x/y@v1"
    assert without_secrets('{"api_key": "abc", "n": 1}') == '{"api_key": "***", "n": 1}'
    assert without_secrets("Authorization: Bearer abc12345, X-A: b") == "Authorization: Bearer ***, X-A: b"


def test_a_toml_stays_a_toml() -> None:
    text = 'secret = 12345678\napi_key = "a"\nurl = "http://a:b@c"\n[x]\noptions = {password = 7, token = "abc"}\n'
    assert tomli.loads(without_secrets(text)) == {
        "secret": "***",
        "api_key": "***",
        "url": "http://***@c",
        "x": {"options": {"password": 7, "token": "abc"}},
    }


def test_secrets_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", 'p/w "quoted" ümlaut')
    monkeypatch.setenv("SOME_KEY", "0123456789abcdef")
    monkeypatch.setenv("SORT_KEY", "by_name")
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/id_ed25519")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id-of-mine")
    for form in ('p/w "quoted" ümlaut', quote('p/w "quoted" ümlaut', safe=""), json.dumps('p/w "quoted" ümlaut')):
        found = without_secrets(f"before {form} after")
        assert "quoted" not in found
        assert found.startswith("before ")
        assert found.endswith(" after")
    assert without_secrets("0123456789abcdef an-id-of-mine") == "*** ***"
    assert without_secrets("by_name /home/me/.ssh/id_ed25519") == "by_name /home/me/.ssh/id_ed25519"


def test_nested_values_are_cleaned() -> None:
    given_ = {"url": "http://a:b@c/", "n": 3, "options": [{"secret": "x", "token": "y"}, ("--api-key", None)]}
    assert cleaned(given_) == {
        "url": "http://***@c/",
        "n": 3,
        "options": [{"secret": "***", "token": "y"}, ["--api-key", None]],
    }


secrets = st.text(string.ascii_letters + string.digits + "!$*()_+.~/@:-", min_size=8, max_size=30)
keys = st.text(string.ascii_letters + string.digits + "_-.", min_size=16, max_size=40).filter(
    lambda text: any(map(str.isdigit, text)) and any(map(str.isalpha, text)) and text[0] not in "./-"
)


def test_a_url_that_a_path_has_folded_is_one_still() -> None:
    folded = str(Path("https://user:pw/S@cret5@example.org:9/x"))
    assert without_secrets(f"error: {folded} is no directory") == "error: https:/***@example.org:9/x is no directory"


@given(secrets)
@settings(max_examples=150, deadline=None)
def test_any_password_of_a_url_is_hidden(password: str) -> None:
    marked = f"Qz7{password}Qz8"
    found = without_secrets(f"open https://user:{marked}@example.org:443/x/y failed")
    assert "Qz8" not in found
    assert found.endswith("/x/y failed")


@given(keys, st.sampled_from(["?token={}", "api_key={}", '"hf_token": "{}"', "Bearer {}", "--secret-key {}"]))
@settings(max_examples=150, deadline=None)
def test_any_key_under_a_secret_name_is_hidden(key: str, form: str) -> None:
    assert key not in without_secrets(f"https://host/x {form.format(key)} end")


words = st.lists(st.text(string.ascii_lowercase, min_size=1, max_size=9), min_size=1, max_size=12).map(" ".join)


@given(words)
@settings(max_examples=150, deadline=None)
def test_prose_stays(text: str) -> None:
    assert without_secrets(text) == text


paths = st.lists(st.text(string.ascii_lowercase + "0123456789_@=.-", min_size=1, max_size=8), min_size=1, max_size=5)


@given(paths, st.sampled_from(["/", "s3://bucket/", "gs://b/", "hf://datasets/a/"]))
@settings(max_examples=150, deadline=None)
def test_paths_stay(parts: list[str], begin: str) -> None:
    names = [part for part in parts if "token" not in part and "secret" not in part]
    path = begin + "/".join(names)
    assert without_secrets(path) == path


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_a_second_pass_changes_nothing(text: str) -> None:
    once = without_secrets(text)
    assert without_secrets(once) == once
    assert without_secrets(shlex.join([text])) is not None
