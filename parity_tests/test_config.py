"""DecoderConfig: published files, what a configuration holds, and all that must be refused."""

import dataclasses
import json
import math
import pickle
from pathlib import Path

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxblock.config import ConfigError, DecoderConfig, LayerSegment, RopeScaling
from jaxblock.config.families import FAMILIES
from jaxblock.config.keys import WITHOUT_EFFECT, WITHOUT_EFFECT_AT

DATA = Path(__file__).parent / "data"
EXPECTED = json.loads((DATA / "configs.json").read_text())
ROWS = {name: row for name, row in EXPECTED.items() if name != "_about"}
HF_ROWS = {name: row for name, row in ROWS.items() if row["format"] == "config.json"}
META_ROWS = {name: row for name, row in ROWS.items() if row["format"] == "meta params.json"}
ABSENT = EXPECTED["_about"]["family_defaults_when_a_key_is_absent"]
CASES = json.loads((DATA / "config_cases.json").read_text())
FULL, SLIDING = "full_attention", "sliding_attention"

# The smallest file of each family: the sizes, the eps and nothing else. Sizes are 1, prime or odd
# where they may be.
SIZES = {
    "vocab_size": 13,
    "hidden_size": 12,
    "intermediate_size": 7,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-4,
}
MOE_SIZES = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 3}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.5}


def tiny(model_type, /, **changes):
    """The smallest file of a family, with changes; a value of `...` takes the key out."""
    entries = {"model_type": model_type, **SIZES}
    if model_type == "mixtral":
        entries |= {"num_local_experts": 5, "num_experts_per_tok": 2}
    if model_type == "qwen3_moe":
        entries |= MOE_SIZES
    entries |= changes
    return {key: value for key, value in entries.items() if value is not ...}


def read(model_type, /, **changes):
    return DecoderConfig.from_hf(tiny(model_type, **changes))


def findings(model_type, /, **changes):
    with pytest.raises(ConfigError) as raised:
        read(model_type, **changes)
    return raised.value.findings


def layer_types(config):
    return [config.layer_kinds[kind].layer_type for kind in config.layers]


def windows(config):
    return [config.layer_kinds[kind].window for kind in config.layers]


def rope(rotary):
    """A rotary table in the words of the expected rows."""
    return {"rope_type": "default", **(rotary.scaling or {}), "rope_theta": rotary.theta}


every_family = pytest.mark.parametrize("model_type", FAMILIES)


# --- Published files -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", HF_ROWS)
def test_published_config(name):
    row = HF_ROWS[name]
    config = DecoderConfig.from_hf(DATA / "configs" / name)
    norm, attention, moe = config.norm, config.attention, config.moe
    assert config.model_type == row["family"]
    assert config.num_parameters() == row["num_parameters"]
    assert config.tie_word_embeddings == row["tied"]
    wrong = dataclasses.replace(config, tie_word_embeddings=not row["tied"])
    assert wrong.num_parameters() == row["num_parameters_if_tie_is_wrong"]

    assert row["sizes"] == {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.feed_forward.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "vocab_size": config.vocab_size,
    }
    assert row["norm"] == {
        "cast": norm.cast,
        "scale_offset": norm.scale_offset,
        "initial_scale": norm.initial_scale,
        "eps": norm.eps,
        "per_layer": {
            (True, False): ["input_layernorm.weight", "post_attention_layernorm.weight"],
            (False, True): ["post_attention_layernorm.weight", "post_feedforward_layernorm.weight"],
            (True, True): [
                "input_layernorm.weight",
                "post_attention_layernorm.weight",
                "post_feedforward_layernorm.weight",
                "pre_feedforward_layernorm.weight",
            ],
        }[norm.pre_norm, norm.post_norm],
    }
    assert config.feed_forward.activation == row["activation"]
    assert row["biases"] == {
        "q": attention.qkv_bias,
        "k": attention.qkv_bias,
        "v": attention.qkv_bias,
        "o": attention.o_bias,
        "feed_forward": config.feed_forward.bias,
    }

    sizes = {kind.window for kind in config.layer_kinds} - {None}
    sliding = [layer for layer, window in enumerate(windows(config)) if window is not None]
    assert len(sizes) <= 1
    assert row["window"]["size"] == next(iter(sizes), None)
    named = {"all": list(range(config.num_hidden_layers)), "none": []}
    assert sliding == named.get(str(row["window"]["layers"]), row["window"]["layers"])

    by_type = {kind.layer_type: rope(kind.rotary) for kind in config.layer_kinds}
    expected = dict(row["rope"])
    if FULL in expected:
        assert by_type == expected
    else:
        expected.pop("partial_rotary_factor", None)
        assert all(table == expected for table in by_type.values())
    assert all(kind.rotary.rotary_dim == attention.head_dim for kind in config.layer_kinds)

    assert attention.softcap == row["attention_softcap"]
    assert config.final_softcap == row["final_softcap"]
    assert attention.scale == row["attention_scale"]
    if row["embed_scale"] is None:
        assert config.embed_scale is None
    else:
        scale = jax.numpy.float32(config.embed_scale)
        assert float(scale) == row["embed_scale"]["float32"]
        assert float(scale.astype("bfloat16")) == row["embed_scale"]["bfloat16"]

    shapes = config.parameter_shapes()["layers"]["attention"]
    if row["qk_norm"] is None:
        assert attention.qk_norm is None and "q_norm" not in shapes
    else:
        assert attention.qk_norm == row["qk_norm"]["axis"]
        assert shapes["q_norm"]["scale"][1:] == (row["qk_norm"]["q_length"],)
        assert shapes["k_norm"]["scale"][1:] == (row["qk_norm"]["k_length"],)
        assert (norm.cast, norm.scale_offset, norm.initial_scale) == tuple(
            row["qk_norm"][key] for key in ("cast", "scale_offset", "initial_scale")
        )
    if row["moe"] is None:
        assert moe is None
    else:
        assert moe.num_experts == row["moe"]["num_experts"]
        assert moe.num_experts_per_tok == row["moe"]["num_active"]
        assert moe.norm_topk_prob == row["moe"]["renormalize"]
        assert moe.moe_intermediate_size == row["moe"]["expert_intermediate_size"]


@pytest.mark.parametrize("name", META_ROWS)
def test_published_params(name):
    row = META_ROWS[name]
    scaled = row["rope_scaling_named_in_file"]
    counts = {}
    for tied in (False, True):
        config = DecoderConfig.from_meta(
            DATA / "configs" / name,
            tie_word_embeddings=tied,
            vocab_size=row["vocab_size_used_for_count"],
            rope_scaling_factor=32.0 if scaled else None,
        )
        counts[tied] = config.num_parameters()
    assert counts == {False: row["num_parameters_untied"], True: row["num_parameters_tied"]}
    assert config.model_type == row["family"]
    assert config.feed_forward.intermediate_size == row["intermediate_size"]
    assert config.attention.num_key_value_heads == row["num_key_value_heads"]
    assert config.attention.head_dim == row["head_dim"]
    assert config.norm.eps == row["rms_norm_eps"]
    (kind,) = config.layer_kinds
    assert kind.rotary.theta == row["rope_theta"]
    assert (kind.rotary.scaling is not None) == scaled


def test_both_files_of_one_model_describe_the_same_decoder():
    for name, meta, arguments in (
        ("llama-3.1-8b", "meta-llama-3.1-8b", {"rope_scaling_factor": 8}),
        ("llama-3.2-1b-instruct", "meta-llama-3.2-1b", {"rope_scaling_factor": 32}),
        ("llama-2-7b", "meta-llama-2-7b", {"vocab_size": 32000}),
    ):
        hf = DecoderConfig.from_hf(DATA / "configs" / f"{name}.json")
        other = DecoderConfig.from_meta(
            DATA / "configs" / f"{meta}.params.json",
            tie_word_embeddings=hf.tie_word_embeddings,
            max_position_embeddings=hf.max_position_embeddings,
            **arguments,
        )
        assert dataclasses.replace(other, special_tokens=hf.special_tokens) == hf


def test_the_incomplete_file_is_refused_for_what_it_lacks():
    name = "_v5-style-qwen2-excerpt.json"
    row = ROWS[name]
    with pytest.raises(ConfigError) as raised:
        DecoderConfig.from_hf(DATA / "configs" / name)
    found = [finding.split()[0] for finding in raised.value.findings]
    assert found == row["missing_keys"]
    entries = json.loads((DATA / "configs" / name).read_text())
    config = DecoderConfig.from_hf(entries | {"hidden_size": 1536, "intermediate_size": 8960})
    assert rope(config.layer_kinds[0].rotary) == row["rope"]
    assert config.tie_word_embeddings == row["tied"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case):
    (source,) = case["args"]
    if "error" in case["expect"]:
        with pytest.raises(ConfigError, match=case["expect"]["error"]):
            DecoderConfig.from_hf(source)
    else:
        assert DecoderConfig.from_hf(source).num_parameters() == case["expect"]["value"]


def test_every_published_file_and_case_was_read():
    assert (len(HF_ROWS), len(META_ROWS), len(CASES)) == (15, 4, 17)
    assert {row["family"] for row in HF_ROWS.values()} | {"gemma"} == set(FAMILIES)


# --- What a configuration is ---------------------------------------------------------------------


@every_family
def test_frozen_hashable_and_picklable(model_type):
    config, other = read(model_type), read(model_type, rms_norm_eps=1e-5)
    assert config == read(model_type) and hash(config) == hash(read(model_type))
    assert config != other
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 3


def test_a_static_argument_of_jit():
    traces = []

    @jax.jit
    def one(x):
        return x

    def scale(x, config):
        traces.append(config)
        return one(x) * config.attention.scale

    scale = jax.jit(scale, static_argnames="config")
    for factor in (8.0, 8.0, 32.0):
        scale(jax.numpy.ones(2), read("llama", rope_scaling={**LLAMA3, "factor": factor}))
    assert len(traces) == 2


def test_scaling_is_a_mapping_that_hashes():
    scaling = RopeScaling(rope_type="linear", factor=2.0)
    assert dict(scaling) == {"rope_type": "linear", "factor": 2.0} == scaling
    assert scaling == RopeScaling(factor=2.0, rope_type="linear")
    assert hash(scaling) == hash(RopeScaling(factor=2.0, rope_type="linear"))
    assert scaling != RopeScaling(rope_type="linear", factor=3.0)
    assert "factor" in scaling and len(scaling) == 2 and scaling.get("beta_fast") is None
    assert eval(repr(scaling)) == scaling


def test_parameter_shapes_are_the_documented_tree():
    llama = read("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    V, D, F, L, N, K, H = 13, 12, 7, 5, 3, 1, 6
    assert llama.parameter_shapes() == {
        "embedding": (V, D),
        "final_norm": {"scale": (D,)},
        "layers": {
            "attention_norm": {"scale": (L, D)},
            "feed_forward_norm": {"scale": (L, D)},
            "attention": {
                "q": (L, D, N, H),
                "k": (L, D, K, H),
                "v": (L, D, K, H),
                "o": (L, N, H, D),
                "q_bias": (L, N, H),
                "k_bias": (L, K, H),
                "v_bias": (L, K, H),
                "o_bias": (L, D),
            },
            "feed_forward": {
                "gate_up": (L, D, 2, F),
                "down": (L, F, D),
                "gate_up_bias": (L, 2, F),
                "down_bias": (L, D),
            },
        },
    }
    olmo2 = read("olmo2").parameter_shapes()
    assert olmo2["unembedding"] == (V, D)
    assert set(olmo2["layers"]) == {
        "attention",
        "attention_post_norm",
        "feed_forward",
        "feed_forward_post_norm",
    }
    assert olmo2["layers"]["attention"]["q_norm"] == {"scale": (L, N * H)}
    assert olmo2["layers"]["attention"]["k_norm"] == {"scale": (L, K * H)}
    gemma3 = read("gemma3_text").parameter_shapes()["layers"]
    assert {"attention_norm", "attention_post_norm", "feed_forward_norm"} < set(gemma3)
    assert gemma3["attention"]["k_norm"] == {"scale": (L, H)}
    assert read("qwen3_moe").parameter_shapes()["layers"]["feed_forward"] == {
        "router": (L, D, 5),
        "gate_up": (L, 5, D, 2, 3),
        "down": (L, 5, 3, D),
    }


# --- Layers --------------------------------------------------------------------------------------


def test_windows_of_qwen2():
    sliding = {"use_sliding_window": True, "sliding_window": 4}
    assert windows(read("qwen2", sliding_window=4)) == [None] * 5
    assert windows(read("qwen2", use_sliding_window=False, max_window_layers=0)) == [None] * 5
    assert windows(read("qwen2", **sliding, max_window_layers=2)) == [None] * 2 + [4] * 3
    deep = read("qwen2", **sliding, num_hidden_layers=30)
    assert windows(deep) == [None] * ABSENT["max_window_layers"]["qwen2"] + [4] * 2
    assert windows(read("qwen2", **sliding, max_window_layers=0)) == [4] * 5
    assert windows(read("qwen2", use_sliding_window=True, max_window_layers=0)) == [4096] * 5
    named = [SLIDING, FULL, FULL, SLIDING, FULL]
    config = read("qwen2", **sliding, max_window_layers=2, layer_types=named)
    assert windows(config) == [4, None, None, 4, None]
    assert config.layers == (0, 1, 1, 0, 1)


def test_windows_of_the_other_families():
    assert windows(read("mistral")) == [4096] * 5
    assert windows(read("mistral", sliding_window=None)) == [None] * 5
    for model_type in ("phi3", "mixtral"):
        assert windows(read(model_type)) == [None] * 5
        assert windows(read(model_type, sliding_window=3)) == [3] * 5
    assert windows(read("qwen3_moe")) == [None] * 5
    assert windows(read("qwen3_moe", use_sliding_window=True, sliding_window=3)) == [3] * 5
    assert windows(read("gemma2")) == [4096, None, 4096, None, 4096]
    assert windows(read("gemma3_text", num_hidden_layers=7)) == [4096] * 5 + [None, 4096]
    short = read("gemma3_text", sliding_window=3, sliding_window_pattern=2)
    assert windows(short) == [3, None, 3, None, 3]
    for model_type in ("llama", "olmo2", "gemma"):
        assert windows(read(model_type, sliding_window=None)) == [None] * 5


def test_layer_types_win_over_the_pattern():
    named = [FULL, SLIDING, FULL, FULL, FULL]
    for model_type, pattern in (("gemma2", {}), ("gemma3_text", {"sliding_window_pattern": 2})):
        config = read(model_type, layer_types=named, sliding_window=3, **pattern)
        assert layer_types(config) == named
    full = read("gemma2", layer_types=[FULL] * 5, sliding_window=None)
    assert len(full.layer_kinds) == 1 and windows(full) == [None] * 5
    assert full == read("gemma2", layer_types=[FULL] * 5)  # no layer has the window
    assert full.to_hf()["sliding_window"] == 4096  # transformers asks for one even so


def test_layer_types_that_say_nothing_new_are_accepted():
    assert read("llama", layer_types=[FULL] * 5) == read("llama")
    assert read("mistral", layer_types=[SLIDING] * 5) == read("mistral")


def test_segments_of_published_layers():
    def segments(name):
        return DecoderConfig.from_hf(DATA / "configs" / name).segments()

    assert segments("llama-2-7b.json") == (LayerSegment(0, (0,), 32),)
    assert segments("gemma-2-2b.json") == (LayerSegment(0, (0, 1), 13),)
    gemma3 = (LayerSegment(0, (0, 0, 0, 0, 0, 1), 4), LayerSegment(24, (0,), 2))
    assert segments("gemma-3-1b-it.json") == gemma3
    qwen2 = read("qwen2", use_sliding_window=True, max_window_layers=2)
    assert qwen2.segments() == (LayerSegment(0, (0,), 2), LayerSegment(2, (1,), 3))


@given(st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=40))
def test_segments_cover_the_layers_in_order(types):
    changes = {"use_sliding_window": True, "sliding_window": 4}
    config = read("qwen3", num_hidden_layers=len(types), layer_types=types, **changes)
    covered = []
    for segment in config.segments():
        assert segment.start == len(covered) and segment.pattern
        # What does not repeat is not unrolled more than it must be.
        assert segment.repeats > 1 or len(segment.pattern) == 1
        covered += segment.pattern * segment.repeats
    assert tuple(covered) == config.layers
    assert layer_types(config) == types


# --- Rotary: two spellings -----------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, LINEAR], ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name != "phi3"])
def test_old_and_new_spelling_are_one(model_type, scaling):
    table, both_kinds = {**scaling, "rope_theta": 5000.0}, {}
    if model_type == "gemma3_text":
        table, both_kinds = {FULL: table}, {"sliding_window_pattern": 2}
    spelled = {"rope_theta": 5000, "rope_scaling": scaling}
    old = read(model_type, **spelled, **both_kinds)
    assert read(model_type, rope_parameters=table, **both_kinds) == old
    assert read(model_type, rope_parameters=table, **spelled, **both_kinds) == old
    scaled = [kind for kind in old.layer_kinds if kind.rotary.scaling is not None]
    assert all(kind.rotary.scaling == scaling and kind.rotary.theta == 5000.0 for kind in scaled)
    if model_type == "gemma3_text":
        assert [kind.layer_type for kind in scaled] == [FULL]
    else:
        assert len(scaled) == len(old.layer_kinds)


def test_the_older_name_of_the_type():
    named = {**LINEAR, "type": "linear"}
    assert read("llama", rope_scaling=named) == read("llama", rope_scaling=LINEAR)
    del named["rope_type"]
    assert read("llama", rope_scaling=named) == read("llama", rope_scaling=LINEAR)


def test_a_factor_of_one_is_one():
    (kind,) = read("llama", rope_scaling={"rope_type": "linear", "factor": 1}).layer_kinds
    assert kind.rotary.scaling == {"rope_type": "linear", "factor": 1.0}


def test_no_scaling_in_all_its_spellings():
    plain = read("llama")
    for nothing in (None, {}, {"rope_type": "default"}, {"type": "default"}):
        assert read("llama", rope_scaling=nothing) == plain
        assert read("llama", rope_parameters=nothing) == plain
    assert plain.layer_kinds[0].rotary.scaling is None


@every_family
def test_the_family_has_its_own_base(model_type):
    expected = ABSENT["rope_theta"][model_type]
    if not isinstance(expected, dict):
        expected = dict.fromkeys([FULL, SLIDING], expected)
    for kind in read(model_type, num_hidden_layers=6).layer_kinds:  # Gemma 3's sixth is full.
        assert kind.rotary.theta == expected[kind.layer_type]


def test_gemma3_scales_its_full_layers_only():
    config = read(
        "gemma3_text",
        sliding_window_pattern=2,
        rope_theta=300000,
        rope_local_base_freq=2000,
        rope_scaling={"rope_type": "linear", "factor": 8},
    )
    sliding, full = config.layer_kinds
    assert (sliding.rotary.theta, sliding.rotary.scaling) == (2000.0, None)
    assert full.rotary.theta == 300000.0
    assert full.rotary.scaling == {"rope_type": "linear", "factor": 8.0}
    new = {
        SLIDING: {"rope_type": "default", "rope_theta": 2000.0},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 300000.0},
    }
    assert read("gemma3_text", sliding_window_pattern=2, rope_parameters=new) == config
    only_full = read("gemma3_text", sliding_window_pattern=2, rope_parameters={FULL: new[FULL]})
    assert only_full.layer_kinds[0].rotary.theta == 10000.0
    both = read(
        "gemma3_text",
        sliding_window_pattern=2,
        rope_parameters={SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}},
    )
    assert both.layer_kinds[0].rotary.scaling == {"rope_type": "linear", "factor": 2.0}
    assert DecoderConfig.from_hf(both.to_hf()) == both


def test_partial_rotary_of_phi3():
    for where in (
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.25}},
    ):
        config = read("phi3", head_dim=16, **where)
        assert config.layer_kinds[0].rotary.rotary_dim == 4
        assert DecoderConfig.from_hf(config.to_hf()) == config
    assert read("phi3", partial_rotary_factor=1) == read("phi3")
    assert read("llama", partial_rotary_factor=1.0) == read("llama")


@given(st.integers(1, 256), st.floats(0.0, 1.0))
@example(22, 15 / 22)  # int(44 * (30 / 44)) is 29.
def test_any_rotary_dim_can_be_written(half, share):
    head_dim, rotary_dim = 2 * half, 2 * max(1, round(half * share))
    config = read("phi3", head_dim=head_dim)
    (kind,) = config.layer_kinds
    rotary = dataclasses.replace(kind.rotary, rotary_dim=rotary_dim)
    config = dataclasses.replace(config, layer_kinds=(dataclasses.replace(kind, rotary=rotary),))
    assert DecoderConfig.from_hf(config.to_hf()) == config


def test_the_original_length_may_stand_outside():
    inside = read("llama", rope_scaling=LLAMA3)
    without = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    outside = {"original_max_position_embeddings": 16}
    assert read("llama", rope_scaling=without, **outside) == inside
    assert read("llama", rope_scaling=LLAMA3, **outside) == inside
    assert read("llama", **outside) == read("llama")


# --- Defaults of the families --------------------------------------------------------------------


@every_family
def test_defaults_of_a_family(model_type):
    config = read(model_type)
    tied = ABSENT["tie_word_embeddings"]
    assert set(tied) == set(FAMILIES)
    assert config.tie_word_embeddings == tied[model_type]
    assert config.attention.qkv_bias == (model_type == "qwen2")
    assert not config.attention.o_bias and not config.feed_forward.bias
    softcaps = ABSENT["softcaps"].get(model_type, {})
    assert config.attention.softcap == softcaps.get("attn_logit_softcapping")
    assert config.final_softcap == softcaps.get("final_logit_softcapping")
    scalar = ABSENT["query_pre_attn_scalar"].get(model_type, config.attention.head_dim)
    assert config.attention.query_pre_attn_scalar == scalar
    assert (config.moe is not None) == (model_type in ("mixtral", "qwen3_moe"))
    if config.moe is not None:
        assert config.moe.norm_topk_prob == (model_type == "mixtral")
    assert config.max_position_embeddings is None


def test_activations_by_name():
    def activation(model_type, **changes):
        return read(model_type, **changes).feed_forward.activation

    expected = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
    expected |= dict.fromkeys(["gelu_pytorch_tanh", "gelu_new"], "gelu_tanh")
    for name, kind in expected.items():
        both = {"hidden_act": name, "hidden_activation": name}
        assert activation("llama", hidden_act=name) == kind
        assert activation("gemma3_text", hidden_activation=name) == kind
        assert activation("gemma2", **both) == kind
        in_gemma = "gelu_tanh" if name == "gelu" else kind
        assert activation("gemma", hidden_act=name) == in_gemma
        assert activation("gemma", **both) == in_gemma
    assert activation("gemma", hidden_activation=None) == "gelu_tanh"
    assert activation("gemma2", hidden_act=None) == "gelu_tanh"


# --- Everything that must be refused -------------------------------------------------------------

REQUIRED = [key for key in SIZES if key not in ("num_key_value_heads", "head_dim")]


@every_family
@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_constant(model_type, key):
    (found,) = findings(model_type, **{key: ...})
    assert found.startswith(f"{key} is missing")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_missing_constant_of_the_experts(model_type, key):
    if model_type == "mixtral":
        key = {"num_experts": "num_local_experts"}.get(key, "num_experts_per_tok")
    (found,) = findings(model_type, **{key: ...})
    assert found.startswith(f"{key.replace('_local', '')} is missing")


@every_family
@pytest.mark.parametrize("key", REQUIRED)
def test_a_constant_of_the_wrong_kind(model_type, key):
    no_number = (None, True, False, "8", "", [8], {}, 0, -1, math.nan, math.inf, -math.inf, 10**400)
    no_size = (*no_number, 8.0, 2**31)
    for value in no_number if key == "rms_norm_eps" else no_size:
        (found,) = findings(model_type, **{key: value})
        assert found.startswith(f"{key} must be") and f"; got {key}=" in found


def test_the_wording_of_a_finding():
    (found,) = findings("llama", hidden_size=8.0)
    assert found == "hidden_size must be an integer from 1 to 2147483647; got hidden_size=8.0"
    with pytest.raises(ConfigError) as raised:
        read("llama", hidden_size=8.0)
    assert str(raised.value) == f"DecoderConfig.from_hf: {found}"


@every_family
def test_key_value_heads_and_head_dim_that_do_not_follow(model_type):
    defaults = FAMILIES[model_type].defaults
    for key in ("num_key_value_heads", "head_dim"):
        if key in defaults:
            assert read(model_type, **{key: ...}) is not None
        else:
            (found,) = findings(model_type, **{key: ...})
            assert found.startswith(f"{key} is missing")


def test_key_value_heads_and_head_dim_that_follow():
    config = read("llama", num_key_value_heads=None, head_dim=None)
    assert config.attention.num_key_value_heads == 3 and config.attention.head_dim == 4
    assert config == read("llama", num_key_value_heads=..., head_dim=...)
    assert read("qwen2", num_key_value_heads=None).attention.num_key_value_heads == 3
    assert read("olmo2", head_dim=None).attention.head_dim == 4
    for model_type in ("gemma", "mistral", "mixtral", "qwen3_moe"):
        (found,) = findings(model_type, num_key_value_heads=None)
        assert "num_key_value_heads" in found
    for model_type in ("gemma", "gemma2", "gemma3_text", "qwen3"):
        (found,) = findings(model_type, head_dim=None)
        assert "head_dim" in found


@every_family
@pytest.mark.parametrize(
    "key, value",
    [
        ("swiglu_limit", 7.0),
        ("swiglu_limit", None),
        ("hidden_dim", 8),
        ("norm_type", "layer_norm"),
        ("attention_multiplier", 1.0),
        ("", 1),
        ("Hidden_size", 12),
        ("text_config", {}),
    ],
)
def test_a_key_that_is_not_understood(model_type, key, value):
    (found,) = findings(model_type, **{key: value})
    assert found.startswith(f"{key} is neither understood nor known to be without effect")
    assert f"got {key}=" in found


@given(st.text(min_size=1), st.none() | st.booleans() | st.integers() | st.text())
def test_any_unknown_key_is_named(key, value):
    known = set(SIZES) | WITHOUT_EFFECT | set(WITHOUT_EFFECT_AT) | set(FAMILIES["llama"].defaults)
    known |= {"model_type", "architectures", "layer_types", "rope_scaling", "rope_parameters"}
    known |= {"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"}
    known |= {"partial_rotary_factor", "original_max_position_embeddings"}
    if key not in known:
        (found,) = findings("llama", **{key: value})
        assert found.startswith(f"{key} is neither understood")


@pytest.mark.parametrize(
    "key, neutral, other",
    [
        ("quantization_config", None, {"quant_method": "gptq"}),
        ("quantization_config", None, {}),
        ("compression_config", None, {"format": "int"}),
        ("is_encoder_decoder", False, True),
        ("is_encoder_decoder", False, 0),
        ("chunk_size_feed_forward", 0, 2),
        ("chunk_size_feed_forward", 0, False),
        ("per_layer_config", {}, {"0": {"hidden_size": 3}}),
        ("pruned_heads", {}, {"0": [1]}),
        ("rope_interleaved", False, True),
        ("use_mrope", False, True),
        ("use_bidirectional_attention", None, True),
        ("use_bidirectional_attention", False, "all"),
        ("add_cross_attention", False, True),
        ("tie_encoder_decoder", False, True),
    ],
)
@every_family
def test_a_key_that_has_an_effect_at_other_values(model_type, key, neutral, other):
    assert read(model_type, **{key: neutral}) == read(model_type)
    (found,) = findings(model_type, **{key: other})
    assert found.startswith(f"{key} must be")


@every_family
def test_the_whole_list_of_keys_without_effect(model_type):
    plain = read(model_type)
    for value in (None, True, 3, 0.5, "text", [1], {"a": 1}):
        assert read(model_type, **dict.fromkeys(WITHOUT_EFFECT, value)) == plain
    assert not WITHOUT_EFFECT & set(WITHOUT_EFFECT_AT)
    for family in FAMILIES.values():
        assert not WITHOUT_EFFECT & set(family.defaults)


FOREIGN = [
    ("llama", {"sliding_window": 4}),
    ("olmo2", {"sliding_window": 4}),
    ("gemma", {"sliding_window": 4}),
    ("llama", {"use_sliding_window": True}),
    ("llama", {"max_window_layers": 3}),
    ("mistral", {"attention_bias": True}),
    ("mixtral", {"attention_bias": True}),
    ("phi3", {"attention_bias": True}),
    ("phi3", {"attention_bias": None}),
    ("qwen2", {"attention_bias": True}),
    ("qwen2", {"attention_bias": False}),
    ("qwen2", {"qkv_bias": True}),
    ("mistral", {"mlp_bias": True}),
    ("qwen3", {"mlp_bias": True}),
    ("llama", {"query_pre_attn_scalar": 256}),
    ("llama", {"attn_logit_softcapping": 50.0}),
    ("llama", {"final_logit_softcapping": 30.0}),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    ("gemma", {"final_logit_softcapping": 30.0}),
    ("gemma2", {"use_sliding_window": False}),
    ("gemma2", {"sliding_window_pattern": 2}),
    ("gemma2", {"rope_local_base_freq": 10000.0}),
    ("llama", {"num_local_experts": 8}),
    ("mixtral", {"moe_intermediate_size": 3}),
    ("mixtral", {"norm_topk_prob": False}),
    ("llama", {"hidden_activation": "silu"}),
    ("qwen3_moe", {"shared_expert_intermediate_size": 3}),
]


@pytest.mark.parametrize("model_type, changes", FOREIGN, ids=repr)
def test_a_key_of_another_family(model_type, changes):
    (found,) = findings(model_type, **changes)
    assert next(iter(changes)) in found


WRONG = [
    ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ("llama", {"tie_word_embeddings": "true"}, "tie_word_embeddings"),
    ("llama", {"attention_bias": None}, "attention_bias"),
    ("llama", {"attention_bias": "q"}, "attention_bias"),
    ("llama", {"mlp_bias": 0}, "mlp_bias"),
    ("llama", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads"),
    ("llama", {"num_key_value_heads": 6}, "num_key_value_heads"),
    ("llama", {"num_attention_heads": 5, "head_dim": None}, "num_attention_heads"),
    ("llama", {"num_attention_heads": 5}, "num_attention_heads"),
    ("gemma2", {"num_attention_heads": 5}, "num_attention_heads"),
    ("olmo2", {"num_attention_heads": 5, "head_dim": ...}, "num_attention_heads"),
    ("llama", {"num_attention_heads": 24, "head_dim": None}, "num_attention_heads"),
    ("llama", {"head_dim": 5}, "head_dim"),
    ("llama", {"head_dim": 1}, "head_dim"),
    ("llama", {"hidden_size": 9, "head_dim": ...}, "head_dim"),
    ("llama", {"hidden_act": "relu"}, "hidden_act"),
    ("llama", {"hidden_act": "SiLU"}, "hidden_act"),
    ("llama", {"hidden_act": "gelu_fast"}, "hidden_act"),
    ("llama", {"hidden_act": "quick_gelu"}, "hidden_act"),
    ("llama", {"hidden_act": None}, "hidden_act"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
    ("gemma2", {"hidden_activation": None}, "hidden_activation"),
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma2", {"hidden_act": "silu"}, "hidden_act"),
    ("gemma2", {"hidden_act": "gelu"}, "hidden_act"),
    ("gemma2", {"hidden_act": "relu"}, "hidden_act"),
    ("gemma3_text", {"hidden_act": "gelu", "hidden_activation": "silu"}, "hidden_act"),
    ("gemma", {"hidden_activation": "silu"}, "hidden_activation"),
    ("gemma", {"hidden_act": "silu", "hidden_activation": "gelu_new"}, "hidden_activation"),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3_moe", {"hidden_act": "gelu_new"}, "hidden_act"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
    ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping"),
    ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping"),
    ("gemma3_text", {"final_logit_softcapping": False}, "final_logit_softcapping"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mistral", {"sliding_window": -1}, "sliding_window"),
    ("mistral", {"sliding_window": True}, "sliding_window"),
    ("qwen2", {"use_sliding_window": None}, "use_sliding_window"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
    ("qwen2", {"max_window_layers": None}, "max_window_layers"),
    ("qwen2", {"layer_types": [FULL] * 4}, "layer_types"),
    ("qwen2", {"layer_types": [FULL] * 6}, "layer_types"),
    ("qwen2", {"layer_types": [FULL] * 4 + ["chunked_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": FULL}, "layer_types"),
    ("qwen2", {"layer_types": [0] * 5}, "layer_types"),
    ("qwen2", {"layer_types": [SLIDING] * 5}, "sliding_window"),
    ("qwen2", {"layer_types": [SLIDING] * 5, "use_sliding_window": False}, "sliding_window"),
    (
        "qwen3",
        {"layer_types": [SLIDING] * 5, "use_sliding_window": True, "sliding_window": None},
        "sliding_window",
    ),
    ("mistral", {"layer_types": [FULL] * 5}, "layer_types"),
    ("mistral", {"layer_types": [SLIDING, FULL] * 2 + [SLIDING]}, "layer_types"),
    ("llama", {"layer_types": [SLIDING] * 5}, "layer_types"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("gemma3_text", {"sliding_window_pattern": None}, "sliding_window_pattern"),
    ("gemma3_text", {"_sliding_window_pattern": 2}, "_sliding_window_pattern"),
    (
        "qwen3_moe",
        {"use_sliding_window": True, "max_window_layers": 3},
        "max_window_layers",
    ),
    ("qwen3_moe", {"num_experts": 5, "num_local_experts": 4}, "num_experts"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts"),
    ("qwen3_moe", {"num_experts_per_tok": 6}, "num_experts_per_tok"),
    ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_moe", {"decoder_sparse_step": True}, "decoder_sparse_step"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob"),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings"),
    ("llama", {"max_position_embeddings": None}, "max_position_embeddings"),
    ("llama", {"max_position_embeddings": "2048"}, "max_position_embeddings"),
    ("llama", {"bos_token_id": "1"}, "bos_token_id"),
    ("llama", {"eos_token_id": [1, "2"]}, "eos_token_id"),
    ("llama", {"pad_token_id": True}, "pad_token_id"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    ("llama", {"architectures": ["LlamaForCausalLMEagle"]}, "architectures"),
    ("llama", {"architectures": ["MistralForCausalLM"]}, "architectures"),
    ("llama", {"architectures": "LlamaForCausalLM"}, "architectures"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
]


@pytest.mark.parametrize("model_type, changes, key", WRONG, ids=repr)
def test_a_value_that_is_refused(model_type, changes, key):
    (found,) = findings(model_type, **changes)
    assert f"{key}=" in found


ROPE_WRONG = [
    ({"rope_theta": 0}, "rope_theta"),
    ({"rope_theta": -10000.0}, "rope_theta"),
    ({"rope_theta": "10000"}, "rope_theta"),
    ({"rope_theta": None}, "rope_theta"),
    ({"rope_theta": True}, "rope_theta"),
    ({"rope_theta": math.nan}, "rope_theta"),
    ({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 20000.0}}, "rope_theta"),
    ({"rope_scaling": {"rope_theta": 5.0}, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta"),
    ({"rope_scaling": [1]}, "rope_scaling"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_parameters": 8.0}, "rope_parameters"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
    ({"rope_scaling": {"rope_type": "su"}}, "su"),
    ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 1, 1]}}, "mrope"),
    ({"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
    ({"rope_scaling": {"rope_type": None, "factor": 2.0}}, "rope_type"),
    ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "type"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "rope_scaling.factor"),
    ({"rope_scaling": {"rope_type": "default", "mrope_section": [2]}}, "mrope_section"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": {**LINEAR, "beta_fast": 32}}, "rope_scaling.beta_fast"),
    ({"rope_scaling": {**LINEAR, "original_max_position_embeddings": 8}}, "original_max"),
    ({"rope_scaling": {**LINEAR, "factor": 0}}, "rope_scaling.factor"),
    ({"rope_scaling": {**LINEAR, "factor": 0.5}}, "rope_scaling.factor"),
    ({"rope_scaling": {**LINEAR, "factor": -2.0}}, "rope_scaling.factor"),
    ({"rope_scaling": {**LINEAR, "factor": True}}, "rope_scaling.factor"),
    ({"rope_scaling": {**LINEAR, "factor": "2"}}, "rope_scaling.factor"),
    ({"rope_scaling": {**LINEAR, "factor": math.inf}}, "rope_scaling.factor"),
    ({"rope_scaling": {**LLAMA3, "mscale": 1.0}}, "rope_scaling.mscale"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
    ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192.0}}, "original_max"),
    ({"rope_scaling": {**YARN, "factor": None}}, "rope_scaling.factor"),
    ({"rope_scaling": {**YARN, "beta_slow": 40}}, "beta_slow"),
    ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast"),
    ({"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale_all_dim"),
    ({"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0}}, "mscale_all_dim"),
    ({"rope_scaling": {**YARN, "truncate": 1}}, "truncate"),
    ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, "attention_factor"),
    ({"rope_scaling": {**YARN, "low_freq_factor": 1.0}}, "low_freq_factor"),
    ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 2.0}}, "scaling"),
    ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "scaling"),
    ({"rope_scaling": LINEAR, "rope_parameters": YARN}, "scaling"),
    ({"rope_scaling": YARN, "original_max_position_embeddings": 8}, "original_max"),
    ({"original_max_position_embeddings": 0}, "original_max"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0}, "partial_rotary_factor"),
    ({"partial_rotary_factor": None}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
    ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "rope_parameters"),
    ({"rope_parameters": {"rope_theta": 9.0, SLIDING: {"rope_type": "default"}}}, "rope_param"),
    ({"rope_ratio": 2.0}, "rope_ratio"),
    ({"rotary_dim": 4}, "rotary_dim"),
]


@pytest.mark.parametrize("changes, word", ROPE_WRONG, ids=repr)
def test_rotary_keys_that_are_refused(changes, word):
    (found,) = findings("llama", **changes)
    assert word in found


@pytest.mark.parametrize("key", [key for key in LLAMA3 if key != "rope_type"])
def test_a_missing_constant_of_llama3(key):
    scaling = {name: value for name, value in LLAMA3.items() if name != key}
    (found,) = findings("llama", rope_scaling=scaling)
    assert found.startswith(f"rope_scaling.{key} is missing")
    (found,) = findings("llama", rope_parameters=scaling)
    assert found.startswith(f"rope_parameters.{key} is missing")


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_parameters.rope_"),
        ({"rope_parameters": {FULL: {}, "chunked_attention": {}}}, "chunked_attention"),
        ({"rope_parameters": {FULL: 3}}, "rope_parameters.full_attention"),
        ({"rope_theta": 5.0, "rope_parameters": {FULL: {"rope_theta": 6.0}}}, "rope_theta"),
        (
            {"rope_local_base_freq": 5.0, "rope_parameters": {SLIDING: {"rope_theta": 6.0}}},
            "rope_local_base_freq",
        ),
        ({"rope_scaling": LINEAR, "rope_parameters": {FULL: {"rope_type": "default"}}}, "scaling"),
        ({"rope_parameters": {SLIDING: {"rope_type": "dynamic"}}}, "dynamic"),
        ({"rope_local_base_freq": None}, "rope_local_base_freq"),
    ],
    ids=repr,
)
def test_rotary_keys_of_gemma3_that_are_refused(changes, word):
    found = findings("gemma3_text", **changes)
    assert all(word in finding for finding in found)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, LINEAR, {"rope_type": "longrope"}], ids=repr)
def test_phi3_has_no_scaling_that_is_computed(scaling):
    (found,) = findings("phi3", rope_scaling=scaling)
    assert scaling["rope_type"] in found


@pytest.mark.parametrize("factor", [2.0, 1.5, 0.1, 0.5, -1.0])
def test_a_share_of_phi3_that_does_not_fit(factor):
    (found,) = findings("phi3", head_dim=6, partial_rotary_factor=factor)
    assert "partial_rotary_factor" in found


def test_all_findings_come_at_once():
    changes = {
        "hidden_size": ...,
        "rms_norm_eps": "1e-6",
        "hidden_act": "relu",
        "rope_scaling": {"rope_type": "linear"},
        "swiglu_limit": 7.0,
        "vocab_size": -1,
    }
    with pytest.raises(ConfigError) as raised:
        read("llama", **changes)
    message, found = str(raised.value), raised.value.findings
    assert len(found) == len(changes)
    assert message.startswith("DecoderConfig.from_hf: every key must be understood; got 6 findings")
    for key in changes:
        assert sum(key in finding for finding in found) == 1
    assert all(finding in message for finding in found)
    assert isinstance(raised.value, ValueError)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (str(copy), copy.findings) == (message, found)


@pytest.mark.parametrize("value", ["notafamily", "gemma3", "Llama", "", None, 3, ["llama"], ...])
def test_a_family_that_is_not_known(value):
    entries = tiny("llama", model_type=value, swiglu_limit=3)
    with pytest.raises(ConfigError, match="model_type") as raised:
        DecoderConfig.from_hf(entries)
    assert len(raised.value.findings) == 1


# --- Any value at all ----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
ROPE_JSON = st.dictionaries(
    st.sampled_from(["rope_type", "type", "rope_theta", FULL, SLIDING, *LLAMA3, *YARN]),
    JSON | st.sampled_from([LINEAR, "linear", "yarn", "llama3", 8.0]),
)
ALL_KEYS = sorted(
    set(SIZES)
    | {key for family in FAMILIES.values() for key in family.defaults}
    | {"rope_scaling", "rope_parameters", "layer_types", "architectures", "model_type"}
    | {"eos_token_id", "num_experts", "num_local_experts", "num_experts_per_tok"}
    | {"_sliding_window_pattern", "original_max_position_embeddings", *WITHOUT_EFFECT_AT}
)


@given(
    st.sampled_from(list(FAMILIES)),
    st.dictionaries(st.sampled_from(ALL_KEYS), JSON | ROPE_JSON, max_size=4),
)
def test_any_value_gives_a_configuration_or_a_config_error(model_type, changes):
    try:
        config = DecoderConfig.from_hf(tiny(model_type, **changes))
    except ConfigError as error:
        assert error.findings and all(error.findings)
    else:
        assert DecoderConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
        hash(config)


@given(st.dictionaries(st.text(max_size=9), JSON, max_size=4))
def test_any_params_give_a_configuration_or_a_config_error(changes):
    params = {"dim": 12, "n_layers": 2, "n_heads": 3, "norm_eps": 1e-5, "multiple_of": 8}
    try:
        DecoderConfig.from_meta(params | changes, tie_word_embeddings=False, vocab_size=7)
    except ConfigError as error:
        assert error.findings


# --- Files ---------------------------------------------------------------------------------------


def test_folder_file_and_mapping_are_one(tmp_path):
    entries = tiny("llama")
    (tmp_path / "config.json").write_text(json.dumps(entries))
    (tmp_path / "params.json").write_text(
        (DATA / "configs/meta-llama-3.1-8b.params.json").read_text()
    )
    config = DecoderConfig.from_hf(entries)
    assert DecoderConfig.from_hf(tmp_path) == config
    assert DecoderConfig.from_hf(str(tmp_path)) == config
    assert DecoderConfig.from_hf(tmp_path / "config.json") == config
    arguments = {"tie_word_embeddings": False, "rope_scaling_factor": 8.0}
    meta = DecoderConfig.from_meta(DATA / "configs/meta-llama-3.1-8b.params.json", **arguments)
    assert DecoderConfig.from_meta(tmp_path, **arguments) == meta


def test_the_source_is_not_changed():
    entries = tiny("gemma3_text", rope_parameters={FULL: {"rope_type": "default"}})
    before = json.dumps(entries)
    DecoderConfig.from_hf(entries)
    assert json.dumps(entries) == before


@pytest.mark.parametrize(
    "content, word",
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"model_type": "llama"', "JSON"),
        (b"[]", "mapping"),
        (b"null", "mapping"),
        (b'"llama"', "mapping"),
        (b"\xff\xfe{}", "JSON"),
        (b'{"model_type": "\xff"}', "JSON"),
        (b"[" * 200_000, "JSON"),
        (b'{"vocab_size": ' + b"9" * 10_000 + b"}", "JSON"),
        (b'{"hidden_size": 8, "hidden_size": 16}', "hidden_size must be given once"),
        (b'{"rope_scaling": {"factor": 1, "factor": 2}}', "factor must be given once"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_file_that_is_no_configuration(tmp_path, content, word):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=word):
        DecoderConfig.from_hf(tmp_path)


def test_json_numbers_that_are_none(tmp_path):
    text = json.dumps(tiny("llama", rms_norm_eps=math.nan))
    assert "NaN" in text
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="rms_norm_eps"):
        DecoderConfig.from_hf(tmp_path)


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path, tmp_path / "nothing.json"):
        with pytest.raises(ConfigError, match="must be a readable file"):
            DecoderConfig.from_hf(path)
    with pytest.raises(ConfigError, match=r"params\.json"):
        DecoderConfig.from_meta(tmp_path, tie_word_embeddings=False)


@pytest.mark.parametrize("source", [None, 3, b"config.json", [("model_type", "llama")]])
def test_a_source_of_the_wrong_type(source):
    with pytest.raises(TypeError, match="source must be a path or a mapping"):
        DecoderConfig.from_hf(source)


def test_names_must_be_strings():
    with pytest.raises(ConfigError, match="mapping from names"):
        DecoderConfig.from_hf({**tiny("llama"), 3: 4})


# --- Meta ----------------------------------------------------------------------------------------

PARAMS = {
    "dim": 12,
    "n_layers": 3,
    "n_heads": 3,
    "norm_eps": 1e-5,
    "multiple_of": 8,
    "vocab_size": -1,
}
ARGUMENTS = {"tie_word_embeddings": False, "vocab_size": 13}


@pytest.mark.parametrize(
    "params, arguments, word",
    [
        ({"dim": ...}, {}, "dim is missing"),
        ({"n_layers": ...}, {}, "n_layers is missing"),
        ({"n_heads": ...}, {}, "n_heads is missing"),
        ({"norm_eps": ...}, {}, "norm_eps is missing"),
        ({"multiple_of": ...}, {}, "multiple_of is missing"),
        ({"n_heads": 5}, {}, "dim"),
        ({"n_heads": 12}, {}, "dim"),
        ({"dim": 9}, {}, "dim"),
        ({"n_kv_heads": 2}, {}, "n_kv_heads"),
        ({"n_kv_heads": 0}, {}, "n_kv_heads"),
        ({"n_layers": True}, {}, "n_layers"),
        ({"norm_eps": 0.0}, {}, "norm_eps"),
        ({"multiple_of": 0}, {}, "multiple_of"),
        ({"ffn_dim_multiplier": 0}, {}, "ffn_dim_multiplier"),
        ({"ffn_dim_multiplier": 1e-9}, {}, "ffn_dim_multiplier"),
        ({"ffn_dim_multiplier": 1e308}, {}, "ffn_dim_multiplier"),
        ({"rope_theta": -1.0}, {}, "rope_theta"),
        ({"use_scaled_rope": 1}, {}, "use_scaled_rope"),
        ({"use_scaled_rope": True}, {}, "rope_scaling_factor"),
        ({}, {"rope_scaling_factor": 8.0}, "rope_scaling_factor"),
        ({"use_scaled_rope": True}, {"rope_scaling_factor": 0}, "rope_scaling_factor"),
        ({"use_scaled_rope": True}, {"rope_scaling_factor": True}, "rope_scaling_factor"),
        ({}, {"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({}, {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({}, {"vocab_size": None}, "vocab_size"),
        ({"vocab_size": ...}, {"vocab_size": None}, "vocab_size"),
        ({}, {"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": 14}, {}, "vocab_size"),
        ({"vocab_size": 0}, {"vocab_size": None}, "vocab_size"),
        ({"vocab_size": -2}, {}, "vocab_size"),
        ({"quantization_args": {"group_size": 32}}, {}, "quantization_args"),
        ({"lora_args": {"rank": 16, "scale": 2.0}}, {}, "lora_args"),
        ({"moe_args": {}}, {}, "moe_args"),
        ({"hidden_dim": 14336}, {}, "hidden_dim"),
        ({"rms_norm_eps": 1e-5}, {}, "rms_norm_eps"),
    ],
    ids=repr,
)
def test_params_that_are_refused(params, arguments, word):
    merged = {key: value for key, value in (PARAMS | params).items() if value is not ...}
    with pytest.raises(ConfigError, match=word) as raised:
        DecoderConfig.from_meta(merged, **(ARGUMENTS | arguments))
    assert len(raised.value.findings) == 1


def test_params_of_the_smallest_file():
    config = DecoderConfig.from_meta(PARAMS, **ARGUMENTS)
    assert config == DecoderConfig.from_meta(
        {**PARAMS, "vocab_size": 13}, tie_word_embeddings=False
    )
    assert config == DecoderConfig.from_meta(
        {**PARAMS, "n_kv_heads": None, "max_seq_len": 99, "max_batch_size": 1}, **ARGUMENTS
    )
    assert config.feed_forward.intermediate_size == 32  # int(2/3 * 48) = 32, a multiple of 8
    assert config.layer_kinds[0].rotary.theta == 10000.0
    assert DecoderConfig.from_hf(config.to_hf()) == config


# --- Back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HF_ROWS)
def test_published_files_come_back(name):
    config = DecoderConfig.from_hf(DATA / "configs" / name)
    entries = config.to_hf()
    assert DecoderConfig.from_hf(json.loads(json.dumps(entries))) == config
    source = json.loads((DATA / "configs" / name).read_text())
    assert entries["architectures"] == source["architectures"]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"):
        assert entries[key] == source.get(key)


def test_windows_come_back():
    config = read("qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=2)
    entries = config.to_hf()
    assert entries["layer_types"] == [FULL] * 2 + [SLIDING] * 3
    assert entries["max_window_layers"] == 2  # for readers that know no layer types
    assert entries["use_sliding_window"] is True and entries["sliding_window"] == 4
    full = read("qwen3").to_hf()
    assert (full["use_sliding_window"], full["sliding_window"]) == (False, None)
    assert full["max_window_layers"] == 5


def test_special_tokens_come_back():
    for eos, kept in ((None, ()), (3, (3,)), ([3], (3,)), ([3, 4], (3, 4)), ([], ())):
        config = read("llama", eos_token_id=eos, bos_token_id=None, pad_token_id=-1)
        assert config.special_tokens.eos_token_ids == kept
        assert config.special_tokens.pad_token_id == -1
        assert DecoderConfig.from_hf(config.to_hf()) == config


def replace_in(config, group, **changes):
    return dataclasses.replace(
        config, **{group: dataclasses.replace(getattr(config, group), **changes)}
    )


def test_what_a_family_has_no_keys_for_cannot_be_written():
    llama, qwen2 = read("llama"), read("qwen2")
    windowed = dataclasses.replace(llama, layer_kinds=read("mistral").layer_kinds)
    for config, field in (
        (windowed, "layer_kinds"),
        (replace_in(llama, "norm", scale_offset=1.0), "norm"),
        (replace_in(llama, "norm", cast="after_scale"), "norm"),
        (replace_in(llama, "attention", qk_norm="head"), "attention"),
        (replace_in(llama, "attention", softcap=50.0), "attention"),
        (replace_in(llama, "attention", query_pre_attn_scalar=7), "attention"),
        (replace_in(qwen2, "attention", qkv_bias=False), "attention"),
        (replace_in(qwen2, "attention", o_bias=True), "attention"),
        (replace_in(qwen2, "feed_forward", bias=True), "feed_forward"),
        (dataclasses.replace(llama, final_softcap=30.0), "final_softcap"),
        (dataclasses.replace(llama, scale_embedding=True), "scale_embedding"),
        (dataclasses.replace(llama, moe=read("mixtral").moe), "moe"),
        (replace_in(read("gemma"), "feed_forward", activation="gelu"), "feed_forward"),
        (replace_in(read("mixtral"), "moe", norm_topk_prob=False), "moe"),
        (dataclasses.replace(llama, hidden_size=0), "hidden_size"),
        (dataclasses.replace(llama, model_type="gpt2"), "model_type"),
        (dataclasses.replace(llama, layers=()), "num_hidden_layers"),
    ):
        with pytest.raises(ConfigError, match=r"DecoderConfig\.to_hf") as raised:
            config.to_hf()
        assert any(field in finding for finding in raised.value.findings)


def test_a_resized_vocabulary_can_be_written():
    config = dataclasses.replace(read("llama"), vocab_size=17)
    assert config.to_hf()["vocab_size"] == 17
    assert config.num_parameters() == read("llama").num_parameters() + 2 * 4 * 12
