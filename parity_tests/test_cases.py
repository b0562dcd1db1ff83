"""Every case of data/cases.json: as it stands, under jit, under vmap, and on the PyTorch side."""

import jax
import numpy as np
import pytest
from cases import load_cases

import jaxblock

CASES = load_cases()
# Only numbers that JAX holds in arrays can be traced, and only results can be compared.
TRACEABLE = [case for case in CASES if case.expected is not None and case.has_arrays]


def parametrize(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


@parametrize(CASES)
def test_case(case):
    with jax.enable_x64(case.needs_x64):
        function = getattr(jaxblock, case.function)
        if case.jitted:
            function = jax.jit(function, static_argnames=tuple(case.keywords))
        if case.error is None:
            assert_expected(function(*case.arguments, **case.keywords), case)
            return
        with pytest.raises(Exception) as raised:
            function(*case.arguments, **case.keywords)
        assert case.error == raised.type.__name__ or case.error in str(raised.value)


@parametrize(TRACEABLE)
def test_case_under_jit(case):
    with jax.enable_x64(case.needs_x64):
        arrays, function = traceable(case)
        assert_expected(jax.jit(function)(*arrays), case)


@parametrize(TRACEABLE)
def test_case_under_vmap(case):
    with jax.enable_x64(case.needs_x64):
        arrays, function = traceable(case)
        results = jax.jit(jax.vmap(function))(*(np.stack([array, array]) for array in arrays))
        for index in range(2):
            one = jax.tree.map(lambda result, index=index: np.asarray(result)[index], results)
            assert_expected(one, case)


@pytest.mark.torch
@parametrize([case for case in CASES if case.expected is not None and not case.jitted])
def test_case_on_the_torch_side(case, torch_ref):
    from jaxblock.parity.arrays import to_numpy, to_torch

    arguments = [
        to_torch(argument) if isinstance(argument, np.ndarray) else argument
        for argument in case.arguments
    ]
    results = getattr(torch_ref, case.function)(*arguments, **case.keywords)
    if isinstance(results, int):
        assert_expected(results, case)
    else:
        assert_expected(jax.tree.map(to_numpy, results), case)


def test_the_cases_were_read():
    assert len(CASES) == 103
    # The others are tested in files of their own alone.
    without = {"attention", "greedy", "next_token_labels", "sample", "top_k", "top_p"}
    without |= {"rotary_magnitude"}
    assert {case.function for case in CASES} == set(jaxblock.ops.__all__) - without
    assert sum(case.error is not None for case in CASES) == 21
    assert any(case.needs_x64 for case in CASES) and any(case.jitted for case in CASES)


def traceable(case):
    """The array arguments, and a function of them with everything else filled in."""
    places = [i for i, value in enumerate(case.arguments) if isinstance(value, np.ndarray)]

    def function(*arrays):
        arguments = list(case.arguments)
        for place, array in zip(places, arrays, strict=True):
            arguments[place] = array
        return getattr(jaxblock, case.function)(*arguments, **case.keywords)

    return [case.arguments[place] for place in places], function


def assert_expected(results, case):
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == len(case.expected)
    for result, expected in zip(results, case.expected, strict=True):
        if isinstance(expected, int):
            assert type(result) is int and result == expected
            continue
        result = np.asarray(result)
        assert result.dtype == expected.dtype
        assert result.shape == expected.shape
        if case.tolerance == 0:
            # The same bits, but for the sign of a zero: -2 times a scale of 0 is -0, in PyTorch
            # too, and the cases write 0.
            np.testing.assert_array_equal(result, expected)
            continue
        wide, exact = result.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_array_less(
            np.abs(wide - exact), np.nextafter(case.tolerance * np.abs(exact), np.inf)
        )
