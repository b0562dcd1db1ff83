"""The whole decoder on real weights: SmolLM2-135M on 256 tokens, and with planted faults."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import jaxblock
from jaxblock import both_models, decoder, smollm2, whole_model_parity
from jaxblock.checkpoint import load_checkpoint, save_checkpoint
from jaxblock.parity.arrays import to_jax, to_numpy
from jaxblock.parity.compare import rms
from jaxblock.whole_model_parity import compare_whole

pytestmark = pytest.mark.torch

LENGTH = 256
NEW_TOKENS = 64
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
def both(tmp_path_factory):
    """The model in both frameworks, from the folder that `save_checkpoint` makes of the GGUF file.

    transformers takes seconds to read that, and half a minute for the GGUF file; test_demo does
    the latter.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("TQDM_DISABLE", "1")
    # Two processes on two cores: PyTorch's threads would spend their time waiting for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    file = smollm2.fetch()
    folder = tmp_path_factory.mktemp("smollm2")
    read = load_checkpoint(file)
    save_checkpoint(folder, read.config, read.params)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    yield both_models.load(folder)
    torch.set_num_threads(threads)
    patch.undo()


@pytest.fixture(scope="module")
def prompt(both):
    tokens = both.tokenizer(TEXT, return_tensors="pt").input_ids[:, :LENGTH]
    assert tokens.shape == (1, LENGTH)
    return tokens


@pytest.fixture(scope="module")
def in_float32(both, prompt):
    return compare_whole(both, prompt, "float32", new_tokens=NEW_TOKENS)


def test_float32_logits_are_as_good_as_pytorchs(in_float32):
    """The factors of the issue, without any allowance beside them."""
    logits = in_float32.stages[-1]
    assert logits.name == "logits" and logits.jax.size == LENGTH * 49152
    assert 0 < logits.jax.rms_error <= 1.3 * logits.torch.rms_error
    assert logits.jax.max_abs_error <= 2 * logits.torch.max_abs_error
    # PyTorch's are those of a right model: two float32 digits in 1e7 of logits of size 10.
    assert 2e-6 < logits.torch.rms_error < 2e-5


def test_every_stage_in_float32_passes(in_float32):
    assert in_float32.reasons == ()
    assert [stage.name for stage in in_float32.stages] == [
        "embedding",
        *(f"block {index}" for index in range(30)),
        "final norm",
        "logits",
    ]
    embedding, *others = in_float32.stages
    assert embedding.between.share_equal == 1.0
    assert all(stage.jax.rms_error > 0 and stage.torch.rms_error > 0 for stage in others)


def test_the_text_is_the_same_token_for_token(both, in_float32):
    assert in_float32.choices == ()  # every argmax of the prompt is equal
    continuation = in_float32.continuation
    assert len(continuation.jax) == NEW_TOKENS
    assert continuation.jax == continuation.torch and continuation.parted is None
    text = both.tokenizer.decode(continuation.jax)
    assert text == continuation.jax_text == continuation.torch_text and " the " in text


def test_bfloat16_logits_are_at_least_as_good_as_pytorchs(both, prompt):
    with both_models.rounded(both, "bfloat16") as params:
        ours = whole_model_parity.jax_stages(params, prompt, both.config)["logits"]
        theirs = whole_model_parity.torch_stages(both.model, prompt)["logits"]
        reference = whole_model_parity.Reference(params, both.config).stages(prompt)["logits"]
    errors = [rms(to_numpy(x).astype(np.float64) - reference.numpy()) for x in (ours, theirs)]
    assert theirs.dtype == torch.bfloat16
    assert 0.05 < errors[0] <= errors[1]
    # And the weights are the originals again.
    assert {p.dtype for p in both.model.parameters()} == {torch.float32}


def test_a_cache_gives_the_logits_of_the_whole_row(both, prompt):
    """16 steps from a cache filled in two pieces, judged as the whole row is."""
    config, tokens = both.config, to_jax(prompt)[:, :48]
    exact = whole_model_parity.Reference(both.params, config).stages(prompt[:, :48])["logits"]
    whole = jax.jit(jaxblock.forward, static_argnames="config")(both.params, tokens, config)
    cache = jaxblock.init_cache(config, 1, 48, dtype=jnp.float32)
    read = jax.jit(jaxblock.prefill, static_argnames="config")
    step = jax.jit(jaxblock.decode_step, static_argnames="config")
    _, cache = read(both.params, tokens[:, :16], cache, config)
    logits, cache = read(both.params, tokens[:, 16:32], cache, config)
    steps = [logits]
    for place in range(32, 48):
        logits, cache = step(both.params, tokens[:, place], cache, config)
        steps.append(logits)
    exact = exact[0, 31:].numpy()
    stepwise = rms(np.concatenate(steps).astype(np.float64) - exact)
    at_once = rms(np.asarray(whole)[0, 31:].astype(np.float64) - exact)
    # Products of one row add in another order than those of 48. Two errors of 17 * D roundings each
    # are within 5 % by chance; the rest is that order.
    assert 0 < stepwise <= 1.5 * at_once


# Planted faults -----------------------------------------------------------------------------------

SHORT = 16


@pytest.fixture(scope="module")
def short(both, prompt):
    """The short comparison; its text is made by PyTorch alone, as compiling ours takes seconds."""
    row = to_jax(whole_model_parity._torch_generate(both.model, prompt[:, :SHORT], 2))

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


def failures(result):
    return [stage.name for stage in result.stages if not stage.ok]


def test_without_a_fault_nothing_is_caught(both, short):
    result = short(both, dtype="float32")
    assert result.ok and result.first_divergence is None, result.reasons


def test_a_weight_of_another_layer_is_caught(both, short):
    """The reader put it there, so the reference has it too: PyTorch is what does not agree."""
    mixed_up = changed(both.params, "attention/v", lambda leaf: leaf.at[3].set(leaf[4]))
    result = short(both._replace(params=mixed_up), dtype="float32")
    assert failures(result) == [f"block {i}" for i in range(3, 30)] + ["final norm", "logits"]
    assert result.first_divergence == "block 3"
    assert any("PyTorch's own error" in reason for reason in result.stages[4].reasons)


def test_another_eps_is_caught(both, short):
    """1e-6 for 1e-5, read from the file: the reference has it too."""
    config = jaxblock.DecoderConfig.from_hf(both.config.to_hf() | {"rms_norm_eps": 1e-6})
    result = short(both._replace(config=config), dtype="float32")
    assert result.first_divergence == "block 0"
    assert "logits" in failures(result)


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
    assert failures(result) == [stage.name for stage in result.stages[first + 1 :]]
    assert not any("PyTorch's own error" in reason for reason in result.reasons)
