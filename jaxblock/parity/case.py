"""Both functions in one dtype: what each side computes, and how the results are judged."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.parity.arguments import Arguments, named_outputs
from jaxblock.parity.arrays import is_float, to_jax, to_numpy
from jaxblock.parity.compare import rms
from jaxblock.parity.explain import explain
from jaxblock.parity.judge import Judgement, judge
from jaxblock.parity.suspects import changed
from jaxblock.parity.tolerance import unit_roundoff
from jaxblock.parity.torch_run import TorchRun

# What fails is looked at again with runs on inputs that differ by a few roundings. They tell how
# large PyTorch's error gets by chance, and, of results of so few elements that all of them may be
# sums that happen to cancel, how large the terms are.
NEARBY_RUNS = 8
SMALLEST_STEP = 2.0**-12
SMALL = 64
# Runs in search of what was mistaken for what, after a failure.
LARGEST_SEARCH = 64

# ("output", its name) or ("gradient", the index of the array).
Key = tuple[str, Any]


@dataclass(frozen=True)
class Result:
    """One array as the three sides computed it."""

    key: Key
    label: str
    jax: Any
    torch: Any
    reference: Any


@dataclass(frozen=True)
class Nearby:
    """What runs on slightly changed inputs tell about each result.

    Attributes:
      term_scales: root mean square of the terms that it is the sum of. If every factor in a sum
        of terms changes by independent relative amounts of deviation d, the sum changes by d times
        the root of the sum of their squares, however much the terms cancel.
      worst_torch_errors: the largest of PyTorch's rms errors, and of its largest errors.
    """

    term_scales: dict[Key, float]
    worst_torch_errors: dict[Key, tuple[float, float]]


@dataclass(frozen=True)
class Case:
    """Both functions in one dtype. What is cached is computed when it is first needed."""

    jax_fn: Callable[..., Any]
    torch_fn: Callable[..., Any]
    reference_fn: Callable[..., Any] | None
    parameters: Callable[[dict[str, jax.Array]], Any] | None
    arguments: Arguments
    dtype: str | None
    gradients: bool
    seed: int

    @cached_property
    def arrays(self) -> list[np.ndarray]:
        """What both functions get, floats rounded."""
        return self.arguments.rounded(self.dtype)

    @cached_property
    def floats(self) -> list[int]:
        """Which of the arrays hold floats."""
        return [i for i, array in enumerate(self.arrays) if is_float(array)]

    @property
    def differentiable(self) -> list[int]:
        """Which of the arrays have a gradient to compare."""
        return self.floats if self.gradients else []

    # --- the three sides ---

    def call_jax(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The outputs of the JAX function by name."""
        named, inputs, keywords = self.arguments.filled(arrays)
        first = () if self.parameters is None else (self.parameters(named),)
        return named_outputs(self.jax_fn(*first, *inputs, **keywords))

    @cached_property
    def jax_arrays(self) -> list[jax.Array]:
        """The same for JAX."""
        return [to_jax(array) for array in self.arrays]

    @cached_property
    def eager(self) -> dict[str, Any]:
        """JAX's outputs without jit."""
        with jax.default_matmul_precision("highest"):
            outputs = self.call_jax(self.jax_arrays)
        return {name: jnp.asarray(output) for name, output in outputs.items()}

    @cached_property
    def jitted(self) -> dict[str, Any]:
        """JAX's outputs under jit."""
        with jax.default_matmul_precision("highest"):
            return jax.jit(self.call_jax)(self.jax_arrays)

    @cached_property
    def jax_gradients(self) -> list[jax.Array]:
        """JAX's gradients, under jit."""

        def pull_back(floats, cotangents):
            def of_floats(floats):
                arrays = list(self.jax_arrays)
                for index, value in zip(self.differentiable, floats, strict=True):
                    arrays[index] = value
                outputs = self.call_jax(arrays)
                return {name: outputs[name] for name in cotangents}

            return jax.vjp(of_floats, floats)[1](cotangents)[0]

        cotangents = {
            name: to_jax(cotangent.astype(self.eager[name].dtype))
            for name, cotangent in self.cotangents.items()
        }
        with jax.default_matmul_precision("highest"):
            return jax.jit(pull_back)([self.jax_arrays[i] for i in self.differentiable], cotangents)

    @cached_property
    def torch_side(self) -> TorchRun:
        """PyTorch in the dtype of the case."""
        return self.run_torch(self.torch_fn)

    @cached_property
    def reference_side(self) -> TorchRun:
        """PyTorch in float64."""
        return self.run_torch(self.reference_fn or self.torch_fn, wide=True)

    def run_torch(
        self,
        function: Callable[..., Any],
        *,
        wide: bool = False,
        arrays: Sequence[np.ndarray] | None = None,
        gradients: bool = True,
    ) -> TorchRun:
        """Run a PyTorch function on the rounded arrays, or others; `wide`: in float64."""
        dtypes = [] if self.dtype is None else [self.dtype]
        arrays = self.arrays if arrays is None else arrays
        if wide:
            dtypes.append("float64")
            arrays = [x.astype(np.float64) if is_float(x) else x for x in arrays]
        gradients = gradients and bool(self.differentiable)
        return TorchRun(function, dtypes, self.arguments, arrays, gradients=gradients)

    @cached_property
    def cotangents(self) -> dict[str, np.ndarray]:
        """Standard normal numbers that every side can hold; 0 where the result is not finite."""
        random = np.random.default_rng(self.seed)
        cotangents = {}
        for name, reference in self.reference_side.outputs.items():
            sides = (self.eager[name], self.torch_side.outputs[name], reference)
            if all(is_float(side) for side in sides):
                cotangent = random.standard_normal(self.eager[name].shape)
                finite = np.isfinite(to_numpy(reference))
                cotangents[name] = np.where(finite, cotangent, 0.0)
        return self.representable(cotangents)

    def representable(self, cotangents: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Cotangents rounded to the dtypes of both sides' outputs, in float64."""
        rounded = {}
        for name, cotangent in cotangents.items():
            for output in (self.eager[name], self.torch_side.outputs[name]):
                cotangent = cotangent.astype(to_numpy(output).dtype).astype(np.float64)
            rounded[name] = cotangent
        return rounded

    # --- the comparison ---

    def check_outputs(self) -> None:
        """All sides must return arrays of the same names and shapes."""
        outputs = self.eager
        others = {"torch_fn": self.torch_side, "reference_fn": self.reference_side}
        for function, run in others.items():
            if list(run.outputs) != list(outputs) or not outputs:
                raise ValueError(
                    "assert_parity: both functions must return the same arrays, at least one; got "
                    f"jax_fn={_describe(outputs)}, {function}={_describe(run.outputs)}"
                )
            for name, output in outputs.items():
                shape = tuple(run.outputs[name].shape)
                if shape != output.shape:
                    hint = ""
                    if np.prod(shape) == output.size > 0:
                        hint = f". It looks like {explain(output, run.outputs[name])[0]}"
                    raise ValueError(
                        f"assert_parity: {_label(name)} must have one shape; got "
                        f"jax_fn={list(output.shape)}, {function}={list(shape)}{hint}"
                    )

    def results(self) -> Iterator[Result]:
        """Every output, as computed eagerly and under jit."""
        for name in self.eager:
            for kind, outputs in (("eager", self.eager), ("jit", self.jitted)):
                yield Result(
                    key=("output", name),
                    label=f"{self._prefix}{_label(name)}, {kind}",
                    jax=outputs[name],
                    torch=self.torch_side.outputs[name],
                    reference=self.reference_side.outputs[name],
                )

    def gradient_results(self) -> Iterator[Result]:
        """The gradient with respect to every float array."""
        if not (self.differentiable and self.cotangents):
            return
        torch_gradients = self.torch_side.pull_back(self.cotangents)
        reference_gradients = self.reference_side.pull_back(self.cotangents)
        for position, index in enumerate(self.differentiable):
            yield Result(
                key=("gradient", position),
                label=f"{self._prefix}gradient of {self.arguments.names[index]}",
                jax=self.jax_gradients[position],
                torch=torch_gradients[position],
                reference=reference_gradients[position],
            )

    def judged(
        self, result: Result, *, share_equal: float | None = None, **limits: Any
    ) -> Judgement:
        """Judge one result; before it fails, or passes on a doubt, look once more."""
        if to_numpy(result.jax).dtype != to_numpy(result.torch).dtype:
            share_equal = None

        def verdict(**changed: Any) -> Judgement:
            return judge(
                result.label,
                result.jax,
                result.torch,
                result.reference,
                share_equal=share_equal,
                **{**limits, **changed},
            )

        judgement = verdict()
        more: dict[str, Any] = {}
        if not judgement.ok and is_float(result.reference) and is_float(result.torch):
            more["torch_errors"] = self.nearby.worst_torch_errors[result.key]
            if judgement.jax.size < SMALL:
                typical = _finite_rms(result.reference)
                more["scale"] = max(typical, self.nearby.term_scales[result.key])
            judgement = verdict(**more)
        if not judgement.doubts:
            return judgement

        # Is PyTorch's error an error of rounding?
        again = self.values(self.torch_again, self.cotangents)[result.key]
        if _finite_rms(again, result.torch) > judgement.torch.rms_error / 8:
            raise ValueError(
                "assert_parity: torch_fn must give one result for one input; got two that differ "
                f"by {_finite_rms(again, result.torch):.2e} (rms) in {result.label}. "
                "Is there dropout in it? Call .eval()."
            )
        if self.reference_fn is not None:
            wide = self.values(self.torch_wide, self.cotangents)[result.key]
            apart = _finite_rms(wide, result.reference)
            if apart > judgement.torch.rms_error / 8:
                judgement = verdict(**{**more, "factor": 0.0})
                doubt = (
                    f"in float64 torch_fn and reference_fn still differ, by {apart:.2e} (rms): "
                    "they do not compute the same, and PyTorch's error excuses none of JAX's"
                )
                return replace(judgement, doubts=(doubt, *judgement.doubts))
        return judgement

    @cached_property
    def torch_again(self) -> TorchRun:
        """A second run, which must not differ from the first."""
        return self.run_torch(self.torch_fn)

    @cached_property
    def torch_wide(self) -> TorchRun:
        """torch_fn, not reference_fn, in float64."""
        return self.run_torch(self.torch_fn, wide=True)

    @cached_property
    def nearby(self) -> "Nearby":
        """PyTorch, in this dtype and in float64, on inputs and cotangents changed a little."""
        narrowest = max((unit_roundoff(self.arrays[i].dtype) for i in self.floats), default=0.0)
        # Large enough to change every rounding.
        step = max(SMALLEST_STEP, 4 * narrowest)
        random = np.random.default_rng(self.seed)

        def change(array: np.ndarray) -> np.ndarray:
            factors = 1.0 + step * random.standard_normal(array.shape)
            return (array.astype(np.float64) * factors).astype(array.dtype)

        unchanged = self.values(self.reference_side, self.cotangents)
        squares = dict.fromkeys(unchanged, 0.0)
        worst = {key: (0.0, 0.0) for key in unchanged}
        for _ in range(NEARBY_RUNS):
            arrays = [change(x) if is_float(x) else x for x in self.arrays]
            cotangents = self.representable({k: change(c) for k, c in self.cotangents.items()})
            torch_values = self.values(self.run_torch(self.torch_fn, arrays=arrays), cotangents)
            function = self.reference_fn or self.torch_fn
            references = self.values(self.run_torch(function, wide=True, arrays=arrays), cotangents)
            for key, reference in references.items():
                squares[key] += _finite_rms(reference, unchanged[key]) ** 2
                error = _finite_difference(torch_values[key], reference)
                worst[key] = (
                    max(worst[key][0], rms(error)),
                    max(worst[key][1], float(np.max(np.abs(error)))),
                )
        scales = {key: math.sqrt(total / NEARBY_RUNS) / step for key, total in squares.items()}
        return Nearby(scales, worst)

    def values(self, run: TorchRun, cotangents: dict[str, np.ndarray]) -> dict[Key, np.ndarray]:
        """The outputs and gradients of a PyTorch run."""
        values: dict[Key, np.ndarray] = {
            ("output", name): to_numpy(output) for name, output in run.outputs.items()
        }
        if self.differentiable:
            for position, gradient in enumerate(run.pull_back(cotangents)):
                values["gradient", position] = to_numpy(gradient)
        return values

    def suspect(self) -> str | None:
        """A usual mistake that turns PyTorch's outputs into JAX's; None if none of them does."""
        before = self.distance(self.reference_side)
        for text, arrays in islice(changed(self.arrays, self.arguments.names), LARGEST_SEARCH):
            try:
                function = self.reference_fn or self.torch_fn
                run = self.run_torch(function, wide=True, arrays=arrays, gradients=False)
                after = self.distance(run)
            except Exception:
                # What a changed input does to a function is not what is tested.
                continue
            if after < before / 8:
                return (
                    f"{self._prefix}PyTorch would give what JAX gives if {text}: the rms error of "
                    f"the outputs would be {after:.2e} instead of {before:.2e}"
                )
        return None

    def distance(self, run: TorchRun) -> float:
        """JAX's outputs against a PyTorch run, in the root mean square of all."""
        return float(
            np.sqrt(np.mean([_finite_rms(x, run.outputs[k]) ** 2 for k, x in self.eager.items()]))
        )

    @property
    def _prefix(self) -> str:
        return "" if self.dtype is None else f"{self.dtype}: "


def _label(name: str) -> str:
    return f"output {name}" if name else "output"


def _describe(outputs: dict[str, Any]) -> str:
    described = [f"{name or 'array'} {list(x.shape)}" for name, x in outputs.items()]
    return "{" + ", ".join(described) + "}"


def _finite_difference(x: Any, y: Any) -> np.ndarray:
    """x - y wherever that is finite, elsewhere 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = to_numpy(x).astype(np.float64) - to_numpy(y).astype(np.float64)
    return np.where(np.isfinite(difference), difference, 0.0)


def _finite_rms(x: Any, y: Any = 0.0) -> float:
    return rms(_finite_difference(x, y))
