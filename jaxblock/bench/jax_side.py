"""The contenders in JAX: jaxblock, and what a JAX user would pick instead.

Every one is jitted, with its parameters as arguments.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxblock
from jaxblock.bench import contenders
from jaxblock.bench.contenders import ADAMW, CHECKED_STEPS, LIMIT, OURS, Builders, Contender
from jaxblock.bench.rows import MODELS, Row, work
from jaxblock.parameters import unflatten

# Tokens whose logits `linear_cross_entropy` holds at once: on a CPU so many that, with a vocabulary
# of 49152, temporary memory stays under the table's gradient in float32 and 40 MB; a GPU has more
# memory, and more to do at once.
CPU_CHUNK = {"float32": 128, "bfloat16": 256}
GPU_CHUNK = 1024


def setup(row: Row) -> dict[str, str]:
    """Once for each row; returns what the numbers depend on.

    GPUs default to TF32 for float32, PyTorch on them does not: both compute what is asked for.
    """
    if jax.default_backend() != "cpu":
        precision = "highest" if row.dtype == "float32" else None
        jax.config.update("jax_default_matmul_precision", precision)
    return {
        "jaxblock": jaxblock.__version__,
        "jax": jax.__version__,
        "flax": importlib.import_module("flax").__version__,
        "optax": optax.__version__,
        "device": f"{jax.devices()[0].device_kind} ({jax.default_backend()})",
    }


def queues() -> bool:
    """Whether a device works through calls in their order: then it is kept busy, as in real use."""
    return jax.default_backend() != "cpu"


def builders(row: Row) -> Builders:
    """jaxblock first, then its peers, then the limits of this machine."""
    if row.kind in MODELS:
        made: Builders = {OURS: _OURS[row.kind](row)}
    else:
        arrays = contenders.component_inputs(row)
        given = {
            name: jnp.asarray(array, jnp.int32 if array.dtype.kind == "i" else row.dtype)
            for name, array in arrays.items()
        }
        made = _COMPONENTS[row.kind](row, given)
        if importlib.util.find_spec("tokamax") is None:
            made.pop("tokamax", None)
    return made if row.kind == "first" else made | _limits(row)


# Components ---------------------------------------------------------------------------------------

Named = Callable[..., Mapping[str, Any]]


def _contender(
    row: Row,
    function: Callable[..., jax.Array],
    floats: tuple[Any, ...],
    named: Named,
    *,
    others: tuple[jax.Array, ...] = (),
    dy: jax.Array | None = None,
) -> Contender:
    """function(*floats, *others), and with `row.backward` the gradients of all floats.

    `named` gives the gradients the names that all contenders share.
    """

    def value_and_gradients(floats, others, dy):
        y, pull_back = jax.vjp(lambda *floats: function(*floats, *others), *floats)
        return y, pull_back(jnp.ones_like(y) if dy is None else dy)

    def value(floats, others, dy):
        return function(*floats, *others), None

    compiled = jax.jit(value_and_gradients if row.backward else value)
    cotangent = dy if row.backward else None

    def outputs(result):
        y, gradients = result
        found = {"y": y} | (dict(named(*gradients)) if gradients is not None else {})
        return {name: np.asarray(array.astype(jnp.float32)) for name, array in found.items()}

    return Contender(lambda: compiled(floats, others, cotangent), outputs, jax.block_until_ready)


def _module(module: nnx.Module, values: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """The parameters of an nnx module, set to `values`, and the function of them and its inputs."""
    graph, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, dict(values))
    return state, lambda state, x: nnx.merge(graph, state)(x)


def _options(row: Row) -> dict[str, Any]:
    return {"dtype": row.dtype, "param_dtype": row.dtype, "rngs": nnx.Rngs(0)}


def _rms_norm(row: Row, given: dict[str, jax.Array]) -> Builders:
    x, scale, dy = given["x"], given["scale"], given["dy"]

    def ours():
        function = partial(jaxblock.rms_norm, eps=contenders.EPS)
        return _contender(row, function, (x, scale), lambda x, scale: dict(x=x, scale=scale), dy=dy)

    def flax():
        module = nnx.RMSNorm(x.shape[-1], epsilon=contenders.EPS, **_options(row))
        state, function = _module(module, {"scale": scale})
        named = lambda state, x: dict(x=x, scale=nnx.to_pure_dict(state)["scale"])  # noqa: E731
        return _contender(row, function, (state, x), named, dy=dy)

    def tokamax():
        kernels = importlib.import_module("tokamax")
        function = lambda x, scale: kernels.layer_norm(  # noqa: E731
            x, scale, None, subtract_mean=False, epsilon=contenders.EPS
        )
        return _contender(row, function, (x, scale), lambda x, scale: dict(x=x, scale=scale), dy=dy)

    return {OURS: ours, "flax.nnx": flax, "tokamax": tokamax}


def _swiglu(row: Row, given: dict[str, jax.Array]) -> Builders:
    x, gate, up, down, dy = (given[name] for name in ("x", "gate", "up", "down", "dy"))

    def ours():
        gate_up = jaxblock.pack_gate_up(gate, up)
        named = lambda x, gate_up, down: dict(  # noqa: E731
            x=x, gate=gate_up[:, 0], up=gate_up[:, 1], down=down
        )
        return _contender(row, jaxblock.swiglu, (x, gate_up, down), named, dy=dy)

    class GatedMLP(nnx.Module):
        def __init__(self, D, F, **options):
            self.gate = nnx.Linear(D, F, use_bias=False, **options)
            self.up = nnx.Linear(D, F, use_bias=False, **options)
            self.down = nnx.Linear(F, D, use_bias=False, **options)

        def __call__(self, x):
            return self.down(nnx.silu(self.gate(x)) * self.up(x))

    def flax():
        kernels = {
            name: {"kernel": kernel}
            for name, kernel in (("gate", gate), ("up", up), ("down", down))
        }
        state, function = _module(GatedMLP(*gate.shape, **_options(row)), kernels)

        def named(state, x):
            found = nnx.to_pure_dict(state)
            return dict(x=x) | {name: found[name]["kernel"] for name in ("gate", "up", "down")}

        return _contender(row, function, (state, x), named, dy=dy)

    def tokamax():
        kernels = importlib.import_module("tokamax")
        weights = jnp.stack([gate, up], axis=1)
        function = lambda x, weights, down: (  # noqa: E731
            kernels.gated_linear_unit(x, weights, activation=jax.nn.silu) @ down
        )
        named = lambda x, weights, down: dict(  # noqa: E731
            x=x, gate=weights[:, 0], up=weights[:, 1], down=down
        )
        return _contender(row, function, (x, weights, down), named, dy=dy)

    return {OURS: ours, "flax.nnx": flax, "tokamax": tokamax}


def _embed(row: Row, given: dict[str, jax.Array]) -> Builders:
    tokens, table, dy = given["tokens"], given["table"], given["dy"]

    def ours():
        function = lambda table, tokens: jaxblock.embed(tokens, table)  # noqa: E731
        named = lambda table: dict(table=table)  # noqa: E731
        return _contender(row, function, (table,), named, others=(tokens,), dy=dy)

    def flax():
        state, function = _module(nnx.Embed(*table.shape, **_options(row)), {"embedding": table})
        named = lambda state: dict(table=nnx.to_pure_dict(state)["embedding"])  # noqa: E731
        return _contender(row, function, (state,), named, others=(tokens,), dy=dy)

    return {OURS: ours, "flax.nnx": flax}


def _loss(row: Row, given: dict[str, jax.Array]) -> Builders:
    x, table, labels = given["x"], given["table"], given["labels"]
    size = CPU_CHUNK[row.dtype] if jax.default_backend() == "cpu" else GPU_CHUNK
    named = lambda x, table: dict(x=x, table=table)  # noqa: E731

    def ours():
        def function(x, table, labels):
            total, count = jaxblock.linear_cross_entropy(x, table, labels, chunk_size=size)
            return total / count

        return _contender(row, function, (x, table), named, others=(labels,))

    def dense():
        def function(x, table, labels):
            logits = jaxblock.unembed(x, table)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return _contender(row, function, (x, table), named, others=(labels,))

    def tokamax():
        kernels = importlib.import_module("tokamax")
        function = lambda x, table, labels: (  # noqa: E731
            kernels.linear_softmax_cross_entropy_loss(x, labels, table.T, reduction="mean")
        )
        return _contender(row, function, (x, table), named, others=(labels,))

    return {OURS: ours, "optax dense": dense, "tokamax": tokamax}


_COMPONENTS: dict[str, Callable[[Row, dict[str, jax.Array]], Builders]] = {
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "embed": _embed,
    "loss": _loss,
}


# The whole model ----------------------------------------------------------------------------------


def _parameters(row: Row) -> dict[str, Any]:
    return unflatten(
        {path: jnp.asarray(leaf, row.dtype) for path, leaf in contenders.model_parameters(row)}
    )


def _tokens(row: Row) -> jax.Array:
    return jnp.asarray(contenders.model_tokens(row), jnp.int32)


def _forward(row: Row) -> Callable[[], Contender]:
    def ours():
        params, tokens, config = _parameters(row), _tokens(row), row.decoder
        forward = jax.jit(jaxblock.forward, static_argnames="config")
        return Contender(
            lambda: forward(params, tokens, config),
            lambda logits: {"logits": np.asarray(logits)},
            jax.block_until_ready,
        )

    return ours


def _generate(row: Row) -> Callable[[], Contender]:
    def ours():
        params, tokens, config = _parameters(row), _tokens(row), row.decoder
        new = row.sizes["new"]
        return Contender(
            lambda: jaxblock.generate(params, tokens, config, max_new_tokens=new),
            lambda tokens: {"tokens": np.asarray(tokens)},
            jax.block_until_ready,
        )

    return ours


def _train(row: Row) -> Callable[[], Contender]:
    def ours():
        optimizer = optax.adamw(**ADAMW)
        step = jax.jit(
            jaxblock.train_step,
            static_argnames=("config", "optimizer", "dtype"),
            donate_argnames="state",
        )
        tokens, config, state = _tokens(row), row.decoder, None

        def reset():
            nonlocal state
            state = None
            state = jaxblock.init_train_state(_parameters(row), optimizer)

        def call():
            nonlocal state
            state, metrics = step(state, tokens, config, optimizer)
            return metrics.loss

        def wait(loss):
            jax.block_until_ready((state, loss))

        def outputs(loss):
            losses = [loss, *(call() for _ in range(CHECKED_STEPS - 1))]
            return {"losses": np.asarray([float(loss) for loss in losses])}

        return Contender(call, outputs, wait, reset)

    return ours


_OURS: dict[str, Callable[[Row], Callable[[], Contender]]] = {
    "first": _forward,
    "forward": _forward,
    "generate": _generate,
    "train": _train,
}


# The limits of the machine ------------------------------------------------------------------------


def _limits(row: Row) -> Builders:
    found: Builders = {}
    needs = work(row)
    if needs.product is not None:
        rows, depth, columns = needs.product

        def product(**how):
            def make():
                x, w = jnp.ones((rows, depth), row.dtype), jnp.ones((depth, columns), row.dtype)
                multiply = jax.jit(lambda x, w: jnp.matmul(x, w, **how).astype(row.dtype))
                return Contender(lambda: multiply(x, w), wait=jax.block_until_ready)

            return make

        found[f"{LIMIT}product, jax"] = product()
        if row.dtype != "float32":
            # XLA's CPU backend multiplies 16-bit numbers faster when asked for a float32 sum.
            wide = product(preferred_element_type=jnp.float32)
            found[f"{LIMIT}product, jax, float32 sum"] = wide
    if needs.copied:

        def copy():
            x = jnp.ones(needs.copied, row.dtype)
            duplicate = jax.jit(jnp.copy)
            return Contender(lambda: duplicate(x), wait=jax.block_until_ready)

        found[f"{LIMIT}copy, jax"] = copy
    return found
