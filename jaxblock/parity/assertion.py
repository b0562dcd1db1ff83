"""`assert_parity`: a JAX function and a PyTorch function on the same numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxblock.parity.arguments import Arguments
from jaxblock.parity.case import Case
from jaxblock.parity.judge import Judgement, render_table
from jaxblock.parity.torch_run import module_of


@dataclass(frozen=True)
class Report:
    """Every comparison that `assert_parity` made; `str()` of it is the table.

    Attributes:
      judgements: one for each array compared.
      hints: after a failure, which mistake would explain it.
    """

    judgements: tuple[Judgement, ...]
    hints: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every comparison passed."""
        return all(judgement.ok for judgement in self.judgements)

    def __str__(self) -> str:
        return (
            "errors against float64; jax float32 products at precision 'highest'; 'equal' is the "
            "share of elements on which both frameworks agree to the bit\n"
            + "\n\n".join([render_table(self.judgements), *self.hints])
        )


def assert_parity(
    jax_fn: Callable[..., Any],
    torch_fn: Callable[..., Any],
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    reference_fn: Callable[..., Any] | None = None,
    parameters: Callable[[dict[str, jax.Array]], Any] | None = None,
    dtypes: Sequence[str] | None = None,
    reduction_length: int | None = None,
    roundings: int = 2,
    factor: float = 2.0,
    share_equal: float | None = None,
    gradients: bool = True,
    seed: int = 0,
) -> Report:
    """Assert that a JAX and a PyTorch function compute the same: forward, under jit, and backward.

    Each side's error is measured against PyTorch in float64 on the same rounded inputs, and JAX's
    must be within the derived bound or at most `factor` times PyTorch's own; see `judge`.

    Args:
      jax_fn: takes and returns pytrees of JAX arrays. A function, an nnx module, a bound apply.
      torch_fn: the same over tensors. A function, a `torch.nn.Module` or a method of one. A module
        is copied; the copy runs on the CPU and is cast to `dtypes`, its buffers too.
      inputs: arrays of NumPy, JAX or PyTorch, in pytrees; a mapping is passed by keyword, a
        sequence by position, one array as the only argument. Integer, boolean and complex arrays
        are passed on and not differentiated, numbers and everything else passed as they are.
      reference_fn: what to run in float64; None takes torch_fn. Pass one if torch_fn falls back to
        float32 somewhere inside, as the norms of the transformers library do. With `parameters` it
        is a module with the same names of parameters.
      parameters: for a torch module whose parameters are to be compared too. It turns the module's
        named parameters (as JAX arrays) into what jax_fn takes as its first argument, and must be
        differentiable: gradients come out under torch's names and in torch's layouts.
      dtypes: run once for each, with all floats rounded to it first; None takes inputs and module
        as they are, float64 inputs as float32 unless 64-bit types are on, as everywhere in JAX.
      reduction_length: the longest sum behind an element; None takes the longest axis of any input
        or parameter, and for gradients the number of rows of an input, if that is larger.
      roundings: how often a value is rounded to a 16-bit dtype between input and result. A gradient
        is allowed twice as many and one more: the values computed again, and their cotangents.
      factor: how much worse than PyTorch JAX may be.
      share_equal: least share of bit-equal elements, for the results in the dtype of PyTorch's.
      gradients: whether to compare them, with respect to every float input (and parameter).
      seed: for the random cotangents, standard normal, the same on all sides.

    Returns: the report, if all is well.

    Raises: AssertionError with the report as its text, if not; ValueError for what cannot be
      compared at all: other outputs or shapes, a torch_fn that gives two results for one input.
      Whatever the two functions raise passes through.
    """
    module = module_of(torch_fn)
    if parameters is not None and module is None:
        raise ValueError(
            "assert_parity: parameters is for a torch.nn.Module; got "
            f"torch_fn={type(torch_fn).__name__}. Pass the weights as inputs."
        )
    if isinstance(dtypes, str):
        dtypes = (dtypes,)
    named = dict(module.named_parameters()) if parameters is not None else {}
    if parameters is not None and reference_fn is not None:
        other = module_of(reference_fn)
        names = set() if other is None else {name for name, _ in other.named_parameters()}
        if names != set(named):
            raise ValueError(
                "assert_parity: reference_fn must be a module with the parameters of torch_fn; got "
                f"names that only one has={sorted(names ^ set(named))}"
            )
    arguments = Arguments.of(named, inputs)
    shapes = [array.shape for array in arguments.arrays]
    if module is not None:
        shapes += [tuple(parameter.shape) for parameter in module.parameters()]
    longest = max((max(shape, default=1) for shape in shapes), default=1)
    rows = max((array[..., :1].size for array in arguments.arrays[len(named) :]), default=1)

    judgements: list[Judgement] = []
    hints: list[str] = []
    for dtype in dtypes or (None,):
        case = Case(
            jax_fn,
            torch_fn,
            reference_fn,
            parameters,
            arguments,
            dtype=None if dtype is None else jnp.dtype(dtype).name,
            gradients=gradients,
            seed=seed,
        )
        case.check_outputs()
        of_outputs = [
            case.judged(
                result,
                reduction_length=reduction_length or longest,
                roundings=roundings,
                factor=factor,
                share_equal=share_equal,
            )
            for result in case.results()
        ]
        judgements += of_outputs
        if not all(judgement.ok for judgement in of_outputs) and (hint := case.suspect()):
            hints.append(hint)
        judgements += [
            case.judged(
                result,
                reduction_length=reduction_length or max(longest, rows),
                roundings=2 * roundings + 1,
                factor=factor,
            )
            for result in case.gradient_results()
        ]
    report = Report(tuple(judgements), tuple(hints))
    if not report.ok:
        raise AssertionError(f"JAX and PyTorch differ\n{report}")
    return report
