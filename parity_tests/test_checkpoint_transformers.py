"""Checkpoints of transformers' own models: to the tree and back, to the bit, in every family."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from helpers import assert_same_bits
from test_config_transformers import EAGER
from tiny_models import map_tree, tensors_of, tiny_model, tree_of

from jaxblock.checkpoint import CheckpointError, layout, load_checkpoint, save_checkpoint
from jaxblock.checkpoint.safetensors_file import open_safetensors
from jaxblock.config.families import FAMILIES
from jaxblock.parameters import flatten
from jaxblock.parity.arrays import to_numpy

pytestmark = pytest.mark.torch
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Beside what tiny_models has of each family: biases, ties and shapes that change what is in a file.
VARIANTS = [
    *((model_type, {}) for model_type in FAMILIES),
    ("llama", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    ("gemma2", {"tie_word_embeddings": False}),
    ("phi3", {"num_key_value_heads": 6}),
    ("qwen3_moe", {"attention_bias": True}),
]
every_variant = pytest.mark.parametrize("model_type, changes", VARIANTS, ids=repr)


def stored(folder):
    """Every tensor of a folder: dtype, shape and bytes by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        findings = []
        for name, tensor in open_safetensors(path, findings).items():
            assert name not in found
            found[name] = (tensor.dtype, tensor.shape, tensor.read().tobytes())
        assert not findings
    return found


def assert_same_tree(params, expected):
    ours, theirs = dict(flatten(params)), dict(flatten(expected))
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        assert isinstance(leaf, jax.Array)
        assert_same_bits(leaf, to_numpy(theirs[path]))


def loaded_by_transformers(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **EAGER
    )
    assert not any(info.values()), info
    return model


@every_variant
def test_every_family_to_the_tree_and_back(model_type, changes, tmp_path):
    model, config = tiny_model(model_type, **changes)
    model = model.to(torch.bfloat16)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs)
    checkpoint = load_checkpoint(theirs)
    own = ("max_position_embeddings", "special_tokens")  # Defaults of the class, written out.
    kept = {name: getattr(config, name) for name in own}
    assert dataclasses.replace(checkpoint.config, **kept) == config
    assert_same_tree(checkpoint.params, tree_of(tensors_of(model), config))
    report = checkpoint.report
    assert report.num_leaves == len(list(flatten(checkpoint.params)))
    assert report.num_tensors == len(stored(theirs)) and not report.dropped

    save_checkpoint(ours, checkpoint.config, checkpoint.params)
    assert stored(ours) == stored(theirs)
    again = loaded_by_transformers(ours)
    assert again.dtype == torch.bfloat16
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == config.tie_word_embeddings
    back = load_checkpoint(ours)
    assert back.config == checkpoint.config
    assert_same_tree(back.params, checkpoint.params)


@pytest.mark.parametrize("model_type", ["gemma3_text", "phi3", "mixtral"])
def test_in_shards_both_ways(model_type, tmp_path):
    model, config = tiny_model(model_type)
    expected = tree_of(tensors_of(model), config)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs, max_shard_size="20KB")
    checkpoint = load_checkpoint(theirs)
    assert len(checkpoint.report.files) > 2
    assert_same_tree(checkpoint.params, expected)
    save_checkpoint(ours, checkpoint.config, checkpoint.params, max_shard_size="20KB")
    files = sorted(path.name for path in ours.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    again = loaded_by_transformers(ours)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert_same_tree(load_checkpoint(ours).params, expected)


def test_a_fault_in_the_table_is_seen(monkeypatch, tmp_path):
    model, config = tiny_model("gemma2")
    model.save_pretrained(tmp_path)
    expected = tree_of(tensors_of(model), config)
    faults = {
        "gate and up": ("D 0 F", "D 1 F"),
        "norms": ("attention_post_norm/scale", "feed_forward_norm/scale"),
        "k and v": ("attention/k", "attention/v"),
    }
    rules = layout._LAYERS["gemma2"]
    for one, other in faults.values():
        swap = {one: other, other: one}
        wrong = tuple(
            rule._replace(leaf=swap.get(rule.leaf, rule.leaf), axes=swap.get(rule.axes, rule.axes))
            for rule in rules
        )
        monkeypatch.setitem(layout._LAYERS, "gemma2", wrong)
        with pytest.raises(AssertionError):
            assert_same_tree(load_checkpoint(tmp_path).params, expected)


def test_a_model_without_its_head(tmp_path):
    # Saved from the inside: names without "model.", and no head.
    model, config = tiny_model("gemma")
    model.model.save_pretrained(tmp_path)
    assert_same_tree(load_checkpoint(tmp_path).params, tree_of(tensors_of(model), config))


def test_experts_as_transformers_holds_them(tmp_path):
    for model_type in ("mixtral", "qwen3_moe"):
        model, config = tiny_model(model_type)
        folder = tmp_path / model_type
        model.save_pretrained(folder)
        tensors = {name: tensor.contiguous() for name, tensor in tensors_of(model).items()}
        assert any(name.endswith("mlp.experts.gate_up_proj") for name in tensors)
        from safetensors.torch import save_file

        save_file(tensors, folder / "model.safetensors")
        checkpoint = load_checkpoint(folder)
        assert_same_tree(checkpoint.params, tree_of(tensors, config))


# --- GGUF ----------------------------------------------------------------------------------------


def write_gguf(path, model, *, factors=None, keys=()):
    """As llama.cpp's converter writes a llama: rows of q and k permuted."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in keys:
        writer.add_uint32(key, value)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in tensors_of(model).items():
        name = name.removesuffix(".weight")
        layer = ""
        if name.startswith("model.layers."):
            _, _, number, name = name.split(".", 3)
            layer = f"blk.{number}."
        values, name = to_numpy(tensor), names[name]
        if name in heads:
            # Row j of the second half of a head goes next to row j of the first.
            rows = values.reshape(heads[name], 2, config.head_dim // 2, config.hidden_size)
            values = np.stack([rows[:, 0], rows[:, 1]], axis=2).reshape(values.shape)
        writer.add_tensor(f"{layer}{name}.weight", np.ascontiguousarray(values))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PLAIN = {"attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize("tied", [True, False])
def test_gguf(tied, tmp_path):
    model, config = tiny_model("llama", tie_word_embeddings=tied, rope_scaling=..., **PLAIN)
    path = tmp_path / "model.gguf"
    write_gguf(path, model)
    checkpoint = load_checkpoint(path)
    kept = {"max_position_embeddings": None, "special_tokens": config.special_tokens}
    assert dataclasses.replace(checkpoint.config, **kept) == config
    assert_same_tree(checkpoint.params, tree_of(tensors_of(model), config))
    # The other way: what transformers makes of the same folder.
    save_checkpoint(tmp_path / "hf", checkpoint.config, checkpoint.params)
    again = loaded_by_transformers(tmp_path / "hf")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_gguf_of_a_scaled_llama(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model, config = tiny_model(
        "llama", rope_scaling=scaling, rope_theta=500000.0, head_dim=64, **PLAIN
    )
    # As llama.cpp's converter computes them.
    wavelength = 2 * np.pi * 500000.0 ** (np.arange(0, 64, 2) / 64)
    smooth = np.clip((8192 / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    factors = (1.0 / ((1.0 - smooth) / 32.0 + smooth)).astype(np.float32)
    assert factors.min() == 1 and factors.max() == 32
    path = tmp_path / "model.gguf"
    write_gguf(path, model, factors=factors)
    checkpoint = load_checkpoint(path)
    assert checkpoint.config.layer_kinds == config.layer_kinds
    assert "rope_freqs.weight" in str(checkpoint.report)
    write_gguf(path, model, factors=factors * np.float32(1.001))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight must be the factors"):
        load_checkpoint(path)


def test_gguf_that_is_not_understood(tmp_path):
    model, _ = tiny_model("llama", rope_scaling=..., **PLAIN)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, keys=[("llama.expert_count", 8), ("llama.logit_scale", 1)])
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path)
    text = str(raised.value)
    assert "llama.expert_count must be 0" in text and "llama.logit_scale is neither" in text


# --- Meta's pickled shards -----------------------------------------------------------------------


def test_pickled_meta(tmp_path):
    from test_checkpoint import (
        META_HF,
        META_PARAMS,
        META_SIZES,
        meta_shards,
        random_llama,
        write_safetensors_folder,
    )

    from jaxblock.checkpoint import load_pickled_meta

    tensors = random_llama(**META_SIZES)
    for number, shard in enumerate(meta_shards(tensors)):
        content = {
            name: torch.from_numpy(np.array(value).view(np.int16)).view(torch.bfloat16)
            for name, value in shard.items()
        }
        torch.save(content, tmp_path / f"consolidated.{number:02d}.pth")
    (tmp_path / "params.json").write_text(json.dumps(META_PARAMS))
    with pytest.raises(CheckpointError, match="jaxblock convert"):
        load_checkpoint(tmp_path)
    write_safetensors_folder(tmp_path / "hf", tensors, **META_HF)
    checkpoint = load_pickled_meta(tmp_path)
    assert_same_tree(checkpoint.params, load_checkpoint(tmp_path / "hf").params)
    torch.save({"layers": print}, tmp_path / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth must be a file of tensors"):
        load_pickled_meta(tmp_path)


def test_dtypes_as_torch_rounds(tmp_path):
    model, config = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    for name in ("bfloat16", "float16"):
        checkpoint = load_checkpoint(tmp_path, dtype=getattr(jnp, name))
        rounded = map_tree(
            lambda leaf, name=name: leaf.to(getattr(torch, name)),
            tree_of(tensors_of(model), config),
        )
        assert_same_tree(checkpoint.params, rounded)
