"""The configuration that a usage log was recorded under: what the advisor takes as the one in force.

The file usage/configuration.yaml holds it, without secrets, and loads as any stores.yaml. Its first line says since
when it has been in force; earlier operations of the log were recorded under another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...adapters.system.files import replace_file
from ...policies import config as configs
from ...policies.errors import ConfigError

if TYPE_CHECKING:
    from ...policies.config import Config

FILE: Final = "configuration.yaml"
_SINCE: Final = "# Written by the usage log beside it: the configuration in force since "
_TIME: Final = "%Y-%m-%dT%H:%M:%S.%fZ"


@dataclass(frozen=True, slots=True)
class Remembered:
    """A configuration, and since when it has been in force, in seconds since 1970."""

    path: Path
    config: Config
    text: str
    """The text as it is written, with paths from where its log lies: the same for routers that are configured alike."""
    since: float

    @property
    def day(self) -> str:
        """The time since when, for people."""
        return f"{datetime.fromtimestamp(self.since, UTC):%Y-%m-%d %H:%M:%S} UTC"


def remember(log: Path, config: Config, now_us: int, file_mode: int) -> int:
    """Write the configuration of the usage log in a directory, unless it is there already, and return its bytes. A file
    that was there stays, or is replaced whole. Raises OSError."""
    path = log / FILE
    text = configs.dump_yaml(config, log.parent)
    before = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if not before.startswith(_SINCE) or before.partition("\n")[2] != text:
        now = datetime.fromtimestamp(now_us / 1e6, UTC)
        text = f"{_SINCE}{now:{_TIME}}\n{text}"
        replace_file(path, text.encode(), file_mode)
    return path.stat().st_size


def remembered(log: Path) -> Remembered | None:
    """Return the configuration that the usage log in a directory was last recorded under; None where the log does not
    say.

    Raises ConfigError where the file cannot be used.
    """
    path = log / FILE
    try:
        first, _, text = path.read_text(encoding="utf-8").partition("\n")
        since = datetime.strptime(first.removeprefix(_SINCE), _TIME).replace(tzinfo=UTC).timestamp()
        return Remembered(path, configs.loads(text, log.parent, names_suffice=True), text, since)
    except FileNotFoundError:
        return None
    except ConfigError as error:
        raise ConfigError(error.problems, str(path)) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"the configuration of the usage log cannot be read: {error}"], str(path)) from error
