"""Tiny random models of every family, and their tensors as the parameter tree, leaf by leaf.

The tree is made here a second time, independently of `jaxblock.checkpoint`: from the names that
transformers 5.24 holds in memory, with nothing but stack, reshape and transpose, so that gradients
can be sent through as well as values.
"""

import numpy as np
import torch
from test_config import LINEAR, LLAMA3, YARN, tiny
from test_config_transformers import build, model_of, randomize

from jaxblock.config import DecoderConfig
from jaxblock.config.families import FAMILIES
from jaxblock.parity.arrays import to_jax

# Odd sizes, grouped heads, head_dim other than D / N; windows are 4, shorter than the tests' rows.
SIZES = {
    "vocab_size": 29,
    "hidden_size": 18,
    "intermediate_size": 23,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
# Rows go beyond the length that a scaled rotary table was made from.
SHORT = {"original_max_position_embeddings": 4}
CHANGES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3 | SHORT},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "qwen3": {"tie_word_embeddings": True, "rope_scaling": YARN | SHORT},
    "gemma": {},
    "gemma2": {
        "sliding_window": 4,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 2.0,
        "num_hidden_layers": 4,
    },
    "gemma3_text": {"sliding_window": 4, "sliding_window_pattern": 2, "rope_scaling": LINEAR},
    "phi3": {"sliding_window": 4, "partial_rotary_factor": 0.6},
    "olmo2": {"attention_bias": True},
    "mixtral": {"sliding_window": 4},
    "qwen3_moe": {"norm_topk_prob": True},
}
assert set(CHANGES) == set(FAMILIES)


def tiny_entries(model_type, **changes):
    """A config.json of the sizes above."""
    return tiny(model_type, **{**SIZES, **CHANGES[model_type], **changes})


def tiny_model(model_type, **changes):
    """A model of transformers with random norms and biases too, and its configuration."""
    entries = tiny_entries(model_type, **changes)
    torch_config = build(entries)
    torch_config._attn_implementation = "eager"  # Gemma 2's cap is in no other.
    model = randomize(model_of(torch_config))
    assert model.config._attn_implementation == "eager"
    return model, DecoderConfig.from_hf(entries)


def tensors_of(model):
    """Its parameters by name; a tied table once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def tree_of(tensors, config):
    """The named tensors of a model, values or gradients, as the parameter tree of torch tensors."""
    rest = dict(tensors)
    attention, moe = config.attention, config.moe
    D, L = config.hidden_size, config.num_hidden_layers
    N, K, H = attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim

    def take(name):
        return rest.pop(name)

    def stack(name, turn=lambda tensor: tensor):
        return torch.stack([turn(take(f"model.layers.{layer}.{name}")) for layer in range(L)])

    def heads(tensor):
        return tensor.T.reshape(D, -1, H)

    layers = {"attention": {}, "feed_forward": {}}
    if config.model_type == "phi3":
        qkv = stack("self_attn.qkv_proj.weight")
        for name, rows in zip("qkv", qkv.split([N * H, K * H, K * H], dim=1), strict=True):
            layers["attention"][name] = torch.stack([heads(layer) for layer in rows])
    else:
        for name in "qkv":
            layers["attention"][name] = stack(f"self_attn.{name}_proj.weight", heads)
    layers["attention"]["o"] = stack("self_attn.o_proj.weight", lambda o: o.T.reshape(N, H, D))
    for name in "qkv" if attention.qkv_bias else "":
        bias = stack(f"self_attn.{name}_proj.bias", lambda bias: bias.reshape(-1, H))
        layers["attention"][f"{name}_bias"] = bias
    if attention.o_bias:
        layers["attention"]["o_bias"] = stack("self_attn.o_proj.bias")
    for name in ("q_norm", "k_norm") if attention.qk_norm else ():
        layers["attention"][name] = {"scale": stack(f"self_attn.{name}.weight")}

    if moe is not None:
        F, E = moe.moe_intermediate_size, moe.num_experts
        layers["feed_forward"] = {
            "router": stack("mlp.gate.weight", lambda router: router.T),
            "gate_up": stack(
                "mlp.experts.gate_up_proj",
                lambda experts: experts.reshape(E, 2, F, D).permute(0, 3, 1, 2),
            ),
            "down": stack("mlp.experts.down_proj", lambda experts: experts.mT),
        }
    elif config.model_type == "phi3":
        layers["feed_forward"]["gate_up"] = stack(
            "mlp.gate_up_proj.weight", lambda fused: fused.reshape(2, -1, D).permute(2, 0, 1)
        )
        layers["feed_forward"]["down"] = stack("mlp.down_proj.weight", lambda down: down.T)
    else:
        parts = ("weight", "bias") if config.feed_forward.bias else ("weight",)
        for part in parts:
            gate, up = (stack(f"mlp.{name}_proj.{part}") for name in ("gate", "up"))
            fused = torch.stack([gate, up], dim=1)
            if part == "weight":
                layers["feed_forward"]["gate_up"] = fused.permute(0, 3, 1, 2)
                layers["feed_forward"]["down"] = stack("mlp.down_proj.weight", lambda down: down.T)
            else:
                layers["feed_forward"]["gate_up_bias"] = fused
                layers["feed_forward"]["down_bias"] = stack("mlp.down_proj.bias")

    norms = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    if config.norm.post_norm:
        norms = {
            "attention_post_norm": "post_attention_layernorm",
            "feed_forward_post_norm": "post_feedforward_layernorm",
        }
        if config.norm.pre_norm:
            norms["attention_norm"] = "input_layernorm"
            norms["feed_forward_norm"] = "pre_feedforward_layernorm"
    for name, theirs in norms.items():
        layers[name] = {"scale": stack(f"{theirs}.weight")}

    tree = {
        "embedding": take("model.embed_tokens.weight"),
        "layers": layers,
        "final_norm": {"scale": take("model.norm.weight")},
    }
    if not config.tie_word_embeddings:
        tree["unembedding"] = take("lm_head.weight")
    assert not rest, sorted(rest)
    return tree


def map_tree(function, tree):
    """The tree with every leaf replaced."""
    return {
        name: map_tree(function, leaf) if isinstance(leaf, dict) else function(leaf)
        for name, leaf in tree.items()
    }


def jax_tree_of(model, config):
    """The parameter tree of a model, for jaxblock."""
    return map_tree(lambda leaf: to_jax(leaf.contiguous()), tree_of(tensors_of(model), config))


def ragged(seed=0, rows=3, length=9):
    """Tokens and mask: a full row, one padded left, one padded right."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, SIZES["vocab_size"], (rows, length))
    mask = np.ones((rows, length), bool)
    mask[1, :3] = False
    mask[2, 7:] = False
    return tokens, mask
