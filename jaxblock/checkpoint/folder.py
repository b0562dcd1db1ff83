"""Which files make up a checkpoint folder, and the tensors in all of them.

Only headers are read here. Everything that is wrong with any of the files comes in one error, so a
model is never loaded in part.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from jaxblock.checkpoint.findings import NotJson, checkpoint_error, parse_json, show
from jaxblock.checkpoint.safetensors_file import MAX_HEADER, open_safetensors
from jaxblock.checkpoint.stored import StoredTensor, open_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Meta's names, and Mistral's for its own single file.
_CONSOLIDATED = re.compile(r"consolidated(?:\.(\d+))?\.safetensors")

# What to do about files that are not read here, by the end of their names.
_INSTEAD = {
    ".safetensors": f"Shards need their index, {INDEX}: copy it too",
    ".bin": "Load it with PyTorch's transformers library and call its save_pretrained, which "
    "writes safetensors",
    ".pth": "Turn it into a Hugging Face folder with `jaxblock convert`",
    ".pt": "Save it again as safetensors",
    ".gguf": "Pass the path of the GGUF file itself",
}


def open_hugging_face(
    folder: str | os.PathLike[str], *, notes: list[str] | None = None
) -> dict[str, StoredTensor]:
    """Find the tensors of a folder as the transformers library writes it, and check the files.

    As in that library a single file comes before an index, if a folder holds both.

    Args:
      folder: holds `model.safetensors`, or `model.safetensors.index.json` and the shards it names.
      notes: gets a sentence for each file that looks like a part of the checkpoint but is not read.

    Returns: every tensor of every file, by name; none has been read.

    Raises: CheckpointError, with all findings in all files.
    """
    folder = Path(folder)
    findings: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    files = _list(folder)
    used: set[str] = set()
    if SINGLE in files:
        tensors = open_safetensors(folder / SINGLE, findings)
        used = {SINGLE}
    elif INDEX in files:
        weight_map = _weight_map(folder / INDEX, findings)
        tensors = _open_shards(folder, weight_map, findings)
        used = {INDEX, *weight_map.values()}
    else:
        findings.append(_nothing_found(folder, f"{SINGLE} or {INDEX}", files))
    if findings:
        raise checkpoint_error("load_checkpoint", findings)
    if notes is not None:
        left = [name for name in files if name == INDEX or name.endswith(".safetensors")]
        notes += [f"{folder / name} is not read" for name in left if name not in used]
    return tensors


def open_meta(folder: str | os.PathLike[str]) -> list[dict[str, StoredTensor]]:
    """Find the tensors of a folder with Meta's names, one mapping for each shard, in order.

    Args:
      folder: holds `consolidated.safetensors`, or `consolidated.00.safetensors` and so on.

    Returns: the tensors of each shard, by name; none has been read.

    Raises: CheckpointError, with all findings in all files.
    """
    folder = Path(folder)
    findings: list[str] = []
    files = _list(folder)
    matches = [match for name in files if (match := _CONSOLIDATED.fullmatch(name))]
    numbered = {int(match[1]): match[0] for match in matches if match[1] is not None}
    plain = [match[0] for match in matches if match[1] is None]
    if not matches:
        what = "consolidated.safetensors or consolidated.00.safetensors, .01 and so on"
        findings.append(_nothing_found(folder, what, files))
    elif len(numbered) + len(plain) < len(matches) or (numbered and plain):
        findings.append(
            f"the shards must be one file, or numbered once each; "
            f"got {_names(match[0] for match in matches)} in {folder}"
        )
    elif missing := sorted(set(range(max(numbered, default=-1) + 1)) - set(numbered))[:1]:
        findings.append(
            f"the shards must be numbered without a gap; got {_names(numbered.values())} and no "
            f"consolidated.{missing[0]:02d}.safetensors in {folder}"
        )
    names = plain or [name for _, name in sorted(numbered.items())]
    shards = [open_safetensors(folder / name, findings) for name in names]
    if findings:
        raise checkpoint_error("load_checkpoint", findings)
    return shards


def _list(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        found = f"a checkpoint must be a readable folder; got {folder} ({error})"
        raise checkpoint_error("load_checkpoint", [found]) from error


def _nothing_found(folder: Path, what: str, files: list[str]) -> str:
    for end, instead in _INSTEAD.items():
        if others := [name for name in files if name.endswith(end)]:
            return f"{folder} must hold {what}; got {_names(others)}. {instead}"
    return f"{folder} must hold {what}; got {_names(files) or 'an empty folder'}"


def _names(names: Iterable[str]) -> str:
    first, *rest = [*names][:6] or [""]
    shown = ", ".join([first, *rest][:5])
    return shown + ", ..." if len(rest) == 5 else shown


def _weight_map(path: Path, findings: list[str]) -> dict[str, str]:
    """The file of each tensor, as the index says; nothing that is not a plain name of a file."""
    try:
        stream, origin = open_file(path)
        with stream:
            if origin.size > MAX_HEADER:
                raise OSError(0, f"more than {MAX_HEADER} bytes")
            text = stream.read(origin.size)
        index = parse_json(text)
    except OSError as error:
        findings.append(f"the index must be a readable file; got {path} ({error.strerror})")
        return {}
    except NotJson as error:
        findings.append(f"the index must be JSON in UTF-8; got {path} ({error})")
        return {}
    weight_map: Any = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        must = f"{path} must have a weight_map, from tensors to files"
        findings.append(f"{must}; got {show(weight_map if isinstance(index, dict) else index)}")
        return {}
    tricks: dict[str, str] = {}
    for name, file in weight_map.items():
        if not _is_plain(file):
            tricks.setdefault(show(file), name)
    for shown, name in tricks.items():
        findings.append(
            f"weight_map must name .safetensors files inside the folder of {path}; got {shown} for "
            f"{show(name)}"
        )
    return {name: file for name, file in weight_map.items() if _is_plain(file)}


def _is_plain(file: Any) -> bool:
    """Whether this is a path downwards, in the one way to write it, on every system."""
    return (
        isinstance(file, str)
        and file.endswith(".safetensors")
        and file.isprintable()
        and not {"\\", ":"} & set(file)
        and not file.startswith("/")
        and str(PurePosixPath(file)) == file
        and ".." not in PurePosixPath(file).parts
    )


def _open_shards(
    folder: Path, weight_map: dict[str, str], findings: list[str]
) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    opened = set()
    for file in sorted(set(weight_map.values())):
        if not _stays_inside(folder, folder / file):
            findings.append(
                f"the files that {INDEX} names must lie inside its folder; got {folder / file}, "
                f"which leads to {os.path.realpath(folder / file)}. Copy the file, or load the "
                "folder it is in"
            )
            continue
        before = len(findings)
        shard = open_safetensors(folder / file, findings)
        if len(findings) == before:
            opened.add(file)
        for name, tensor in shard.items():
            listed = weight_map.get(name)
            if name in tensors:
                files = f"{tensors[name].file} and {tensor.file}"
                findings.append(f"{show(name)} must be in one shard; got {files}")
            elif listed is None:
                findings.append(
                    f"{INDEX} must list every tensor; got {show(name)} in {tensor.file}"
                )
            elif listed != file:
                must = f"{show(name)} must be in the shard that {INDEX} says, {listed}"
                findings.append(f"{must}; got it in {tensor.file}")
            tensors.setdefault(name, tensor)
    # Of a shard that could not be read the tensors are missing for that reason.
    for name, file in weight_map.items():
        if name not in tensors and file in opened:
            must = f"{show(name)} must be in {folder / file}, as {INDEX} says"
            findings.append(f"{must}; got a file without it")
    return tensors


def _stays_inside(folder: Path, file: Path) -> bool:
    """Whether links lead nowhere but into the folder or, in a cache of the Hub, to its blobs."""
    real, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    # models--owner--name/snapshots/<commit>/<file> links to models--owner--name/blobs/<hash>.
    in_cache = real.parent.name == "snapshots" and target.is_relative_to(real.parents[1] / "blobs")
    return in_cache or target.is_relative_to(real)
