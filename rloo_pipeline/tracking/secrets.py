"""What looks like a secret is never logged."""

import json
import re
from typing import Any
from urllib.parse import quote

HIDDEN = "(hidden)"
# Ends of names. max_tokens and the like end with an s; short words must stand alone, as monkey is no key.
_NAME = (
    r"(?:token|token[_-]?value|secret|password|passwd|passphrase|passcode|credentials?|authorization|cookies?|bearer"
    r"|(?:api|access|secret|private)[_-]?key|(?<![a-z])(?:auth|key|pass|pwd|sig|signature))"
)
_SECRET_KEY = re.compile(rf"{_NAME}$", re.IGNORECASE)
# A password may hold @, / and ?, so it goes as far as the text has an @. That takes too much rather than too little.
_USER_IN_URL = re.compile(r"(://)(?:[^\s/:@]*:[^\s\"'<>]*|[^\s/?#]*)@")
_SECRET_IN_URL = re.compile(rf"([?&][\w.-]*{_NAME}=)[^&\s]+", re.IGNORECASE)
_WEBHOOK = re.compile(
    r"(://(?:hooks\.slack\.com/|(?:[\w-]+\.)?discord(?:app)?\.com/api/webhooks/|[\w.-]+\.webhook\.office\.com/))\S+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"((?:^|:\s*)bearer\s+)\S+", re.IGNORECASE)


def hide(key: str, value: Any) -> str:
    """The value as text: plain if it is a string, else JSON; without secrets, which are told by the keys' names."""
    cleaned = _clean(key, value)
    return cleaned if isinstance(cleaned, str) else json.dumps(cleaned, ensure_ascii=False, sort_keys=True)


def hide_in_url(text: str) -> str:
    """The text without user names, passwords and keys in its URLs."""
    for pattern, rest in ((_USER_IN_URL, ""), (_SECRET_IN_URL, HIDDEN), (_WEBHOOK, HIDDEN)):
        text = pattern.sub(rf"\1{rest}", text)
    return text


def without(secret: str | None, text: str) -> str:
    """The text without the secret, as it is or as JSON or a URL would write it."""
    if not secret:
        return text
    in_json = json.dumps(secret)[1:-1]
    for form in sorted({secret, in_json, in_json.replace("/", r"\/"), quote(secret, safe="")}, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def _clean(key: str, value: Any) -> Any:
    if value is not None and not isinstance(value, bool) and _SECRET_KEY.search(key):
        return HIDDEN
    if isinstance(value, dict):
        return {name: _clean(name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_clean(key, item) for item in value]
    return _BEARER.sub(rf"\1{HIDDEN}", hide_in_url(value)) if isinstance(value, str) else value
