"""Atomic files and folders: checksums, and writing to a temporary name before renaming."""

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from headwater.util.errors import HeadwaterError, first_line

STAGING = ".writing-"
# How the plain exceptions of Rust libraries (safetensors, tokenizers) end.
_OS_ERROR = re.compile(r"\(os error (\d+)\)|[Nn]o space left")
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk is full for this user (a quota)",
    errno.EFBIG: "the disk is full, or a limit on the size of files is reached (ulimit -f)",
}
# An address such as "s3://bucket", also as a Path, which drops a slash. A single letter is a Windows drive.
_ADDRESS = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")


def open_regular(file: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises `OSError` for anything else, without waiting.

    A pipe would wait for its writer, and a device may have no end.
    """
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(file))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(file: str | os.PathLike[str]) -> bytes:
    """Read a regular file. Raises `OSError`, also for anything that is not a regular file."""
    with open_regular(file) as stream:
        return stream.read()


def sha256_of(file: Path) -> str:
    """Compute the SHA-256 of a regular file's content, in hex. Raises `OSError`."""
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def flush_path(path: Path) -> None:
    """Sync a file or folder to the disk, so that a rename never precedes the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_address(text: str | Path) -> bool:
    """Whether a path that a user wrote is an address, such as s3://bucket/run."""
    return _ADDRESS.match(str(text)) is not None


def check_local(path: str | Path, name: str = "") -> None:
    """Raise `HeadwaterError` for an address where a path is needed, and for text that cannot be a path.

    name: of the option, argument or field.
    """
    quoted = f"{name and f'{name}: '}{ascii(str(path)) if not str(path).isprintable() else repr(str(path))}"
    if is_address(path):
        raise HeadwaterError(
            f"{quoted} is an address, but headwater reads and writes local files only; give a local path."
        )
    try:
        is_path = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise HeadwaterError(f"{quoted} has characters that no path can have; give another name.")


def local(path: str | Path, name: str = "") -> Path:
    """A path as a `Path`. Raises `HeadwaterError` for an address. name: of the argument."""
    check_local(path, name)
    return Path(path)


def explain_absence(path: str | Path, expected: str = "file or folder") -> str:
    """Explain why a path is not the expected kind of file, in a sentence without its full stop.

    A path that exists is not called missing: it may be of another kind, a link to nothing, or in a closed folder.
    """
    check_local(path)
    name = repr(str(path))
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if os.path.islink(path):
            return f"{name} is a link to {os.readlink(path)!r}, which does not exist"
        return f"There is no {expected} {name}"
    except (OSError, ValueError) as error:
        return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
    kind = "a folder" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else "a device, a pipe or a socket"
    return (
        f"{name} is {kind}, not a {expected}" if kind.removeprefix("a ") not in expected else f"{name} cannot be used"
    )


@contextmanager
def replace_file(file: Path) -> Iterator[Path]:
    """Yield a temporary name next to `file`; its file is synced and renamed to `file` when the block ends.

    Readers see the old content or the new. If the block raises, the old content stays. An `OSError` names the file.
    """
    check_local(file)
    # A random name, so that two processes writing the same file cannot mix their contents.
    staged = file.with_name(f"{STAGING}{file.name[:50]}-{secrets.token_hex(4)}")
    try:
        yield staged
        flush_path(staged)
        staged.replace(file)
    except OSError as error:
        if error.filename in (None, str(staged)):
            error.filename, error.filename2 = str(file), None
        raise
    finally:
        with suppress(OSError):
            staged.unlink()


def replace_text(file: Path, text: str) -> None:
    """Replace a file atomically: readers see the old content or the new."""
    with replace_file(file) as staged:
        staged.write_text(text, encoding="utf-8", newline="\n")


def settle_path(path: Path) -> Path:
    """Return a path that means the same before and after its parent folders are created: "new/../x" becomes "x".

    Raises `HeadwaterError` for an address.
    """
    check_local(path)
    return Path(os.path.realpath(path)) if ".." in path.parts else path


def missing_folders(folder: Path) -> list[Path]:
    """List a folder and its parents that do not exist, the deepest first."""
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the deepest first, up to the first that is not empty."""
    with suppress(OSError):
        for path in folders:
            path.rmdir()


def check_free(target: Path) -> None:
    """Raise `HeadwaterError` if a folder to be created exists and is not empty."""
    target = settle_path(target)
    if (target.is_symlink() or target.exists()) and (not target.is_dir() or any(target.iterdir())):
        if Path.cwd().is_relative_to(os.path.realpath(target)):
            raise HeadwaterError(f"{str(target)!r} is the current folder, or contains it; choose a new folder.")
        raise HeadwaterError(f"{str(target)!r} already exists; remove it, or choose another folder.")


@contextmanager
def explain_disk_errors(explain: Callable[[str], str]) -> Iterator[None]:
    """Turn disk errors into a `HeadwaterError` with the message that `explain` makes from the reason."""
    try:
        yield
    except HeadwaterError:
        raise
    except Exception as error:
        if (problem := disk_problem(error)) is None:
            raise
        raise HeadwaterError(explain(problem)) from error


@contextmanager
def stage_folder(target: Path, explain: Callable[[str], str] | None = None) -> Iterator[Path]:
    """Yield a temporary folder that is synced and renamed to `target` when the block ends without an error.

    If the block raises, the folder is removed. If the process is killed, it stays, with a hidden name. If several
    processes write the same target, the first to finish wins.

    explain: makes the message for a disk error from the reason.
    Raises `HeadwaterError` if the target exists and is not empty, before or after the block, and for disk errors.
    """
    check_free(target)
    target = target.absolute()
    folder = target.with_name(f"{STAGING}{target.name}-{secrets.token_hex(4)}")
    with explain_disk_errors(explain or (lambda problem: f"{str(target)!r} could not be written: {problem}.")):
        new = missing_folders(target.parent)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            yield folder
            for path in folder.rglob("*"):
                flush_path(path)
            flush_path(folder)
            try:
                folder.rename(target)
            except OSError:
                check_free(target)  # another process may have created it meanwhile
                raise
            flush_path(target.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            remove_empty(new)  # keeps folders that contain the target


def disk_problem(error: BaseException) -> str | None:
    """Describe a disk error in words; None for any other error."""
    text = first_line(error)
    match = _OS_ERROR.search(text)
    if not isinstance(error, OSError) and not match:
        return None
    number = getattr(error, "errno", None) or (int(match[1]) if match and match[1] else None)
    if number in _FULL or "o space left" in text:
        return _FULL.get(number or 0, _FULL[errno.ENOSPC])
    return getattr(error, "strerror", None) or text
