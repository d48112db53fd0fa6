"""Commands over a configuration: `init`, `check` and `route`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from ...adapters.system.files import directory_mode
from ...policies.config import Config, StoreConfig, load, warnings
from ...policies.config.adapters import load_adapter
from ...policies.errors import AnabranchError, ConfigError, NoRouteError, Problem
from ...policies.names.destination import Destination, wildcard_in
from ...policies.outputs import write_new_file
from ..migration.plan import refused_open
from ..placement.on_disk.directories import missing_directories
from ..placement.on_disk.in_force import configuration_of, file_of
from .output import LocalPath, config_option, echo_json, echo_result, echo_warnings, json_option

TEMPLATE = """\
# Which stores there are, what lives in each, and how durable it is.
# `anabranch check` says what is wrong with this file, `anabranch route NAME` where a destination goes and why.

directory: data                          # relative to this file; stores live in data/stores/<name>
# create_directory: false                # once it is there: a disk that is not mounted is an error then, no empty queue
# file_mode: 0640                        # who may read the files; 0600 where nothing is said: this user alone

# usage: {}                              # records who is sent what and when it is acked, for `anabranch recommend`

# Options for all stores that do not give them themselves:
# defaults:
#   journal: {segment_size: 32MiB}

stores:
  # Few messages that stay for long: in a journal of their own they keep nobody else's files.
  - name: orders
    match: ["queue://orders.>"]          # > is any number of segments, also none; * is one; exact names win
    journal:
      sync: always                       # on disk when send() returns

  # Many that are gone in a moment: their files are used again at once.
  - name: telemetry
    match: ["queue://telemetry.>", "topic://ticks.*"]
    journal:
      sync: never                        # the operating system chooses when

  # All the rest: queues, topics and maps.
  - name: rest
    match: [">"]
    # per_destination: true              # a store of its own for each destination that lands here
    journal:
      sync: periodic                     # a power loss costs at most the interval plus one sync of work
      sync_interval: 1s
"""


@click.command()
@click.argument("path", type=LocalPath(), default=Path("stores.yaml"))
@json_option
def init_command(path: Path, as_json: bool) -> None:
    """Write a commented configuration file.

    The file is PATH, or stores.yaml. Its directory is made if it is missing. A file that exists is never replaced.

    \b
    Example:
      anabranch init
      anabranch init config/stores.yaml
    """
    if path.is_dir():
        raise ConfigError(["is a directory; give the name of a file in it, as stores.yaml"], str(path))
    try:
        write_new_file(path, TEMPLATE)
    except FileExistsError as error:
        # The directory's name may be a file's too.
        taken = error.filename if error.filename is not None else path
        raise ConfigError(["exists already and was left as it is; give another name"], str(taken)) from None
    echo_result(as_json, {"written": str(path)}, f"Wrote {path}. Look through it, then: anabranch check {path}")


@click.command()
@click.argument("path", type=LocalPath(), required=False)
@config_option
@json_option
@click.pass_context
def check_command(ctx: click.Context, path: Path | None, config_path: Path, as_json: bool) -> None:
    """Say what is wrong with a configuration file.

    The file is PATH or stores.yaml, or the configuration that a directory is opened under. All problems are listed at
    once. An open of the data directory that would be refused is one of them: the file gives a store another kind than
    it has, or hides messages. The command creates nothing, and changes nothing. There are warnings, too: for valid text
    that is probably not meant, for files that more users may read than the configuration says, and for directories that
    are missing and must not be made.

    \b
    Example:
      anabranch check stores.yaml
      anabranch check -c stores.yaml --json
    """
    path = file_of(path or config_path)
    doubtful: list[Problem] = []
    try:
        config = load(path)
        refused = [
            Problem(f"store {store.name!r}: {said}", config._line_of(store))
            for store in config.stores
            for said in _refused(store)
        ]
        refused += _refused_open(config, doubtful)
        if refused:
            raise ConfigError(refused, str(path))
    except ConfigError as error:
        if not as_json:
            raise
        problems = [{"line": problem.line, "message": problem.message} for problem in error.problems]
        echo_json({"path": str(path), "valid": False, "problems": problems})
        ctx.exit(2)
    doubtful += [*warnings(path), *map(Problem, missing_directories(config)), *too_open(config)]
    if as_json:
        found = [{"line": warning.line, "message": warning.message} for warning in doubtful]
        stores = [store.name for store in config.stores]
        echo_json({"path": str(path), "valid": True, "problems": [], "warnings": found, "stores": stores})
        return
    for warning in doubtful:
        click.echo(f"{path}{f':{warning.line}' if warning.line else ''}: warning: {warning.message}", err=True)
    click.echo(f"{path} is valid. Data directory: {config.directory}")
    for store in config.stores:
        own = ", one for each destination" if store.per_destination else ""
        click.echo(f"  {store.name} ({_kind_of(store)}{own}): {', '.join(store.match)}")


def _kind_of(store: StoreConfig) -> str:
    """Return a store's kind, and how durable a journal is."""
    return f"{store.kind}, sync: {store._sync}" if store._sync else store.kind


def _refused_open(config: Config, doubtful: list[Problem]) -> list[Problem]:
    """Return the problem that an open would refuse. If the directory cannot be looked at, a problem joins
    `doubtful`."""
    try:
        found = refused_open(config)
    except (AnabranchError, OSError) as error:
        doubtful.append(Problem(f"the stores in {config.directory} cannot be compared: {error}"))
        return []
    return [] if found is None else [Problem(str(found))]


def _refused(store: StoreConfig) -> list[str]:
    """Return the adapter's problems with a store's options, beside those that their model finds."""
    try:
        check = getattr(load_adapter(store.kind), "check_options", None)
        if check is not None:
            check(store.options)
    except ConfigError as error:
        return [problem.message for problem in error.problems]
    except (AnabranchError, ValueError) as error:
        return [str(error)]
    return []


@click.command()
@click.argument("name")
@config_option
@json_option
def route_command(name: str, config_path: Path, as_json: bool) -> None:
    """Say which store a destination goes to, and why.

    NAME is queue://..., topic://... or map://...; a bare name is a queue. Every pattern that matches it is listed,
    the winner first, with the reason why each stands where it stands.

    \b
    Example:
      anabranch route --config stores.yaml orders.custom
      anabranch route -c data --json topic://ticks.eu
    """
    destination = Destination.parse(name)
    wildcard = wildcard_in(destination.name)
    if wildcard is not None:
        echo_warnings(
            [
                f"{destination} holds the wildcard {wildcard}, which only patterns have; the answer is for a "
                "destination that is really named so"
            ]
        )
    routes = configuration_of(config_path).routes()
    matches = routes.matches(destination)
    if not matches:
        nearest = ", ".join(routes.nearest(destination))
        raise NoRouteError(f"no pattern in {config_path} matches {destination}; the closest are: {nearest}")
    rows = [{"store": m.target.name, "pattern": m.pattern.text, "reason": m.reason} for m in matches]
    store, pattern = rows[0]["store"], rows[0]["pattern"]
    target = matches[0].target
    is_own = target.per_destination
    said = {"destination": str(destination), "store": store, "pattern": pattern, "per_destination": is_own}
    said |= {"kind": target.kind, "sync": target._sync}
    own = ", a store of its own there" if is_own else ""
    lines = [f"{destination} goes to store {store} ({_kind_of(target)}{own}) by pattern {pattern}"]
    width, store_width = (max(len(row[column]) for row in rows) for column in ("pattern", "store"))
    lines += [f"  {row['pattern']:{width}}  {row['store']:{store_width}}  {row['reason']}" for row in rows]
    echo_result(as_json, said | {"matches": rows}, *lines)


class Root(NamedTuple):
    """A directory that files of ours lie in."""

    path: Path
    file_mode: int
    suffix: str = ""
    """The end of our files' names in a directory that others may use too; empty: all files there are ours."""

    def remedy(self) -> str:
        """Return the command that sets the modes."""
        if self.suffix:
            return f"find {self.path} -name '*{self.suffix}' -exec chmod {self.file_mode:04o} {{}} +"
        parts = []
        for who, shift in (("u", 6), ("g", 3), ("o", 0)):
            bits = self.file_mode >> shift
            parts.append(f"{who}={'r' * bool(bits & 4)}{'w' * bool(bits & 2)}{'X' * bool(bits & 4)}")
        return f"chmod -R {','.join(parts)} {self.path}"


def too_open(config: Config) -> list[Problem]:
    """Return one warning for each directory in which something has a mode beyond `file_mode`, which was made by hand,
    or by an earlier version. Looks at modes alone; paths that cannot be looked at are skipped."""
    roots = list(_roots(config))
    warnings = []
    for root in roots:
        found = [path for path in _ours(root, {other.path for other in roots}) if _is_beyond(path, root.file_mode)]
        if found:
            warnings.append(
                Problem(
                    f"{root.path}: {len(found)} of the files and directories here may be read or written by more users "
                    f"than file_mode {root.file_mode:04o} says, such as {found[0]}; none of them was changed. "
                    f"Change it with: {root.remedy()}"
                )
            )
    return warnings


def _roots(config: Config) -> Iterator[Root]:
    yield Root(config.directory, config.file_mode)
    for store in config.stores:
        mode = getattr(store.options, "file_mode", None) or config.file_mode
        yield Root(config.directory_of(store), mode)
        if store.index_directory is not None:
            yield Root(store.index_directory, mode, ".mdb")
            yield Root(store.index_directory, mode, ".sums")
        archive = getattr(store.options, "archive_directory", None)
        if archive is not None:
            yield Root(archive, mode, ".seg")


def _ours(root: Root, others: set[Path]) -> Iterator[Path]:
    """Yield a directory and all that is ours in it, without what is another root's."""
    for directory, names, files in os.walk(root.path):
        here = Path(directory)
        if not root.suffix:
            yield here
        names[:] = sorted(name for name in names if here / name not in others)
        yield from (here / name for name in sorted(files) if name.endswith(root.suffix))


def _is_beyond(path: Path, file_mode: int) -> bool:
    try:
        found = path.lstat().st_mode
    except OSError:
        return False  # it has gone meanwhile
    if stat.S_ISDIR(found):
        return bool(found & 0o777 & ~directory_mode(file_mode))
    return stat.S_ISREG(found) and bool(found & 0o777 & ~file_mode)
