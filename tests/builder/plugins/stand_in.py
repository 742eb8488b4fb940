"""A stand-in for the tensorrt module, so that its pure-Python plugin package runs on a CPU.

The package is that of the tensorrt-cu13-bindings wheel; the wheel's library is never loaded. Enums and plain values
come from TensorRT for RTX, which has no plugins; what symbolic shapes need is here. Nothing is executed by it.
"""

from __future__ import annotations

import enum
import importlib.util
import subprocess
import sys
import types
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BINDINGS = "tensorrt-cu13-bindings==11.4.0.106"
_BASES = (
    "ISymExpr ISymExprs IKernelLaunchParams IPluginV3QuickAOTBuild IPluginV3QuickBuild IPluginV3QuickCore "
    "IPluginV3QuickRuntime IPluginCreatorV3Quick IPluginV3"
)


class IDimensionExpr:
    """A dimension: its value, and whether the network fixes it."""

    def __init__(self, value: int, constant: bool = True) -> None:
        self.value, self.constant = value, constant

    def is_constant(self) -> bool:
        return self.constant

    def is_size_tensor(self) -> bool:
        return False

    def get_constant_value(self) -> int:
        assert self.constant, "TensorRT does not know a dynamic dimension's value"
        return self.value


class IExprBuilder:
    def __init__(self, operations: Any) -> None:
        self._evaluate = {
            operations.SUM: lambda x, y: x + y,
            operations.SUB: lambda x, y: x - y,
            operations.PROD: lambda x, y: x * y,
            operations.MAX: max,
            operations.MIN: min,
            operations.EQUAL: lambda x, y: int(x == y),
            operations.LESS: lambda x, y: int(x < y),
            operations.FLOOR_DIV: lambda x, y: x // y,
            operations.CEIL_DIV: lambda x, y: -(-x // y),
        }

    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(value)

    def operation(self, operation: Any, a: IDimensionExpr, b: IDimensionExpr) -> IDimensionExpr:
        return IDimensionExpr(self._evaluate[operation](a.value, b.value), a.constant and b.constant)


class QuickPluginCreationRequest(enum.Enum):
    UNKNOWN = 0
    PREFER_JIT = 1
    PREFER_AOT = 2
    STRICT_JIT = 3
    STRICT_AOT = 4


class DimsExprs(list):
    def __init__(self, size: int) -> None:
        super().__init__([None] * size)


@dataclass
class PluginTensorDesc:
    type: Any = None
    format: Any = None
    dims: tuple[int, ...] = ()
    scale: float = 1.0


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    min: tuple[int, ...] = ()
    opt: tuple[int, ...] = ()
    max: tuple[int, ...] = ()


class ITensor:
    """A tensor of a network: enough to be an argument of a plugin."""


@dataclass
class Registry:
    all_creators: list[Any] = field(default_factory=list)

    def register_creator(self, creator: Any, namespace: str) -> bool:
        self.all_creators.append(creator)
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return next(c for c in self.all_creators if (c.name, c.plugin_namespace) == (name, namespace))


def download(folder: Path) -> Path:
    """The unpacked wheel of BINDINGS, from the folder or the package index; RuntimeError if there is neither."""
    package = folder / "tensorrt_bindings" / "plugin"
    if package.is_dir():
        return package
    folder.mkdir(parents=True, exist_ok=True)
    # Any Python's wheel does: only its Python files are used, and they are the same.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.11", "--implementation", "cp", "--abi", "none"]
    command += ["--platform", "manylinux_2_28_x86_64", "--dest", str(folder), BINDINGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    wheels = list(folder.glob("tensorrt_cu13_bindings-*.whl"))
    if done.returncode != 0 or not wheels:
        raise RuntimeError((done.stderr.strip() or "no wheel").splitlines()[-1])
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("tensorrt_bindings/plugin/")])
    return package


def load(package: Path) -> types.ModuleType:
    """A module `tensorrt` with tensorrt.plugin from the package; sys.modules keeps neither name."""
    import tensorrt_rtx as rtx

    trt = types.ModuleType("tensorrt")
    trt.__dict__.update({name: value for name, value in vars(rtx).items() if not name.startswith("__")})
    trt.__version__, trt.__path__ = "11.4.0.106", []
    for cls in (IDimensionExpr, IExprBuilder, QuickPluginCreationRequest, DimsExprs, PluginTensorDesc, ITensor):
        setattr(trt, cls.__name__, cls)
    trt.DynamicPluginTensorDesc = DynamicPluginTensorDesc
    for name in _BASES.split():
        setattr(trt, name, type(name, (), {"__init__": lambda self, *arguments, **named: None}))
    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "tensorrt"}
    for name in before:
        del sys.modules[name]
    sys.modules["tensorrt"] = trt
    try:
        spec = importlib.util.spec_from_file_location(
            "tensorrt.plugin", package / "__init__.py", submodule_search_locations=[str(package)]
        )
        trt.plugin = importlib.util.module_from_spec(spec)
        sys.modules["tensorrt.plugin"] = trt.plugin
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            spec.loader.exec_module(trt.plugin)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
            del sys.modules[name]
        sys.modules.update(before)
    return trt


@dataclass
class Launch:
    """A kernel launch as TensorRT stores it in an engine, with the symbolic values evaluated."""

    kernel: str
    code: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_mem: int
    scalars: list[int]


@dataclass
class Planned:
    """A plugin taken through the calls that TensorRT makes when it builds an engine."""

    output_shapes: list[tuple[int, ...]]
    output_types: list[Any]
    aliased_inputs: list[int]
    tactics: list[int]
    launches: dict[int, Launch]


class _Assigned:
    """Takes what a plugin assigns to it: launch parameters by name, scalars by index."""

    def __init__(self) -> None:
        self.__dict__["values"] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.values[key] = value

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value


def plan(
    trt: Any, plugin_id: str, inputs: list[tuple[tuple[int, ...], Any]], dynamic: tuple = (), **attributes: Any
) -> Planned:
    """Build a plugin for inputs [(shape, dtype)]; dynamic: (input, dimension) pairs that the network leaves open."""
    namespace, name = plugin_id.split("::")
    create = getattr(getattr(trt.plugin.op, namespace), name)(*(trt.ITensor() for _ in inputs), **attributes)
    tensors, shape_tensors, plugin = create(trt.QuickPluginCreationRequest.STRICT_AOT)
    assert len(tensors) == len(inputs)
    assert not shape_tensors
    builder = IExprBuilder(trt.DimensionOperation)
    types_in = [dtype for _, dtype in inputs]
    types_out = list(plugin.get_output_data_types(types_in, [len(shape) for shape, _ in inputs]))
    dims = [
        [IDimensionExpr(size, (i, d) not in dynamic) for d, size in enumerate(shape)]
        for i, (shape, _) in enumerate(inputs)
    ]
    shapes_out = [tuple(dim.value for dim in dims_out) for dims_out in plugin.get_output_shapes(dims, [], builder)]
    linear = trt.TensorFormat.LINEAR
    shapes = [shape for shape, _ in inputs] + shapes_out
    # As TensorRT has them: -1 for an open dimension, whose size the profile says.
    seen = [tuple(-1 if (i, d) in dynamic else size for d, size in enumerate(shape)) for i, shape in enumerate(shapes)]
    descs = [
        DynamicPluginTensorDesc(PluginTensorDesc(dtype, linear, known), opt=shape)
        for known, shape, dtype in zip(seen, shapes, types_in + types_out, strict=True)
    ]
    supported = [(d.type, d.format) for d in plugin.get_supported_format_combinations(descs, len(inputs))]
    assert supported == [(d.desc.type, d.desc.format) for d in descs], "the plugin takes other types than the network's"
    plugin.configure_plugin(descs[: len(inputs)], descs[len(inputs) :])
    tactics = plugin.get_valid_tactics()
    launches = {}
    for tactic in tactics or [0]:
        plugin.set_tactic(tactic)
        params, values = _Assigned(), _Assigned()
        plugin.get_launch_params(dims, descs, len(inputs), params, values, builder)
        kernel, code = plugin.get_kernel([d.desc for d in descs[: len(inputs)]], [d.desc for d in descs[len(inputs) :]])
        count = values.values.pop("nbSymExprs")
        arguments = [values.values[i] for i in range(count)]
        assert all(argument.dtype == trt.PluginArgDataType.INT32 for argument in arguments)
        numbers = {name: value.expr.value for name, value in params.values.items()}
        grid, block = (tuple(numbers[f"{what}_{axis}"] for axis in "xyz") for what in ("grid", "block"))
        launches[tactic] = Launch(
            kernel, code, grid, block, numbers["shared_mem"], [argument.expr.value for argument in arguments]
        )
    aliased = [plugin.get_aliased_input(i) for i in range(plugin.get_num_outputs())]
    return Planned(shapes_out, types_out, aliased, tactics, launches)
