"""Mask credentials in what is written about a launch.  Imported by both halves; imports no other module.

A value is masked because of its key (`api_key`, `HF_TOKEN`, `--password`), of its place (`user:pass@`
in a URL, the signature of a presigned one, what follows `Bearer`), or of its shape (`hf_…`, `sk-…`).
Keys of training that only look like one (`max_tokens`, `eos_token`, `prompt_key`, `tokenizer`) stay.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from verl_profiler.events.json_values import is_list, is_mapping, is_tuple

__all__ = ["MASK", "is_secret", "mask", "mask_command", "mask_text"]

MASK = "***"


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Anywhere in a key, with its separators taken out.
_ALWAYS = re.compile(
    "password|passwd|passphrase|passcode|secret|credential|apikey|accesskey|privatekey|secretkey|authkey|"
    "signingkey|encryptionkey|sharedkey|accountkey|sshkey|accesstoken|authtoken|apitoken|securitytoken|"
    "sessiontoken|refreshtoken|hubtoken|bearer|authorization|cookie|webhook"
)
_WHOLE = frozenset(
    {"auth", "oauth", "creds", "cred", "jwt", "sig", "signature", "sas", "pat", "pw"}
)
# Words that make a credential of the `key` or `token` after them, also in the plural or before `_file`.
_OF = _set(
    "api access secret private signing encryption auth oauth account ssh shared session security "
    "refresh bearer hf hub wandb openai aws github gitlab"
)
# Words after which `key`, `token` or `pass` is one of training or of data.
_NOT_OF = {
    "key": _set(
        "prompt image images video videos audio reward fn data source sort group tool tools cache "
        "partition primary foreign uid id answer response responses text input output label feature "
        "dict map hash metric metrics message messages teacher thinking model query value ground truth "
        "multi modal extra info index column field name sample batch task agent monitor"
    ),
    "token": _set(
        "eos bos pad unk sep cls mask stop special image video audio per next first last max min num "
        "new prompt response input output begin end start tool think one single vision chat role dp "
        "of to inter by total avg mean each"
    ),
    "pass": _set("num single first second third per forward backward one two multi by"),
}
# `auth_mode=disabled`: how, not with what.
_HOW = _set("mode type enabled enable method scheme provider required timeout")
_NAMES = ("key", "keys", "token", "tokens")
_PLAIN = frozenset({"", "true", "false", "null", "none", MASK})

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+")

_SHAPES = re.compile(
    r"\b(?:hf_|gh[opsur]_|github_pat_|glpat-|npm_|pypi-|xox[a-z]-|dop_v1_|r8_)[\w-]{16,}"
    r"|\bsk-[\w-]{16,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_BEARER = re.compile(
    r"(?i)\b(bearer|basic)(\s{1,3}|%20|\+)(?=[A-Za-z]*[\d.~+/=_-]|[A-Za-z]{16})[\w.~+/=-]{6,}"
)
# An `@` belongs to the user information up to the last one before the path.
_USER = re.compile(
    r"(?<=://)(?:[^\s/?#\"'<>]*|[^\s/?#:@\"'<>]*:(?!\d{1,5}[/?#])(?:(?!://)[^\s\"'<>])*)@"
)
_HOOK = re.compile(r"(?i)(?<=://hooks\.slack\.com/)[^\s\"'<>]+")
# A key, where it is not the middle of one, and what divides it from its value.
_KEY = re.compile(
    r"(?<![\w.+@/~\[\]-])(?P<prefix>[+~@/.\[\]-]*)(?P<key>\w[\w.@/+\[\]-]*)(?P<quote>\\{0,7}[\"'])?"
    r"(?:(?P<between>[ \t]{0,3}(?:=>|[:=]{1,2})[ \t]{0,3})|(?P<gap>[ \t]{1,3}))"
)
_QUERY = re.compile(r"(?<=[?&;])(?P<key>[\w.%$-]+)=(?P<value>[^\s&;#\"'<>]*)")
_OPENING = re.compile(r"[bBfFrRuU]{0,2}(\\{0,7}[\"'])")
_UNQUOTED = re.compile(r"[^\s\"']*")
_NEXT_KEY = re.compile(r"[,;&]\s?\\{0,7}[\"']?[\w.-]+\\{0,7}[\"']?[:=]")
_CLOSING = re.compile(r"[)\]},;]+\Z")
_HEADER = re.compile(r"(?i)(?:authorization|cookie)")
_LINE = re.compile(r"[^\r\n\"']*")


def is_secret(key: str) -> bool:
    """Whether the value of this key is a credential; `key` may be a path such as `a.b.api_key`."""
    if key in ("PWD", "OLDPWD"):
        return False
    parts = re.split(r"[./@:]", key.strip("+~-/@."))
    if any(map(_has_secret_word, parts)):
        return True
    last = parts[-1]
    before, end = ["", "", *_words(last)][-2:]
    if end in _NOT_OF:
        return before not in _NOT_OF[end]
    pairs = itertools.pairwise(_words(last))
    return end == "pwd" or any(first in _OF and second in _NAMES for first, second in pairs)


def _words(key: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(key)]


def _has_secret_word(part: str) -> bool:
    words = _words(part)
    if words and words[-1] in _HOW:
        return False
    return bool(_ALWAYS.search("".join(words))) or any(word in _WHOLE for word in words)


def mask(value: Any, known: Iterable[str] = (), key: str = "") -> Any:
    """Return plain containers with every credential in them masked; keys stay.

    Args:
        value: Dicts, lists, strings, numbers, as deep as they are.
        known: Credentials by value, masked wherever they are.
        key: The key that `value` is under.
    """
    if is_mapping(value):
        secret = is_secret(key)
        return {
            mask_text(str(name), known) if isinstance(name, str) else name: mask(
                each, known, key if secret else str(name)
            )
            for name, each in value.items()
        }
    if is_list(value) or is_tuple(value):
        return [mask(each, known, key) for each in value]
    if value is None or isinstance(value, bool):
        return value
    if is_secret(key) and str(value).lower() not in _PLAIN:
        return MASK
    return mask_text(value, known) if isinstance(value, str) else value


def mask_command(words: Sequence[str], known: Iterable[str] = ()) -> list[str]:
    """Return a command line, word by word, with its credentials masked."""
    known = tuple(known)
    found: list[str] = []
    secret_next = False
    for word in words:
        name, given, value = word.partition("=")
        if secret_next and not word.startswith("--"):
            found.append(MASK)
            secret_next = False
            continue
        secret_next = False
        if given and re.fullmatch(r"[^\s\"'{},]+", name) and is_secret(name):
            found.append(word if value.lower() in _PLAIN else f"{name}={MASK}")
            continue
        secret_next = not given and re.fullmatch(r"--?[A-Za-z][\w.-]*", word) is not None
        secret_next = secret_next and is_secret(word)
        found.append(mask_text(word, known))
    return found


def mask_text(text: str, known: Iterable[str] = ()) -> str:
    """Return free text (an error, a URL, a script, JSON, YAML) with its credentials masked.

    Args:
        text: Any text.
        known: Credentials by value, masked wherever they are.
    """
    for value in sorted(known, key=len, reverse=True):
        text = text.replace(value, MASK)
    if "://" in text:
        text = _HOOK.sub(MASK, _USER.sub(f"{MASK}@", text))
    text = _QUERY.sub(_masked_parameter, text)
    text = _assignments(text)
    return _SHAPES.sub(MASK, _BEARER.sub(rf"\1\2{MASK}", text))


def _masked_parameter(match: re.Match[str]) -> str:
    if is_secret(match["key"]) and match["value"].lower() not in _PLAIN:
        return f"{match['key']}={MASK}"
    return match[0]


def _assignments(text: str) -> str:
    """Mask the values of `key=value`, `key: value`, `"key": "value"` and `--key value`."""
    parts: list[str] = []
    done = at = 0
    while (match := _KEY.search(text, at)) is not None:
        at = match.end()
        if match["gap"] and not match["prefix"].endswith("-"):
            continue
        if not is_secret(match["key"]):
            # The value may begin with a key of its own.
            at = match.end("key") if match["gap"] else at
            continue
        start, end = _value(text, at, match["key"])
        value = text[start:end]
        if value.lower() in _PLAIN or value.startswith((f"{MASK}#", f"{MASK}&")):
            continue
        if match["gap"] and value.startswith("--"):
            continue
        parts += [text[done:start], MASK]
        done = at = end
    return "".join([*parts, text[done:]])


def _value(text: str, at: int, key: str) -> tuple[int, int]:
    """Return where the value that begins here begins and ends, without its quotes."""
    opening = _OPENING.match(text, at)
    if opening is not None:
        end = text.find(opening[1], opening.end())
        while end > 0 and len(opening[1]) == 1 and text[end - 1] == "\\":
            end = text.find(opening[1], end + 1)
        return opening.end(), len(text) if end < 0 else end
    if _HEADER.search(key):
        return at, _LINE.match(text, at).end()  # type: ignore[union-attr]
    end = _UNQUOTED.match(text, at).end()  # type: ignore[union-attr]
    run = text[at:end]
    following = _NEXT_KEY.search(run)
    closing = _CLOSING.search(run)
    if following is not None:
        run = run[: following.start()]
    elif closing is not None:
        run = run[: closing.start()]
    return at, at + len(run)
