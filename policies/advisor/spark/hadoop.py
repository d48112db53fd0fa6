"""Files for a command's user in any file system that Spark's Hadoop knows, as `outputs` writes them on this machine.

    with file_system("hdfs://namenode/advice", master) as files:
        files.check_files(directory, names, overwrite=False)        # before the work; touches nothing
        files.write_files(directory, {"stores.yaml": text}, overwrite=False)

All is written beside its place, under the name `.<name>.<16 hex digits>.tmp`, and renamed into it. That makes it appear
whole or not at all as far as renaming does on that file system: on HDFS it is one step, in object stores a copy, file
by file. Files of a process that was killed stay: nobody can tell there whether it is still at work.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, SparkError
from ...outputs import taken
from .session import kinds_of_spark_errors, reason_of, spark_errors, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def file_system(url: str, master: str | None = None, *, read: bool = False) -> Iterator[FileSystem]:
    """Open the file system of a URL, through the session that is there or a new one on `master`, to `read` or to write.

    Raises SparkError for what it and Spark raise in the block.
    """
    with spark_errors(
        f"{url} cannot be {'read' if read else 'written'}", "check the URL, and that its file system is there"
    ):
        yield FileSystem(spark_session(master), url)


class FileSystem:
    """A file system of Hadoop's. Directories and files are given as URLs of it. Nothing of it is for several
    threads."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        context = getattr(spark, "_sc", None)
        if context is None:
            raise SparkError(f"{url} cannot be written through Spark Connect; give a path of this machine")
        self._jvm = context._jvm
        self._gateway = context._gateway
        configuration = context._jsc.hadoopConfiguration()
        self._files = self._path(url).getFileSystem(configuration)
        # Another face of the same: it alone can rename without replacing.
        self._context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(
            self._path(url).toUri(), configuration
        )

    def check_files(self, directory: str, names: Sequence[str], *, overwrite: bool) -> None:
        """Raise ConfigError where `write_files` would refuse to write these files. Touches nothing."""
        self._check_directory(directory)
        for name in names:
            self.check_file(_join(directory, name), overwrite=overwrite)

    def check_file(self, url: str, *, overwrite: bool) -> None:
        """Raise ConfigError where a file cannot be written there. Touches nothing."""
        self._check_directory(self._parent(url))
        status = self._status(url)
        if status is not None and status.isDirectory():
            raise ConfigError([f"{url} is in the way: a file of that name is to be written; give another directory"])
        if status is not None and not overwrite:
            raise taken(url)

    def check_new_directory(self, url: str, *, overwrite: bool) -> None:
        """Raise ConfigError where `write_directory` would refuse to make a directory. Touches nothing.

        With `overwrite` one may be replaced that holds Parquet and nothing else.
        """
        self._check_directory(self._parent(url))
        status = self._status(url)
        if status is None:
            return
        if not overwrite:
            raise taken(url)
        if status.isDirectory():
            for entry in self._files.listStatus(self._path(url)):
                name = entry.getPath().getName()
                if not (name.startswith(("_", ".")) or name.endswith(".parquet")) or entry.isDirectory():
                    raise ConfigError([f"{url} holds {name}, which is no trace, and was left as it is; give another"])

    def write_files(self, directory: str, texts: Mapping[str, str], *, overwrite: bool) -> list[str]:
        """Write files as `outputs.write_files` does; return the URLs written."""
        self.check_files(directory, list(texts), overwrite=overwrite)
        there = self._status(directory) is not None
        with self._scratch(directory if there else self._parent(directory), "anabranch") as scratch:
            for name, text in texts.items():
                self._write(f"{scratch}/{name}", text)
            if not there:
                self._rename(scratch, directory)
            else:
                self._move(scratch, directory, list(texts), overwrite=overwrite)
        return [_join(directory, name) for name in texts]

    def copy_file(self, source: Path, url: str, *, overwrite: bool) -> None:
        """Copy a file of this machine there."""
        self.check_file(url, overwrite=overwrite)
        parent, name = self._parent(url), self._path(url).getName()
        with self._scratch(parent, "anabranch") as scratch:
            self._files.copyFromLocalFile(self._path(source.absolute().as_uri()), self._path(f"{scratch}/{name}"))
            self._move(scratch, parent, [name], overwrite=overwrite)

    def fetch(self, url: str, to: Path) -> None:
        """Copy what is there to this machine, with all that is in it."""
        if self._status(url) is None:
            raise ConfigError([f"there is nothing at {url}; give the URL of a directory"])
        to.parent.mkdir(parents=True, exist_ok=True)
        self._files.copyToLocalFile(False, self._path(url), self._path(to.absolute().as_uri()), True)

    def write_directory(self, url: str, write: Callable[[str], object], *, overwrite: bool) -> None:
        """Let `write` make a directory, whose URL it is given, of which one that is there already is replaced."""
        self.check_new_directory(url, overwrite=overwrite)
        with self._scratch(self._parent(url), self._path(url).getName()) as scratch:
            write(f"{scratch}/new")
            old = overwrite and self._status(url) is not None
            if old:
                self._rename(url, f"{scratch}/old")
            try:
                self._rename(f"{scratch}/new", url)
            except BaseException:
                if old:
                    self._rename(f"{scratch}/old", url)
                raise

    def _check_directory(self, url: str) -> None:
        """Raise ConfigError where a directory cannot be made or written to."""
        path = self._path(url)
        status = self._status(url)
        while status is None and path.getParent() is not None:
            path = path.getParent()
            status = self._status(path.toString())
        if status is None:
            return
        if not status.isDirectory():
            raise ConfigError([f"{path.toString()} is in the way: a directory is needed there; give another one"])
        try:
            self._files.access(path, self._jvm.org.apache.hadoop.fs.permission.FsAction.WRITE_EXECUTE)
        except kinds_of_spark_errors() as error:
            if "AccessControlException" not in reason_of(error):
                raise
            raise ConfigError(
                [f"{path.toString()} cannot be written to by this user; give another directory"]
            ) from error

    def _path(self, url: str) -> Any:
        path = self._jvm.org.apache.hadoop.fs.Path(url)
        # Of `hdfs://host` Hadoop takes the user's home directory.
        return path if path.toUri().getPath() else self._jvm.org.apache.hadoop.fs.Path(f"{url}/")

    def _parent(self, url: str) -> str:
        parent = self._path(url).getParent()
        if parent is None:
            raise ConfigError([f"{url} is the root of its file system; give a directory in it"])
        return str(parent.toString())

    def _status(self, url: str) -> Any:
        """Return what is there; None where nothing is."""
        path = self._path(url)
        return self._files.getFileStatus(path) if self._files.exists(path) else None

    @contextmanager
    def _scratch(self, parent: str, name: str) -> Iterator[str]:
        """Make a directory beside what is to be written, removed at the end unless it was renamed."""
        scratch = _join(parent, f".{name}.{secrets.token_hex(8)}.tmp")
        self._files.mkdirs(self._path(scratch))
        try:
            yield scratch
        finally:
            with suppress(*kinds_of_spark_errors()):  # what is told is why it came to this
                self._files.delete(self._path(scratch), True)

    def _write(self, url: str, text: str) -> None:
        stream = self._files.create(self._path(url), False)
        try:
            stream.write(bytearray(text, "utf-8"))
            if stream.hasCapability("hsync"):
                stream.hsync()
        finally:
            stream.close()

    def _move(self, scratch: str, directory: str, names: Sequence[str], *, overwrite: bool) -> None:
        placed: list[str] = []
        try:
            for name in names:
                self._rename(_join(scratch, name), _join(directory, name), overwrite=overwrite)
                placed.append(name)
        except BaseException:
            for name in placed if not overwrite else ():
                self._files.delete(self._path(_join(directory, name)), False)
            raise

    def _rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        """Raise ConfigError where the target is there, unless `overwrite`."""
        rename = getattr(self._jvm.org.apache.hadoop.fs, "Options$Rename")
        options = self._gateway.new_array(rename, 1)
        options[0] = rename.OVERWRITE if overwrite else rename.NONE
        try:
            self._context.rename(self._path(source), self._path(target), options)
        except kinds_of_spark_errors() as error:
            if "FileAlreadyExistsException" in reason_of(error):
                raise taken(target) from None
            raise


def _join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}"
