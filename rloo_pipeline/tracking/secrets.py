"""What looks like a secret is never logged."""

import json
import re
from typing import Any

HIDDEN = "(hidden)"
# max_tokens and the like end with an s.
_NAME = r"(?:token|secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|credentials?|authorization)"
_SECRET_KEY = re.compile(rf"{_NAME}$", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(://)[^/\s@]+@")
_SECRET_IN_URL = re.compile(rf"([?&][\w-]*{_NAME}=)[^&\s]+", re.IGNORECASE)


def hide(key: str, value: Any) -> str:
    """The value as text: plain if it is a string, else JSON; without secrets, which are told by the keys' names."""
    cleaned = _clean(key, value)
    return cleaned if isinstance(cleaned, str) else json.dumps(cleaned, ensure_ascii=False, sort_keys=True)


def hide_in_url(text: str) -> str:
    """The text without user names, passwords and keys in its URLs."""
    return _SECRET_IN_URL.sub(rf"\1{HIDDEN}", _USER_IN_URL.sub(r"\1", text))


def _clean(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _clean(name, item) for name, item in value.items()}
    if isinstance(value, list):
        return [_clean(key, item) for item in value]
    if value is not None and _SECRET_KEY.search(key):
        return HIDDEN
    return hide_in_url(value) if isinstance(value, str) else value
