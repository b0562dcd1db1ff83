"""A trained decoder in PyTorch, recorded call by call, and the same calls through `jaxblock`.

The transformers library runs the model. Hooks record what its embedding, its norms, its
feed-forward layers and its tied projection were given and what they made of it. `jaxblock` then
gets the same inputs and the same weights, and `torch_ref` in float64 judges both results.

Two things are kept apart on purpose. The judge uses the weights and the eps that each PyTorch
module held when it ran; `jaxblock` uses the parameter tree made of the checkpoint, and the eps of
the configuration. So a weight that went to the wrong layer, or was turned the wrong way, shows.
"""

import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

import jaxblock
import torch_ref
from jaxblock.parity import Judgement, compare, judge, unit_roundoff
from jaxblock.parity.arrays import to_jax, to_numpy
from jaxblock.smollm2 import sha256

# The logits of one prompt take 0.2 MB a token in float32, and several times that while compared.
MAX_TOKENS = 512

# Of float32 products; GPUs default to TF32 and TPUs to bfloat16 passes.
MATMUL_PRECISION = "highest"


class ModelError(ValueError):
    """This checkpoint or prompt cannot be compared; the text says why."""


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
      parameters: picks its parameters out of the tree of `parameter_tree`.
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


def load(gguf: Path) -> tuple[LlamaForCausalLM, Any]:
    """The model in float32, and its tokenizer, from one GGUF file and nothing else (no network).

    Raises: ModelError if the file cannot be read, is no model of the llama family, is not tied, or
      does not fill the model exactly.
    """
    try:
        with gguf.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"load: the checkpoint must be readable; got {error}") from error
    if magic != b"GGUF":
        raise ModelError(f"load: the checkpoint must be a GGUF file; got {gguf}, magic={magic!r}")

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source: dict[str, Any] = dict(gguf_file=gguf.name, local_files_only=True)
    try:
        config = AutoConfig.from_pretrained(gguf.parent, **source)
        if config.model_type != "llama":
            raise ModelError(
                "load: the checkpoint must be of the llama family (RMSNorm, SwiGLU); got "
                f"architecture={config.model_type}"
            )
        if not config.tie_word_embeddings:
            raise ModelError(
                "load: the checkpoint must have tied embeddings, because the tied projection is "
                f"what is compared; got a projection of its own (output.weight) in {gguf.name}"
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, config=config, dtype=torch.float32, output_loading_info=True, **source
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    except ModelError:
        raise
    except Exception as error:  # whatever two libraries raise on a file that is not ours
        raise ModelError(
            f"load: transformers must be able to read the checkpoint; got {gguf.name}, "
            f"{type(error).__name__}: {error}"
        ) from error
    model, findings = loaded
    findings = {what: sorted(found) for what, found in findings.items() if found}
    if findings:
        raise ModelError(f"load: the checkpoint must fill the model exactly; got {findings}")
    if model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr():
        raise ModelError(
            "load: lookup and projection must share one table in PyTorch; got two copies"
        )
    return model, tokenizer


def tokenize(tokenizer: Any, prompt: str) -> Tensor:
    """The prompt as ids [1 T]."""
    tokens: Tensor = tokenizer(prompt, return_tensors="pt").input_ids.long()
    if not 1 <= tokens.shape[1] <= MAX_TOKENS:
        raise ModelError(
            f"tokenize: the prompt must have 1 to {MAX_TOKENS} tokens; got T={tokens.shape[1]}"
        )
    return tokens


def setting(model: LlamaForCausalLM, gguf: Path, prompt: str, tokens: Tensor) -> dict[str, Any]:
    """What the numbers depend on: versions, devices, precision, weights and prompt."""
    packages = ("jax", "jaxlib", "torch", "transformers", "gguf", "numpy")
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")
    return {
        "versions": {
            "python": platform.python_version(),
            "jaxblock": jaxblock.__version__,
            **{package: version(package) for package in packages},
        },
        "device": {"jax": str(jax.devices()[0]), "torch": str(model.device)},
        "precision": MATMUL_PRECISION,
        "model": gguf.name,
        "sha256": sha256(gguf),
        "sizes": {name: getattr(model.config, name) for name in sizes},
        "prompt": prompt,
        "tokens": tokens[0].tolist(),
    }


def sites(config: Any) -> list[Site]:
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


def parameters_in(model: LlamaForCausalLM, dtype: str) -> dict[str, Tensor]:
    """PyTorch's named parameters, rounded to `dtype`; the tied table stands in it once."""
    return {
        name: parameter.detach().to(getattr(torch, dtype))
        for name, parameter in model.named_parameters()
    }


def parameter_tree(parameters: Mapping[str, Tensor], config: Any) -> dict[str, Any]:
    """PyTorch's named parameters as the tree of `jaxblock`, without attention.

    Every parameter is taken exactly once; what is left over must be attention's four kernels a
    layer, and nothing else.

    Raises: ModelError naming what is missing or left over.
    """
    rest = dict(parameters)
    layers = range(config.num_hidden_layers)

    def take(name: str) -> Tensor:
        if name not in rest:
            raise ModelError(f"parameter_tree: every layer must be complete; got no {name}")
        return rest.pop(name)

    def take_layers(name: str) -> Tensor:
        return torch.stack([take(f"model.layers.{layer}.{name}.weight") for layer in layers])

    def kernels(name: str) -> jax.Array:
        return to_jax(take_layers(name).mT)  # PyTorch keeps [out, in]

    tree = {
        "embedding": to_jax(take("model.embed_tokens.weight")),
        "final_norm": {"scale": to_jax(take("model.norm.weight"))},
        "layers": {
            "attention_norm": {"scale": to_jax(take_layers("input_layernorm"))},
            "feed_forward_norm": {"scale": to_jax(take_layers("post_attention_layernorm"))},
            "feed_forward": {
                "gate_up": jaxblock.pack_gate_up(kernels("mlp.gate_proj"), kernels("mlp.up_proj")),
                "down": kernels("mlp.down_proj"),
            },
        },
    }
    attention = {
        f"model.layers.{layer}.self_attn.{projection}_proj.weight"
        for layer in layers
        for projection in "qkvo"
    }
    if rest.keys() != attention:
        raise ModelError(
            "parameter_tree: every parameter must be used exactly once; got "
            f"left_over={sorted(rest.keys() - attention)}, "
            f"missing={sorted(attention - rest.keys())}"
        )
    return tree


def record(
    model: LlamaForCausalLM, parameters: Mapping[str, Tensor], tokens: Tensor
) -> dict[str, Call]:
    """Run the model with these parameters on the tokens; its calls by PyTorch's module name."""
    calls: dict[str, Call] = {}

    def keep(site):
        def hook(module, inputs, output):
            assert site.module not in calls, f"{site.module} ran twice"
            # Inside the call the module holds `parameters`, rounded as they are.
            weights = tuple(weight.detach() for weight in module.parameters())
            eps = getattr(module, "variance_epsilon", None)
            calls[site.module] = Call(
                site.component, inputs[0].clone(), weights, eps, output.clone()
            )

        return hook

    handles = [
        model.get_submodule(site.module).register_forward_hook(keep(site))
        for site in sites(model.config)
    ]
    try:
        with torch.no_grad():
            torch.func.functional_call(model, dict(parameters), (tokens,), {"use_cache": False})
    finally:
        for handle in handles:
            handle.remove()
    return calls


def compare_model(
    model: LlamaForCausalLM,
    tokens: Tensor,
    dtype: str,
    functions: Functions = Functions(),
) -> Iterator[Row]:
    """`record` and `compare_calls` with everything rounded to `dtype`."""
    parameters = parameters_in(model, dtype)
    calls = record(model, parameters, tokens)
    yield from compare_calls(
        model.config, calls, parameter_tree(parameters, model.config), functions
    )


def compare_calls(
    config: Any,
    calls: Mapping[str, Call],
    tree: Mapping[str, Any],
    functions: Functions = Functions(),
) -> Iterator[Row]:
    """Repeat the recorded calls through the jitted functions and judge both results in float64.

    Args:
      config: transformers' configuration of the model.
      calls: of `record`.
      tree: of `parameter_tree`.
      functions: what to test.

    Yields: one row a site, as soon as it is known.
    """
    jitted = {
        "embed": jax.jit(functions.embed),
        "rms_norm": jax.jit(
            partial(functions.rms_norm, eps=config.rms_norm_eps, cast="before_scale")
        ),
        "swiglu": jax.jit(functions.swiglu),
        "unembed": jax.jit(functions.unembed),
    }
    for site in sites(config):
        call = calls[site.module]
        with jax.default_matmul_precision(MATMUL_PRECISION):
            result = jitted[site.component](to_jax(call.input), *site.parameters(tree))
        dtype = str(call.output.dtype).removeprefix("torch.")
        yield Row(site, dtype, _judge(site, config, call, result))


def _judge(site: Site, config: Any, call: Call, result: jax.Array) -> Judgement:
    hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
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
