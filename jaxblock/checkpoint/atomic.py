"""Replacing a folder as a whole: whenever the machine stops, the old one is there or the new one.

The new folder is written beside the old one, under a name that nobody reads, and made durable. Then
one of two things happens.

- Linux and macOS can exchange two names in one step (`renameat2` with RENAME_EXCHANGE, `renamex_np`
  with RENAME_SWAP). At every moment the name leads to the whole old folder or the whole new one.
- Elsewhere, and on file systems that cannot (network ones, mostly), the old folder is renamed to
  `.<name>.jaxblock-old`, then the new one to `<name>`. Between the two steps the name leads
  nowhere, and after a crash just there it stays so. Both folders are whole then, and the rule is:
  *if `<name>` is not there, `.<name>.jaxblock-old` is the folder*. `current` applies it for
  readers; the next writer puts the old folder back before it begins.

A folder that did not exist, or an empty one, is put in place in one step everywhere. Two writers at
a time do not mix: the last one to finish wins. What crashed writers left is removed by the next
writer of the same folder, which tells it from the work of living ones by a lock.

What is not promised: a reader that opens file after file by path may see a first file of the old
folder and a second one of the new (the readers of this package refuse a file that was exchanged
since they read its header); and a disk that says "written" before it is so.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

# An existing folder is deleted only if it holds this file, so is a checkpoint.
MARKER = "config.json"


@contextlib.contextmanager
def replace_folder(folder: str | os.PathLike[str], *, marker: str = MARKER) -> Iterator[Path]:
    """Write a folder anew, in one step.

    Use as `with replace_folder(folder) as new:` and write into `new`. At the end of the block `new`
    takes the place of `folder` and whatever was in that is deleted; if the block raises, `folder`
    stays as it was.

    Args:
      folder: to be replaced, or made. A symbolic link stays, and what it leads to is replaced.
      marker: a file that an existing folder must hold, unless it is empty.

    Raises: FileExistsError if what is in the way is not ours to delete: a file, a folder without
      the marker or with folders in it, or the one that the program runs in.
    """
    target = Path(os.path.realpath(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent):
        _clean(target)
        _check(target, marker)
        new = target.with_name(_prefix(target) + secrets.token_hex(8))
        new.mkdir()
        held = _flock(new, wait=False)
    try:
        yield new
        _flush(new)
        with _lock(target.parent):
            _check(target, marker)
            _put(new, target)
    finally:
        # After an exchange this is the old folder.
        shutil.rmtree(new, ignore_errors=True)
        if held is not None:
            os.close(held)


def current(folder: str | os.PathLike[str]) -> Path:
    """Where a reader finds `folder`: there, or where a crash in the middle of the swap left it."""
    target = Path(os.path.realpath(folder))
    return _old(target) if not target.exists() and _old(target).is_dir() else Path(folder)


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.jaxblock-old")


def _prefix(target: Path) -> str:
    return f".{target.name}.jaxblock-new-"


def _check(target: Path, marker: str) -> None:
    """That nothing is deleted which is not a checkpoint."""
    must = "replace_folder: what is replaced must be"
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{must} a folder; got the file {target}. Choose another name")
    if target.samefile(Path.cwd()):
        raise FileExistsError(
            f"{must} another folder than the one the program runs in; got {target}. "
            "Run it from elsewhere"
        )
    with os.scandir(target) as entries:
        found = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    if found and marker not in found:
        raise FileExistsError(
            f"{must} empty or a checkpoint, with a {marker}; got {target} with {min(found)}. "
            "Choose another folder"
        )
    if inner := [name for name, is_folder in found.items() if is_folder]:
        raise FileExistsError(
            f"{must} a folder of files alone, as all in it is deleted; got {target} with the "
            f"folder {min(inner)}. Choose another folder"
        )


# The swap -----------------------------------------------------------------------------------------


def _put(new: Path, target: Path) -> None:
    """Let `new` take the place of `target`, for good."""
    if target.exists():
        shutil.copymode(target, new)
    if not target.exists() or not any(target.iterdir()):
        if os.name == "nt" and target.exists():
            target.rmdir()  # POSIX renames over an empty folder, Windows over none.
        new.rename(target)
        _sync(target.parent)
    elif _exchange(new, target):
        _sync(target.parent)
    else:
        target.rename(_old(target))
        try:
            new.rename(target)
        except BaseException:
            _old(target).rename(target)
            raise
        _sync(target.parent)
        shutil.rmtree(_old(target), ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; false if system or file system cannot."""
    names = os.fsencode(one), os.fsencode(other)
    try:
        library = ctypes.CDLL(None)
        if os.uname().sysname == "Linux":
            here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
            return library.renameat2(here, names[0], here, names[1], exchange) == 0
        swap = 2  # RENAME_SWAP
        return library.renamex_np(*names, swap) == 0
    except (AttributeError, OSError, TypeError):  # Neither macOS nor a recent C library.
        return False


# Leftovers ----------------------------------------------------------------------------------------


def _clean(target: Path) -> None:
    """Put right and remove what crashed writers left."""
    if _old(target).is_dir():
        if target.exists():
            shutil.rmtree(_old(target))
        else:
            _old(target).rename(target)
    for left in target.parent.iterdir():
        if left.name.startswith(_prefix(target)):
            # Whoever holds the lock is still writing.
            if (held := _flock(left, wait=False)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)


@contextlib.contextmanager
def _lock(parent: Path) -> Iterator[None]:
    """Writers that swap or clean up in the same place do so one after the other."""
    held = _flock(parent, wait=True)
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _flock(folder: Path, *, wait: bool) -> int | None:
    """A lock that ends with this process, however that ends; None if it is not to be had."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks: there leftovers stay.
        return None
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # Held by another one; or a file system without locks.
        os.close(number)
        return None
    return number


# Durability ---------------------------------------------------------------------------------------


def _flush(folder: Path) -> None:
    """Wait until all that is in `folder` is on the disk."""
    for place, _, files in os.walk(folder):
        for name in files:
            _sync(Path(place, name))
        _sync(Path(place))


def _sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Not every file system can.
            raise
    finally:
        os.close(number)
