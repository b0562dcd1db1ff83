"""DecoderConfig against transformers' own classes: same defaults, same model, and back again."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from test_config import FULL, LINEAR, LLAMA3, SLIDING, YARN, read, tiny
from transformers.activations import ACT2FN

from jaxblock.config import DecoderConfig
from jaxblock.config.families import FAMILIES
from jaxblock.config.hugging_face import ACTIVATIONS
from jaxblock.config.keys import WITHOUT_EFFECT

pytestmark = pytest.mark.torch
transformers.logging.set_verbosity_error()

SLIDES = {"use_sliding_window": True, "sliding_window": 3}
NEW_GEMMA3 = {
    SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
    FULL: {**YARN, "rope_theta": 7000.0},
}
# Files of every family, each with something that changes the computation; sequences of 7 tokens.
VARIANTS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": None, "head_dim": None, "rope_theta": 500000}),
    ("llama", {"num_key_value_heads": ..., "head_dim": ..., "hidden_act": "gelu"}),
    ("llama", {"rope_scaling": LLAMA3, "rope_theta": 50.0, "hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 50.0}, "hidden_act": "swish"}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    ("llama", {"rope_scaling": YARN, "rope_theta": 50.0}),
    ("llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    ("llama", {"rope_scaling": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}}),
    ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5, "rope_theta": 50.0}}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 3, "head_dim": ...}),
    ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {**SLIDES, "max_window_layers": 2}),
    ("qwen2", {**SLIDES, "layer_types": [SLIDING, FULL, FULL, SLIDING, FULL]}),
    ("qwen2", {**SLIDES, "use_sliding_window": False, "max_window_layers": 0}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("qwen2", {"num_key_value_heads": None, "head_dim": ..., "tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {**SLIDES, "max_window_layers": 0, "attention_bias": True}),
    ("gemma", {}),
    ("gemma", {"hidden_act": "gelu", "attention_bias": True}),
    ("gemma", {"hidden_act": "silu", "tie_word_embeddings": False}),
    ("gemma2", {}),
    ("gemma2", {"sliding_window": 3, "query_pre_attn_scalar": 7, "attention_bias": True}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.25}),
    ("gemma2", {"layer_types": [FULL] * 5, "sliding_window": 3}),
    ("gemma2", {"hidden_activation": "gelu", "rope_scaling": LINEAR}),
    ("gemma3_text", {}),
    ("gemma3_text", {"sliding_window": 3, "sliding_window_pattern": 2, "rope_scaling": LINEAR}),
    ("gemma3_text", {"sliding_window": 3, "sliding_window_pattern": 3, "rope_theta": 70.0}),
    ("gemma3_text", {"rope_local_base_freq": 20.0, "final_logit_softcapping": 0.5}),
    ("gemma3_text", {"layer_types": [FULL, SLIDING] + [FULL] * 3, "rope_parameters": NEW_GEMMA3}),
    ("gemma3_text", {"rope_parameters": {SLIDING: {"rope_theta": 9.0}}, "sliding_window": 3}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 3, "num_key_value_heads": ..., "head_dim": ...}),
    ("phi3", {"partial_rotary_factor": 0.7, "rope_theta": 50.0}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.34}}),
    ("olmo2", {}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 3, "rope_scaling": LINEAR}),
    ("mixtral", {}),
    ("mixtral", {"sliding_window": 3, "num_local_experts": ..., "num_experts": 4}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {**SLIDES, "norm_topk_prob": True, "attention_bias": True}),
    ("qwen3_moe", {"num_experts": ..., "num_local_experts": 4, "head_dim": ...}),
]
# The grouped products of PyTorch take no odd sizes.
EAGER = {"experts_implementation": "eager"}
every_variant = pytest.mark.parametrize("model_type, changes", VARIANTS, ids=repr)
every_family = pytest.mark.parametrize("model_type", FAMILIES)


def build(entries):
    """transformers' configuration of a file; the padding id of its class may have no row here."""
    entries = copy.deepcopy({"pad_token_id": None, **entries})
    return transformers.CONFIG_MAPPING[entries.pop("model_type")](**entries)


def model_of(config, device="cpu"):
    torch.manual_seed(3)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()


def randomize(model):
    """Norms and biases too, so that none of them is as if it were not there."""
    random = np.random.default_rng(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(0.3 * random.standard_normal(parameter.shape)))
    return model


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([[1, 5, 12, 0, 3, 3, 7]])).logits


@every_family
def test_absent_keys_stand_for_the_same(model_type):
    # Keys that are fields of the class; those that are not are seen in the variants.
    cls = transformers.CONFIG_MAPPING[model_type]
    fields = {
        name: field.default
        for name, field in cls.__dataclass_fields__.items()
        if name in FAMILIES[model_type].defaults
    }
    assert {"tie_word_embeddings"} < set(fields)
    for name, default in fields.items():
        ours = FAMILIES[model_type].defaults[name]
        assert (ours or None) == (default or None), name


@every_family
def test_every_key_that_transformers_writes_is_known(model_type):
    hf = build(tiny(model_type))
    for entries in (hf.to_dict(), hf.to_diff_dict(), json.loads(hf.to_json_string())):
        assert DecoderConfig.from_hf(entries | {"pad_token_id": None}) == read(
            model_type,
            max_position_embeddings=hf.max_position_embeddings,
            bos_token_id=hf.bos_token_id,
            eos_token_id=hf.eos_token_id,
        )


@every_variant
def test_the_same_model(model_type, changes):
    entries = tiny(model_type, **changes)
    ours, hf = DecoderConfig.from_hf(entries), build(entries)
    model = model_of(hf, "meta")
    state = dict(model.state_dict())
    if ours.tie_word_embeddings:
        del state["lm_head.weight"]
    assert ours.num_parameters() == sum(tensor.numel() for tensor in state.values())
    assert ours.num_parameters() == sum(tensor.numel() for tensor in model.parameters())
    assert ours.tie_word_embeddings == hf.tie_word_embeddings
    assert ours.norm.eps == hf.rms_norm_eps

    attention, hf_attention = ours.attention, model.model.layers[0].self_attn
    assert attention.scale == hf_attention.scaling
    assert attention.softcap == getattr(hf, "attn_logit_softcapping", None)
    assert ours.final_softcap == getattr(hf, "final_logit_softcapping", None)
    names = [name for name in state if name.startswith("model.layers.0.")]
    assert attention.qkv_bias == any("self_attn.v_proj.bias" in name for name in names)
    assert attention.o_bias == any("self_attn.o_proj.bias" in name for name in names)
    assert ours.feed_forward.bias == any("mlp.down_proj.bias" in name for name in names)
    assert ours.norm.pre_norm == any("input_layernorm" in name for name in names)
    assert ours.norm.post_norm == any("post_feedforward_layernorm" in name for name in names)

    for layer, kind in enumerate(ours.layers):
        window = getattr(hf, "sliding_window", None)
        if getattr(hf, "layer_types", None):
            window = window if hf.layer_types[layer] == SLIDING else None
        assert ours.layer_kinds[kind].window == window
        table = hf.rope_parameters
        if model_type == "gemma3_text":
            table = table[hf.layer_types[layer]]
        expected = {key: value for key, value in table.items() if key != "type"}
        share = expected.pop("partial_rotary_factor", 1.0)
        rotary = ours.layer_kinds[kind].rotary
        scaling = {"rope_type": "default", **(rotary.scaling or {})}
        assert {**scaling, "rope_theta": rotary.theta} == expected
        assert rotary.rotary_dim == int(attention.head_dim * share)


@every_variant
def test_transformers_builds_the_same_model_from_what_is_written(model_type, changes, tmp_path):
    entries = tiny(model_type, **changes)
    ours = DecoderConfig.from_hf(entries)
    (tmp_path / "config.json").write_text(json.dumps(ours.to_hf()))
    assert DecoderConfig.from_hf(tmp_path) == ours
    model = randomize(model_of(build(entries)))
    again = model_of(transformers.AutoConfig.from_pretrained(tmp_path))
    assert type(again) is type(model)
    assert type(again).__name__ == ours.to_hf()["architectures"][0]
    again.load_state_dict(model.state_dict(), strict=True)
    expected, actual = logits_of(model), logits_of(again)
    assert torch.isfinite(expected).all() and expected.std() > 0
    assert torch.equal(actual, expected)


@every_variant
def test_what_transformers_writes_is_read_as_the_same(model_type, changes):
    entries = tiny(model_type, **changes)
    ours, hf = DecoderConfig.from_hf(entries), build(entries)
    written = json.loads(hf.to_json_string())
    back = DecoderConfig.from_hf(written)
    own = {"max_position_embeddings", "special_tokens"}
    for name in DecoderConfig.__dataclass_fields__.keys() - own:
        assert getattr(back, name) == getattr(ours, name), name


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"rope_theta": 50.0}], ids=repr)
def test_the_logits_do_see_a_difference(changes):
    # The control of the test above: another file, the same weights, other logits.
    model = randomize(model_of(build(tiny("llama"))))
    other = model_of(build(tiny("llama", **changes)))
    other.load_state_dict(model.state_dict(), strict=True)
    assert not torch.equal(logits_of(other), logits_of(model))


NO_EFFECT = {
    "attention_dropout": 0.5,
    "embd_pdrop": 0.5,
    "initializer_range": 0.9,
    "is_decoder": True,
    "max_sequence_length": 3,
    "output_router_logits": True,
    "pretraining_tp": 2,
    "resid_pdrop": 0.5,
    "router_aux_loss_coef": 9.0,
    "router_jitter_noise": 0.5,
    "use_cache": False,
}


@every_family
def test_keys_without_effect_have_none(model_type):
    assert set(NO_EFFECT) <= WITHOUT_EFFECT
    model = randomize(model_of(build(tiny(model_type))))
    other = model_of(build(tiny(model_type, **NO_EFFECT)))
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(logits_of(other), logits_of(model))


def test_keys_of_generation_are_the_same_list():
    keys = transformers.GenerationConfig._get_default_generation_params()
    assert set(keys) <= WITHOUT_EFFECT


@every_family
def test_norms_round_and_shift_as_said(model_type):
    norm = read(model_type).norm
    theirs = model_of(build(tiny(model_type))).model.norm.to(torch.bfloat16)
    assert (theirs.weight == norm.initial_scale).all()
    random = np.random.default_rng(7)
    scale = torch.from_numpy(random.standard_normal(12)).to(torch.bfloat16)
    x = torch.from_numpy(random.standard_normal((64, 12))).to(torch.bfloat16)
    with torch.no_grad():
        theirs.weight.copy_(scale)
        expected = theirs(x)
    unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.eps)
    # The values of the offset are exact in bfloat16 sums of float32.
    results = {
        "after_scale": (unit * (norm.scale_offset + scale.float())).to(torch.bfloat16),
        "before_scale": unit.to(torch.bfloat16) * (norm.scale_offset + scale),
    }
    assert torch.equal(results.pop(norm.cast), expected)
    (other,) = results.values()
    assert not torch.equal(other, expected)


@every_family
def test_rows_looked_up_are_scaled_as_said(model_type):
    config = read(model_type)
    embed = model_of(build(tiny(model_type))).model.embed_tokens.to(torch.bfloat16)
    tokens = torch.arange(13)
    scale = 1.0 if config.embed_scale is None else config.embed_scale
    factor = torch.tensor(scale, dtype=torch.float32).to(torch.bfloat16)
    assert torch.equal(embed(tokens), embed.weight * factor)
    assert (config.embed_scale is None) == (not model_type.startswith("gemma"))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_the_named_functions(name):
    # At 2.6989 the two forms of GELU differ most, by 4.7e-4.
    x = torch.linspace(-4.0, 4.0, 129, dtype=torch.float64)
    x[0] = 2.6989
    functions = {
        "silu": torch.nn.functional.silu(x),
        "gelu": torch.nn.functional.gelu(x),
        "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh"),
    }
    gaps = {kind: (ACT2FN[name](x) - y).abs().max() for kind, y in functions.items()}
    assert gaps.pop(ACTIVATIONS[name]) < 1e-14
    assert min(gaps.values()) > 1e-4
