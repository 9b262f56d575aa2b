"""Keeping credentials out of what a run writes down: the configuration as text, without the values of secret keys."""

from __future__ import annotations

import re
from itertools import pairwise

REDACTED = '"<redacted>"'

_KEY_LINE = re.compile(
    r"""^(?P<indent>\s*(?:-\s+)?)(?P<quote>["']?)(?P<key>[\w.+/@-]+)(?P=quote)(?P<sep>\s*[:=]\s*)(?P<value>.*)$"""
)
_INLINE = re.compile(
    r"""(?P<head>(?P<quote>["']?)\b(?P<key>[\w.-]+)(?P=quote)\s*[:=]\s*)"""
    r"""(?P<value>"[^"]*"|'[^']*'|[^\s,}\]&"']+)"""
)
_URL_LOGIN = re.compile(r"(?P<head>[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)", re.IGNORECASE)
_HARMLESS = re.compile(r"""(?:null|none|~|true|false|""|''|\[\]|\{\}|[-+]?[\d_.]+(?:e[-+]?\d+)?)""", re.IGNORECASE)
_SECRET_WORDS = frozenset(
    "secret secrets password passwd authorization credentials apikey accesskey privatekey secretkey".split()
)
_TEXT_TOKENS = frozenset("eos bos pad unk mask sep cls end stop start special per id ids limit budget".split())
"""Words that make a key like `eos_token` or `token_ids` name a piece of text and not a credential."""


def is_secret(key: str) -> bool:
    """True for keys that name a credential: hf_token, api_key, wandbApiKey, password … but not max_new_tokens.

    Only whole words of the key count, so `tokenizer` and `tokens` are not secrets.
    """
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", key).lower())
    if "token" in words and not _TEXT_TOKENS & set(words):
        return True
    return bool(_SECRET_WORDS & {*words, *(a + b for a, b in pairwise(words))})


def redact(text: str) -> str:
    """The configuration text with the values of secret keys, and passwords in URLs, blanked.

    Numbers, booleans and null stay: they are no credentials, and `token: null` says something useful.
    """
    lines: list[str] = []
    hidden: int | None = None  # indentation of a secret key whose value is on the lines below it
    for line in text.splitlines(keepends=True):
        body, end = line.rstrip("\r\n"), line[len(line.rstrip("\r\n")) :]
        depth = len(body) - len(body.lstrip())
        if hidden is not None and _belongs_to(hidden, body):
            continue
        hidden = None
        found = _KEY_LINE.match(body)
        if found and is_secret(found["key"]):
            value = found["value"].strip()
            if not value or value[0] in "|>":
                hidden = depth
                lines.append(f"{body[: found.start('value')].rstrip()} {REDACTED}{end}")
                continue
            if not _HARMLESS.fullmatch(value):
                lines.append(f"{body[: found.start('value')]}{REDACTED}{end}")
                continue
        lines.append(_redact_inline(body) + end)
    return "".join(lines)


def _belongs_to(depth: int, body: str) -> bool:
    """True for lines of the value of a key at that indentation: deeper, blank, or an item of its list."""
    stripped = body.lstrip()
    indent = len(body) - len(stripped)
    return not stripped or indent > depth or (indent == depth and stripped.startswith("- "))


def _redact_inline(body: str) -> str:
    """Blanks secrets in flow mappings (`{token: abc}`), in overrides (`- reward.api_key=abc`) and in URLs."""

    def blank(found: re.Match[str]) -> str:
        keep = not is_secret(found["key"]) or _HARMLESS.fullmatch(found["value"])
        return found[0] if keep else found["head"] + REDACTED

    return _URL_LOGIN.sub(rf"\g<head>{REDACTED[1:-1]}", _INLINE.sub(blank, body))
