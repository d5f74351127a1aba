"""The directory of a run is held by one run at a time, on Windows, too; its files are whole or not there."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from loopax import durable
from loopax._src.durable import files
from loopax._src.durable.files import locked, patiently, write_whole

MOST_READ = 1 << 20  # bytes at once, by any reader of a short file


class Msvcrt:
    """Locks of regions as the C runtime of Windows documents them.

    A region is locked from where the file stands; it may lie behind the end of the file. One that another handle has
    locked, also a handle of the same process, cannot be locked again (EACCES). A locked region is unlocked as a whole.
    """

    LK_UNLCK, LK_LOCK, LK_NBLCK = 0, 1, 2

    def __init__(self) -> None:
        self.regions: dict[tuple[int, int, int], int] = {}  # inode, start, stop: the handle

    def locking(self, handle: int, mode: int, nbytes: int) -> None:
        start, inode = os.lseek(handle, 0, os.SEEK_CUR), os.fstat(handle).st_ino
        region = inode, start, start + nbytes
        if mode == self.LK_UNLCK:
            if self.regions.get(region) != handle:
                raise OSError(errno.EACCES, "Permission denied")
            del self.regions[region]
            return
        assert mode == self.LK_NBLCK, "LK_LOCK waits for ten seconds"
        if any(inode == other and start < stop and first < region[2] for other, first, stop in self.regions):
            raise PermissionError(errno.EACCES, "Permission denied")
        self.regions[region] = handle

    def refuses(self, file: Path) -> bool:
        """Whether somebody who reads the file from its start would be refused."""
        return any(inode == file.stat().st_ino and first < MOST_READ for inode, first, _ in self.regions)


@pytest.fixture
def msvcrt(monkeypatch: pytest.MonkeyPatch) -> Msvcrt:
    found = Msvcrt()
    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(files, "msvcrt", found)
    return found


@pytest.fixture(params=["as here", "as on Windows"])
def system(request: pytest.FixtureRequest) -> None:
    if request.param == "as on Windows":
        request.getfixturevalue("msvcrt")


@pytest.mark.usefixtures("system")
def test_one_run_at_a_time_which_the_error_names(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 4194304")  # of an earlier run
    for _ in range(2):
        with locked("f", tmp_path):
            assert (tmp_path / "lock").read_text().strip() == f"process {os.getpid()}"
            in_use = pytest.raises(RuntimeError, match=rf"in use by another run \(process {os.getpid()}\)\. Wait")
            with in_use, locked("f", tmp_path):
                raise AssertionError
            with locked("f", tmp_path.parent):  # another directory
                pass


def test_the_file_can_be_read_while_it_is_locked_on_windows(tmp_path: Path, msvcrt: Msvcrt) -> None:
    with locked("f", tmp_path):
        assert len(msvcrt.regions) == 1
        assert not msvcrt.refuses(tmp_path / "lock")
    assert msvcrt.regions == {}


def test_an_error_lets_go_on_windows(tmp_path: Path, msvcrt: Msvcrt) -> None:
    with pytest.raises(KeyError), locked("f", tmp_path):
        raise KeyError
    assert msvcrt.regions == {}


def run(directory: Path) -> Any:
    f = lambda x, y: (jnp.sin(x) + y, x)
    carry, rows = durable.scan(f, jnp.zeros(3), jnp.arange(10.0), directory=directory, checkpoint_every=4)
    return carry, rows[:]


@pytest.mark.usefixtures("msvcrt")
def test_a_run_on_windows(tmp_path: Path) -> None:
    first = run(tmp_path / "run")
    with locked("f", tmp_path / "run"), pytest.raises(RuntimeError, match=r"durable.scan.* is in use by another run"):
        run(tmp_path / "run")
    again = run(tmp_path / "run")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), first, again))


def test_without_any_lock_durable_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(files, "msvcrt", None)
    with pytest.raises(RuntimeError, match=r"cannot be locked .*: this Python has neither fcntl nor msvcrt"):
        run(tmp_path)


def test_a_file_system_without_locks_is_not_one_that_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "fcntl", SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4, LOCK_UN=8))
    with pytest.raises(RuntimeError, match=r"cannot be locked .*No locks available.* on a file system that has locks"):
        run(tmp_path)


def refuse(times: int, replace: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse so many times, as Windows does while somebody has the file open."""
    left = [times]

    def replaced(self: Path, target: Path) -> Any:
        if left[0]:
            left[0] -= 1
            raise PermissionError(errno.EACCES, "The process cannot access the file", str(target))
        return replace(self, target)

    return replaced


def test_a_file_that_is_being_read_is_replaced_afterwards_on_windows(tmp_path: Path, monkeypatch: Any) -> None:
    write_whole(tmp_path / "a.json", "before")
    monkeypatch.setattr(Path, "replace", refuse(3, Path.replace))
    with pytest.raises(PermissionError):  # elsewhere, it is a matter of rights
        write_whole(tmp_path / "a.json", "now")
    monkeypatch.setattr(files, "ON_WINDOWS", True)
    write_whole(tmp_path / "a.json", "now")
    assert (tmp_path / "a.json").read_text() == "now"


def test_what_stays_refused_is_an_error_on_windows(monkeypatch: Any) -> None:
    def refused() -> None:
        raise PermissionError

    monkeypatch.setattr(files, "ON_WINDOWS", True)
    monkeypatch.setattr(files, "_PATIENCE_SECONDS", 0.05)
    with pytest.raises(PermissionError):
        patiently(refused)


def test_files_have_the_same_bytes_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text mode would write other ends of lines on Windows, in the encoding of its language."""
    monkeypatch.setattr(os, "linesep", "\r\n")
    files.write_sealed(tmp_path / "a.json", "å\nb")
    assert (tmp_path / "a.json").read_bytes().startswith("å\nb\n".encode())
    assert files.read_sealed(tmp_path / "a.json") == "å\nb"


def test_a_path_with_two_slashes_is_refused(tmp_path: Path) -> None:
    """TensorStore takes none; on Windows, that of a share begins so."""
    with pytest.raises(ValueError, match=r"got '//.*takes no path that begins with two slashes. Give a directory on a"):
        run(Path(f"/{tmp_path}"))
    assert not any(tmp_path.iterdir())
