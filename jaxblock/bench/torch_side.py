"""The contenders in PyTorch: eager, torch.compile, and the transformers library's own modules."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jaxblock.bench import contenders
from jaxblock.bench.contenders import ADAMW, CHECKED_STEPS, LIMIT, Builders, Contender
from jaxblock.bench.rows import MODELS, Row, work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def setup(row: Row) -> dict[str, str]:
    """Once for each row; returns what the numbers depend on.

    As many threads as XLA takes: one for each core that this process may run on.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.compiler.reset()
    found = {"torch": torch.__version__, "torch device": DEVICE}
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        found["torch device"] = torch.cuda.get_device_name()
    return found


def queues() -> bool:
    """Whether a device works through calls in their order: then it is kept busy, as in real use."""
    return DEVICE == "cuda"


def builders(row: Row) -> Builders:
    """The peers, then the limits of this machine."""
    if row.kind in MODELS:
        made = _MODELS[row.kind](row)
    else:
        given = {
            name: torch.from_numpy(array).to(
                DEVICE, None if array.dtype.kind == "i" else getattr(torch, row.dtype)
            )
            for name, array in contenders.component_inputs(row).items()
        }
        made = _COMPONENTS[row.kind](row, given)
    return made if row.kind == "first" else made | _limits(row)


def _wait(result: Any) -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _host(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


# Components ---------------------------------------------------------------------------------------

Named = Callable[..., Mapping[str, Tensor]]


def _contender(
    row: Row,
    function: Callable[..., Tensor],
    floats: Sequence[Tensor],
    named: Named,
    *,
    others: tuple[Tensor, ...] = (),
    dy: Tensor | None = None,
    compiled: bool = False,
    parameters: Sequence[Tensor] = (),
) -> Contender:
    """function(*floats, *others), and with `row.backward` the gradients of floats and parameters.

    `named` gives the gradients the names that all contenders share.
    """
    floats = [tensor.detach().clone().requires_grad_(row.backward) for tensor in floats]
    wanted = [*floats, *parameters]
    run = torch.compile(function, dynamic=False) if compiled else function

    def call():
        if not row.backward:
            with torch.inference_mode():
                return run(*floats, *others), None
        y = run(*floats, *others)
        return y.detach(), torch.autograd.grad(y, wanted, dy)

    def outputs(result):
        y, gradients = result
        found = {"y": y} | (dict(named(*gradients)) if gradients is not None else {})
        return {name: _host(tensor) for name, tensor in found.items()}

    return Contender(call, outputs, _wait)


def _eager_and_compiled(make: Callable[..., Contender]) -> Builders:
    return {"torch": make, "torch.compile": partial(make, compiled=True)}


def _frozen(module: torch.nn.Module, row: Row) -> Any:
    return module.to(DEVICE, getattr(torch, row.dtype)).requires_grad_(row.backward)


def _rms_norm(row: Row, given: dict[str, Tensor]) -> Builders:
    x, scale, dy = given["x"], given["scale"], given["dy"]
    named = lambda x, scale: dict(x=x, scale=scale)  # noqa: E731

    def functional(compiled=False):
        function = lambda x, scale: F.rms_norm(x, scale.shape, scale, contenders.EPS)  # noqa: E731
        return _contender(row, function, (x, scale), named, dy=dy, compiled=compiled)

    def transformers():
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        module = _frozen(LlamaRMSNorm(x.shape[-1], contenders.EPS), row)
        module.weight.data.copy_(scale)
        return _contender(row, module, (x,), named, dy=dy, parameters=(module.weight,))

    return _eager_and_compiled(functional) | {"transformers": transformers}


def _swiglu(row: Row, given: dict[str, Tensor]) -> Builders:
    x, dy = given["x"], given["dy"]
    # torch.nn.Linear keeps [out, in].
    weights = [given[name].T.contiguous() for name in ("gate", "up", "down")]

    def named(x, gate, up, down):
        return dict(x=x, gate=gate.T, up=up.T, down=down.T)

    def functional(compiled=False):
        def function(x, gate, up, down):
            return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

        return _contender(row, function, (x, *weights), named, dy=dy, compiled=compiled)

    def transformers():
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaMLP

        config = LlamaConfig(hidden_size=row.sizes["D"], intermediate_size=row.sizes["F"])
        module = _frozen(LlamaMLP(config), row)
        theirs = (module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)
        for parameter, weight in zip(theirs, weights, strict=True):
            parameter.data.copy_(weight)
        return _contender(row, module, (x,), named, dy=dy, parameters=theirs)

    return _eager_and_compiled(functional) | {"transformers": transformers}


def _embed(row: Row, given: dict[str, Tensor]) -> Builders:
    tokens, table, dy = given["tokens"], given["table"], given["dy"]

    def functional(compiled=False):
        function = lambda table, tokens: F.embedding(tokens, table)  # noqa: E731
        named = lambda table: dict(table=table)  # noqa: E731
        return _contender(
            row, function, (table,), named, others=(tokens,), dy=dy, compiled=compiled
        )

    return _eager_and_compiled(functional)


def _loss(row: Row, given: dict[str, Tensor]) -> Builders:
    x, table, labels = given["x"], given["table"], given["labels"]
    named = lambda x, table: dict(x=x, table=table)  # noqa: E731

    def functional(compiled=False):
        # As in the loss of transformers, logits of 16 bits are widened for the softmax.
        def function(x, table, labels):
            return F.cross_entropy(F.linear(x, table).float(), labels)

        return _contender(row, function, (x, table), named, others=(labels,), compiled=compiled)

    return _eager_and_compiled(functional)


_COMPONENTS: dict[str, Callable[[Row, dict[str, Tensor]], Builders]] = {
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "embed": _embed,
    "loss": _loss,
}


# The whole model ----------------------------------------------------------------------------------


def _model(row: Row) -> tuple[Any, Tensor, Callable[[], None]]:
    """LlamaForCausalLM of transformers, tokens, and what sets its parameters."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    model: Any = LlamaForCausalLM(LlamaConfig(**row.config))
    model = model.to(DEVICE, getattr(torch, row.dtype))
    # Greedy and without an end, as `jaxblock.generate` is called.
    model.generation_config = GenerationConfig(do_sample=False)

    def load():
        model.load_state_dict(dict(_state_dict(row)), strict=not row.config["tie_word_embeddings"])

    load()
    tokens = torch.from_numpy(contenders.model_tokens(row)).to(DEVICE)
    return model.eval(), tokens, load


def _state_dict(row: Row) -> Iterator[tuple[str, Tensor]]:
    """The parameter tree of jaxblock under the names and in the layouts of transformers."""
    outer = {
        "embedding": "model.embed_tokens.weight",
        "unembedding": "lm_head.weight",
        "final_norm/scale": "model.norm.weight",
    }
    D = row.config["hidden_size"]
    for path, leaf in contenders.model_parameters(row):
        name, tensor = "/".join(path), torch.from_numpy(leaf)
        if name in outer:
            yield outer[name], tensor
            continue
        for index, one in enumerate(tensor):
            prefix, last = f"model.layers.{index}", path[-1]
            if name == "layers/attention_norm/scale":
                yield f"{prefix}.input_layernorm.weight", one
            elif name == "layers/feed_forward_norm/scale":
                yield f"{prefix}.post_attention_layernorm.weight", one
            elif last in ("q", "k", "v"):
                yield f"{prefix}.self_attn.{last}_proj.weight", one.reshape(D, -1).T
            elif last == "o":
                yield f"{prefix}.self_attn.o_proj.weight", one.reshape(-1, D).T
            elif last == "gate_up":
                yield f"{prefix}.mlp.gate_proj.weight", one[:, 0].T
                yield f"{prefix}.mlp.up_proj.weight", one[:, 1].T
            else:
                assert last == "down", name
                yield f"{prefix}.mlp.down_proj.weight", one.T


def _forward(row: Row) -> Builders:
    model, tokens, _ = _model(row)

    def transformers(compiled=False):
        run = torch.compile(model, dynamic=False) if compiled else model

        def call():
            with torch.inference_mode():
                return run(tokens, use_cache=False).logits

        return Contender(call, lambda logits: {"logits": _host(logits)}, _wait)

    found: Builders = {"transformers": transformers}
    if row.kind != "first":
        found["transformers, torch.compile"] = partial(transformers, compiled=True)
    return found


def _generate(row: Row) -> Builders:
    model, tokens, _ = _model(row)

    def transformers(**options):
        mask = torch.ones_like(tokens)

        def call():
            with torch.inference_mode():
                return model.generate(
                    tokens, attention_mask=mask, max_new_tokens=row.sizes["new"], **options
                )

        return Contender(call, lambda tokens: {"tokens": tokens.cpu().numpy()}, _wait)

    return {
        "transformers": transformers,
        "transformers, static cache": partial(transformers, cache_implementation="static"),
    }


def _train(row: Row) -> Builders:
    model, tokens, load = _model(row)
    model.train()  # Without dropout nothing but what a user would write.

    def transformers(compiled=False):
        run = torch.compile(model, dynamic=False) if compiled else model
        optimizer: Any = None

        def reset():
            nonlocal optimizer
            model.zero_grad()
            load()
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=ADAMW["learning_rate"], weight_decay=ADAMW["weight_decay"]
            )

        def call():
            loss = run(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def outputs(loss):
            losses = [loss, *(call() for _ in range(CHECKED_STEPS - 1))]
            return {"losses": np.asarray([float(loss) for loss in losses])}

        return Contender(call, outputs, _wait, reset)

    return {
        "transformers": transformers,
        "transformers, torch.compile": partial(transformers, compiled=True),
    }


_MODELS: dict[str, Callable[[Row], Builders]] = {
    "first": _forward,
    "forward": _forward,
    "generate": _generate,
    "train": _train,
}


# The limits of the machine ------------------------------------------------------------------------


def _limits(row: Row) -> Builders:
    found: Builders = {}
    needs, dtype = work(row), getattr(torch, row.dtype)
    if needs.product is not None:
        rows, depth, columns = needs.product

        def product(transposed):
            x = torch.ones(rows, depth, dtype=dtype, device=DEVICE)
            w = torch.ones(depth, columns, dtype=dtype, device=DEVICE)
            w = w.T.contiguous().T if transposed else w
            return Contender(lambda: x @ w, wait=_wait)

        found[f"{LIMIT}product, torch"] = partial(product, False)
        found[f"{LIMIT}product, torch, [out, in]"] = partial(product, True)
    if needs.copied:

        def copy():
            x = torch.ones(needs.copied, dtype=dtype, device=DEVICE)
            target = torch.empty_like(x)
            return Contender(lambda: target.copy_(x), wait=_wait)

        found[f"{LIMIT}copy, torch"] = copy
    return found
