"""GGUF files of the llama family: their metadata as a configuration, their tensors by name.

llama.cpp's converter puts the two halves of a head's rotary pairs next to each other, as Meta does;
the rules of `layout` undo that. Source: ggml-org/ggml, docs/gguf.md; ggml-org/llama.cpp,
conversion of LlamaForCausalLM and src/llama-arch.cpp.
"""

from pathlib import Path
from typing import Any

import numpy as np

from jaxblock.checkpoint.findings import checkpoint_error
from jaxblock.checkpoint.gguf_file import GGUFFile, open_gguf
from jaxblock.checkpoint.layout import GGUF
from jaxblock.checkpoint.source import Source
from jaxblock.checkpoint.stored import StoredTensor
from jaxblock.config import ConfigError, DecoderConfig, RopeScaling
from jaxblock.config.reader import Reader, number, one_of, size, token
from jaxblock.ops.rotary import rotary_frequencies

# The factors by which the frequencies of Llama 3.1 and later are divided, in place of constants.
_FACTORS = "rope_freqs.weight"
# Keys of the architecture that leave the computation as it is.
_WITHOUT_EFFECT = ("tensor_data_layout", "rope.scaling.finetuned")


def gguf_source(path: Path) -> Source:
    """The tensors of a GGUF file and the configuration that its metadata describe.

    Raises: CheckpointError, with all findings.
    """
    file = open_gguf(path)
    tensors = dict(file.tensors)
    factors = tensors.pop(_FACTORS, None)
    findings: list[str] = []
    dropped: list[str] = []
    config = None
    entries = _entries(file, findings)
    try:
        if not findings:
            config = DecoderConfig.from_hf(entries)
        if config is not None and factors is not None:
            entries["rope_scaling"] = _llama3(factors, config, findings)
            config = DecoderConfig.from_hf(entries)
            dropped.append(f"{_FACTORS}, the llama3 scaling of the configuration")
    except ConfigError as error:
        findings += [f"metadata as a config.json: {finding}" for finding in error.findings]
    if config is None or findings:
        raise checkpoint_error("load_checkpoint", findings)
    return Source(
        format="llama, a GGUF file",
        config=config,
        # The format's own way to say that the table is tied.
        tie=True if GGUF.head not in tensors else None,
        naming=GGUF,
        tensors=tensors,
        dropped=dropped,
        notes=["rotary pairs: neighbouring channels in the file, halves of a head in the tree"],
    )


def _entries(file: GGUFFile, findings: list[str]) -> dict[str, Any]:
    """The metadata in the words of a `config.json`."""
    whole = Reader(file.metadata, findings)
    architecture = whole.take("general.architecture", one_of({"llama": "llama"}))
    if findings:
        return {}
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    reader = Reader(own, findings, prefix=prefix)
    heads = reader.take("attention.head_count", size)
    hidden_size = reader.take("embedding_length", size)
    good = reader.good("attention.head_count", "embedding_length")
    head_dim = hidden_size // heads if good else 0
    table = file.tensors.get(GGUF.table)
    rows = table.shape[0] if table is not None and table.shape else 1
    entries = {
        "model_type": "llama",
        "vocab_size": reader.take("vocab_size", size, default=rows),
        "hidden_size": hidden_size,
        "intermediate_size": reader.take("feed_forward_length", size),
        "num_hidden_layers": reader.take("block_count", size),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.take("attention.head_count_kv", size, default=heads),
        "head_dim": reader.take("attention.key_length", size, default=head_dim),
        "rms_norm_eps": reader.take("attention.layer_norm_rms_epsilon", _decimal),
        "rope_theta": reader.take("rope.freq_base", _decimal, default=10000.0),
        "max_position_embeddings": reader.take("context_length", size, default=None),
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        reader.neutral(key, (entries["head_dim"],), "it is the size of a head")
    for key in ("expert_count", "expert_used_count"):
        reader.neutral(key, (0,), "experts are not read from GGUF")
    kinds: dict[str, str] = {"none": "default", "linear": "linear"}
    scaling = reader.take("rope.scaling.type", one_of(kinds), default="default")
    factor = reader.take("rope.scaling.factor", number(1.0, strict=False), default=None)
    must = "rope.scaling.factor must come with the rope.scaling.type linear"
    fits = scaling == "linear" or factor in (None, 1.0)
    reader.require(fits, must, {"rope.scaling.factor": factor})
    if scaling == "linear":
        entries["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    reader.finish(_WITHOUT_EFFECT)
    for key, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        id = whole.take(f"tokenizer.ggml.{name}_token_id", token, default=None)
        entries[f"{key}_token_id"] = id
    return {key: value for key, value in entries.items() if value is not None}


def _decimal(value: Any) -> float:
    """The constant that was rounded to float32 for the file: 1e-5, not 9.99999974e-6."""
    with np.errstate(over="ignore"):  # An infinite one is refused as such.
        return float(str(np.float32(number()(value))))


def _llama3(stored: StoredTensor, config: DecoderConfig, findings: list[str]) -> RopeScaling | None:
    """The scaling whose frequencies are the plain ones divided by the stored factors.

    All published files share three of its constants; the fourth is the largest factor.
    """
    (kind,) = config.layer_kinds
    rotary = kind.rotary
    factors = np.ones(0)
    if stored.shape == (rotary.rotary_dim // 2,):
        factors = stored.read().astype(np.float64)
    if rotary.scaling is None and factors.size and 0.99 < factors.min() <= factors.max() < np.inf:
        scaling = RopeScaling(
            rope_type="llama3",
            factor=max(1.0, float(factors.max())),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        plain = np.asarray(rotary_frequencies(rotary.rotary_dim, theta=rotary.theta))
        scaled = rotary_frequencies(rotary.rotary_dim, theta=rotary.theta, scaling=scaling)
        if np.allclose(plain / factors, np.asarray(scaled), rtol=1e-5, atol=0.0):
            return scaling
    must = f"{_FACTORS} must be the factors of a llama3 scaling, and the only one"
    findings.append(f"{must}; got {stored.dtype}{list(stored.shape)} in {stored.file}")
    return None
