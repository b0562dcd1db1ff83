"""What a path holds, by its headers: the configuration, and dtype and size of every leaf."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxblock.commands.shared import stop
from jaxblock.config import ConfigError, DecoderConfig

DTYPES = ("float32", "bfloat16", "float16", "float64")


class Leaf(NamedTuple):
    """One array of the parameter tree.

    Attributes:
      shape: of the array.
      dtype: of the tensors that it is made of; several names if they differ, None where there are
        no files.
    """

    shape: tuple[int, ...]
    dtype: str | None

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int | None:
        """What it takes up once it is loaded: float32 where it is made of several dtypes."""
        if self.dtype is None:
            return None
        return self.size * itemsize(self.dtype if self.dtype in DTYPES else "float32")


@dataclasses.dataclass(frozen=True)
class Contents:
    """What `contents` found.

    Attributes:
      format: of the files, in words.
      files: those that hold tensors.
      config: of the decoder.
      leaves: of the parameter tree, by path.
      tie: whether lookup and logits share a table, and by what that was decided.
      dtype: that of most parameters, or what the configuration says; None if nothing does.
      notes: what else one should know.
    """

    format: str
    files: tuple[Path, ...]
    config: DecoderConfig
    leaves: Mapping[str, Leaf]
    tie: str
    dtype: str | None
    notes: tuple[str, ...] = ()


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def contents(
    path: Path,
    *,
    tie: bool | None = None,
    vocab_size: int | None = None,
    rope_scaling_factor: float | None = None,
) -> Contents:
    """Read headers; tensors only where a stored head must be compared with the table.

    Args:
      path: a folder of transformers or of Meta, an Orbax folder, a GGUF file, or the file of a
        configuration alone.
      tie, vocab_size, rope_scaling_factor: what Meta's `params.json` does not say; `tie` stands in
        place of what other files say, too.

    Raises: ConfigError or CheckpointError, with all findings.
    """
    if not path.exists():
        stop(f"inspect: PATH must be a folder or a file; got {path}, which is not there")
    if path.is_dir():
        from jaxblock.orbax_folder import is_orbax

        if is_orbax(path):
            return _orbax(path)
        if (path / "config.json").is_file():
            weights = any(path.glob("*.safetensors*"))
            return _files(path, tie, None) if weights else _config(path / "config.json", tie)
        if (path / "params.json").is_file():
            if any(path.glob("*.safetensors")):
                return _files(path, tie, rope_scaling_factor)
            return _meta_config(path / "params.json", tie, vocab_size, rope_scaling_factor)
        stop(f"inspect: PATH must hold a config.json or a params.json; got {_list(path)} in {path}")
    if path.suffix == ".safetensors":
        stop(f"inspect: PATH must be the folder of the model; got one of its files, {path}")
    if path.suffix == ".json":
        if path.name == "params.json":
            return _meta_config(path, tie, vocab_size, rope_scaling_factor)
        return _config(path, tie)
    return _files(path, tie, None)


def _list(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5) or "nothing"


def _files(path: Path, tie: bool | None, rope_scaling_factor: float | None) -> Contents:
    from jaxblock.checkpoint.plan import open_source, plan

    planned = plan(open_source(path, rope_scaling_factor=rope_scaling_factor), tie=tie)
    source, leaves = planned.source, {}
    for leaf, shape in _shapes(planned.config).items():
        dtypes = {str(tensor.dtype) for tensor, _ in planned.parts[leaf]}
        leaves[leaf] = Leaf(shape, " and ".join(sorted(dtypes)))
    return Contents(
        format=source.format,
        files=tuple(sorted({tensor.file for tensor in source.tensors.values()})),
        config=planned.config,
        leaves=leaves,
        tie=planned.tie,
        dtype=_most(leaves),
        notes=(*(f"dropped: {dropped}" for dropped in source.dropped), *source.notes),
    )


def _orbax(path: Path) -> Contents:
    from jaxblock.orbax_folder import open_orbax

    config, found = open_orbax(path)
    leaves = {
        "/".join(leaf): Leaf(tuple(array.shape), str(array.dtype)) for leaf, array in found.items()
    }
    tables = "one table" if config.tie_word_embeddings else "two tables"
    return Contents(
        format=f"{config.model_type}, an Orbax folder",
        files=(),
        config=config,
        leaves=leaves,
        tie=f"{'tied' if config.tie_word_embeddings else 'not tied'}: {tables}, by config.json",
        dtype=_most(leaves),
    )


def _config(file: Path, tie: bool | None) -> Contents:
    config = DecoderConfig.from_hf(file)
    if tie is not None:
        config = dataclasses.replace(config, tie_word_embeddings=tie)
    entries = json.loads(file.read_bytes())
    # Released and current name; neither is a key of the configuration itself.
    dtype = entries.get("dtype") or entries.get("torch_dtype")
    return _without_files("a config.json without weights", config, tie, dtype)


def _meta_config(
    file: Path, tie: bool | None, vocab_size: int | None, rope_scaling_factor: float | None
) -> Contents:
    try:
        config = DecoderConfig.from_meta(
            file,
            tie_word_embeddings=tie,
            vocab_size=vocab_size,
            rope_scaling_factor=rope_scaling_factor,
        )
    except ConfigError as error:
        options = "Options: --tie or --no-tie, --vocab-size, --rope-scaling-factor"
        raise ConfigError(f"{error}\n{options}", error.findings) from error
    return _without_files("Meta's params.json, without safetensors", config, tie, None)


def _without_files(form: str, config: DecoderConfig, tie: bool | None, dtype: Any) -> Contents:
    by = "the configuration" if tie is None else "the option"
    tables = "tied: one table" if config.tie_word_embeddings else "not tied: two tables"
    return Contents(
        format=f"{config.model_type}, {form}",
        files=(),
        config=config,
        leaves={leaf: Leaf(shape, None) for leaf, shape in _shapes(config).items()},
        tie=f"{tables}, by {by}",
        dtype=dtype if dtype in DTYPES else None,
    )


def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    from jaxblock.parameters import flatten

    return {"/".join(path): shape for path, shape in flatten(config.parameter_shapes())}


def _most(leaves: Mapping[str, Leaf]) -> str:
    """The dtype of most parameters."""
    sizes: dict[str, int] = {}
    for leaf in leaves.values():
        dtype = leaf.dtype if leaf.dtype in DTYPES else "float32"
        sizes[dtype] = sizes.get(dtype, 0) + leaf.size
    return max(sizes, key=sizes.__getitem__)
