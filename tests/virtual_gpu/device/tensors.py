"""Torch's tensors on the virtual GPU: a device of torch of its own ("virtual"), whose work is queued on streams.

Real: which operations the engine asks torch for, on which stream, with which memory, and whether the host waits. Stood
in for: the operations themselves. Each is torch's own for the CPU, run as a host function in stream order. Matrix
products sum in float64, so that a row does not depend on the rows beside it; no GPU's GEMM does that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import backend_registration

from tests.virtual_gpu.device.library import driver
from tests.virtual_gpu.device.memory import allocate, borrowed
from tests.virtual_gpu.device.streams import call, current_stream, enqueue, label_by_caller

NAME = "virtual"
_aten = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """inner: the CPU tensor over its memory, which the host must not read."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"DeviceTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            return _copy(*args)
        if func is _aten._to_copy.default and torch.device(kwargs.get("device") or NAME).type != NAME:
            return _to_host(args[0], kwargs.get("dtype"))
        if func is _aten._local_scalar_dense.default:
            return _to_host(args[0], None).item()
        if func is _aten.equal.default:
            return torch.equal(*(_to_host(tensor, None) for tensor in args))
        kind, written = _kind(func)
        if kind == "view":
            found = func(*_each(_inner, args), **_each(_inner, kwargs))
            return _each(DeviceTensor, found) if isinstance(found, list | tuple) else DeviceTensor(found)
        if kind == "writing":
            return _write(func, written, args, kwargs)
        return _compute(func, args, kwargs)


@functools.cache
def install() -> torch.device:
    """Make the device known to torch, once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, _arange)
    install.library = library  # type: ignore[attr-defined]  # it ends with its registrations
    return torch.device(NAME, 0)


@functools.cache
def _kind(func: Any) -> tuple[str, tuple[int, str] | None]:
    """ "view", "writing" (and the argument's place and name) or "new"."""
    schema = func._schema
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            assert sum(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments) == 1, func
            return "writing", (place, argument.name)
    return ("view" if any(result.alias_info is not None for result in schema.returns) else "new"), None


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value


def _each(function: Callable[[Any], Any], values: Any) -> Any:
    """The function's results for the arguments of an operation: values, and values in lists."""
    if isinstance(values, dict):
        return {
            name: _each(function, value) if isinstance(value, list) else function(value)
            for name, value in values.items()
        }
    return [_each(function, value) if isinstance(value, list) else function(value) for value in values]


def _key(value: Any) -> Any:
    """Return the part of a value that the shapes of an operation's results depend on."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape, value.stride(), value.dtype
    return (type(value), value) if not isinstance(value, list) else tuple(map(_key, value))


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


_shapes: dict[Any, tuple[type | None, list[tuple[Any, Any, torch.dtype]]]] = {}


def _results(func: Any, args: Any, kwargs: Any) -> tuple[type | None, list[tuple[Any, Any, torch.dtype]]]:
    """The type that holds several results or None for one; shape, stride and dtype of each."""
    key = func, tuple(map(_key, args)), tuple((name, _key(value)) for name, value in kwargs.items())
    if key not in _shapes:
        found = func(*_each(_meta, args), **_each(_meta, kwargs))
        kind = None if isinstance(found, torch.Tensor) else type(found)
        _shapes[key] = kind, [(x.shape, x.stride(), x.dtype) for x in ((found,) if kind is None else found)]
    return _shapes[key]


def _argument(value: Any) -> Any:
    """Return the argument that the queued operation works with."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor):
        if value.dim():
            raise RuntimeError(f"a tensor {list(value.shape)} of the host in an operation of the device")
        return value.clone()  # a number, which torch passes to kernels by value
    return borrowed(value.inner) if isinstance(value, DeviceTensor) else value


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Queue an operation with new results."""
    kind, shapes = _results(func, args, kwargs)
    outs = [allocate(*shape) for shape in shapes]
    targets = [borrowed(out) for out in outs]
    args, kwargs = _each(_argument, args), _each(_argument, kwargs)
    operation = _EXACT.get(func, func)

    def run() -> None:
        results = operation(*args, **kwargs)
        for target, result in zip(targets, (results,) if kind is None else results, strict=True):
            target.copy_(result)

    enqueue(run, str(func))
    wrapped = [DeviceTensor(out) for out in outs]
    return wrapped[0] if kind is None else kind(wrapped)


def _write(func: Any, written: tuple[int, str] | None, args: Any, kwargs: Any) -> Any:
    """Queue an operation that writes to one of its arguments, which is what it returns."""
    assert written is not None
    place, name = written
    target = args[place] if place < len(args) else kwargs[name]
    if not isinstance(target, DeviceTensor):
        raise RuntimeError(f"{func} writes to the host what it computes on the device")
    args, kwargs = _each(_argument, args), _each(_argument, kwargs)
    operation = _EXACT.get(func, func)
    enqueue(lambda: operation(*args, **kwargs), str(func))
    return target


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if target.numel() == 0:
        return target
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        return _write(_aten.copy_.default, (0, "self"), (target, source), {})
    if isinstance(target, DeviceTensor):
        _to_device(target, source, non_blocking)
    else:
        _read(target, source, non_blocking)
    return target


def _to_device(target: DeviceTensor, source: torch.Tensor, non_blocking: bool) -> None:
    if source.shape != target.shape or not source.is_contiguous():
        source = source.expand(target.shape).contiguous()
    if source.dtype is not target.dtype or not target.is_contiguous():
        staged = torch.empty(source.shape, dtype=source.dtype, device=target.device)
        _to_device(staged, source, non_blocking)
        target.copy_(staged)
        return
    label_by_caller("to device", behind="/staging.py")
    call("cuMemcpyHtoDAsync", target.data_ptr(), source.data_ptr(), _num_bytes(source), current_stream())
    _end_copy(source, non_blocking)


def _read(target: torch.Tensor, source: DeviceTensor, non_blocking: bool) -> None:
    if not target.is_contiguous():
        raise RuntimeError("a copy to memory of the host that is not contiguous")
    if source.dtype is not target.dtype or source.shape != target.shape or not source.is_contiguous():
        source = source.to(target.dtype).expand(target.shape).contiguous()
    label_by_caller("to host")
    call("cuMemcpyDtoHAsync", target.data_ptr(), source.data_ptr(), _num_bytes(source), current_stream())
    _end_copy(target, non_blocking)


def _end_copy(on_host: torch.Tensor, non_blocking: bool) -> None:
    if non_blocking:
        driver().torch_host_used(on_host.untyped_storage().data_ptr(), current_stream())
    else:
        label_by_caller("wait")
        call("cuStreamSynchronize", current_stream())


def _to_host(source: DeviceTensor, dtype: torch.dtype | None) -> torch.Tensor:
    host = torch.empty(source.shape, dtype=dtype or source.dtype)
    if host.numel():
        _read(host, source, non_blocking=False)
    return host


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _empty(size: Sequence[int], dtype: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    stride = torch.empty(size, device="meta").stride()
    return _empty_strided(size, stride, dtype)


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: Any = None, *a: Any, **k: Any) -> torch.Tensor:
    return DeviceTensor(allocate(size, stride, dtype or torch.get_default_dtype()))


def _arange(*args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    values = torch.arange(*args, dtype=dtype)
    made = torch.empty(values.shape, dtype=values.dtype, device=NAME)
    target = borrowed(made.inner)
    enqueue(lambda: _discard(target.copy_(values)), "aten.arange")
    return made


def _discard(value: Any) -> None:
    """Host functions return nothing."""


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).to(a.dtype)


def _mm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(a.double() @ b.double())


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    return (beta * bias.double() + alpha * (a.double() @ b.double())).to(a.dtype)


def _addmm_(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return sums.copy_(sums.double() + a.double() @ b.double())


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, bias: None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rows after the last group are not written, as on a GPU, where they are whatever was in memory: NaN here."""
    out = torch.full((a.shape[0], b.shape[2]), float("nan"), dtype=a.dtype)
    begin = 0
    for matrix, end in zip(b, offs.tolist(), strict=True):
        out[begin:end] = _mm(a[begin:end], matrix)
        begin = end
    return out


_EXACT: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _mm,
    _aten.mm.out: _mm_out,
    _aten.addmm.default: _addmm,
    _aten.addmm_.default: _addmm_,
    _aten._grouped_mm.default: _grouped_mm,
}
