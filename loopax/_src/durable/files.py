"""Files of a durable run: a directory that one run holds, and files that are there whole or not at all.

Windows differs from other systems in both. It has no `flock`, and a file that one process reads cannot be replaced by
another one at that moment.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from loopax._src.durable.options import on_first

T = TypeVar("T")
ON_WINDOWS = os.name == "nt"


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


fcntl, msvcrt = _module("fcntl"), _module("msvcrt")  # the second one on Windows alone, which has not the first one

_HELD = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}  # what a system says of a lock of another run
_HOLDER_BYTES = 32  # which process holds the directory, at the start of the file
_LOCKED_BYTE = 1 << 30  # Windows lets nobody read a locked byte: one so far behind the text that nobody does
_PATIENCE_SECONDS = 5.0


@contextmanager
def locked(where: str, root: Path) -> Iterator[None]:
    """Hold the directory; an error where another run does. The system lets go when the process ends, however."""
    with ExitStack() as stack:

        def hold() -> None:
            file = stack.enter_context(_opened(root / "lock"))
            try:
                _lock(file)
            except OSError as error:
                if error.errno not in _HELD:
                    raise _no_lock(where, root, str(error)) from error
                raise RuntimeError(
                    f"{where}(directory={str(root)!r}) is in use by another run ({_holder(file)}). "
                    "Wait until it ends, or give another directory."
                ) from error
            stack.callback(_unlock, file)
            file.seek(0)
            file.write(f"process {os.getpid()}".ljust(_HOLDER_BYTES).encode())

        if fcntl is None and msvcrt is None:
            raise _no_lock(where, root, "this Python has neither fcntl nor msvcrt")
        on_first(hold)
        yield


def _opened(path: Path) -> FileIO:
    """To read and write, without a buffer, made where it is not there."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
    return FileIO(os.open(path, flags, 0o666), "r+")


def _lock(file: FileIO) -> None:
    """OSError where another run, also one of this process, has locked the file."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        file.seek(_LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)


def _unlock(file: FileIO) -> None:
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_UN)
    else:  # closing does so too, but Windows says not when
        file.seek(_LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)


def _holder(file: FileIO) -> str:
    file.seek(0)
    return file.read(_HOLDER_BYTES).decode(errors="replace").strip()


def _no_lock(where: str, root: Path, why: str) -> RuntimeError:
    return RuntimeError(
        f"{where}(directory={str(root)!r}) cannot be locked against other runs: {why}. Two runs in one directory would "
        "destroy each other's saves. Give a directory on a file system that has locks, such as a local disk."
    )


def patiently(action: Callable[[], T]) -> T:
    """Do something with a file that another process may have open, which Windows refuses as long as it has."""
    end = time.perf_counter() + _PATIENCE_SECONDS
    while True:
        try:
            return action()
        except PermissionError:
            if not ON_WINDOWS or time.perf_counter() > end:
                raise
        time.sleep(0.01)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, with the same bytes on every system."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with open(unfinished, "wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    patiently(lambda: unfinished.replace(path))


def write_sealed(path: Path, text: str) -> None:
    """Write a file as `write_whole` does, with a checksum of the text on its last line."""
    write_whole(path, f"{text}\n{sha256(text.encode()).hexdigest()}")


def read_sealed(path: Path) -> str:
    """Read the text of a file that `write_sealed` has written; ValueError where it has changed."""
    text, _, seal = patiently(lambda: path.read_text(encoding="utf-8")).rpartition("\n")
    if sha256(text.encode()).hexdigest() != seal:
        raise ValueError("its checksum differs")
    return text
