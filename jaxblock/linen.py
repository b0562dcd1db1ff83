"""Flax Linen modules: they hold parameters and call `jaxblock.ops`; all arithmetic is there.

Parameter names and shapes are those of the parameter tree of `jaxblock`, so one nested dict drives
the functions, these modules and those of `jaxblock.nnx`, to the same bits:

    module.apply({"params": params}, x)

What the modules share:

- `dtype` is the dtype to compute in: inputs are cast to it. None follows the input, and parameters
  follow the activations; `flax.linen` layers promote both to the wider of the two instead.
- `param_dtype` is the dtype that parameters are created in.
- `<parameter>_init` takes (key, shape, dtype), also wrapped in `nn.with_partitioning`; the defaults
  have names, so that they can be wrapped.
- D is taken from the input, as in `flax.linen`. Parameters of another shape than the configured one
  are refused by Flax (`flax.errors.ScopeParamShapeError`).
"""

from typing import Any, Literal

import jax.numpy as jnp
from flax import linen as nn
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from jaxblock import ops
from jaxblock.block import row_attention, row_block
from jaxblock.config import DecoderConfig
from jaxblock.config.decoder_config import Shapes, check_config
from jaxblock.decoder import forward
from jaxblock.ops import checks
from jaxblock.ops.feed_forward import GATED_FEED_FORWARDS
from jaxblock.ops.initializers import (
    default_down_init,
    default_embedding_init,
    default_gate_up_init,
)
from jaxblock.ops.remat import Remat
from jaxblock.parameters import attention_shapes, init_leaves, layer_shapes

__all__ = [
    "Attention",
    "Decoder",
    "DecoderBlock",
    "RMSNorm",
    "SwiGLU",
    "TiedEmbedding",
    "default_down_init",
    "default_embedding_init",
    "default_gate_up_init",
]


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2 over D) + eps) * (scale + scale_offset)

    Attributes:
      eps, scale_offset, cast: as in `jaxblock.rms_norm`.
      scale_init: of the parameter `scale` [D]. None starts at a factor of one: zeros for a
        scale_offset of 1, otherwise ones.

    Called with x [*B D]; returns the shape of x, in `dtype`.
    """

    eps: float
    scale_offset: float = 0.0
    cast: Literal["after_scale", "before_scale"] = "after_scale"
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    scale_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalise x [*B D] over its last axis."""
        x = checks.activations("RMSNorm", x, self.dtype)
        one = initializers.zeros if self.scale_offset == 1.0 else initializers.ones
        scale = self.param("scale", self.scale_init or one, x.shape[-1:], self.param_dtype)
        return ops.rms_norm(x, scale, eps=self.eps, scale_offset=self.scale_offset, cast=self.cast)


class SwiGLU(nn.Module):
    """y = (activation(x · gate_up[:, 0]) * (x · gate_up[:, 1])) · down

    Attributes:
      intermediate_size: F. The parameters are `gate_up` [D 2 F] and `down` [F D]; a shard of F
        holds matching halves of gate and up.
      activation: "silu" (`jaxblock.swiglu`), "gelu" (`jaxblock.geglu`, exact) or "gelu_tanh"
        (`jaxblock.geglu`, the tanh form of Gemma).
      gate_up_init, down_init: None is a truncated normal with the variance 1/D and 1/F.

    Called with x [*B D]; returns the shape of x, in `dtype`.
    """

    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    gate_up_init: Initializer | None = None
    down_init: Initializer | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Send x [*B D] through the gated feed-forward."""
        x = checks.activations("SwiGLU", x, self.dtype)
        checks.choice("SwiGLU", "activation", self.activation, tuple(GATED_FEED_FORWARDS))
        D, F = x.shape[-1], checks.size("SwiGLU", "intermediate_size", self.intermediate_size)
        gate_up_init = self.gate_up_init or default_gate_up_init
        down_init = self.down_init or default_down_init
        gate_up = self.param("gate_up", gate_up_init, (D, 2, F), self.param_dtype)
        down = self.param("down", down_init, (F, D), self.param_dtype)
        return GATED_FEED_FORWARDS[self.activation](x, gate_up, down)


class TiedEmbedding(nn.Module):
    """embed: y = embedding[tokens];  unembed: logits = x · embedding^T

    One parameter that two methods read, so the table is one leaf with one gradient and one set of
    optimizer moments. Apply with `method="unembed"`; a call without `method` is `embed`.

    Attributes:
      vocab_size: V.
      hidden_size: D. The parameter is `embedding` [V D].
      softcap, num_valid: as in `jaxblock.unembed`.
      embedding_init: None is normal with the variance 1/D, as in `nn.Embed`.
    """

    vocab_size: int
    hidden_size: int
    softcap: float | None = None
    num_valid: int | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    embedding_init: Initializer | None = None

    def setup(self) -> None:
        """Create the table once, for both methods."""
        V = checks.size("TiedEmbedding", "vocab_size", self.vocab_size)
        D = checks.size("TiedEmbedding", "hidden_size", self.hidden_size)
        embedding_init = self.embedding_init or default_embedding_init
        self.embedding = self.param("embedding", embedding_init, (V, D), self.param_dtype)

    def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
        """The same as `embed`."""
        return self.embed(tokens)

    def embed(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
        """Rows of the table for tokens [*B], in `dtype`; None follows the table."""
        # The rows are cast, not the table: nothing of the size [V D] is made.
        rows = ops.embed(tokens, self.embedding)
        return checks.activations("TiedEmbedding.embed", rows, self.dtype)

    def unembed(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits of x [*B D]: float32 [*B V], float64 if computed in float64."""
        x = checks.activations("TiedEmbedding.unembed", x, self.dtype)
        return ops.unembed(x, self.embedding, softcap=self.softcap, num_valid=self.num_valid)


class Attention(nn.Module):
    """y = attend(rotate(norm(x · q + q_bias)), rotate(norm(x · k + k_bias)), x · v + v_bias) · o

    Attributes:
      config: the decoder that this is a part of: sizes, biases, norms, scale and cap.
      kind: index into `config.layer_kinds`: window and rotary table.

    The parameters are those of `layers/attention`, for one layer. Called with x [B T D] and, where
    they are needed, `positions` and `mask` [B T] as in `jaxblock.forward`; returns [B T D].
    """

    config: DecoderConfig
    kind: int = 0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Integer[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Let the tokens of x [B T D] attend to those before them in their rows."""
        x = checks.activations("Attention", x, self.dtype)
        check_config("Attention", self.config)
        params = _params(self, attention_shapes(self.config))
        kind = self.config.layer_kinds[self.kind]
        return row_attention(params, x, self.config, kind, positions=positions, mask=mask)


class DecoderBlock(nn.Module):
    """x = x + attention branch;  x = x + feed-forward branch

    Attributes:
      config: the decoder that this is a layer of.
      kind: index into `config.layer_kinds`: window and rotary table.

    The parameters are those of `layers`, for one layer. Called with x [B T D] and, where they are
    needed, `positions` and `mask` [B T] as in `jaxblock.forward`; returns [B T D].
    """

    config: DecoderConfig
    kind: int = 0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Integer[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Send the residual stream x [B T D] through the layer."""
        x = checks.activations("DecoderBlock", x, self.dtype)
        check_config("DecoderBlock", self.config)
        params = _params(self, layer_shapes(self.config))
        kind = self.config.layer_kinds[self.kind]
        return row_block(params, x, self.config, kind, positions=positions, mask=mask)


class Decoder(nn.Module):
    """logits = unembed(final_norm(blocks(embed(tokens))))

    Attributes:
      config: the decoder.
      remat: what the backward pass keeps of each layer, as in `jaxblock.forward`.

    The parameters are the whole tree, layers stacked: what `jaxblock.load_checkpoint` returns is
    applied by `decoder.apply({"params": checkpoint.params}, tokens)`. Called as `jaxblock.forward`.
    """

    config: DecoderConfig
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    remat: Remat = "matmul_outputs"

    @nn.compact
    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        *,
        positions: Integer[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of tokens [B T]."""
        check_config("Decoder", self.config)
        params = _params(self, self.config.parameter_shapes())
        return forward(
            params,
            tokens,
            self.config,
            positions=positions,
            mask=mask,
            dtype=self.dtype,
            remat=self.remat,
        )


def _params(module: Attention | DecoderBlock | Decoder, shapes: Shapes) -> dict[str, Any]:
    """The module's parameters, created by its first call: a leaf or a dict of them by each name."""
    dtype = module.param_dtype

    def create(key, name):
        made = init_leaves(
            type(module).__name__, module.config, {name: shapes[name]}, key, dtype=dtype
        )
        return made[name]

    return {name: module.param(name, create, name) for name in shapes}
