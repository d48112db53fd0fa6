"""`${name}` in Spring's files, and `${name:default}`: system properties first, then the environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..errors import ConfigError, Problem

_PLACEHOLDER: Final = re.compile(r"\$\{([^${}:]*)(?::([^{}]*))?\}")
_ROUNDS_MAX: Final = 20
"""The most rounds of replacing. Values may hold placeholders themselves; one that leads to itself would never end."""
_LENGTH_MAX: Final = 65536
_ASSIGNMENT: Final = re.compile(r"(?:export\s+)?([A-Za-z_][\w.\-]*)\s*[=:]\s*(.*)")
_OPTION: Final = re.compile(r"-D([^=\s]+)=(.*)")


class Placeholders:
    """The values that `${...}` stands for."""

    def __init__(self, properties: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._properties, self._environment = properties, environment

    def resolve(self, text: str) -> str:
        """Return the text without placeholders. Raises ValueError, which says which one has no value, and what to
        do."""
        if "#{" in text:
            raise ValueError(
                f"{text!r} is an expression, which is not evaluated; write its value into a copy of the file"
            )
        for _ in range(_ROUNDS_MAX):
            if "${" not in text:
                return text
            replaced = _PLACEHOLDER.sub(self._value, text)
            if replaced == text or len(replaced) > _LENGTH_MAX:
                break
            text = replaced
        raise ValueError(f"{text[:100]!r} cannot be resolved: its placeholders are mistyped, or lead to themselves")

    def _value(self, match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        for known in (self._properties, self._environment):
            if name in known:
                return known[name]
        if default is not None:
            return default
        raise ValueError(f"${{{name}}} has no value; give it by --property {name}=VALUE, or a file by --properties")


def read_properties(path: Path) -> dict[str, str]:
    """Return the properties in a file: lines `name=value` as Java writes them, or a shell's, such as ActiveMQ's `env`.
    The options `-Dname=value` in a shell's variables count as properties too. Raises ConfigError."""
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(["no such file"], str(path)) from None
    except OSError as error:
        raise ConfigError([f"the file cannot be read: {error.strerror}"], str(path)) from None
    except UnicodeDecodeError:
        raise ConfigError(["not UTF-8; save the file as UTF-8"], str(path)) from None
    found: dict[str, str] = {}
    for line in re.sub(r"\\\r?\n[ \t]*", "", text).splitlines():
        match = _ASSIGNMENT.fullmatch(line.strip())
        if match is not None:
            found[match[1]] = _unquoted(match[2].strip())
            for option in _words(match[2]):
                if (define := _OPTION.fullmatch(option)) is not None:
                    found[define[1]] = define[2]
    return found


def given_properties(given: tuple[str, ...]) -> dict[str, str]:
    """Return the properties given as `name=value`. Raises ConfigError."""
    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ConfigError([Problem(f"--property {text!r}: expected NAME=VALUE")])
        found[name] = value
    return found


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _words(text: str) -> list[str]:
    try:
        return [word for part in shlex.split(text) for word in part.split()]
    except ValueError:  # a quote without its partner: no shell's line
        return []
