"""The whole decoder on real weights: SmolLM2-135M on 256 tokens, and with planted faults."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import jaxblock
from jaxblock import decoder
from jaxblock.checkpoint import load_checkpoint, save_checkpoint
from jaxblock.model_parity import both_models, smollm2
from jaxblock.model_parity.whole_model import (
    Reference,
    compare_whole,
    jax_stages,
    torch_generate,
    torch_stages,
)
from jaxblock.parity.arrays import to_jax, to_numpy
from jaxblock.parity.compare import rms

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
    # As the suite runs a process a core: PyTorch's threads would wait for each other.
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
    row = jaxblock.generate(both.params, to_jax(prompt), both.config, max_new_tokens=NEW_TOKENS)
    theirs = torch_generate(both.model, prompt, NEW_TOKENS)
    assert theirs.shape == (1, LENGTH + NEW_TOKENS)
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


# Planted faults -----------------------------------------------------------------------------------

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
