"""Loading and saving without PyTorch: what lands where, and what is refused."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits

import jaxblock.checkpoint.save
from jaxblock.checkpoint import CheckpointError, copying, load_checkpoint, save_checkpoint
from jaxblock.checkpoint.safetensors_file import open_safetensors, write_safetensors
from jaxblock.ops.rotary import rotary_frequencies
from jaxblock.parameters import flatten, unflatten

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
L, D, N, K, H, F, V = 3, 12, 6, 2, 4, 16, 13
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "rms_norm_eps": 1e-5,
}


def random_llama(dtype=BFLOAT16, **sizes):
    """The tensors of a llama without biases and tie, by their names in transformers' files."""
    s = {"L": L, "D": D, "N": N, "K": K, "H": H, "F": F, "V": V} | sizes
    random = np.random.default_rng(7)

    def draw(*shape):
        return random.standard_normal(shape).astype(dtype)

    tensors = {"model.embed_tokens.weight": draw(s["V"], s["D"])}
    for layer in range(s["L"]):
        shapes = {
            "input_layernorm": (s["D"],),
            "post_attention_layernorm": (s["D"],),
            "self_attn.q_proj": (s["N"] * s["H"], s["D"]),
            "self_attn.k_proj": (s["K"] * s["H"], s["D"]),
            "self_attn.v_proj": (s["K"] * s["H"], s["D"]),
            "self_attn.o_proj": (s["D"], s["N"] * s["H"]),
            "mlp.gate_proj": (s["F"], s["D"]),
            "mlp.up_proj": (s["F"], s["D"]),
            "mlp.down_proj": (s["D"], s["F"]),
        }
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
    return tensors | {"model.norm.weight": draw(s["D"]), "lm_head.weight": draw(s["V"], s["D"])}


def write_file(path, tensors):
    entries = {name: (x.dtype, x.shape, lambda x=x: x) for name, x in tensors.items()}
    write_safetensors(path, entries, {"format": "pt"})


def write_safetensors_folder(folder, tensors, model_type="llama", **changes):
    folder.mkdir(exist_ok=True)
    entries = {"model_type": model_type, **SIZES, "tie_word_embeddings": False, **changes}
    (folder / "config.json").write_text(json.dumps(entries))
    write_file(folder / "model.safetensors", tensors)
    return folder


def load(folder, tensors, model_type="llama", /, *, arguments=(), **changes):
    write_safetensors_folder(folder, tensors, model_type, **changes)
    return load_checkpoint(folder, **dict(arguments))


def refused(folder, tensors, model_type="llama", /, *, arguments=(), **changes):
    """All findings, in one text."""
    write_safetensors_folder(folder, tensors, model_type, **changes)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(folder, **dict(arguments))
    assert raised.value.findings
    return "\n".join(raised.value.findings)


def assert_same_tree(params, expected):
    ours, theirs = dict(flatten(params)), dict(flatten(expected))
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        assert_same_bits(leaf, theirs[path])


def stored(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in open_safetensors(path, []).items():
            found[name] = np.array(tensor.read())
    return found


# --- What lands where ----------------------------------------------------------------------------


def test_every_layer_lands_in_its_slice(tmp_path):
    # B103: ten comes after nine, not after one.
    tensors = {
        name: np.full_like(x, int(name.split(".")[2])) if ".layers." in name else x
        for name, x in random_llama(np.float32, L=12).items()
    }
    calls = []
    arguments = {"progress": lambda done, total: calls.append((done, total))}
    checkpoint = load(tmp_path, tensors, num_hidden_layers=12, arguments=arguments)
    for leaf in jax.tree.leaves(checkpoint.params["layers"]):
        for layer in range(12):
            assert (np.asarray(leaf)[layer] == layer).all()
    report = checkpoint.report
    assert (report.num_tensors, report.num_leaves) == (3 + 12 * 9, 11)
    num_bytes = sum(x.nbytes for x in tensors.values())
    assert report.num_bytes == num_bytes
    assert str(report).startswith(
        f"llama, a folder of transformers: 111 tensors ({num_bytes / 1e6:,.1f} MB) in "
        "model.safetensors to 11 leaves (11 float32)\nnot tied: two tables"
    )
    assert calls == sorted(calls) and calls[-1] == (num_bytes, num_bytes)


def test_kernels_turn_by_name_and_not_by_shape(tmp_path):
    # B21, B104: every axis is 4, so nothing but the rule says which is which.
    sizes = {"L": 4, "D": 4, "N": 1, "K": 1, "H": 4, "F": 4, "V": 4}
    tensors = random_llama(np.float32, **sizes)
    square = {
        "hidden_size": 4,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 4,
        "num_hidden_layers": 4,
        "vocab_size": 4,
    }
    params = load(tmp_path, tensors, **square).params
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    for layer in range(4):
        attention = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])[
            "attention"
        ]
        feed_forward = {
            "gate": params["layers"]["feed_forward"]["gate_up"][layer, :, 0],
            "up": params["layers"]["feed_forward"]["gate_up"][layer, :, 1],
            "down": params["layers"]["feed_forward"]["down"][layer],
        }
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            kernel = np.asarray(attention[name]).reshape(4, 4)
            stored_kernel = tensors[f"{prefix}.self_attn.{name}_proj.weight"]
            np.testing.assert_allclose(x @ kernel, x @ stored_kernel.T, rtol=1e-5, atol=1e-6)
            assert_same_bits(kernel, stored_kernel.T)
        for name, kernel in feed_forward.items():
            assert_same_bits(kernel, tensors[f"{prefix}.mlp.{name}_proj.weight"].T)


def fused(tensors):
    """The same model as phi3 has it."""
    result = {name: x for name, x in tensors.items() if "_proj" not in name or "o_proj" in name}
    for layer in range(L):
        prefix = f"model.layers.{layer}"
        rows = [tensors[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
        result[f"{prefix}.self_attn.qkv_proj.weight"] = np.concatenate(rows)
        rows = [tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        result[f"{prefix}.mlp.gate_up_proj.weight"] = np.concatenate(rows)
        name = f"{prefix}.mlp.down_proj.weight"
        result[name] = tensors[name]
    return result


def test_fused_tensors(tmp_path):
    # B20, B23.
    tensors = random_llama()
    apart = load(tmp_path / "llama", tensors)
    folder = tmp_path / "phi3"
    together = load(folder, fused(tensors), "phi3")
    before = (folder / "model.safetensors").read_bytes()
    assert_same_tree(together.params, apart.params)
    assert_same_tree(load_checkpoint(folder).params, apart.params)
    assert (folder / "model.safetensors").read_bytes() == before
    assert together.report.num_tensors == 3 + L * 6 and apart.report.num_tensors == 3 + L * 9

    wrong = fused(tensors)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    wrong[name] = wrong[name][:-1]
    text = refused(folder, wrong, "phi3")
    assert (
        f"{name} must have the shape [40, 12] (rows 0 to 23 q, rows 24 to 31 k, rows 32 to 39 v); "
        "got [39, 12] in"
    ) in text


def test_names_of_experts(tmp_path):
    # B24: w1 is gate, w3 up, w2 down; F = D and 2 F = D too, so shapes cannot tell.
    for F in (4, 8):
        random = np.random.default_rng(F)
        E, D = 3, 8
        gate, up = random.standard_normal((2, L, E, F, D)).astype(np.float32)
        down = random.standard_normal((L, E, D, F)).astype(np.float32)
        router = random.standard_normal((L, E, D)).astype(np.float32)
        base = random_llama(np.float32, D=D)
        base = {name: x for name, x in base.items() if ".mlp." not in name}
        each, stacked = dict(base), dict(base)
        for layer in range(L):
            block = f"model.layers.{layer}.block_sparse_moe"
            each[f"{block}.gate.weight"] = router[layer]
            for e in range(E):
                each[f"{block}.experts.{e}.w1.weight"] = gate[layer, e]
                each[f"{block}.experts.{e}.w3.weight"] = up[layer, e]
                each[f"{block}.experts.{e}.w2.weight"] = down[layer, e]
            block = f"model.layers.{layer}.mlp"
            stacked[f"{block}.gate.weight"] = router[layer]
            both = np.concatenate([gate[layer], up[layer]], axis=1)
            stacked[f"{block}.experts.gate_up_proj"] = both
            stacked[f"{block}.experts.down_proj"] = down[layer]
        sizes = {
            "hidden_size": D,
            "intermediate_size": F,
            "num_local_experts": E,
            "num_experts_per_tok": 2,
        }
        one = load(tmp_path, each, "mixtral", **sizes)
        other = load(tmp_path, stacked, "mixtral", **sizes)
        assert_same_tree(one.params, other.params)
        layers = one.params["layers"]["feed_forward"]
        assert_same_bits(layers["gate_up"][:, :, :, 0], gate.swapaxes(2, 3))
        assert_same_bits(layers["gate_up"][:, :, :, 1], up.swapaxes(2, 3))
        assert_same_bits(layers["down"], down.swapaxes(2, 3))
        assert_same_bits(layers["router"], router.swapaxes(1, 2))
        save_checkpoint(tmp_path / "saved", other.config, other.params)
        assert stored(tmp_path / "saved").keys() == each.keys()


def test_arrays_of_a_fresh_tree_are_its_own(tmp_path):
    # B72: tied, and donated to a jitted step as it comes.
    tensors = random_llama(np.float32)
    del tensors["lm_head.weight"]
    params = load(tmp_path, tensors, tie_word_embeddings=True).params
    before = {name: x.copy() for name, x in stored(tmp_path).items()}
    leaves = jax.tree.leaves(params)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves) == 10
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)
    for _ in range(3):
        params = step(params)
    assert_same_bits(params["embedding"], 8 * before["model.embed_tokens.weight"])
    for name, x in stored(tmp_path).items():
        assert_same_bits(x, before[name])


# --- Dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strips_make_no_difference(dtype):
    # Longer and wider than a strip; as in the rules: a kernel, rotary pairs, experts, one axis.
    for shape, order in (
        ((700, 300), (1, 0)),
        ((65, 4100), (1, 0)),
        ((200, 1024), (1, 0)),
        ((200, 1024), (0, 1)),
        ((3, 70, 2, 500), (3, 0, 2, 1)),
        ((2, 300, 400), (0, 2, 1)),
        ((3, 2, 200, 350), (0, 3, 1, 2)),
        ((200_000,), (0,)),
    ):
        values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        leaf = copying.empty([shape[axis] for axis in order], values.dtype)
        assert leaf.ctypes.data % 64 == 0
        copying.copy(leaf.transpose(np.argsort(order)), values.reshape(-1, shape[-1]))
        assert_same_bits(leaf, values.transpose(order))
        back = np.empty_like(values)
        copying.copy(back, leaf.transpose(np.argsort(order)))
        assert_same_bits(back, values)


def hand_made(path, dtype, data, shape):
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}})
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


def test_dtypes_stay_leaf_by_leaf(tmp_path):
    # B83, and norms in float32 beside kernels in bfloat16.
    tensors = random_llama()
    tensors["model.norm.weight"] = np.array([1, -3] * (D // 2), BFLOAT16)
    assert tensors["model.norm.weight"].tobytes()[:4] == bytes.fromhex("803f40c0")
    for name, x in tensors.items():
        if "layernorm" in name:
            tensors[name] = x.astype(np.float32)
        if "down_proj" in name:
            tensors[name] = x.astype(np.float16)
    checkpoint = load(tmp_path, tensors)
    assert checkpoint.report.dtypes == {"bfloat16": 8, "float32": 2, "float16": 1}
    assert checkpoint.params["final_norm"]["scale"].dtype == jnp.bfloat16
    assert checkpoint.params["final_norm"]["scale"].tolist() == [1, -3] * (D // 2)
    save_checkpoint(tmp_path / "saved", checkpoint.config, checkpoint.params)
    for name, x in stored(tmp_path / "saved").items():
        assert_same_bits(x, tensors[name])
    # transformers casts all to it, and float32 loses nothing.
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"


def test_several_dtypes_in_one_leaf(tmp_path):
    tensors = random_llama()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float16)
    checkpoint = load(tmp_path, tensors)
    gate_up = checkpoint.params["layers"]["feed_forward"]["gate_up"]
    assert gate_up.dtype == np.float32
    assert_same_bits(gate_up[1, :, 1], tensors[name].T.astype(np.float32))
    name = "model.layers.2.mlp.gate_proj.weight"
    assert_same_bits(gate_up[2, :, 0], tensors[name].T.astype(np.float32))
    assert "layers/feed_forward/gate_up is float32" in str(checkpoint.report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", [np.float32, BFLOAT16, np.float16], ids=str)
def test_casts_round_once(source, dtype, tmp_path):
    tensors = random_llama(source)
    # Halfway between two bfloat16 numbers, but for a bit that float16 would lose.
    if source == np.float32:
        tensors["model.norm.weight"][:2] = [1 + 2**-8 + 2**-20, 1 + 2**-8]
    checkpoint = load(tmp_path, tensors, arguments={"dtype": dtype})
    assert checkpoint.report.dtypes == {dtype: 11}
    for leaf, name in (
        ("final_norm", "model.norm.weight"),
        ("embedding", "model.embed_tokens.weight"),
    ):
        actual = jax.tree.leaves(checkpoint.params[leaf])[0]
        exact = tensors[name].astype(np.float64)
        assert_same_bits(actual, exact.astype(np.float32).astype(dtype))
        if source == np.float32 and dtype == "bfloat16" and leaf == "final_norm":
            assert actual[:2].tolist() == [1 + 2**-7, 1]


def test_dtypes_that_are_refused(tmp_path, x64):
    for dtype in (np.int64, np.float64, np.bool_):
        tensors = random_llama()
        tensors["model.norm.weight"] = np.ones(D, dtype)
        text = refused(tmp_path, tensors)
        assert (
            "model.norm.weight must be of one of the dtypes float32, float16, bfloat16; got "
            f"{np.dtype(dtype)} in" in text
        )
    tensors = random_llama(np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    text = refused(tmp_path, tensors, arguments={"dtype": "float16"})
    assert "model.layers.1.mlp.up_proj.weight must fit into float16" in text
    assert load_checkpoint(tmp_path, dtype="float64").params["embedding"].dtype == np.float64
    with jax.enable_x64(False), pytest.raises(ValueError, match="dtype must be one of float32"):
        load_checkpoint(tmp_path, dtype="float64")
    with pytest.raises(ValueError, match="got dtype=int32"):
        load_checkpoint(tmp_path, dtype=np.int32)
    # B83: a dtype that NumPy does not have.
    write_safetensors_folder(tmp_path, tensors)
    hand_made(tmp_path / "model.safetensors", "F8_E4M3", b"\0" * 4, [4])
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load_checkpoint(tmp_path)


# --- Names, shapes, biases -----------------------------------------------------------------------


def test_all_findings_come_at_once(tmp_path):
    # B11, B45, B102.
    tensors = random_llama()
    tensors["model.norm.bias"] = np.zeros(D, np.float32)
    tensors["model.layers.0.input_layernorm.bias"] = np.zeros(D, np.float32)
    tensors["model.layers.3.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"]
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.1.self_attn.o_proj.weight"] = np.zeros((N * H, D), np.float32)
    findings = refused(tmp_path, tensors).splitlines()
    assert sorted(finding.split(":")[0].split(";")[0] for finding in findings) == [
        "model.layers.0.input_layernorm.bias is unexpected",
        "model.layers.1.self_attn.o_proj.weight must have the shape [12, 24]",
        "model.layers.2.mlp.up_proj.weight is missing",
        "model.layers.3.mlp.up_proj.weight is unexpected",
        "model.norm.bias is unexpected",
    ]
    assert "got [24, 12] in" in findings[-1]
    # With a key that is not understood, files that cannot be read.
    write_safetensors_folder(tmp_path, tensors, rope_theta="large")
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(tmp_path)
    text = str(raised.value)
    assert "config.json: rope_theta must be" in text and "model.safetensors" in text


def test_what_only_the_configuration_claims_costs_nothing(tmp_path):
    tensors = random_llama()
    for name in list(tensors):
        if ".mlp." in name:
            tensors[name.replace(".mlp.", ".mlp.experts.0.")] = tensors.pop(name)
    sizes = {"num_experts": 2**31 - 1, "num_experts_per_tok": 1, "moe_intermediate_size": F}
    text = refused(tmp_path, tensors, "qwen3_moe", **sizes)
    assert "3 layers of 2147483647 experts must have a tensor each; got" in text
    # A table of 2^30 frequencies is not computed to be compared with one of 2.
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    table = {name: np.ones(2, np.float32)}
    sizes = {"vocab_size": 2**31 - 1, "head_dim": 2**31 - 2, "num_attention_heads": 2**31 - 1}
    sizes |= {"num_key_value_heads": 1, "hidden_size": 2**31 - 1}
    text = refused(tmp_path, random_llama() | table, **sizes)
    assert f"{name} must be the rotary table" in text
    assert "model.embed_tokens.weight must have the shape [2147483647, 2147483647]" in text


def with_biases(tensors, names):
    biases = {}
    for name, x in tensors.items():
        if any(f"{part}_proj" in name for part in names):
            biases[name.replace("weight", "bias")] = x[:, 0].copy()
    return tensors | biases


def test_biases(tmp_path):
    # B46: qwen2 has three, exactly.
    tensors = random_llama()
    three = with_biases(tensors, "qkv")
    params = load(tmp_path, three, "qwen2").params["layers"]["attention"]
    name = "model.layers.2.self_attn.q_proj.bias"
    assert_same_bits(params["q_bias"][2], three[name].reshape(N, H))
    assert "o_bias" not in params
    text = refused(tmp_path, with_biases(tensors, "qkvo"), "qwen2")
    assert "model.layers.0.self_attn.o_proj.bias is unexpected" in text
    text = refused(tmp_path, with_biases(tensors, "qk"), "qwen2")
    assert "model.layers.0.self_attn.v_proj.bias is missing" in text
    # B47: and llama has what its flags say.
    text = refused(tmp_path, three)
    assert "model.layers.1.self_attn.k_proj.bias is unexpected" in text
    every = with_biases(tensors, ["q", "k", "v", "o", "gate", "up", "down"])
    checkpoint = load(tmp_path, every, attention_bias=True, mlp_bias=True)
    save_checkpoint(tmp_path / "saved", checkpoint.config, checkpoint.params)
    back = stored(tmp_path / "saved")
    assert back.keys() == every.keys()
    for name, x in every.items():
        assert_same_bits(back[name], x)
    text = refused(tmp_path, every, attention_bias=True, mlp_bias=False)
    assert "mlp.up_proj.bias is unexpected" in text and "q_proj.bias" not in text


def test_the_second_norm_of_another_family(tmp_path):
    # B50.
    tensors = random_llama()
    for layer in range(L):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.post_feedforward_layernorm.weight"] = tensors.pop(
            f"{prefix}.input_layernorm.weight"
        )
        tensors[f"{prefix}.self_attn.q_norm.weight"] = np.ones(N * H, BFLOAT16)
        tensors[f"{prefix}.self_attn.k_norm.weight"] = np.ones(K * H, BFLOAT16)
    text = refused(tmp_path, tensors)
    assert "got model_type='llama' and the names of olmo2" in text
    assert "model.layers.0.input_layernorm.weight is missing" in text
    assert "model.layers.0.post_feedforward_layernorm.weight is unexpected" in text
    layers = load(tmp_path, tensors, "olmo2").params["layers"]
    name = "model.layers.1.post_attention_layernorm.weight"
    assert_same_bits(layers["attention_post_norm"]["scale"][1], tensors[name])
    # As gemma2 has it, the norm of that name is the same one, and another stands before the
    # feed-forward.
    for layer in range(L):
        prefix = f"model.layers.{layer}"
        del tensors[f"{prefix}.self_attn.q_norm.weight"]
        del tensors[f"{prefix}.self_attn.k_norm.weight"]
        for name in ("input_layernorm", "pre_feedforward_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = np.full(D, layer, BFLOAT16)
    checkpoint = load(tmp_path, tensors, "gemma2")
    layers = checkpoint.params["layers"]
    name = "model.layers.1.post_attention_layernorm.weight"
    assert_same_bits(layers["attention_post_norm"]["scale"][1], tensors[name])
    assert (layers["feed_forward_norm"]["scale"][2] == 2).all()
    # B03: the offset comes with the family, and the scales stay as they are in the file.
    assert checkpoint.config.norm.scale_offset == 1.0


def test_rotary_tables_in_old_files(tmp_path):
    # B102.
    tensors = random_llama()
    table = np.asarray(rotary_frequencies(H, theta=10000.0))
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(L)]
    for dtype in (np.float32, np.float16, BFLOAT16):
        checkpoint = load(tmp_path, tensors | dict.fromkeys(names, table.astype(dtype)))
        assert "inv_freq and 2 more, the rotary table" in str(checkpoint.report)
        assert checkpoint.report.num_tensors == len(tensors)
    for wrong in (table * np.float32(1.0001), table[:-1], table.astype(np.int32)):
        text = refused(tmp_path, tensors | {names[1]: wrong})
        assert f"{names[1]} must be the rotary table of the configuration" in text
    text = refused(tmp_path, tensors | {names[0].replace(".0.", ".7."): table})
    assert "model.layers.7.self_attn.rotary_emb.inv_freq is unexpected" in text


# --- The tie -------------------------------------------------------------------------------------


def test_ties(tmp_path):
    # B60, B61, B62; the table at the head of jaxblock/checkpoint/tie.py.
    tensors = random_llama()
    table, head = tensors["model.embed_tokens.weight"], tensors.pop("lm_head.weight")
    equal, other = tensors | {"lm_head.weight": table}, tensors | {"lm_head.weight": head}

    def tie(tensors, flag, override=None):
        arguments = {"tie": override}
        checkpoint = load(tmp_path, tensors, tie_word_embeddings=flag, arguments=arguments)
        assert checkpoint.config.tie_word_embeddings == ("unembedding" not in checkpoint.params)
        return checkpoint

    checkpoint = tie(tensors, True)
    assert checkpoint.config.tie_word_embeddings and not checkpoint.report.dropped
    checkpoint = tie(equal, True)
    assert checkpoint.report.dropped == ("lm_head.weight, equal to model.embed_tokens.weight",)
    text = refused(tmp_path, other, tie_word_embeddings=True)
    assert "lm_head.weight must equal model.embed_tokens.weight" in text and "tie=False" in text
    text = refused(tmp_path, tensors, tie_word_embeddings=False)
    assert "lm_head.weight must be in the files" in text and "pass tie=True" in text
    for tensors_with_head in (equal, other):
        unembedding = tie(tensors_with_head, False).params["unembedding"]
        assert_same_bits(unembedding, tensors_with_head["lm_head.weight"])
    assert "although they are equal" in tie(equal, False).report.tie

    assert tie(tensors, False, True).config.tie_word_embeddings
    assert not tie(other, True, False).config.tie_word_embeddings
    assert "although it is not" in str(tie(other, True, True).report)
    text = refused(tmp_path, tensors, tie_word_embeddings=True, arguments={"tie": False})
    assert "lm_head.weight must be in the files" in text and "pass" not in text

    # One table in the file, and tied again.
    checkpoint = tie(equal, True)
    save_checkpoint(tmp_path / "saved", checkpoint.config, checkpoint.params)
    assert "lm_head.weight" not in stored(tmp_path / "saved")
    assert load_checkpoint(tmp_path / "saved").config == checkpoint.config
    # Equal values of another dtype are equal.
    checkpoint = tie(tensors | {"lm_head.weight": table.astype(np.float32)}, True)
    assert checkpoint.report.dropped


# --- Meta ----------------------------------------------------------------------------------------

META_SIZES = {"D": 24, "N": 6, "K": 2, "H": 4, "F": 32, "V": 14}
META_PARAMS = {
    "dim": 24,
    "n_layers": L,
    "n_heads": 6,
    "n_kv_heads": 2,
    "multiple_of": 32,
    "ffn_dim_multiplier": 0.3,
    "norm_eps": 1e-5,
    "vocab_size": -1,
}
META_HF = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 14,
}


def meta_shards(tensors, *, shards=2, table_axis=1, heads=N, key_heads=K, head_dim=H):
    """The shards of Meta's that hold the same model: rows of q and k interleaved, then all cut."""

    def interleave(x, heads):
        halves = x.reshape(heads, 2, head_dim // 2, -1)
        pairs = [halves[:, half, pair] for pair in range(head_dim // 2) for half in range(2)]
        return np.stack(pairs, axis=1).reshape(x.shape)

    names = {
        "embed_tokens": ("tok_embeddings", table_axis),
        "norm": ("norm", None),
        "lm_head": ("output", 0),
        "input_layernorm": ("attention_norm", None),
        "post_attention_layernorm": ("ffn_norm", None),
        "q_proj": ("attention.wq", 0),
        "k_proj": ("attention.wk", 0),
        "v_proj": ("attention.wv", 0),
        "o_proj": ("attention.wo", 1),
        "gate_proj": ("feed_forward.w1", 0),
        "up_proj": ("feed_forward.w3", 0),
        "down_proj": ("feed_forward.w2", 1),
    }
    result = [{} for _ in range(shards)]
    for name, x in tensors.items():
        *_, short, _ = name.split(".")
        meta, axis = names[short]
        if ".layers." in name:
            meta = f"layers.{name.split('.')[2]}.{meta}"
        if short in ("q_proj", "k_proj"):
            x = interleave(x, heads if short == "q_proj" else key_heads)
        pieces = [x] * shards if axis is None else np.split(x, shards, axis)
        for shard, piece in zip(result, pieces, strict=True):
            shard[f"{meta}.weight"] = piece
    return result


def write_meta(folder, shards, params):
    folder.mkdir(exist_ok=True)
    for number, shard in enumerate(shards):
        write_file(folder / f"consolidated.{number:02d}.safetensors", shard)
    (folder / "params.json").write_text(json.dumps(params))
    return folder


@pytest.mark.parametrize("table_axis", [0, 1])
def test_meta(table_axis, tmp_path):
    # Llama 1 and 2 cut the table by columns, Llama 3 by rows.
    tensors = random_llama(**META_SIZES)
    expected = load(tmp_path / "hf", tensors, **META_HF)
    shards = meta_shards(tensors, table_axis=table_axis)
    for shard in shards:  # As Llama 2 has it.
        shard["rope.freqs"] = np.asarray(rotary_frequencies(H, theta=1e4)).astype(BFLOAT16)
    folder = write_meta(tmp_path / "meta", shards, META_PARAMS)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config == expected.config
    assert_same_tree(checkpoint.params, expected.params)
    report = str(checkpoint.report)
    assert "2 shards" in report and "halves of a head" in report and "rope.freqs" in report
    assert "by what they hold" in checkpoint.report.tie

    one = meta_shards(tensors, shards=1)
    assert_same_tree(
        load_checkpoint(write_meta(tmp_path / "one", one, META_PARAMS)).params, expected.params
    )


def test_meta_ties_by_what_the_tables_hold(tmp_path):
    tensors = random_llama(**META_SIZES)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    params = META_PARAMS | {"vocab_size": 14, "use_scaled_rope": True}
    folder = write_meta(tmp_path, meta_shards(tensors, table_axis=0), params)
    checkpoint = load_checkpoint(folder, rope_scaling_factor=32.0)
    assert checkpoint.config.tie_word_embeddings
    assert checkpoint.report.dropped == ("output.weight, equal to tok_embeddings.weight",)
    assert checkpoint.config.layer_kinds[0].rotary.scaling["factor"] == 32.0
    assert not load_checkpoint(folder, rope_scaling_factor=8, tie=False).config.tie_word_embeddings
    with pytest.raises(CheckpointError, match="rope_scaling_factor is missing"):
        load_checkpoint(folder)


def test_meta_that_does_not_fit(tmp_path):
    tensors = random_llama(**META_SIZES)
    shards = meta_shards(tensors)
    # B30: the size that the file gives, against the one that the formula gives.
    write_meta(tmp_path, shards, META_PARAMS | {"ffn_dim_multiplier": 1.0})
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(tmp_path)
    assert "layers.0.feed_forward.w1.weight must have the shape [64, 24]; got [32, 24]" in str(
        raised.value
    )
    shards[1]["layers.0.attention_norm.weight"] = np.zeros(24, BFLOAT16)
    shards[1]["layers.1.attention.wo.weight"] = np.zeros((24, 11), BFLOAT16)
    del shards[1]["layers.2.attention.wq.weight"]
    write_meta(tmp_path, shards, META_PARAMS)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(tmp_path)
    text = str(raised.value)
    assert "layers.0.attention_norm.weight must be the same in every shard" in text
    assert "layers.1.attention.wo.weight must be cut into equal pieces" in text
    assert "layers.2.attention.wq.weight must be in every one of the 2 shards" in text
    with pytest.raises(
        CheckpointError, match="rope_scaling_factor must come with a folder of Meta"
    ):
        load_checkpoint(write_safetensors_folder(tmp_path / "hf", tensors), rope_scaling_factor=8.0)


# --- Shards --------------------------------------------------------------------------------------


def test_shards_that_are_not_whole(tmp_path):
    # B100.
    tensors = random_llama()
    config = load(tmp_path / "one", tensors).config
    params = load_checkpoint(tmp_path / "one").params
    folder = tmp_path / "shards"
    save_checkpoint(folder, config, params, max_shard_size=2500)
    assert_same_tree(load_checkpoint(folder).params, params)
    second = sorted(folder.glob("*.safetensors"))[1]
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{second.name}.*cut off"):
        load_checkpoint(folder)
    second.unlink()
    with pytest.raises(CheckpointError, match=second.name):
        load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="which is not there|got no"):
        load_checkpoint(tmp_path / "nowhere")


def test_damaged_files_are_refused_or_loaded_whole(tmp_path):
    # A bit of the header or of the configuration turned, or the end cut off: an error of ours, or
    # a model with every leaf (a digit of eps, for example, can be any other).
    tensors = {name: x for name, x in random_llama(L=1).items() if name != "lm_head.weight"}
    folder = write_safetensors_folder(
        tmp_path, tensors, num_hidden_layers=1, tie_word_embeddings=True
    )
    random = np.random.default_rng(0)
    outcomes = {"refused": 0, "loaded": 0}
    for name in ("model.safetensors", "config.json"):
        whole = (folder / name).read_bytes()
        reach = int.from_bytes(whole[:8], "little") + 8 if name != "config.json" else len(whole)
        for case in range(80):
            damaged = bytearray(whole)
            if case % 8 == 0:
                del damaged[random.integers(len(whole)) :]
            else:
                damaged[random.integers(reach)] ^= 1 << random.integers(8)
            (folder / name).write_bytes(damaged)
            try:
                checkpoint = load_checkpoint(folder)
            except CheckpointError as error:
                assert error.findings
                outcomes["refused"] += 1
            else:
                shapes = dict(flatten(checkpoint.config.parameter_shapes()))
                leaves = dict(flatten(checkpoint.params))
                assert {path: leaf.shape for path, leaf in leaves.items()} == shapes
                outcomes["loaded"] += 1
        (folder / name).write_bytes(whole)
    assert outcomes["refused"] > 100 and outcomes["loaded"] > 0, outcomes


# --- Saving --------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path):
    """A checkpoint, loaded, and its folder."""
    folder = tmp_path / "small"
    checkpoint = load(folder, random_llama())
    return checkpoint.config, checkpoint.params, folder


def test_trees_that_do_not_fit(small, tmp_path):
    # B84.
    config, params, _ = small
    leaves = dict(flatten(params))
    leaves["layers", "attention", "q"] = leaves["layers", "attention", "q"][0]
    leaves["layers", "attention", "k"] = leaves["layers", "attention", "k"].astype(jnp.int32)
    leaves["layers", "feed_forward", "down"] = "a string"
    leaves["final_norm", "scale"] = 1.0
    leaves["final_norm", "bias"] = np.zeros(D, np.float32)
    del leaves["unembedding",]
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(tmp_path / "saved", config, unflatten(leaves))
    text = str(raised.value)
    for finding in (
        f"layers/attention/q must have the shape [{L}, {D}, {N}, {H}]; got [{D}, {N}, {H}]",
        "layers/attention/k must be of one of the dtypes float32, float16, bfloat16; got int32",
        "layers/feed_forward/down must be an array; got str",
        "final_norm/scale must be an array; got float",
        "final_norm/bias must be a leaf of this configuration",
        "params must have unembedding; it is missing",
    ):
        assert finding in text
    assert not (tmp_path / "saved").exists()
    with pytest.raises(CheckpointError, match="embedding must be known"):
        jax.jit(lambda tree: save_checkpoint(tmp_path / "saved", config, tree))(params)
    with pytest.raises(TypeError, match="params must be nested dicts; got list"):
        save_checkpoint(tmp_path / "saved", config, [params])
    # Two dtypes in one tensor of the file.
    together = load(tmp_path / "phi3", fused(random_llama()), "phi3")
    leaves = dict(flatten(together.params))
    leaves["layers", "attention", "k"] = leaves["layers", "attention", "k"].astype(jnp.float32)
    with pytest.raises(
        CheckpointError, match=r"the leaves in model\.layers\.0\.self_attn\.qkv_proj"
    ):
        save_checkpoint(tmp_path / "saved", together.config, unflatten(leaves))
    # A llama with a norm that no llama has.
    odd = dataclasses.replace(config, norm=dataclasses.replace(config.norm, pre_norm=False))
    with pytest.raises(CheckpointError, match="must"):
        save_checkpoint(tmp_path / "saved", odd, params)


def test_numpy_sharded_and_turned_arrays_are_written(small, tmp_path):
    config, params, folder = small
    expected = stored(folder)
    mesh = jax.make_mesh((2,), ("F",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "F"))

    def elsewhere(leaf):
        fits = leaf.ndim >= 2 and leaf.shape[1] % 2 == 0
        return jax.device_put(leaf, spread) if fits else np.asfortranarray(np.asarray(leaf))

    save_checkpoint(tmp_path / "saved", config, jax.tree.map(elsewhere, params))
    back = stored(tmp_path / "saved")
    assert back.keys() == expected.keys()
    for name, x in expected.items():
        assert_same_bits(back[name], x)


def test_padding_is_not_written(small, tmp_path):
    from jaxblock.vocabulary import pad_vocabulary

    config, params, folder = small
    padded, wide = pad_vocabulary(config, params, 8)
    assert padded.num_valid == V and wide["embedding"].shape[0] == 16
    save_checkpoint(tmp_path / "saved", padded, wide)
    back = load_checkpoint(tmp_path / "saved")
    assert back.config == config
    assert_same_tree(back.params, params)


def test_sizes_of_shards(small, tmp_path):
    config, params, _ = small
    calls = []
    save_checkpoint(
        tmp_path / "saved",
        config,
        params,
        max_shard_size="2.5 kB",
        progress=lambda done, total: calls.append((done, total)),
    )
    index = json.loads((tmp_path / "saved" / "model.safetensors.index.json").read_text())
    total = index["metadata"]["total_size"]
    assert total == sum(x.nbytes for x in stored(tmp_path / "saved").values())
    assert calls == sorted(calls) and calls[-1] == (total, total)
    for file in set(index["weight_map"].values()):
        tensors = open_safetensors(tmp_path / "saved" / file, [])
        assert sum(tensor.read().nbytes for tensor in tensors.values()) <= 2500
    # A tensor above the limit has a file of its own.
    save_checkpoint(tmp_path / "saved", config, params, max_shard_size=1)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == 3 + 9 * L
    for size in ("5", "5XB", "GB", 0, -1, True, 1.5, "0GB", None):
        with pytest.raises(ValueError, match="max_shard_size must be"):
            save_checkpoint(tmp_path / "saved", config, params, max_shard_size=size)


def test_a_crash_leaves_the_old_folder(small, monkeypatch):
    config, params, folder = small
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write = jaxblock.checkpoint.save.write_safetensors
    written = []

    def fail(path, tensors, metadata):
        write(path, tensors, metadata)
        written.append(path)
        if len(written) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(jaxblock.checkpoint.save, "write_safetensors", fail)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(folder, config, jax.tree.map(lambda x: x * 0, params), max_shard_size=2500)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(folder.parent.iterdir()) == [folder]


def test_tokenizer_files_come_along(small, tmp_path):
    config, params, folder = small
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("no part of it")
    save_checkpoint(tmp_path / "saved", config, params, tokenizer_from=folder)
    # And in place.
    save_checkpoint(folder, config, params, tokenizer_from=folder)
    expected = ["config.json", "model.safetensors", "tokenizer.json"]
    for place in (tmp_path / "saved", folder):
        assert sorted(path.name for path in place.iterdir()) == expected
    with pytest.raises(CheckpointError, match="tokenizer_from must be a folder with tokenizer"):
        save_checkpoint(tmp_path / "saved", config, params, tokenizer_from=tmp_path / "none")


# --- Memory --------------------------------------------------------------------------------------

PEAK = """
import resource, sys
import jax
from jaxblock.checkpoint import load_checkpoint, save_checkpoint
folder, allowed = sys.argv[1], int(sys.argv[2])
jax.device_put(1.0).block_until_ready()
load_checkpoint(sys.argv[3])  # Threads, and whatever else is made once.

def own():  # Private memory; pages of a mapped file are the system's.
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["VmData"].split()[0]) * 1024

limit = own() + allowed
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
config, params, _ = load_checkpoint(folder)
save_checkpoint(sys.argv[4], config, params)
print("torch" in sys.modules, "transformers" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_memory(tmp_path):
    sizes = {"L": 6, "D": 512, "N": 8, "K": 8, "H": 64, "F": 1024, "V": 4096}
    entries = {
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 1024,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    }
    tensors = {
        name: np.ones(x.shape, x.dtype) for name, x in random_llama(np.float32, **sizes).items()
    }
    del tensors["lm_head.weight"]
    folder = write_safetensors_folder(tmp_path / "large", tensors, **entries)
    write_safetensors_folder(tmp_path / "small", random_llama())
    params = sum(x.nbytes for x in tensors.values())
    layer = sum(x.nbytes for name, x in tensors.items() if ".layers.1." in name)
    assert params > 50e6 and layer < params / 6

    def run(allowed):
        command = [sys.executable, "-c", PEAK, folder, str(allowed), tmp_path / "small"]
        return subprocess.run(
            [*command, tmp_path / "saved"], capture_output=True, text=True, timeout=120
        )

    enough = run(params + layer)
    assert enough.returncode == 0, enough.stderr
    assert enough.stdout.split() == ["False", "False"]
    # The control: with less than the parameters it cannot go well.
    assert run(params - 4 * layer).returncode != 0
