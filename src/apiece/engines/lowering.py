"""Layers on images, for many clients at once. Under vmap every client has weights of its own, which makes a
convolution a grouped one, for which libraries are slow. Two other ways: batched matrix products of the
images' windows, and kernels of our own that never write the windows down (CUDA alone).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from apiece import kernels, tree
from apiece.kernels import Geometry
from apiece.params import Params
from apiece.random import as_key
from apiece.shard import Batch
from apiece.task import Task
from apiece.tree import Tree

Size = tuple[int, ...]


class _Windows(torch.autograd.Function):
    """(B, H, W, C) → (B, H', W', kh·kw·C): an image's windows, flattened. Its adjoint is _Overlap."""

    @staticmethod
    def forward(x: Tensor, kernel: Size, stride: Size, shape: Size) -> Tensor:
        windows = x.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])
        return windows.permute(0, 1, 2, 4, 5, 3).flatten(3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rest = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Overlap.apply(gradient, *ctx.rest), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], x: Tensor, *rest: Size) -> tuple[Tensor, int]:
        return _folded(_Windows.apply, dims[0], x, rest)


class _Overlap(torch.autograd.Function):
    """(B, H', W', kh·kw·C) → (B, H, W, C): windows added up where they overlap."""

    @staticmethod
    def forward(windows: Tensor, kernel: Size, stride: Size, shape: Size) -> Tensor:
        back = torch.ops.aten.unfold_backward
        batch, down = windows.shape[:2]
        parts = windows.unflatten(3, (*kernel, -1)).permute(0, 1, 2, 5, 3, 4)
        channels = parts.shape[3]
        rows = back(parts, [batch, down, shape[1], channels, kernel[0]], 2, kernel[1], stride[1])
        image: Tensor = back(rows, [batch, *shape, channels], 1, kernel[0], stride[0])
        return image

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rest = inputs[1:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _Windows.apply(gradient, *ctx.rest), None, None, None

    @staticmethod
    def vmap(info: Any, dims: tuple[int | None, ...], windows: Tensor, *rest: Size) -> tuple[Tensor, int]:
        return _folded(_Overlap.apply, dims[0], windows, rest)


def _folded(
    fn: Callable[..., Tensor], dim: int | None, x: Tensor, rest: tuple[Size, ...]
) -> tuple[Tensor, int]:
    """Images of many clients are images: the clients' axis goes into the batch."""
    assert dim is not None
    clients = x.movedim(dim, 0)
    return fn(clients.flatten(0, 1), *rest).unflatten(0, clients.shape[:2]), 0


class Unfolded(nn.Conv2d):
    """The same layer as windows × weights; its images are kept with channels last."""

    def forward(self, x: Tensor) -> Tensor:
        padding: Any = self.padding
        up, left = padding
        image = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, up, up))
        windows = _Windows.apply(image, self.kernel_size, self.stride, tuple(image.shape[1:3]))
        weights = self.weight.permute(2, 3, 1, 0).flatten(0, 2)
        out: Tensor = windows @ weights
        return (out if self.bias is None else out + self.bias).permute(0, 3, 1, 2)


class _Conv(torch.autograd.Function):
    """(B, H, W, C), (kh, kw, C, O) → (B, H', W', O). It and the next two are each other's derivatives."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, g: Geometry) -> Tensor:
        return _run(_conv, x, w, g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _keep(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), (by_x, by_w, _), g = ctx.saved_tensors, ctx.needs_input_grad, ctx.geometry
        return (
            _ToInput.apply(gradient, w, g) if by_x else None,
            _ToWeight.apply(x, gradient, g) if by_w else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, g: Geometry) -> tuple[Tensor, int]:
        return _batched(_Conv.apply, dims, x, w, g)


class _ToInput(torch.autograd.Function):
    """(B, H', W', O), (kh, kw, C, O) → (B, H, W, C)."""

    @staticmethod
    def forward(dy: Tensor, w: Tensor, g: Geometry) -> Tensor:
        return _run(kernels.conv_to_input, dy, w, g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _keep(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (dy, w), (by_dy, by_w, _), g = ctx.saved_tensors, ctx.needs_input_grad, ctx.geometry
        return (
            _Conv.apply(gradient, w, g) if by_dy else None,
            _ToWeight.apply(gradient, dy, g) if by_w else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, dims: Any, dy: Tensor, w: Tensor, g: Geometry) -> tuple[Tensor, int]:
        return _batched(_ToInput.apply, dims, dy, w, g)


class _ToWeight(torch.autograd.Function):
    """(B, H, W, C), (B, H', W', O) → (kh, kw, C, O)."""

    @staticmethod
    def forward(x: Tensor, dy: Tensor, g: Geometry) -> Tensor:
        return _run(kernels.conv_to_weight, x, dy, g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _keep(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, dy), (by_x, by_dy, _), g = ctx.saved_tensors, ctx.needs_input_grad, ctx.geometry
        return (
            _ToInput.apply(dy, gradient, g) if by_x else None,
            _Conv.apply(x, gradient, g) if by_dy else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, dy: Tensor, g: Geometry) -> tuple[Tensor, int]:
        return _batched(_ToWeight.apply, dims, x, dy, g)


def _conv(x: Tensor, w: Tensor, g: Geometry) -> Tensor:
    return kernels.conv(x, w, x.new_zeros(g.O).expand(len(x), -1), g)


def _keep(ctx: Any, a: Tensor, b: Tensor, geometry: Geometry) -> None:
    ctx.save_for_backward(a, b)
    ctx.geometry = geometry


def _run(kernel: Callable[..., Tensor], a: Tensor, b: Tensor, g: Geometry) -> Tensor:
    """The kernel on tensors with an axis of clients before their four, or without."""
    if a.dim() > 4:
        return kernel(_dense(a), _dense(b), g)
    return kernel(a.contiguous()[None], b.contiguous()[None], g)[0]


def _dense(tensor: Tensor) -> Tensor:
    """Contiguous but for the axis of clients, along which one tensor may stand for all."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()


def _owned(dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """The tensors with clients along the first axis: the first few of them, in a narrowed step."""
    pairs = list(zip(tensors, dims, strict=False))
    size = min(tensor.shape[dim] for tensor, dim in pairs if dim is not None)
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)[:size]
        for tensor, dim in pairs
    ]


def _batched(
    fn: Callable[..., Tensor], dims: tuple[int | None, ...], a: Tensor, b: Tensor, g: Geometry
) -> tuple[Tensor, int]:
    """An axis of clients for both; where there was one already, the two become one."""
    a, b = _owned(dims, a, b)
    depth = max(a.dim(), b.dim())
    if depth == 5:
        return fn(a, b, g), 0
    inner = (a if a.dim() == depth else b).shape[1]
    a, b = (t if t.dim() == depth else t[:, None].expand(-1, inner, *t.shape[1:]) for t in (a, b))
    return fn(a.flatten(0, 1), b.flatten(0, 1), g).unflatten(0, (len(a), inner)), 0


class _Affine(torch.autograd.Function):
    """_Conv plus a bias, (O,), in one kernel."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor, g: Geometry) -> Tensor:
        if x.dim() > 4:
            return kernels.conv(_dense(x), _dense(w), _dense(bias), g)
        return kernels.conv(x.contiguous()[None], w.contiguous()[None], bias.contiguous()[None], g)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, _, geometry = inputs
        _keep(ctx, x, w, geometry)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, w), (by_x, by_w, by_bias, _), g = ctx.saved_tensors, ctx.needs_input_grad, ctx.geometry
        return (
            _ToInput.apply(gradient, w, g) if by_x else None,
            _ToWeight.apply(x, gradient, g) if by_w else None,
            gradient.sum((0, 1, 2)) if by_bias else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor, g: Geometry) -> tuple[Tensor, int]:
        x, w, bias = _owned(dims, x, w, bias)
        if x.dim() == w.dim() == 5 and bias.dim() == 2:
            return _Affine.apply(x, w, bias, g), 0
        product, _ = _batched(_Conv.apply, (0, 0), x, w, g)
        while bias.dim() < product.dim() - 3:
            bias = bias[:, None]
        return product + bias[..., None, None, None, :], 0


class Direct(nn.Conv2d):
    """The same layer by kernels that read each window where it lies."""

    def forward(self, x: Tensor) -> Tensor:
        image, weight = x.permute(0, 2, 3, 1), self.weight.permute(2, 3, 1, 0)
        padding: Any = self.padding
        sizes = zip(image.shape[1:3], padding, self.kernel_size, self.stride, strict=True)
        height, width = [(along + 2 * edge - window) // step + 1 for along, edge, window, step in sizes]
        images, H, W, C = image.shape
        O, kernel, stride = self.out_channels, self.kernel_size, self.stride  # noqa: E741
        g = Geometry(images, H, W, C, height, width, O, kernel, stride, tuple(padding))
        y: Tensor = (
            _Conv.apply(image, weight, g) if self.bias is None else _Affine.apply(image, weight, self.bias, g)
        )
        return y.permute(0, 3, 1, 2)


class _Pool(torch.autograd.Function):
    """(B, H, W, C) → the largest entries of k × k windows, (B, H/k, W/k, C), and which they are."""

    @staticmethod
    def forward(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        return kernels.pool(x, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.shape, ctx.size = tuple(inputs[0].shape[1:3]), inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return _Unpool.apply(gradient, *ctx.saved_tensors, ctx.shape, ctx.size), None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: int) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        clients = x.movedim(dims[0], 0)
        found = _Pool.apply(clients.flatten(0, 1), size)
        return tuple(t.unflatten(0, clients.shape[:2]) for t in found), (0, 0)


class _Unpool(torch.autograd.Function):
    """(B, H/k, W/k, C) → (B, H, W, C): each entry where it came from, zeros elsewhere."""

    @staticmethod
    def forward(dy: Tensor, index: Tensor, shape: Size, size: int) -> Tensor:
        return kernels.unpool(dy, index, shape, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.size = inputs[3]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Linear, so its derivative picks what it has scattered; seldom needed, so plainly."""
        (index,), k = ctx.saved_tensors, ctx.size
        h, w = index.shape[1:3]
        windows = gradient[:, : h * k, : w * k].unflatten(2, (w, k)).unflatten(1, (h, k))
        tiles = windows.movedim(2, 3).flatten(3, 4)
        return tiles.gather(3, index.long()[:, :, :, None]).squeeze(3), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, dy: Tensor, index: Tensor, shape: Size, size: int) -> tuple[Tensor, int]:
        dy, index = _owned(dims, dy, index)
        flat = _Unpool.apply(dy.flatten(0, 1), index.flatten(0, 1), shape, size)
        return flat.unflatten(0, dy.shape[:2]), 0


class Pooled(nn.MaxPool2d):
    """The same layer; its images are read as they lie and written with channels last."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Pool.apply(x.permute(0, 2, 3, 1), _side(self.kernel_size))[0]
        return y.permute(0, 3, 1, 2)


def _side(size: int | tuple[int, ...]) -> int:
    """Of a square."""
    return size if isinstance(size, int) else size[0]


# How each kind of layer may be computed: PyTorch's own way comes first.
WAYS: Mapping[type[nn.Module], Mapping[str, type[nn.Module]]] = {
    nn.Conv2d: {"library": nn.Conv2d, "windows": Unfolded, "direct": Direct},
    nn.MaxPool2d: {"library": nn.MaxPool2d, "direct": Pooled},
}


def ways(layer: nn.Module, device: torch.device) -> list[str]:
    """The ways this layer can be computed; of most layers there are none but their own."""
    if type(layer) is nn.Conv2d:
        plain = (
            layer.groups == 1
            and tuple(layer.dilation) == (1, 1)
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )
    elif type(layer) is nn.MaxPool2d:
        plain = layer.kernel_size == layer.stride and layer.padding == 0 and layer.dilation == 1
        plain = plain and not layer.ceil_mode and not layer.return_indices
        plain = plain and (isinstance(layer.kernel_size, int) or len(set(layer.kernel_size)) == 1)
    else:
        return []
    able = device.type == "cuda" and kernels.available
    return [way for way in WAYS[type(layer)] if plain and (able or way != "direct")]


def lowered(task: Task, chosen: Mapping[str, str]) -> Task:
    """`task` with each named layer computed that way; parameters keep their names and values."""
    if not chosen:
        return task
    module = copy.deepcopy(task.module)
    for name, way in chosen.items():
        layer = module.get_submodule(name)
        layer.__class__ = WAYS[type(layer)][way]
    return replace(task, module=module)


def fastest(task: Task, x: Tree, y: Tensor, clients: int) -> dict[str, str]:
    """How to compute each layer: by measuring a training step of `clients` clients on a batch (x, y).

    Layer by layer, the others as already chosen; on a CPU PyTorch's own way is best and nothing is measured.
    """
    chosen: dict[str, str] = {}
    if task.device.type != "cuda":
        return chosen
    given = tree.map(lambda leaf: leaf.expand(clients, *leaf.shape).clone(), (task.init(0), x, y))
    for name, layer in task.module.named_modules():
        options = ways(layer, task.device)
        if "windows" in options and not torch.backends.cuda.matmul.allow_tf32:
            # The library's grouped convolution is not exact in full precision: 4e-5 off after four rounds.
            options.remove("library")
        taken = {way: _milliseconds(lowered(task, {**chosen, name: way}), *given) for way in options}
        if taken:
            chosen[name] = min(taken, key=lambda way: taken[way])
    return chosen


def _milliseconds(task: Task, params: Params, x: Tree, y: Tensor) -> float:
    """Of one gradient, replayed: launching it would hide what the device needs."""

    def gradient(params: Params, x: Tree, y: Tensor) -> Tree:
        weight = torch.ones(len(y), device=y.device)
        return grad(task.objective)(params, Batch(x, y, weight, None, as_key(0, y.device), True))

    def step() -> Tree:
        return vmap(gradient)(params, x, y)

    with torch.no_grad():
        step()
        graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        taken: list[float] = []
        for _ in range(3):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
    return min(taken)
