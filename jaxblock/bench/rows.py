"""What is measured: one row for each computation and dtype, with its sizes and its least work.

Sizes carry the letters of the house: B rows, T tokens, D hidden, F intermediate, V vocabulary.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxblock import costs
from jaxblock.config import DecoderConfig

Kind = Literal["rms_norm", "swiglu", "embed", "loss", "forward", "generate", "train", "first"]
MODELS = ("forward", "generate", "train", "first")

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Row:
    """One computation in one dtype.

    Attributes:
      kind: what is computed. `first` is the first `forward` in a new process: tracing, compiling.
      dtype: of the inputs and the parameters.
      sizes: by letter; `new` counts the tokens that `generate` adds.
      backward: gradients of all float inputs, too.
      model: the name of the model, and its config.json.
    """

    kind: Kind
    dtype: str
    sizes: Mapping[str, int]
    backward: bool = False
    model: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """In the table and for --rows."""
        size = "x".join(str(number) for letter, number in self.sizes.items() if letter != "new")
        if self.kind == "generate":
            size += f"+{self.sizes['new']}"
        direction = "" if self.kind in MODELS else " forward+backward" * self.backward or " forward"
        what = f"first {self.model} forward" if self.kind == "first" else self.kind
        model = f"{self.model} " if self.model and self.kind != "first" else ""
        return f"{model}{what} {size}{direction}"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def decoder(self) -> DecoderConfig:
        """The configuration of its model."""
        return DecoderConfig.from_hf(dict(self.config))


@dataclass(frozen=True)
class Work:
    """The least that any implementation must do.

    Attributes:
      product: [rows, summed, columns] of the matrix product whose speed is the limit, or None.
      flops: operations in all matrix products.
      copied: numbers in the array whose copying speed is the limit, or 0.
      bytes: memory traffic that no product hides.
    """

    product: tuple[int, int, int] | None = None
    flops: int = 0
    copied: int = 0
    bytes: int = 0


def work(row: Row) -> Work:
    """What bounds the row from below: its products, or its memory traffic, or one after the other.

    Counted as traffic: the inputs and outputs of a row without products, once each; weights read
    anew for every generated token; the seven passes of AdamW (p, g, m, v read; p, m, v written).
    """
    s, b = row.sizes, row.itemsize
    if row.kind == "rms_norm":
        numbers = s["T"] * s["D"]
        # Forward x and y; backward x and dy again, and dx.
        return Work(copied=numbers, bytes=b * numbers * (5 if row.backward else 2))
    if row.kind == "embed":
        rows, table = s["T"] * s["D"], s["V"] * s["D"]
        # Backward: the table's gradient written, dy read.
        traffic = 2 * rows + (table + rows if row.backward else 0)
        return Work(copied=table if row.backward else rows, bytes=b * traffic)
    passes = 3 if row.backward else 1
    if row.kind == "swiglu":
        flops = 6 * s["T"] * s["D"] * s["F"] * passes
        return Work(product=(s["T"], s["D"], 2 * s["F"]), flops=flops)
    if row.kind == "loss":
        shape = (s["T"], s["D"], s["V"])
        return Work(product=shape, flops=2 * math.prod(shape) * passes)
    config = row.decoder
    tokens, parameters = s["B"] * s["T"], config.num_parameters()
    product = (tokens, config.hidden_size, 2 * config.feed_forward.intermediate_size)
    parts = costs.prefill_costs(config, batch=s["B"], length=s["T"], itemsize=b)
    last = parts[-1].flops
    flops = sum(part.flops for part in parts) - last
    if row.kind == "generate":
        traffic = b * parameters * (s["new"] - 1)
        return Work(product, flops + last, copied=parameters // 4, bytes=traffic)
    flops = (flops + last * s["T"]) * (3 if row.kind == "train" else 1)
    if row.kind == "train":
        return Work(product, flops, copied=parameters // 4, bytes=7 * b * parameters)
    return Work(product, flops)


DTYPES = ("float32", "bfloat16")


def component_rows(kind: Kind, *sizes: Mapping[str, int]) -> list[Row]:
    """Forward, and forward with backward, in both dtypes."""
    return [
        Row(kind, dtype, one, backward)
        for one in sizes
        for backward in (False, True)
        for dtype in DTYPES
    ]


def model_rows(
    name: str, config: Mapping[str, Any], *rows: tuple[Kind, dict[str, int]]
) -> list[Row]:
    """Rows of one model, in both dtypes."""
    return [
        Row(kind, dtype, sizes, kind == "train", name, config)
        for kind, sizes in rows
        for dtype in DTYPES
    ]


def cpu_rows(*, quick: bool = False) -> list[Row]:
    """The rows of `jaxblock bench`; `quick`: an eighth of tokens and vocabulary, two layers."""
    less = 8 if quick else 1
    V = 49152 // less
    config = {**SMOLLM2, "vocab_size": V, "num_hidden_layers": 2 if quick else 30}
    T, new = 256 // less, 64 // less
    decode = [Row("swiglu", dtype, dict(T=T, D=1024, F=2816)) for T in (1, 8) for dtype in DTYPES]
    return [
        *component_rows("rms_norm", dict(T=4096 // less, D=1024), dict(T=4096 // less, D=4096)),
        *component_rows(
            "swiglu", dict(T=1024 // less, D=1024, F=2816), dict(T=2048 // less, D=576, F=1536)
        ),
        *decode,
        *component_rows("embed", dict(T=2048 // less, D=576, V=V)),
        *[row for row in component_rows("loss", dict(T=1024 // less, D=576, V=V)) if row.backward],
        *model_rows(
            "SmolLM2-135M" if not quick else "two-layer SmolLM2",
            config,
            ("first", dict(B=1, T=T)),
            ("forward", dict(B=1, T=T)),
            ("forward", dict(B=4, T=T)),
            ("generate", dict(B=1, T=T, new=new)),
            ("generate", dict(B=8, T=T, new=new)),
            ("train", dict(B=4, T=T)),
        ),
    ]


def choose(rows: list[Row], pattern: str | None) -> list[Row]:
    """Those whose name and dtype contain a match of the regular expression.

    Raises: re.error for a pattern that is none.
    """
    expression = re.compile(pattern or "", re.IGNORECASE)
    return [row for row in rows if expression.search(f"{row.name} {row.dtype}")]
