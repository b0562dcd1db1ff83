"""Which tensor of a file is which part of the parameter tree: one table, read in both directions.

A rule says: the tensor of this name, with these axes, is the part with those axes of that leaf.

    self_attn.q_proj.weight  [N*H D]  =  attention/q [D N H]

The letters are those of the house: D hidden_size, F intermediate_size, N and K heads, H head_dim,
E experts, V vocab_size. `*` joins letters to one stored axis. A digit picks an index: gate and up
are 0 and 1 of the leaf's axis of two, `c` where both are stored in one. `p` is the two channels of
a rotary pair and `h` the pairs of a head: neighbours in Meta's files and GGUF, halves in the tree.
Rules that share a name lie one after the other in the rows of that tensor. What turns a kernel
from [out, in] to [in, out] is thus the order of the letters, and never a shape.

Sources: transformers 5.24.0, src/transformers/models/<model_type>/modeling_*.py; the names of
experts in files, src/transformers/conversion_mapping.py; Meta, meta-llama/llama, llama/model.py;
GGUF, ggml-org/llama.cpp, gguf-py/gguf/tensor_mapping.py and LlamaModel.permute of its converter.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jaxblock.config import DecoderConfig
from jaxblock.parameters import flatten


class Rule(NamedTuple):
    """The tensor `name` [stored] = the part [axes] of the leaf."""

    name: str
    stored: str
    leaf: str
    axes: str


@dataclass(frozen=True)
class Naming:
    """How files of one kind name their tensors; `{L}` and `{E}` stand for layer and expert.

    Attributes:
      table, head, final_norm: the tensors outside the layers.
      layer: what the names of a layer's tensors begin with.
      rules: of one layer. Those whose leaf a configuration does not have do not apply.
    """

    table: str
    head: str
    final_norm: str
    layer: str
    rules: tuple[Rule, ...]

    def all_rules(self) -> Iterator[Rule]:
        """In the order in which they are written."""
        yield Rule(self.table, "V D", "embedding", "V D")
        for rule in self.rules:
            yield Rule(self.layer + rule.name, rule.stored, f"layers/{rule.leaf}", f"L {rule.axes}")
        yield Rule(self.final_norm, "D", "final_norm/scale", "D")
        yield Rule(self.head, "V D", "unembedding", "V D")


@dataclass(frozen=True)
class Part:
    """A run of rows of a stored tensor, and where in the tree it lies.

    Attributes:
      rows: of the stored tensor.
      leaf, index: the part is `leaf[index]`.
      split: the shape of that, with an axis for every letter.
      order: puts those axes into the stored order.
    """

    rows: slice
    leaf: str
    index: tuple[int | slice, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]

    def in_stored_order(self, part: np.ndarray) -> np.ndarray:
        """`leaf[index]` with its axes as in the file: in C order it has the values of the rows."""
        return part.reshape(self.split).transpose(self.order)


@dataclass(frozen=True)
class Placement:
    """One stored tensor: its name, its shape, and its parts from the first row to the last."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def _norm(name: str, leaf: str, axis: str = "D") -> Rule:
    return Rule(f"{name}.weight", axis, f"{leaf}/scale", axis)


_Q = Rule("self_attn.q_proj.weight", "N*H D", "attention/q", "D N H")
_K = Rule("self_attn.k_proj.weight", "K*H D", "attention/k", "D K H")
_V = Rule("self_attn.v_proj.weight", "K*H D", "attention/v", "D K H")
_O = Rule("self_attn.o_proj.weight", "D N*H", "attention/o", "N H D")
_GATE_UP = Rule("mlp.gate_up_proj.weight", "c*F D", "feed_forward/gate_up", "D c F")
_DOWN = Rule("mlp.down_proj.weight", "D F", "feed_forward/down", "F D")

_ATTENTION = (
    *(_Q, _K, _V, _O),
    Rule("self_attn.q_proj.bias", "N*H", "attention/q_bias", "N H"),
    Rule("self_attn.k_proj.bias", "K*H", "attention/k_bias", "K H"),
    Rule("self_attn.v_proj.bias", "K*H", "attention/v_bias", "K H"),
    Rule("self_attn.o_proj.bias", "D", "attention/o_bias", "D"),
)
_FUSED_ATTENTION = (*(rule._replace(name="self_attn.qkv_proj.weight") for rule in (_Q, _K, _V)), _O)
_HEAD_NORMS = (
    _norm("self_attn.q_norm", "attention/q_norm", "H"),
    _norm("self_attn.k_norm", "attention/k_norm", "H"),
)
_PROJECTION_NORMS = (
    _norm("self_attn.q_norm", "attention/q_norm", "N*H"),
    _norm("self_attn.k_norm", "attention/k_norm", "K*H"),
)
_MLP = (
    Rule("mlp.gate_proj.weight", "F D", "feed_forward/gate_up", "D 0 F"),
    Rule("mlp.up_proj.weight", "F D", "feed_forward/gate_up", "D 1 F"),
    _DOWN,
    Rule("mlp.gate_proj.bias", "F", "feed_forward/gate_up_bias", "0 F"),
    Rule("mlp.up_proj.bias", "F", "feed_forward/gate_up_bias", "1 F"),
    Rule("mlp.down_proj.bias", "D", "feed_forward/down_bias", "D"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    expert = f"{block}.experts.{{E}}"
    return (
        Rule(f"{block}.gate.weight", "E D", "feed_forward/router", "D E"),
        Rule(f"{expert}.{gate}.weight", "F D", "feed_forward/gate_up", "E D 0 F"),
        Rule(f"{expert}.{up}.weight", "F D", "feed_forward/gate_up", "E D 1 F"),
        Rule(f"{expert}.{down}.weight", "D F", "feed_forward/down", "E F D"),
    )


# As transformers 5 holds experts in memory, and in files with their conversion left out.
_STACKED_EXPERTS = (
    Rule("mlp.gate.weight", "E D", "feed_forward/router", "D E"),
    Rule("mlp.experts.gate_up_proj", "E c*F D", "feed_forward/gate_up", "E D c F"),
    Rule("mlp.experts.down_proj", "E D F", "feed_forward/down", "E F D"),
)
# The second norm of a layer has one name and two meanings: before the feed-forward here ...
_PRE_NORMS = (
    _norm("input_layernorm", "attention_norm"),
    _norm("post_attention_layernorm", "feed_forward_norm"),
)
# ... and on what leaves attention here.
_POST_NORMS = (
    _norm("post_attention_layernorm", "attention_post_norm"),
    _norm("post_feedforward_layernorm", "feed_forward_post_norm"),
)
_FOUR_NORMS = (
    _norm("input_layernorm", "attention_norm"),
    _norm("pre_feedforward_layernorm", "feed_forward_norm"),
    *_POST_NORMS,
)
_PLAIN = (*_PRE_NORMS, *_ATTENTION, *_MLP)

# What transformers writes into files, by model type.
_LAYERS: dict[str, tuple[Rule, ...]] = {
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": (*_PLAIN, *_HEAD_NORMS),
    "gemma": _PLAIN,
    "gemma2": (*_FOUR_NORMS, *_ATTENTION, *_MLP),
    "gemma3_text": (*_FOUR_NORMS, *_ATTENTION, *_HEAD_NORMS, *_MLP),
    "phi3": (*_PRE_NORMS, *_FUSED_ATTENTION, _GATE_UP, _DOWN),
    "olmo2": (*_POST_NORMS, *_ATTENTION, *_PROJECTION_NORMS, *_MLP),
    "mixtral": (*_PRE_NORMS, *_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")),
    "qwen3_moe": (
        *_PRE_NORMS,
        *_ATTENTION,
        *_HEAD_NORMS,
        *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
}

# Rotary pairs are neighbouring channels in both: the llama family alone.
_PAIRED_Q = Rule("attention.wq.weight", "N*h*p D", "attention/q", "D N p h")
_PAIRED_K = Rule("attention.wk.weight", "K*h*p D", "attention/k", "D K p h")
META = Naming(
    table="tok_embeddings.weight",
    head="output.weight",
    final_norm="norm.weight",
    layer="layers.{L}.",
    rules=(
        _norm("attention_norm", "attention_norm"),
        _norm("ffn_norm", "feed_forward_norm"),
        _PAIRED_Q,
        _PAIRED_K,
        _V._replace(name="attention.wv.weight"),
        _O._replace(name="attention.wo.weight"),
        _MLP[0]._replace(name="feed_forward.w1.weight"),
        _MLP[1]._replace(name="feed_forward.w3.weight"),
        _DOWN._replace(name="feed_forward.w2.weight"),
    ),
)
GGUF = Naming(
    table="token_embd.weight",
    head="output.weight",
    final_norm="output_norm.weight",
    layer="blk.{L}.",
    rules=(
        _norm("attn_norm", "attention_norm"),
        _norm("ffn_norm", "feed_forward_norm"),
        _PAIRED_Q._replace(name="attn_q.weight"),
        _PAIRED_K._replace(name="attn_k.weight"),
        _V._replace(name="attn_v.weight"),
        _O._replace(name="attn_output.weight"),
        _MLP[0]._replace(name="ffn_gate.weight"),
        _MLP[1]._replace(name="ffn_up.weight"),
        _DOWN._replace(name="ffn_down.weight"),
    ),
)


def hugging_face(model_type: str, stored: Collection[str] = ()) -> Naming:
    """The names of a family: as `stored` has them where there is a choice, else as written."""
    rules = _LAYERS[model_type]
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in stored):
        experts = any("{E}" in rule.name for rule in rules)
        kept = tuple(rule for rule in rules if not rule.leaf.startswith("feed_forward/"))
        rules = (*kept, *_STACKED_EXPERTS) if experts else rules
    # A model saved without its head (LlamaModel) has the names of its insides.
    prefix = "" if "embed_tokens.weight" in stored else "model."
    return Naming(
        table=f"{prefix}embed_tokens.weight",
        head="lm_head.weight",
        final_norm=f"{prefix}norm.weight",
        layer=f"{prefix}layers.{{L}}.",
        rules=rules,
    )


def placements(config: DecoderConfig, naming: Naming) -> list[Placement]:
    """Every stored tensor of the model, in the order in which they are written.

    Of a leaf that has no rule in `naming` there is no part: `uncovered` finds those.
    """
    shapes = leaf_shapes(config)
    letters = _sizes(config)
    rows: dict[str, list[tuple[Rule, dict[str, int]]]] = {}
    present = (rule for rule in naming.all_rules() if rule.leaf in shapes)
    for in_layer, group in groupby(present, lambda rule: "{L}" in rule.name):
        rules = list(group)
        for layer in range(letters["L"] if in_layer else 1):
            for rule in rules:
                for expert in range(letters["E"] if "{E}" in rule.name else 1):
                    name = rule.name.format(L=layer, E=expert)
                    rows.setdefault(name, []).append((rule, {"L": layer, "E": expert}))
    return [_placement(name, rules, letters) for name, rules in rows.items()]


def _sizes(config: DecoderConfig) -> dict[str, int]:
    attention, moe = config.attention, config.moe
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "L": config.num_hidden_layers,
        "N": attention.num_attention_heads,
        "K": attention.num_key_value_heads,
        "H": attention.head_dim,
        "h": attention.head_dim // 2,
        "E": moe.num_experts if moe else 0,
        "F": moe.moe_intermediate_size if moe else config.feed_forward.intermediate_size,
        "c": 2,
        "p": 2,
    }


def _placement(
    name: str, rules: list[tuple[Rule, dict[str, int]]], letters: dict[str, int]
) -> Placement:
    parts = []
    first = 0
    for rule, place in rules:
        stored = [axis.split("*") for axis in rule.stored.split()]
        shape = [math.prod(letters[letter] for letter in axis) for axis in stored]
        # An axis whose number is in the tensor's name is an index, and so is a digit.
        at = {axis: place[axis] for axis in "LE" if f"{{{axis}}}" in rule.name}
        axes = rule.axes.split()
        whole = slice(None)
        index = [at.get(axis, int(axis) if axis.isdigit() else whole) for axis in axes]
        while index and index[-1] == whole:
            index.pop()
        kept = " ".join(axis for axis in axes if axis not in at and not axis.isdigit())
        # Letters that are neighbours on both sides stay one axis, which copies faster.
        for axis in stored:
            kept = kept.replace(" ".join(axis), "*".join(axis))
        left = kept.split()
        order = [
            name
            for axis in stored
            for name in (["*".join(axis)] if "*".join(axis) in left else axis)
        ]
        parts.append(
            Part(
                rows=slice(first, first + shape[0]),
                leaf=rule.leaf,
                index=tuple(index),
                split=tuple(math.prod(letters[x] for x in axis.split("*")) for axis in left),
                order=tuple(left.index(axis) for axis in order),
            )
        )
        first += shape[0]
    return Placement(name, (first, *shape[1:]), tuple(parts))


def uncovered(config: DecoderConfig, placed: Iterable[Placement]) -> list[str]:
    """The leaves of which some element has no source, or two: none, unless a family cannot be."""
    covered: Counter[str] = Counter()
    seen = set()
    twice = set()
    for placement in placed:
        for part in placement.parts:
            covered[part.leaf] += math.prod(part.split)
            key = (part.leaf, str(part.index))  # Slices do not hash.
            twice |= {part.leaf} if key in seen else set()
            seen.add(key)
    shapes = leaf_shapes(config)
    return [leaf for leaf in shapes if leaf in twice or covered[leaf] != math.prod(shapes[leaf])]


def leaf_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """`config.parameter_shapes()` with the path of every leaf for its key."""
    return {"/".join(path): shape for path, shape in flatten(config.parameter_shapes())}
