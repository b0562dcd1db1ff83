"""SmolLM2-135M: `jaxblock parity` on it, the whole decoder on 256 tokens, and planted faults."""

import json
import re
import socket
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from parity_command import run_parity
from transformers import AutoModelForCausalLM

import jaxblock
from jaxblock import decoder
from jaxblock.model_parity import both_models, components, smollm2, whole_model
from jaxblock.model_parity.both_models import ModelError
from jaxblock.model_parity.components import Functions
from jaxblock.model_parity.whole_model import (
    Reference,
    compare_whole,
    jax_stages,
    torch_generate,
    torch_stages,
)
from jaxblock.parity.arrays import to_jax, to_numpy
from jaxblock.parity.compare import rms

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
]

LAYERS = 30
CALLS = 1 + (2 * LAYERS + 1) + LAYERS + 1
STAGES = 1 + LAYERS + 2
NEW_TOKENS = 24
PROMPT = "In the year 1905 a young clerk in the patent office of Bern"


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One whole run with its JSON file, and the model that it loaded, for the tests below.

    The text is shorter than the user's: a test of the whole model has it whole.
    """
    file = tmp_path_factory.mktemp("demo") / "parity.json"
    loaded = []
    load = both_models.load

    def load_and_keep(path):
        loaded.append(load(path))
        return loaded[-1]

    def refuse(*address):
        raise AssertionError(f"the network was asked for: {address}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(both_models, "load", load_and_keep)
        compare_whole = partial(whole_model.compare_whole, new_tokens=NEW_TOKENS)
        patch.setattr(whole_model, "compare_whole", compare_whole)
        # pip runs in a process of its own; nothing in this one may ask the network.
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        result = run_parity("--json", str(file))
    assert result.exit_code == 0, result.output
    return result, json.loads(file.read_text()), loaded[0]


@pytest.fixture(scope="module")
def recording(demo):
    """The calls of a short prompt and the parameter tree, by dtype."""
    _, _, both = demo
    tokens = both_models.tokenize(both, PROMPT)

    def record(dtype):
        with both_models.rounded(both, dtype) as params:
            return components.record(both, tokens), params

    return both.config, {dtype: record(dtype) for dtype in ("float32", "bfloat16")}


def test_the_demo_compares_every_call_in_both_dtypes(demo):
    result, document, both = demo
    assert document["verdict"] == "PASS"
    assert f"PASS: {2 * (CALLS + STAGES)} comparisons" in result.stdout
    rows = document["components"]
    assert len(rows) == 2 * CALLS and all(row["ok"] for row in rows)
    for dtype in ("float32", "bfloat16"):
        modules = [row["module"] for row in rows if row["dtype"] == dtype]
        wanted = [
            name
            for name, module in both.model.named_modules()
            if name == "lm_head"
            or isinstance(module, torch.nn.Embedding)
            or type(module).__name__ in ("LlamaRMSNorm", "LlamaMLP")
        ]
        assert sorted(modules) == sorted(wanted)
    assert 40 <= len(document["tokens"]) <= 60
    assert document["sha256"] == {"SmolLM2-135M-Instruct.Q4_1.gguf": smollm2.GGUF_SHA256}
    assert document["precision"] == "highest"
    assert document["versions"]["jaxblock"] == jaxblock.__version__


def test_the_demo_shows_numbers_of_real_activations(demo):
    """Errors above zero everywhere but in the lookup: nothing was compared with itself."""
    _, document, _ = demo
    for row in document["components"]:
        exact = row["component"] == "embed"
        assert (row["jax"]["rms_error"] == 0.0) == exact, row["name"]
        assert (row["torch"]["rms_error"] == 0.0) == exact, row["name"]
        assert row["jax"]["rms_error"] <= row["limit_rms"]
        assert row["jax"]["max_abs_error"] <= row["limit_max"]
        if exact:
            assert row["between"]["share_equal"] == 1.0
    logits = document["components"][-1]
    assert (logits["jax"]["dtype"], logits["torch"]["dtype"]) == ("float32", "bfloat16")


def test_the_demo_compares_the_whole_model_in_both_dtypes(demo):
    result, document, _ = demo
    assert [whole["dtype"] for whole in document["whole_model"]] == ["float32", "bfloat16"]
    for whole in document["whole_model"]:
        assert whole["ok"] and whole["reasons"] == [] and whole["first_divergence"] is None
        names = [stage["name"] for stage in whole["stages"]]
        blocks = [f"block {index}" for index in range(LAYERS)]
        assert names == ["embedding", *blocks, "final norm", "logits"]
        assert whole["stages"][0]["between"]["share_equal"] == 1.0
        assert all(stage["jax"]["rms_error"] > 0 for stage in whole["stages"][1:])
        assert all(stage["torch"]["rms_error"] > 0 for stage in whole["stages"][1:])
        assert all(choice["tie"] for choice in whole["other_choices"])
    float32, bfloat16 = document["whole_model"]
    assert float32["other_choices"] == []
    assert float32["stages"][-1]["ratio"] <= 1.35
    assert bfloat16["stages"][-1]["torch"]["rms_error"] > 0.05
    lines = result.stdout.splitlines()
    assert sum(line.startswith("| blocks (the worst)") for line in lines) == 2
    assert sum(line.startswith("ok   block 29") for line in lines) == 2


def test_the_demo_writes_the_same_english_in_both_frameworks(demo):
    """A wrongly read file would give other text, or none that one can read."""
    result, document, _ = demo
    continuation = document["whole_model"][0]["continuation"]
    assert continuation["jax"] == continuation["torch"]
    assert len(continuation["jax"]) == NEW_TOKENS
    assert continuation["parted"] is None
    words = continuation["jax_text"].split()
    assert {"the", "library"} <= set(words) and len(words) > 15
    assert "float32: the likeliest token is the same after all" in result.stdout
    assert f"Greedy: {NEW_TOKENS} of {NEW_TOKENS} tokens equal." in result.stdout
    assert result.stdout.count(" ".join(words[:4])) >= 2  # side by side
    other = document["whole_model"][1]["continuation"]
    assert other["parted"] is None or other["parted"]["tie"]


def test_the_table_survives_a_pipe(demo):
    result, _, _ = demo
    assert "\x1b" not in result.stdout and "…" not in result.stdout
    lines = result.stdout.splitlines()
    number = r"\d\.\d\de[+-]\d\d"
    row = re.compile(rf"ok  .* +(float32|bfloat16)\S*( +{number}){{4}} +\d+\.\d\d +{number} +\S+%$")
    assert sum(bool(row.match(line)) for line in lines) == 2 * (CALLS + STAGES)
    assert sum(line.startswith("| rms_norm") for line in lines) == 2
    assert "PyTorch rounds its logits to 16 bits" in result.stdout
    assert "Loading PyTorch" in result.stderr and "Loading" not in result.stdout


def test_a_fault_gives_exit_status_1(demo, tmp_path, monkeypatch):
    _, _, both = demo
    faulty = Functions(swiglu=scaled(jaxblock.swiglu))
    monkeypatch.setattr(both_models, "load", lambda path: both)
    compare = partial(components.compare_components, functions=faulty)
    monkeypatch.setattr(components, "compare_components", compare)
    # The whole model on three new tokens, one of them another than PyTorch's.
    wrong = lambda params, tokens, config, max_new_tokens: jnp.append(tokens, ids, axis=1)  # noqa: E731
    ids = jnp.asarray([[28, 28, 28]], jnp.int32)
    compare_whole = partial(whole_model.compare_whole, new_tokens=3, generate=wrong)
    monkeypatch.setattr(whole_model, "compare_whole", compare_whole)
    file = tmp_path / "parity.json"
    result = run_parity("--dtype", "float32", "--prompt", PROMPT, "--json", str(file))
    assert result.exit_code == 1, result.output
    assert f"FAIL: {LAYERS} of {CALLS + STAGES} comparisons; float32: greedy" in result.stdout
    assert "FAIL swiglu layer 29" in result.stdout and "FAIL rms_norm" not in result.stdout
    document = json.loads(file.read_text())
    assert document["verdict"] == "FAIL"
    failed = [row["component"] for row in document["components"] if not row["ok"]]
    assert failed == ["swiglu"] * LAYERS
    (whole,) = document["whole_model"]
    assert whole["first_divergence"] is None and not whole["ok"]
    assert "greedy token 1 is 28 in jax" in whole["reasons"][0]
    assert list(tmp_path.iterdir()) == [file]


# Planted faults in the components -----------------------------------------------------------------


def failures(recording, dtype, *, tree=None, **faulty):
    """The names of the calls that are judged to differ, with faulty functions or another tree.

    With a faulty function, of the calls of that function: the others are as they were.
    """
    config, recorded = recording
    calls, right_tree = recorded[dtype]
    places = [site for site in components.sites(config) if not faulty or site.component in faulty]
    rows = components.compare_calls(config, calls, tree or right_tree, Functions(**faulty), places)
    return [row.judgement.name for row in rows if not row.judgement.ok]


def names(component):
    """The names of all calls of a component."""
    if component == "rms_norm":
        norms = ("attention_norm", "feed_forward_norm")
        layers = [f"rms_norm layer {i} {norm}" for i in range(LAYERS) for norm in norms]
        return [*layers, "rms_norm final_norm"]
    if component == "swiglu":
        return [f"swiglu layer {i}" for i in range(LAYERS)]
    return [component]


def scaled(function):
    def faulty(*arguments, **keywords):
        y = function(*arguments, **keywords)
        return y * jnp.asarray(1.01, y.dtype)

    return faulty


def mean_subtracted(x, scale, **keywords):
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return jaxblock.rms_norm(centred.astype(x.dtype), scale, **keywords)


def with_other(function, **fault):
    return lambda *arguments, **keywords: function(*arguments, **{**keywords, **fault})


FAULTS = {
    "embed": {
        "times 1.01": scaled(jaxblock.embed),
        "the next row": lambda tokens, embedding: jaxblock.embed(tokens + 1, embedding),
    },
    "rms_norm": {
        "times 1.01": scaled(jaxblock.rms_norm),
        "mean subtracted": mean_subtracted,
        "offset of one": with_other(jaxblock.rms_norm, scale_offset=1.0),
    },
    "swiglu": {
        "times 1.01": scaled(jaxblock.swiglu),
        "gate and up swapped": lambda x, gate_up, down: jaxblock.swiglu(x, gate_up[:, ::-1], down),
        "GELU for SiLU": jaxblock.geglu,
    },
    "unembed": {
        "times 1.01": scaled(jaxblock.unembed),
        "one column off": lambda x, embedding: (
            jaxblock.unembed(x, embedding).at[..., 4001].multiply(1.01)
        ),
        "the next row": lambda x, embedding: jaxblock.unembed(x, jnp.roll(embedding, 1, axis=0)),
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_fault_nothing_is_caught(recording, dtype):
    assert failures(recording, dtype) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("component", "fault"),
    [(component, fault) for component, faults in FAULTS.items() for fault in faults],
)
def test_a_fault_in_a_function_is_caught(recording, component, fault, dtype):
    caught = failures(recording, dtype, **{component: FAULTS[component][fault]})
    if component == "swiglu" and dtype == "bfloat16" and fault != "gate and up swapped":
        # 1 % is little above the 0.8 % that four bfloat16 roundings explain, and in some layers one
        # activation outweighs all others together: its own rounding decides there.
        assert set(caught) <= set(names(component))
        assert len(caught) >= 0.8 * LAYERS
    else:
        assert caught == names(component)


def test_a_larger_eps_is_caught(recording):
    """1e-4 for 1e-5 changes a norm by 4.5e-5 over its mean square. The stream of a trained model
    grows from layer to layer, until that is below what rounding explains: later in float32."""
    faulty = with_other(jaxblock.rms_norm, eps=1e-4)
    caught = failures(recording, "float32", rms_norm=faulty)
    assert caught[:16] == names("rms_norm")[:16]  # layers 0 to 7
    assert set(caught) <= set(names("rms_norm"))
    assert "rms_norm layer 0 attention_norm" in failures(recording, "bfloat16", rms_norm=faulty)


def test_the_other_cast_order_is_caught_in_16_bits(recording):
    """Its error is no larger, so no bound can: the share of bit-equal elements tells."""
    faulty = with_other(jaxblock.rms_norm, cast="after_scale")
    assert failures(recording, "bfloat16", rms_norm=faulty) == names("rms_norm")
    assert failures(recording, "float32", rms_norm=faulty) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["gate_up", "down"])
def test_the_weight_of_another_layer_is_caught(recording, kernel, dtype):
    tree = recording[1][dtype][1]
    leaves = tree["layers"]["feed_forward"]
    mixed_up = leaves[kernel].at[3].set(leaves[kernel][4])
    layers = {**tree["layers"], "feed_forward": {**leaves, kernel: mixed_up}}
    assert failures(recording, dtype, tree={**tree, "layers": layers}) == ["swiglu layer 3"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_lost_tie_is_caught(recording, dtype):
    """A table that went on without the projection: here, one row of it was trained on."""

    def unembed(x, embedding):
        return jaxblock.unembed(x, embedding.at[4001].multiply(1.01))

    assert failures(recording, dtype, unembed=unembed) == ["unembed"]


def test_a_judge_of_other_weights_is_caught(recording):
    """If the reference is not what PyTorch ran, JAX must not pass for agreeing with it."""
    config, recorded = recording
    calls, tree = recorded["float32"]
    gate, up, down = calls["model.layers.3.mlp"].weights
    wrong = replace(calls["model.layers.3.mlp"], weights=(up, gate, down))
    leaves = tree["layers"]["feed_forward"]
    swapped = leaves["gate_up"].at[3].set(leaves["gate_up"][3, :, ::-1])
    layers = {**tree["layers"], "feed_forward": {**leaves, "gate_up": swapped}}
    rows = components.compare_calls(
        config, {**calls, "model.layers.3.mlp": wrong}, {**tree, "layers": layers}
    )
    (failed,) = [row.judgement for row in rows if not row.judgement.ok]
    assert failed.name == "swiglu layer 3"
    assert failed.jax.rms_error <= failed.limit_rms  # jax and the reference do agree
    assert all(reason.startswith("PyTorch's own result: ") for reason in failed.reasons)


@pytest.mark.parametrize("prompt", ["", "tea " * 600])
def test_a_prompt_that_does_not_fit_is_refused(demo, prompt):
    _, _, both = demo
    message = r"^tokenize: the prompt must have 1 to 512 tokens; got T=(0|60[0-9])$"
    with pytest.raises(ModelError, match=message):
        both_models.tokenize(both, prompt)


# The whole model ----------------------------------------------------------------------------------

LENGTH = 256
MORE_TOKENS = 64
TEXT = """\
The library of Alexandria was founded in the third century BC. Ships that entered the harbour had to
hand over their books, which were copied by scribes; the copies went back to the owners and the
originals stayed on the shelves. Today historians do not agree on how many scrolls it held. Ancient
writers give numbers between forty thousand and seven hundred thousand, but most of them lived long
after the events and repeated what they had read in older books. What is certain is that scholars
from all around the Mediterranean came to work there. Eratosthenes, who was head of the library for
several decades, measured the circumference of the earth with a stick, a shadow and the distance
between two cities. Aristarchus claimed that the earth moves around the sun. Callimachus wrote a
catalogue of all Greek literature in one hundred and twenty books, sorted by subject and by author,
and with a short biography of every author. None of it has survived except for a few quotations.
The end of the library was slow. A fire during the war of Caesar destroyed part of the books in the
harbour, later emperors cut the salaries of the scholars, and when the city was conquered in the
seventh century, there was probably little left to burn. The lesson that later librarians drew from
this story is that books survive where many copies of them are kept in many places.
""".replace("\n", " ")


@pytest.fixture(scope="module")
def both(demo):
    return demo[2]


@pytest.fixture(scope="module")
def prompt(both):
    tokens = both.tokenizer(TEXT, return_tensors="pt").input_ids[:, :LENGTH]
    assert tokens.shape == (1, LENGTH)
    return tokens


@pytest.fixture(scope="module")
def logits(both, prompt):
    """In float32: of jaxblock, of PyTorch, and in float64."""
    run = jax.jit(jaxblock.forward, static_argnames="config")
    with torch.no_grad():
        theirs = both.model(prompt, use_cache=False).logits
    exact = Reference(both.params, both.config).stages(prompt)["logits"]
    return np.asarray(run(both.params, to_jax(prompt), both.config)), theirs.numpy(), exact.numpy()


def errors(logits, exact):
    """Root mean square, and largest."""
    error = logits.astype(np.float64) - exact
    return rms(error), float(np.abs(error).max())


def test_float32_logits_are_as_good_as_pytorchs(logits):
    ours, theirs, exact = logits
    assert ours.shape == (1, LENGTH, 49152)
    (our_rms, our_largest), (their_rms, their_largest) = (errors(x, exact) for x in (ours, theirs))
    assert 0 < our_rms <= 1.3 * their_rms
    assert our_largest <= 2 * their_largest
    # What was measured of another PyTorch: 8.6e-6.
    assert 5e-6 < their_rms < 1e-5
    np.testing.assert_array_equal(ours.argmax(-1), exact.argmax(-1))
    np.testing.assert_array_equal(theirs.argmax(-1), exact.argmax(-1))


def test_the_text_is_the_same_token_for_token(both, prompt):
    row = jaxblock.generate(both.params, to_jax(prompt), both.config, max_new_tokens=MORE_TOKENS)
    theirs = torch_generate(both.model, prompt, MORE_TOKENS)
    assert theirs.shape == (1, LENGTH + MORE_TOKENS)
    np.testing.assert_array_equal(row, theirs)
    assert " the " in both.tokenizer.decode(theirs[0, LENGTH:])


def test_a_cache_gives_the_logits_of_the_whole_row(both, prompt, logits):
    """Two pieces of a prompt and 15 steps, judged as the whole row is."""
    ours, _, exact = (x[0, 31:47] for x in logits)
    config, tokens = both.config, to_jax(prompt)
    cache = jaxblock.init_cache(config, 1, 48, dtype=jnp.float32)
    read = jax.jit(jaxblock.prefill, static_argnames="config")
    step = jax.jit(jaxblock.decode_step, static_argnames="config")
    _, cache = read(both.params, tokens[:, :16], cache, config)
    steps, cache = read(both.params, tokens[:, 16:32], cache, config)
    steps = [steps]
    for place in range(32, 47):
        row, cache = step(both.params, tokens[:, place], cache, config)
        steps.append(row)
    # Products of one row add in another order than those of 256; no more than that.
    stepwise, at_once = errors(np.concatenate(steps), exact), errors(ours, exact)
    assert 0 < stepwise[0] <= 1.5 * at_once[0]


def test_bfloat16_logits_are_as_good_as_pytorchs(both, prompt):
    """All tokens look at the first, whose error is then in all of them: one draw of few. PyTorch's
    own is 0.117 with one thread and 0.127 with two; the issue's figure is 0.138."""
    with both_models.rounded(both, "bfloat16") as params:
        ours = jax_stages(params, prompt, both.config)["logits"]
        exact = Reference(params, both.config).stages(prompt)["logits"].numpy()
        theirs = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            theirs.append(torch_stages(both.model, prompt)["logits"])
        torch.set_num_threads(1)
    assert {x.dtype for x in theirs} == {torch.bfloat16}
    their_rms = [errors(to_numpy(x), exact)[0] for x in theirs]
    assert 0.05 < errors(np.asarray(ours), exact)[0] <= max(their_rms)
    assert max(their_rms) <= 0.138
    # And the weights are the originals again.
    assert {p.dtype for p in both.model.parameters()} == {torch.float32}


def test_saved_weights_are_read_by_transformers(both, tmp_path):
    """What the GGUF file holds, through our reader and writer, is what transformers read of it."""
    jaxblock.save_checkpoint(tmp_path, both.config, both.params)
    model, findings = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not any(findings.values()), findings
    theirs = dict(both.model.named_parameters())
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys() and len(ours) == 272
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Planted faults in the whole model ----------------------------------------------------------------

SHORT = 16


@pytest.fixture(scope="module")
def short(both, prompt):
    """The short comparison; its text is made by PyTorch alone, as compiling ours takes seconds."""
    row = to_jax(torch_generate(both.model, prompt[:, :SHORT], 2))

    def given(params, tokens, config, *, max_new_tokens):
        return row

    return partial(compare_whole, tokens=prompt[:, :SHORT], new_tokens=2, generate=given)


def changed(params, name, change):
    """The tree with one leaf of the layers replaced."""
    path = name.split("/")
    layers = dict(params["layers"])
    inner = layers
    for key in path[:-1]:
        inner[key] = dict(inner[key])
        inner = inner[key]
    inner[path[-1]] = change(inner[path[-1]])
    return {**params, "layers": layers}


def failing_stages(result):
    return [stage.name for stage in result.stages if not stage.ok]


def test_without_a_fault_the_whole_model_passes(both, short):
    result = short(both, dtype="float32")
    assert result.ok and result.first_divergence is None, result.reasons


def test_a_weight_of_another_layer_is_caught(both, short):
    """The reader put it there, so the reference has it too: PyTorch is what does not agree."""
    mixed_up = changed(both.params, "attention/v", lambda leaf: leaf.at[3].set(leaf[4]))
    result = short(both._replace(params=mixed_up), dtype="float32")
    assert failing_stages(result) == [f"block {i}" for i in range(3, 30)] + ["final norm", "logits"]
    assert result.first_divergence == "block 3"
    assert any("PyTorch's own error" in reason for reason in result.stages[4].reasons)


def test_another_eps_is_caught(both, short):
    """1e-6 for 1e-5, read from the file: the reference has it too."""
    config = jaxblock.DecoderConfig.from_hf(both.config.to_hf() | {"rms_norm_eps": 1e-6})
    result = short(both._replace(config=config), dtype="float32")
    assert result.first_divergence == "block 0"
    assert "logits" in failing_stages(result)


def interleaved(params, tokens, config):
    """Neighbouring channels of a head turned together, as in Meta's files, in place of halves."""
    H = config.attention.head_dim
    order = np.arange(H).reshape(-1, 2).T.reshape(-1)
    for name in "qk":
        params = changed(params, f"attention/{name}", lambda leaf: leaf[..., order])
    return decoder.activations(params, tokens, config)


def one_percent(params, tokens, config):
    grow = lambda leaf: leaf.at[7].multiply(1.01)  # noqa: E731
    params = changed(params, "feed_forward_norm/scale", grow)
    return decoder.activations(params, tokens, config)


@pytest.mark.parametrize(("fault", "first"), [(interleaved, 0), (one_percent, 7)])
def test_a_fault_in_the_decoder_is_caught(both, short, fault, first):
    result = short(both, dtype="float32", activations=fault)
    assert result.first_divergence == f"block {first}"
    assert failing_stages(result) == [stage.name for stage in result.stages[first + 1 :]]
    assert not any("PyTorch's own error" in reason for reason in result.reasons)
