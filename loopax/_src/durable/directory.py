"""The directory of a durable run: where things stand in it, and that only one process uses it."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopax._src.durable.hosts import on_first

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None


@dataclass(frozen=True)
class Directory:
    """Where the parts of a run stand."""

    root: Path

    @property
    def lock(self) -> Path:
        """Held by the process that runs."""
        return self.root / "lock"

    @property
    def program(self) -> Path:
        """What is run: versions, types, checksums."""
        return self.root / "program.json"

    @property
    def saves(self) -> Path:
        """A directory for each save, which Orbax writes."""
        return self.root / "saves"

    @property
    def outputs(self) -> Path:
        """An array in Zarr's format for each leaf of a scan's outputs."""
        return self.root / "outputs"


def open_directory(where: str, path: Any) -> Directory:
    """The directory, made if it is not there; an error where it cannot be written to."""
    root = whole_path(where, path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{where}(directory=...) cannot be written to: {error.strerror}. Give a directory in which this "
            "process may make files",
            str(root),
        ) from error
    return Directory(root)


def whole_path(where: str, path: Any) -> Path:
    """From the root of the file system on; an error where a link on the way leads nowhere."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{where}(directory=...): got {path!r}, expected a path (a str or a pathlib.Path).")
    whole = Path(path).expanduser().absolute()
    for one in [*reversed(whole.parents), whole]:
        if one.is_symlink() and not one.exists():
            raise FileNotFoundError(
                errno.ENOENT,
                f"{where}(directory=...) leads through a link to {os.readlink(one)}, which is not there. Make that "
                "directory (a disk may not be mounted), or remove the link",
                str(one),
            )
    return whole


@contextmanager
def locked(where: str, directory: Directory) -> Iterator[None]:
    """Hold the directory; an error where another run does. The system lets go when the process ends, however."""
    with ExitStack() as stack:
        if fcntl is not None:
            on_first(lambda: stack.enter_context(_held(where, directory)))
        yield


@contextmanager
def _held(where: str, directory: Directory) -> Iterator[None]:
    assert fcntl is not None
    with open(directory.lock, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise RuntimeError(
                f"{where}(directory={str(directory.root)!r}) is in use by another run ({file.read().strip()}). Wait "
                "until it ends, or give another directory."
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with open(unfinished, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
