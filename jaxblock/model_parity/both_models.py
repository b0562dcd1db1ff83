"""One checkpoint, read twice: by the transformers library, and by `load_checkpoint`.

The two readers have nothing in common. What one of them puts in the wrong place, the other does
not, so a comparison of the two models is a test of the reader too.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from jaxblock.checkpoint import LoadReport, load_checkpoint
from jaxblock.config import DecoderConfig

# The logits of one prompt take 0.2 MB a token in float32, and several times that while compared.
MAX_TOKENS = 512

# Of float32 products; GPUs default to TF32 and TPUs to bfloat16 passes.
MATMUL_PRECISION = "highest"


class ModelError(ValueError):
    """This checkpoint or prompt cannot be compared; the text says why."""


class BothModels(NamedTuple):
    """A checkpoint in both frameworks, in float32 whatever the files hold.

    Attributes:
      path: of the folder or GGUF file.
      model, tokenizer: of transformers.
      config, params, report: of `load_checkpoint`.
    """

    path: Path
    model: Any
    tokenizer: Any
    config: DecoderConfig
    params: dict[str, Any]
    report: LoadReport


def load(path: Path) -> BothModels:
    """Both models and the tokenizer, from these files and nothing else (no network).

    Raises: CheckpointError with everything that `load_checkpoint` finds; ModelError if transformers
      cannot read the checkpoint, or does not fill its model exactly.
    """
    if not path.exists():
        raise ModelError(f"load: the checkpoint must be a folder or a file; got nothing at {path}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(
            "load: the checkpoint must be a folder that transformers loads, or a GGUF file; got "
            f"no config.json in {path}. `jaxblock convert` makes such a folder of Meta's"
        )
    config, params, report = load_checkpoint(path, dtype=np.float32)
    model, tokenizer = _load_torch(path, config)
    return BothModels(path, model, tokenizer, config, params, report)


def _load_torch(path: Path, config: DecoderConfig) -> tuple[Any, Any]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = path
    opened: AbstractContextManager[None] = nullcontext()
    source: dict[str, Any] = {"local_files_only": True}
    if path.is_file():
        folder, source["gguf_file"] = path.parent, path.name
        opened = _gguf_read_once()
    options: dict[str, Any] = {}
    if config.attention.softcap is not None:
        # No other attention of transformers caps its scores.
        options["attn_implementation"] = "eager"
    if config.moe is not None:
        # Its grouped products take only sizes that are multiples of 16 bytes.
        options["experts_implementation"] = "eager"
    try:
        with opened:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True, **options, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    except Exception as error:  # whatever two libraries raise on files that are not theirs
        raise ModelError(
            f"load: transformers must be able to read the checkpoint; got {path.name}, "
            f"{type(error).__name__}: {error}"
        ) from error
    model, findings = loaded
    findings = {what: sorted(found) for what, found in findings.items() if found}
    if findings:
        raise ModelError(f"load: the checkpoint must fill PyTorch's model exactly; got {findings}")
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    if shared != config.tie_word_embeddings:
        raise ModelError(
            "load: lookup and projection must share one table in both frameworks or in none; got "
            f"tied={shared} in PyTorch, tied={config.tie_word_embeddings} in jaxblock"
        )
    # Greedy, without what a folder's own file may ask for: penalties, an early end.
    model.generation_config = GenerationConfig(do_sample=False)
    return model.eval(), tokenizer


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """While this lasts, the gguf library does once what transformers asks it for again and again.

    It opens the file for its configuration, its weights and its tokenizer, each time with the
    98,000 strings of the latter, and looks up all names for each module: half of the time to load.
    """
    import gguf

    with ExitStack() as stack:
        for name in ("GGUFReader", "get_tensor_name_map"):
            original = getattr(gguf, name)
            stack.callback(setattr, gguf, name, original)
            setattr(gguf, name, lru_cache(maxsize=1)(original))
        yield


def tokenize(both: BothModels, prompt: str) -> Tensor:
    """The prompt as ids [1 T]."""
    tokens: Tensor = both.tokenizer(prompt, return_tensors="pt").input_ids.long()
    if not 1 <= tokens.shape[1] <= MAX_TOKENS:
        raise ModelError(
            f"tokenize: the prompt must have 1 to {MAX_TOKENS} tokens; got T={tokens.shape[1]}"
        )
    if (largest := int(tokens.max())) >= both.config.vocab_size:
        raise ModelError(
            "tokenize: every token must have a row of the embedding; got "
            f"token={largest}, V={both.config.vocab_size}. Is the tokenizer of another model?"
        )
    return tokens


@contextmanager
def rounded(both: BothModels, dtype: str) -> Iterator[dict[str, Any]]:
    """PyTorch's parameters rounded to `dtype` while this lasts; yields the same of jaxblock's.

    Buffers stay as transformers made them: the rotary frequencies are float32 in every dtype.
    """
    parameters = list(both.model.parameters())  # a tied table once
    originals = [parameter.data for parameter in parameters]
    try:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original.to(getattr(torch, dtype))
        yield jax.tree.map(lambda leaf: leaf.astype(dtype), both.params)
    finally:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data = original
