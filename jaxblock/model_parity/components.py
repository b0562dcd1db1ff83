"""The components of a model in PyTorch, recorded call by call, and the same calls in `jaxblock`.

The transformers library runs the model. Hooks record what its embedding, its norms, its
feed-forward layers and its tied projection were given and what they made of it. `jaxblock` then
gets the same inputs and the same weights, and `torch_ref` in float64 judges both results.

Two things are kept apart on purpose. The judge uses the weights and the eps that each PyTorch
module held when it ran; `jaxblock` uses the parameter tree and the eps of `load_checkpoint`. So a
weight that went to the wrong layer, or was turned the wrong way, shows, and shows where.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

import jaxblock
import torch_ref
from jaxblock.config import DecoderConfig
from jaxblock.model_parity.both_models import MATMUL_PRECISION, BothModels, rounded
from jaxblock.parity import Judgement, compare, judge, unit_roundoff
from jaxblock.parity.arrays import to_jax, to_numpy


@dataclass(frozen=True)
class Functions:
    """The four functions under test: `jaxblock`'s, or someone else's with the same signatures."""

    embed: Callable[..., jax.Array] = jaxblock.embed
    rms_norm: Callable[..., jax.Array] = jaxblock.rms_norm
    swiglu: Callable[..., jax.Array] = jaxblock.swiglu
    unembed: Callable[..., jax.Array] = jaxblock.unembed


class Site(NamedTuple):
    """Where in the model a component is called.

    Attributes:
      component: the function, by its name in `Functions`.
      place: the layer and the use, in words.
      module: PyTorch's name of it.
      parameters: picks its parameters out of the tree.
    """

    component: str
    place: str
    module: str
    parameters: Callable[[Any], tuple[jax.Array, ...]]

    @property
    def name(self) -> str:
        """Component and place in one."""
        return f"{self.component} {self.place}".rstrip()


@dataclass(frozen=True)
class Call:
    """What PyTorch was given at a site, the weights (and eps) it held, and what it returned."""

    component: str
    input: Tensor
    weights: tuple[Tensor, ...]
    eps: float | None
    output: Tensor

    @cached_property
    def reference(self) -> Tensor:
        """What `torch_ref` returns for the same in float64."""
        weights = [weight.double() for weight in self.weights]
        if self.component == "embed":
            return torch_ref.embed(self.input, *weights)
        x = self.input.double()
        if self.component == "rms_norm":
            assert self.eps is not None
            return torch_ref.rms_norm(x, *weights, eps=self.eps)
        if self.component == "swiglu":
            gate, up, down = weights
            return torch_ref.swiglu(x, torch_ref.pack_gate_up(gate.mT, up.mT), down.mT)
        return torch_ref.unembed(x, *weights)


class Row(NamedTuple):
    """One line of the result: a site in one dtype."""

    site: Site
    dtype: str
    judgement: Judgement


def has_components(config: DecoderConfig) -> bool:
    """Whether the components can be compared one by one: those of a tied Llama without biases."""
    return (
        config.model_type == "llama"
        and config.tie_word_embeddings
        and config.feed_forward.activation == "silu"
        and not config.feed_forward.bias
    )


def sites(config: DecoderConfig) -> list[Site]:
    """Every place of the model where one of the four functions is called."""
    layers = range(config.num_hidden_layers)

    def scale(norm, layer):
        return lambda tree: (tree["layers"][norm]["scale"][layer],)

    def feed_forward(layer):
        def parameters(tree):
            leaves = tree["layers"]["feed_forward"]
            return leaves["gate_up"][layer], leaves["down"][layer]

        return parameters

    found = [Site("embed", "", "model.embed_tokens", lambda tree: (tree["embedding"],))]
    for layer in layers:
        torch_layer = f"model.layers.{layer}"
        for norm, torch_norm in (
            ("attention_norm", "input_layernorm"),
            ("feed_forward_norm", "post_attention_layernorm"),
        ):
            place = f"layer {layer} {norm}"
            found.append(Site("rms_norm", place, f"{torch_layer}.{torch_norm}", scale(norm, layer)))
    found.append(
        Site("rms_norm", "final_norm", "model.norm", lambda tree: (tree["final_norm"]["scale"],))
    )
    for layer in layers:
        module = f"model.layers.{layer}.mlp"
        found.append(Site("swiglu", f"layer {layer}", module, feed_forward(layer)))
    found.append(Site("unembed", "", "lm_head", lambda tree: (tree["embedding"],)))
    return found


def record(both: BothModels, tokens: Tensor) -> dict[str, Call]:
    """Run PyTorch's model on the tokens as it stands; its calls by PyTorch's module name."""
    calls: dict[str, Call] = {}

    def keep(site):
        def hook(module, inputs, output):
            assert site.module not in calls, f"{site.module} ran twice"
            # `rounded` changes what the parameters hold, not the tensors that they held before.
            weights = tuple(weight.detach() for weight in module.parameters())
            eps = getattr(module, "variance_epsilon", None)
            calls[site.module] = Call(
                site.component, inputs[0].clone(), weights, eps, output.clone()
            )

        return hook

    handles = [
        both.model.get_submodule(site.module).register_forward_hook(keep(site))
        for site in sites(both.config)
    ]
    try:
        with torch.no_grad():
            both.model(tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def compare_components(
    both: BothModels, tokens: Tensor, dtype: str, functions: Functions = Functions()
) -> Iterator[Row]:
    """`record` and `compare_calls` with everything rounded to `dtype`."""
    with rounded(both, dtype) as params:
        calls = record(both, tokens)
    yield from compare_calls(both.config, calls, params, functions)


def compare_calls(
    config: DecoderConfig,
    calls: Mapping[str, Call],
    tree: Mapping[str, Any],
    functions: Functions = Functions(),
    places: Sequence[Site] | None = None,
) -> Iterator[Row]:
    """Repeat the recorded calls through the jitted functions and judge both results in float64.

    Args:
      config: of the model.
      calls: of `record`.
      tree: its parameters in the same dtype.
      functions: what to test.
      places: where; None means everywhere.

    Yields: one row a site, as soon as it is known.
    """
    jitted = {
        "embed": jax.jit(functions.embed),
        "rms_norm": jax.jit(
            partial(functions.rms_norm, eps=config.norm.eps, cast=config.norm.cast)
        ),
        "swiglu": jax.jit(functions.swiglu),
        "unembed": jax.jit(functions.unembed),
    }
    for site in sites(config) if places is None else places:
        call = calls[site.module]
        with jax.default_matmul_precision(MATMUL_PRECISION):
            result = jitted[site.component](to_jax(call.input), *site.parameters(tree))
        dtype = str(call.output.dtype).removeprefix("torch.")
        yield Row(site, dtype, _judge(site, config, call, result))


def _judge(site: Site, config: DecoderConfig, call: Call, result: jax.Array) -> Judgement:
    hidden_size = config.hidden_size
    intermediate_size = config.feed_forward.intermediate_size
    # How long the sums are behind an element, and how many values on the way to it are rounded to
    # the dtype of the activations: the normalised value; gate, up and their product. PyTorch rounds
    # silu(gate) as well.
    reduction_length, roundings, torch_roundings = {
        "embed": (1, 0, 0),
        "rms_norm": (hidden_size, 1, 1),
        "swiglu": (hidden_size + intermediate_size, 3, 4),
        "unembed": (hidden_size, 0, 0),
    }[site.component]
    torch_dtype = to_numpy(call.output).dtype
    same_dtype = result.dtype == torch_dtype
    judgement = judge(
        site.name,
        result,
        call.output,
        call.reference,
        reduction_length=reduction_length,
        roundings=roundings,
        # Beside logits that PyTorch rounded to 16 bits, "as good as PyTorch" would prove nothing
        # for ours in float32: there the derived bound alone counts.
        factor=2.0 if same_dtype else 0.0,
        share_equal=_least_share_equal(site.component, call),
    )
    if not same_dtype:
        # Bit for bit, our logits can be compared only after the rounding that PyTorch did.
        between = compare(to_numpy(result).astype(torch_dtype), call.output)
        judgement = dataclasses.replace(judgement, between=between)
    # If PyTorch itself is outside what rounding explains, the judge does not compute what it ran.
    torch_alone = judge(
        site.name,
        call.output,
        call.output,
        call.reference,
        reduction_length=reduction_length,
        roundings=torch_roundings,
        factor=0.0,
    )
    reasons = tuple(f"PyTorch's own result: {reason}" for reason in torch_alone.reasons)
    return dataclasses.replace(judgement, reasons=judgement.reasons + reasons)


def _least_share_equal(component: str, call: Call) -> float | None:
    """The share of elements that must equal PyTorch's to the bit, where one can be derived.

    A lookup: all. A norm that rounds to 16 bits before it scales: both sides round the normalised
    value, and where they round it alike, the product (exact in float32) is the same too. In float32
    that value is off by at most (D / 2 + 9) u32 on each side: half the error of a sum of D positive
    terms, the 8 u32 of rsqrt, one product. Two values at the relative distance d have a 16-bit
    rounding boundary between them with probability d / u16 at most. Scaling first and rounding once
    disagrees with that on a good part of all elements, and no bound on the error would show it.
    """
    dtype = to_numpy(call.output).dtype
    if component == "embed":
        return 1.0
    if component == "rms_norm" and jnp.finfo(dtype).bits == 16:
        distance = 2 * (call.input.shape[-1] / 2 + 9) * unit_roundoff(jnp.float32)
        return 1.0 - distance / unit_roundoff(dtype)
    return None
