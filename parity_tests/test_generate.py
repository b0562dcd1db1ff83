"""Generation: the same text as transformers, stopping, sampling by row, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import assert_same_bits
from tiny_models import jax_tree_of, tiny_model

import jaxblock
from jaxblock.generate import _generate

pytestmark = pytest.mark.torch

V = 29


@pytest.fixture(scope="module")
def small():
    model, config = tiny_model("gemma3_text", num_hidden_layers=2)
    return model, config, jax_tree_of(model, config)


def prompts(rows=3, length=7):
    tokens = np.random.default_rng(3).integers(0, V, (rows, length))
    mask = np.ones((rows, length), bool)
    mask[1, :4] = False
    return tokens, mask


def test_greedy_text_is_that_of_transformers(small):
    """Past the window, with a row padded on the left, which is all that transformers takes."""
    model, config, params = small
    tokens, mask = prompts()
    theirs = model.generate(
        torch.tensor(tokens),
        attention_mask=torch.tensor(mask).long(),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ours = jaxblock.generate(params, tokens, config, max_new_tokens=12, mask=mask)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == jnp.int32
    # Padding on the right changes the place of the prompt and nothing else.
    right = np.stack(
        [np.roll(row, -4) if number == 1 else row for number, row in enumerate(tokens)]
    )
    right_mask = np.stack([np.roll(mask[0], 0), np.roll(mask[1], -4), mask[2]])
    moved = jaxblock.generate(params, right, config, max_new_tokens=12, mask=right_mask)
    assert_same_bits(moved[:, 7:], ours[:, 7:])
    # One token needs no loop, and under jit all is one program.
    one = jax.jit(partial(jaxblock.generate, config=config, max_new_tokens=1))(
        params, jnp.asarray(tokens), mask=jnp.asarray(mask)
    )
    assert_same_bits(one, ours[:, :8])


def test_a_row_ends_at_its_stop_token(small):
    _, config, params = small
    tokens, mask = prompts()
    free = np.asarray(jaxblock.generate(params, tokens, config, max_new_tokens=12, mask=mask))
    stop = int(free[0, 7 + 2])
    ended = jaxblock.generate(
        params, tokens, config, max_new_tokens=12, mask=mask, stop_tokens=(stop, 3), pad_token=5
    )
    for row in range(3):
        new = free[row, 7:]
        hits = np.flatnonzero((new == stop) | (new == 3))
        length = hits[0] + 1 if hits.size else 12
        np.testing.assert_array_equal(ended[row, 7 : 7 + length], new[:length])
        assert (ended[row, 7 + length :] == 5).all()


def test_draws_depend_on_the_rows_own_key(small):
    _, config, params = small
    tokens, _ = prompts()
    sampler = partial(jaxblock.top_k, k=9, temperature=2.0)
    run = partial(jaxblock.generate, params, config=config, max_new_tokens=6, sampler=sampler)
    keys = jax.random.split(jax.random.key(0), 3)
    together = run(tokens, key=keys)
    order = np.array([2, 0, 1])
    assert_same_bits(run(tokens[order], key=keys[order]), np.asarray(together)[order])
    # Equal rows under one key differ, and the same key draws the same again.
    same = np.repeat(tokens[:1], 3, axis=0)
    drawn = run(same, key=jax.random.key(1))
    assert len({tuple(row) for row in np.asarray(drawn)}) == 3
    # A partial made anew is the same program.
    sizes = _generate.__wrapped__._cache_size()
    again = jaxblock.generate(
        params,
        same,
        config,
        max_new_tokens=6,
        sampler=partial(jaxblock.top_k, temperature=2.0, k=9),
        key=jax.random.key(1),
    )
    assert_same_bits(again, drawn)
    assert _generate.__wrapped__._cache_size() == sizes


def test_padded_rows_are_never_chosen(small):
    _, config, params = small
    tokens, _ = prompts()
    free = jaxblock.generate(params, tokens, config, max_new_tokens=4)
    config, params = jaxblock.pad_vocabulary(config, params, 64)
    # What would win if it were looked at.
    params["embedding"] = params["embedding"].at[V:].set(100.0)
    assert_same_bits(jaxblock.generate(params, tokens, config, max_new_tokens=4), free)


def test_bad_arguments(small):
    _, config, params = small
    tokens, mask = prompts()
    run = partial(jaxblock.generate, params, tokens, config)
    for keywords, message in [
        (dict(max_new_tokens=0), "generate: max_new_tokens must be at least 1"),
        (dict(max_new_tokens=2, stop_tokens=(V,)), r"stop_tokens must lie in \[0, 29\)"),
        (dict(max_new_tokens=2, pad_token=-1), r"pad_token must lie in \[0, 29\)"),
        (
            dict(max_new_tokens=2, key=jax.random.key(0)),
            "greedy takes none; got key='one'. Pass sampler=",
        ),
        (dict(max_new_tokens=2, sampler=jaxblock.sample), "needs a key.*got key='none'. Pass key="),
        (dict(max_new_tokens=2, mask=mask[:, :3]), r"generate: mask must have the shape \[B T\]"),
        (dict(max_new_tokens=2, mask=np.zeros_like(mask)), "every row must have a real token"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(**keywords)
    with pytest.raises(IndexError, match=r"generate: tokens must lie in \[0, 29\)"):
        jaxblock.generate(params, tokens + V, config, max_new_tokens=2)
