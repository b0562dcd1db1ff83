"""Flax NNX modules: they hold parameters and call `jaxblock.ops`; all arithmetic is there.

Parameter names and shapes are those of the parameter tree of `jaxblock`, so one nested dict drives
the functions, these modules and those of `jaxblock.linen`, to the same bits:

    nnx.update(module, params)                    # dict into module
    nnx.to_pure_dict(nnx.state(module))           # module into dict

What the modules share:

- `dtype` is the dtype to compute in: inputs are cast to it. None follows the input, and parameters
  follow the activations; `flax.nnx` layers promote both to the wider of the two instead.
- `param_dtype` is the dtype that parameters are created in.
- `<parameter>_init` takes (key, shape, dtype), also wrapped in `nnx.with_partitioning`;
  `<parameter>_metadata` goes to `nnx.Param`, for instance {"out_sharding": (None, None, "model")}.
- `rngs` needs the stream `params`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from jaxblock import ops
from jaxblock.block import row_attention, row_block
from jaxblock.config import DecoderConfig
from jaxblock.config.decoder_config import check_config
from jaxblock.decoder import forward
from jaxblock.ops import checks
from jaxblock.ops.feed_forward import GATED_FEED_FORWARDS
from jaxblock.ops.initializers import (
    default_down_init,
    default_embedding_init,
    default_gate_up_init,
)
from jaxblock.ops.remat import Remat
from jaxblock.parameters import attention_shapes, init_leaves, init_params, layer_shapes

__all__ = [
    "Attention",
    "Branch",
    "Decoder",
    "DecoderBlock",
    "RMSNorm",
    "SwiGLU",
    "TiedEmbedding",
    "default_down_init",
    "default_embedding_init",
    "default_gate_up_init",
]

NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class RMSNorm(nnx.Module):
    """y = x / sqrt(mean(x^2 over D) + eps) * (scale + scale_offset)

    Args:
      hidden_size: D, the length of `scale` [D].
      eps, scale_offset, cast: as in `jaxblock.rms_norm`.
      scale_init: None starts at a factor of one: zeros for a scale_offset of 1, otherwise ones.

    Called with x [*B D]; returns the shape of x, in `dtype`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        scale_offset: float = 0.0,
        cast: Literal["after_scale", "before_scale"] = "after_scale",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scale_init: Initializer | None = None,
        rngs: nnx.Rngs,
        scale_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.hidden_size = checks.size("RMSNorm", "hidden_size", hidden_size)
        self.eps = eps
        self.scale_offset = scale_offset
        self.cast = cast
        self.dtype = dtype
        self.param_dtype = param_dtype
        one = initializers.zeros if scale_offset == 1.0 else initializers.ones
        self.scale = nnx.Param(
            (scale_init or one)(rngs.params(), (hidden_size,), param_dtype), **scale_metadata
        )

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Normalise x [*B D] over its last axis."""
        return ops.rms_norm(
            checks.activations("RMSNorm", x, self.dtype),
            self.scale[...],
            eps=self.eps,
            scale_offset=self.scale_offset,
            cast=self.cast,
        )


class SwiGLU(nnx.Module):
    """y = (activation(x · gate_up[:, 0]) * (x · gate_up[:, 1])) · down

    Args:
      hidden_size: D.
      intermediate_size: F. The parameters are `gate_up` [D 2 F] and `down` [F D]; a shard of F
        holds matching halves of gate and up.
      activation: "silu" (`jaxblock.swiglu`), "gelu" (`jaxblock.geglu`, exact) or "gelu_tanh"
        (`jaxblock.geglu`, the tanh form of Gemma).
      gate_up_init, down_init: by default a truncated normal with the variance 1/D and 1/F.

    Called with x [*B D]; returns the shape of x, in `dtype`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Literal["silu", "gelu", "gelu_tanh"] = "silu",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        gate_up_init: Initializer = default_gate_up_init,
        down_init: Initializer = default_down_init,
        rngs: nnx.Rngs,
        gate_up_metadata: Mapping[str, Any] = NO_METADATA,
        down_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        checks.choice("SwiGLU", "activation", activation, tuple(GATED_FEED_FORWARDS))
        self.hidden_size = checks.size("SwiGLU", "hidden_size", hidden_size)
        self.intermediate_size = checks.size("SwiGLU", "intermediate_size", intermediate_size)
        self.activation = activation
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.gate_up = nnx.Param(
            gate_up_init(rngs.params(), (hidden_size, 2, intermediate_size), param_dtype),
            **gate_up_metadata,
        )
        self.down = nnx.Param(
            down_init(rngs.params(), (intermediate_size, hidden_size), param_dtype),
            **down_metadata,
        )

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Send x [*B D] through the gated feed-forward."""
        x = checks.activations("SwiGLU", x, self.dtype)
        return GATED_FEED_FORWARDS[self.activation](x, self.gate_up[...], self.down[...])


class TiedEmbedding(nnx.Module):
    """embed: y = embedding[tokens];  unembed: logits = x · embedding^T

    One `nnx.Param` that two methods read, shared with no other module: the table is one leaf, with
    one gradient and one set of optimizer moments, in graph mode and in tree mode.

    Args:
      vocab_size: V.
      hidden_size: D. The parameter is `embedding` [V D].
      softcap, num_valid: as in `jaxblock.unembed`.
      embedding_init: by default normal with the variance 1/D, as `nnx.Embed`.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        softcap: float | None = None,
        num_valid: int | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        embedding_init: Initializer = default_embedding_init,
        rngs: nnx.Rngs,
        embedding_metadata: Mapping[str, Any] = NO_METADATA,
    ):
        self.vocab_size = checks.size("TiedEmbedding", "vocab_size", vocab_size)
        self.hidden_size = checks.size("TiedEmbedding", "hidden_size", hidden_size)
        self.softcap = softcap
        self.num_valid = num_valid
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.embedding = nnx.Param(
            embedding_init(rngs.params(), (vocab_size, hidden_size), param_dtype),
            **embedding_metadata,
        )

    def __call__(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
        """The same as `embed`."""
        return self.embed(tokens)

    def embed(self, tokens: Integer[Array, "*B"]) -> Float[Array, "*B D"]:
        """Rows of the table for tokens [*B], in `dtype`; None follows the table."""
        # The rows are cast, not the table: nothing of the size [V D] is made.
        rows = ops.embed(tokens, self.embedding[...])
        return checks.activations("TiedEmbedding.embed", rows, self.dtype)

    def unembed(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits of x [*B D]: float32 [*B V], float64 if computed in float64."""
        return ops.unembed(
            checks.activations("TiedEmbedding.unembed", x, self.dtype),
            self.embedding[...],
            softcap=self.softcap,
            num_valid=self.num_valid,
        )


class Branch(nnx.Module):
    """A part of the parameter tree: a `nnx.Param` for each leaf, a `Branch` for each dict."""

    def __init__(self, params: Mapping[str, Any]):
        for name, value in params.items():
            setattr(self, name, Branch(value) if isinstance(value, Mapping) else nnx.Param(value))

    def params(self) -> dict[str, Any]:
        """The part of the tree that this holds, as nested dicts of arrays."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))


class Attention(Branch):
    """y = attend(rotate(norm(x · q + q_bias)), rotate(norm(x · k + k_bias)), x · v + v_bias) · o

    Args:
      config: the decoder that this is a part of: sizes, biases, norms, scale and cap.
      kind: index into `config.layer_kinds`: window and rotary table.

    The parameters are those of `layers/attention`, for one layer. Called with x [B T D] and, where
    they are needed, `positions` and `mask` [B T] as in `jaxblock.forward`; returns [B T D].
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        kind: int = 0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_config("Attention", config)
        shapes = attention_shapes(config)
        super().__init__(init_leaves("Attention", config, shapes, rngs.params(), dtype=param_dtype))
        self.config = config
        self.kind = kind
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Integer[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Let the tokens of x [B T D] attend to those before them in their rows."""
        x = checks.activations("Attention", x, self.dtype)
        kind = self.config.layer_kinds[self.kind]
        return row_attention(self.params(), x, self.config, kind, positions=positions, mask=mask)


class DecoderBlock(Branch):
    """x = x + attention branch;  x = x + feed-forward branch

    Args:
      config: the decoder that this is a layer of.
      kind: index into `config.layer_kinds`: window and rotary table.

    The parameters are those of `layers`, for one layer. Called with x [B T D] and, where they are
    needed, `positions` and `mask` [B T] as in `jaxblock.forward`; returns [B T D].
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        kind: int = 0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_config("DecoderBlock", config)
        shapes = layer_shapes(config)
        super().__init__(
            init_leaves("DecoderBlock", config, shapes, rngs.params(), dtype=param_dtype)
        )
        self.config = config
        self.kind = kind
        self.dtype = dtype

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        positions: Integer[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Send the residual stream x [B T D] through the layer."""
        x = checks.activations("DecoderBlock", x, self.dtype)
        kind = self.config.layer_kinds[self.kind]
        return row_block(self.params(), x, self.config, kind, positions=positions, mask=mask)


class Decoder(Branch):
    """logits = unembed(final_norm(blocks(embed(tokens))))

    Args:
      config: the decoder.
      remat: what the backward pass keeps of each layer, as in `jaxblock.forward`.

    The parameters are the whole tree, layers stacked: what `jaxblock.load_checkpoint` returns goes
    in by `nnx.update(decoder, checkpoint.params)`, and `decoder.params()` goes into
    `jaxblock.prefill`, `decode_step` and `generate`. Called as `jaxblock.forward`, with the module
    in place of params and config.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        remat: Remat = "matmul_outputs",
        rngs: nnx.Rngs,
    ):
        super().__init__(init_params(config, rngs.params(), dtype=param_dtype))
        self.config = config
        self.dtype = dtype
        self.remat = remat

    def __call__(
        self,
        tokens: Integer[Array, "B T"],
        *,
        positions: Integer[Array, "B T"] | None = None,
        mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of tokens [B T]."""
        return forward(
            self.params(),
            tokens,
            self.config,
            positions=positions,
            mask=mask,
            dtype=self.dtype,
            remat=self.remat,
        )
