"""The PyTorch side of `assert_parity`: run on copies, never on what the caller holds."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import MethodType
from typing import Any

import numpy as np

from jaxblock.parity.arguments import Arguments, named_outputs
from jaxblock.parity.arrays import to_torch


def module_of(function: Any) -> Any:
    """The `torch.nn.Module` that function is, or is a method of; None if there is none."""
    import torch

    for candidate in (function, getattr(function, "__self__", None)):
        if isinstance(candidate, torch.nn.Module):
            return candidate
    return None


class TorchRun:
    """One run, ready for its backward pass.

    Args:
      function: a module or a method of one is copied to the CPU and cast to one of `dtypes` after
        the other, parameters and buffers, as `torch.nn.Module.to` does. Other functions are run as
        they are.
      arrays: for the places of `arguments`; what is in place of parameters is put into the copy.
      gradients: whether `pull_back` will be called.
    """

    def __init__(
        self,
        function: Any,
        dtypes: Sequence[str],
        arguments: Arguments,
        arrays: Sequence[np.ndarray],
        *,
        gradients: bool,
    ):
        import torch

        tensors = [to_torch(array) for array in arrays]
        module = module_of(function)
        if module is not None:
            copy = _cast_copy(module, dtypes)
            function = copy if function is module else MethodType(function.__func__, copy)
            indices, *_ = arguments.filled(range(len(tensors)))
            parameters = dict(copy.named_parameters())
            for name, index in indices.items():
                parameters[name].data = tensors[index]
                tensors[index] = parameters[name]
        self._leaves = [tensor for tensor in tensors if tensor.is_floating_point()]
        for leaf in self._leaves:
            leaf.requires_grad_(gradients)
        # Copies of the inputs: PyTorch lets nothing overwrite what it differentiates.
        _, inputs, keywords = arguments.filled([tensor.clone() for tensor in tensors])
        self.outputs = {
            name: output if isinstance(output, torch.Tensor) else torch.as_tensor(output)
            for name, output in named_outputs(function(*inputs, **keywords)).items()
        }

    def pull_back(self, cotangents: Mapping[str, np.ndarray]) -> list[Any]:
        """The gradient with respect to every float array; zeros where there is no way to it."""
        import torch

        outputs = {
            name: output
            for name, output in self.outputs.items()
            if name in cotangents and output.requires_grad
        }
        if not outputs:
            return [torch.zeros_like(leaf) for leaf in self._leaves]
        return list(
            torch.autograd.grad(
                list(outputs.values()),
                self._leaves,
                [to_torch(cotangents[name]).to(outputs[name].dtype) for name in outputs],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )


def _cast_copy(module: Any, dtypes: Sequence[str]) -> Any:
    import torch

    copy = deepcopy(module).cpu()
    for dtype in dtypes:
        copy.to(getattr(torch, dtype))
    for parameter in copy.parameters():
        parameter.requires_grad_(False)
    return copy
