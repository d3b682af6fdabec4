"""Secrets are left out of every text that is printed or written: `without_secrets`. No torch here.

Hidden are: values of this process's secret environment variables; users and passwords in URLs; secret parameters of
URLs (``?token=…``, signatures); values that a name calls secret (``api_key=…``, ``"password": "…"``,
``--api-key …``); headers (``Bearer …``, ``Basic …``); and keys by their own form (``hf_…``, ``sk-…``, …).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"

# Environment variables. What ends in KEY alone may be anything, so only long values count, and no paths.
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|API_?KEY|ACCESS_KEY(?:_ID)?|SECRET(?:_KEY)?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$",
    re.IGNORECASE,
)
_KEY_VARIABLE = re.compile(r"_KEY$", re.IGNORECASE)
_SHORTEST_SECRET = 8  # shorter values ("true", "0") would match ordinary text
_SHORTEST_KEY = 16
_NUMBER, _SHORTEST_NUMBER = re.compile(r"[\d_.+\-]+"), 4

# `https:\/\/` is how some JSON writes it, `https:/` what a path makes of it.
_URL = re.compile(r"(?P<scheme>[A-Za-z0-9+.-]{1,30}):(?P<slashes>\\{0,8}/(?:\\{0,8}/)?)(?P<rest>[^\s'\"<>`]+)")
_PORT = re.compile(r"[^/:@]*:\d{1,5}(?:[/?#\\]|$)")
_HOST = re.compile(
    r"(?:localhost|\[[0-9A-Fa-f:.]+\]|[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}|\d+(?:\.\d+){3}|[\w.-]+:\d+)\.?(?=[:/?#,;)\\]|$)"
)
# Azure's ``abfs://container@account`` names no user.
_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")

# Names whose values are secret, with `_`, `-` or nothing between words, and any words before.
_SECRET_NAMES = (
    r"(?:[A-Za-z0-9]+[_-])*(?:api[_-]?key|access[_-]?key(?:[_-]?id)?|secret(?:[_-]?(?:access[_-]?)?key)?|"
    r"private[_-]?key|account[_-]?key|signing[_-]?key|client[_-]?secret|"
    r"[A-Za-z0-9]*(?:password|passwd|passphrase)|credentials?)"
)
# A name that ends in "token" may mean a token of text (``eos_token``): its value must look like a key.
_TOKEN_NAMES = r"(?:(?:[A-Za-z0-9]+[_-])*|[A-Za-z0-9]*)token"
_PARAMETER = re.compile(
    r"(?P<name>[?&;#](?:amp;)?(?:x-(?:amz|goog|oss|cos|ms)-(?:signature|credential|security-token)|sig|signature|"
    r"awsaccesskeyid|googleaccessid|ossaccesskeyid|auth|pwd|pass|key-pair-id|policy|"
    rf"{_SECRET_NAMES}|{_TOKEN_NAMES})=)(?P<value>[^&#;\s'\"<>\\`]+)",
    re.IGNORECASE,
)
_KEY_PARAMETER = re.compile(r"(?P<name>[?&](?:amp;)?key=)(?P<value>[A-Za-z0-9_\-.%]{16,})", re.IGNORECASE)
# `"api_key": "…"`, also as a string within JSON: `\"api_key\": \"…\"`.
_QUOTED_PAIR = re.compile(
    rf"(?P<name>(?P<quote>\\{{0,15}}[\"'])(?:(?P<secret>{_SECRET_NAMES})|(?P<token>{_TOKEN_NAMES}))(?P=quote)\s*[:=]\s*)"
    r"(?P<open>\\{0,15}[\"'])(?P<value>(?:(?!(?P=open)).)+)(?P=open)",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![A-Za-z0-9_\-])(?:--)?(?:(?P<secret>{_SECRET_NAMES})|(?P<token>{_TOKEN_NAMES}))\s*[=]\s*)"
    r"(?:(?P<open>\\{0,15}[\"'])(?P<quoted>(?:(?!(?P=open)).)+)(?P=open)|(?P<bare>[^\s'\",;&(){}\[\]\\]+))",
    re.IGNORECASE,
)
_STATED = re.compile(
    rf"(?P<name>(?<![A-Za-z0-9_\-])(?:--)?(?:(?P<secret>{_SECRET_NAMES})|(?P<token>{_TOKEN_NAMES})):\s*)"
    r"(?P<open>\\{0,15}[\"']?)(?P<value>[A-Za-z0-9_\-.+/=~]{8,})(?P=open)",
    re.IGNORECASE,
)
_OPTION = re.compile(
    rf"(?P<name>(?<!\S)--(?:(?P<secret>{_SECRET_NAMES})|(?P<token>{_TOKEN_NAMES}))\s+)(?P<value>'[^']+'|[^\s'\"-]\S*)",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(?P<name>\b(?:proxy-)?authorization\\{0,15}[\"']?\s*[:=]\s*\\{0,15}[\"']?(?:(?:bearer|basic|token|digest)\s+)?)"
    r"(?P<value>[A-Za-z0-9_\-.+/=~]{8,})",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<name>\bbearer(?:\s+|%20))(?P<value>[A-Za-z0-9_\-.+/=~]{8,})", re.IGNORECASE)
_BASIC = re.compile(r"(?P<name>\bbasic(?:\s+|%20))(?P<value>[A-Za-z0-9_\-+/]{4,}={0,2})", re.IGNORECASE)
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?:(-----END [A-Z ]*PRIVATE KEY-----)|\Z)", re.DOTALL
)
_KNOWN = re.compile(
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|"
    r"xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|wandb_v\d_\w{20,}|"
    r"sk-(?=[\w-]{0,80}\d)(?=[\w-]{0,80}[A-Z])[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)
# Every pattern above needs one of these.
_HINT = re.compile(r"[:=]|--|basic|bearer|hf_|gh[pousr]_|github_pat_|glpat-|xox|AKIA|ASIA|AIza|wandb_v|sk-|eyJ", re.I)


def without_secrets(text: str) -> str:
    """A text with ``***`` in place of each secret; see this module's description."""
    return _hide(text, _values_of_environment())


def _hide(text: str, values: list[str]) -> str:
    """`without_secrets`, given the values of the environment."""
    for value in values:
        text = text.replace(value, HIDDEN)
    if _HINT.search(text) is None:
        return text
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}\2", text)
    text = _URL.sub(_without_user, text)
    text = _PARAMETER.sub(_hidden_parameter, text)
    text = _KEY_PARAMETER.sub(rf"\g<name>{HIDDEN}", text)
    for pattern in (_QUOTED_PAIR, _ASSIGNED, _STATED, _OPTION):
        text = pattern.sub(_hidden_value, text)
    text = _HEADER.sub(rf"\g<name>{HIDDEN}", text)
    text = _BEARER.sub(_hidden_bearer, text)
    text = _BASIC.sub(_hidden_basic, text)
    return _KNOWN.sub(HIDDEN, text)


def cleaned(value: Any) -> Any:
    """A copy of nested mappings, lists and tuples with `without_secrets` applied to every string, keys aside.

    The value of a key that is called secret is hidden as a whole.
    """
    return _cleaned(value, _values_of_environment())


def _cleaned(value: Any, values: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key, item) else _cleaned(item, values) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(item, values) for item in value]
    return _hide(value, values) if isinstance(value, str) else value


def holds_secret(text: str) -> bool:
    """Whether `without_secrets` would hide something."""
    return without_secrets(text) != text


def _is_secret(key: Any, value: Any) -> bool:
    """Whether the name of a value calls it secret."""
    if not isinstance(key, str) or not isinstance(value, str) or value == "":
        return False
    # The last part of a dotted key, `data.options.secret`.
    pair = f"{json.dumps(key.rpartition('.')[2])}: {json.dumps(value)}"
    found = _QUOTED_PAIR.fullmatch(pair)
    return found is not None and _hidden_value(found) != pair


def _values_of_environment() -> list[str]:
    """The values to hide, as they are and as URLs and JSON write them.

    The longest is the first, since it may hold another.
    """
    found: set[str] = set()
    for name, value in os.environ.items():
        value = value.strip()
        is_path = value.startswith(("/", "./", "../", "~"))
        is_secret = _SECRET_VARIABLE.search(name) is not None and len(value) >= _SHORTEST_SECRET
        is_key = _KEY_VARIABLE.search(name) is not None and len(value) >= _SHORTEST_KEY
        if (is_secret or is_key) and not is_path and value != HIDDEN:
            found |= {value, quote(value, safe=""), quote(value), quote_plus(value), json.dumps(value)[1:-1]}
    return sorted(found, key=len, reverse=True)


def _without_user(found: re.Match[str]) -> str:
    """A URL without user and password. A password may hold ``/`` and ``@``."""
    scheme, rest = found["scheme"], found["rest"]
    authority = re.split(r"[/?#\\]", rest, maxsplit=1)[0]
    user, at, _ = authority.rpartition("@")
    begin = f"{scheme}:{found['slashes']}"
    if at and ":" not in user:
        is_container = scheme.lower() in _CONTAINER_SCHEMES or not user
        return found[0] if is_container else f"{begin}{HIDDEN}@{rest[len(user) + 1 :]}"
    has_password = re.match(r"[^/?#@\\:]*:", rest) is not None and (at != "" or _PORT.match(rest) is None)
    places = list(_places(rest)) if has_password else []
    if not places:
        return found[0]
    # The host follows the last `@` that something like a host follows: a password may look like a host itself, and
    # hiding a part of a path as well does no harm.
    end = next((place for place in reversed(places) if _HOST.match(rest, place + 1)), places[-1])
    return f"{begin}{HIDDEN}@{rest[end + 1 :]}"


def _places(text: str) -> Iterator[int]:
    """Where ``@`` stands in a text."""
    return (at for at, character in enumerate(text) if character == "@")


def _hidden_parameter(found: re.Match[str]) -> str:
    return f"{found['name']}{HIDDEN}"


def _hidden_value(found: re.Match[str]) -> str:
    """A pair of name and value with the value hidden, if it is a secret."""
    groups = found.groupdict()
    value = next(groups[name] for name in ("value", "quoted", "bare") if groups.get(name) is not None)
    is_placeholder = value.strip("'") in (HIDDEN, "None", "null", "true", "false", "True", "False", "none", "...", "…")
    if is_placeholder or (found["token"] and not _looks_like_a_key(value.strip("'"))):
        return found[0]
    around = groups.get("open") or ""
    if found.re is _STATED and around == "" and value.isalpha():  # prose: "password: required"
        return found[0]
    if groups.get("bare") is not None and _NUMBER.fullmatch(value):
        if len(value) < _SHORTEST_NUMBER:
            return found[0]
        around = '"'  # TOML stays TOML
    return f"{found['name']}{around}{HIDDEN}{around}"


def _looks_like_a_key(value: str) -> bool:
    """Whether a value may be a key: at least 8 letters, digits and few signs, not letters alone unless it is long."""
    if re.fullmatch(r"[A-Za-z0-9_\-.+/=~:%|]{8,}", value) is None or value.startswith(("/", "./", "../", "~", "<")):
        return False
    has_digit, has_letter = re.search(r"\d", value) is not None, re.search(r"[A-Za-z]", value) is not None
    is_prefixed = re.match(r"(?:hf|sk|pk|ghp|gho|glpat)[_-]", value) is not None
    return has_letter and (has_digit or is_prefixed or len(value) >= 32)


def _hidden_bearer(found: re.Match[str]) -> str:
    return f"{found['name']}{HIDDEN}" if _looks_like_a_key(found["value"]) else found[0]


def _hidden_basic(found: re.Match[str]) -> str:
    """The header with its value hidden, if that is a user and a password in base64."""
    value = found["value"]
    try:
        text = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_" if re.search("[-_]", value) else None)
    except (binascii.Error, ValueError):
        return found[0]
    is_pair = b":" in text and all(32 <= byte < 127 or byte >= 0xC2 for byte in text)
    return f"{found['name']}{HIDDEN}" if is_pair else found[0]
