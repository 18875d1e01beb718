"""A folder that a command writes: one process at a time writes to it, and a refused command leaves nothing in it."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from headwater.util.errors import HeadwaterError
from headwater.util.files import missing_folders, remove_empty, settle_path

LOCK = ".lock"
# Seconds to wait for a folder that another process has locked: `headwater runs` locks it briefly to see whether it is
# free, and the processes of a killed run may take a moment to end.
PATIENCE = 5.0

# Folders that this thread has locked -> whether their contents stay if the command fails.
_stays: dict[tuple[Path, int], bool] = {}


@contextmanager
def occupy_folder(folder: Path, *, empty: bool = False, nested: bool = False) -> Iterator[None]:
    """Lock a folder, which is created if it is missing.

    If the block raises before `keep_contents` is called, what is new in the folder is removed, and the folder if it was
    created here.

    empty: the folder must hold nothing. nested: do nothing if a caller in this thread has locked it.
    Raises `HeadwaterError` if another process has locked the folder, or if it cannot be written.
    """
    folder = settle_path(folder)
    key = Path(os.path.realpath(folder)), threading.get_ident()
    if nested and key in _stays:
        yield
        return
    new, stays = missing_folders(folder), False
    try:
        lock = _acquire_lock(folder)
        try:
            old_names = {path.name for path in folder.iterdir()} - {LOCK}
            _stays[key] = False
            if empty and old_names:
                raise HeadwaterError(f"{str(folder)!r} already exists; remove it, or choose another folder.")
            yield
        except BaseException:
            if not _stays.get(key):
                _remove_new(folder, old_names | {LOCK})
            raise
        finally:
            stays = _stays.pop(key, False)
            with suppress(OSError):
                if (folder / LOCK).stat().st_size == 0:  # otherwise the lock file belongs to another program
                    (folder / LOCK).unlink()
            lock.release()
    except BaseException:
        if not stays:
            remove_empty(new)
        raise


def keep_contents(folder: Path) -> None:
    """Let what is in a folder, and in the occupied folders above it, stay even if the command fails from now on."""
    inner = Path(os.path.realpath(folder))
    for path, thread in list(_stays):
        if path == inner or path in inner.parents:
            _stays[path, thread] = True


def _acquire_lock(folder: Path) -> FileLock:
    """Take the lock of a folder, which is created too. Raises `HeadwaterError`."""
    end = time.monotonic() + PATIENCE
    lock = FileLock(folder / LOCK)
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            if _is_file_of(lock):
                return lock
            lock.release()
        except Timeout:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            raise HeadwaterError(f"Another command is writing to {str(folder)!r}; wait or use another --out.") from None
        except NotImplementedError as error:
            raise HeadwaterError(
                f"The file system of {str(folder)!r} has no locks (flock), which keep runs apart; choose another --out."
            ) from error
        except OSError as error:
            if isinstance(error, FileNotFoundError) and time.monotonic() < end + 1:
                continue  # another command created it and removed it again when it was refused
            raise HeadwaterError(
                f"The folder {str(folder)!r} cannot be written: {error.strerror}; choose another --out."
            ) from error


def _is_file_of(lock: FileLock) -> bool:
    """Whether a lock is held on the file that now has its name: a command that is refused removes the file."""
    descriptor = lock._context.lock_file_fd
    try:
        return descriptor is None or os.path.samestat(os.fstat(descriptor), os.stat(lock.lock_file))
    except FileNotFoundError:
        return False


def _remove_new(folder: Path, old_names: set[str]) -> None:
    """Remove what a folder did not hold before."""
    for path in folder.iterdir():
        if path.name not in old_names:
            with suppress(OSError):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
