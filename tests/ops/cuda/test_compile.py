"""nvcc: every kernel within its file's limits; what is said where there is no nvcc.

`./build.sh test --all` compiles all of every file for every architecture. Without it that is sm_90, the attention for
heads of 64 only: a minute on one core, where all of it takes five.
"""

from __future__ import annotations

import json
import os

import pytest

from faser_trtllm.errors import ConfigError, FaserError
from faser_trtllm.ops.cuda import compiler
from faser_trtllm.ops.cuda.driver import device_arch
from tests.support.effort import pick

KERNEL = """
// limits of big_*: registers <= 200, spill_bytes <= 0, shared_bytes <= 0
// limits: registers <= 32, spill_bytes <= 0, shared_bytes <= 128
extern "C" __global__ void twice(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= FACTOR;
}
"""

PTXAS_LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    24 bytes stack frame, 28 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 35328 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for helper
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""


@pytest.fixture
def nvcc():
    try:
        return compiler.find_nvcc()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def one_kernel(tmp_path, monkeypatch, nvcc):
    """A folder of sources with one file, and a cache of its own."""
    (tmp_path / "twice.cu").write_text(KERNEL)
    monkeypatch.setattr(compiler, "source_dir", lambda: tmp_path)
    monkeypatch.setattr(compiler, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "twice.cu"


ONE_HEAD = {"FASER_HEAD_DIM": 64}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", pick(("sm_90",), compiler.ARCHITECTURES))
def test_every_kernel_keeps_its_limits(nvcc, arch):
    jobs = os.cpu_count() or 1
    done = compiler.compile_all(sorted(set(compiler.stems()) - {"verify_attention"}), [arch], jobs)
    done += compiler.compile_all(["verify_attention"], [arch], jobs, pick(ONE_HEAD, None))
    assert [sentence for compiled in done for sentence in compiler.broken_limits(compiled)] == []
    for compiled in done:
        assert compiled.path.read_bytes().startswith(b"\x7fELF")
        assert compiled.resources, f"{compiled.stem} has no kernel for {compiled.arch}"


def test_the_entry_points_are_there(nvcc):
    """ops/cuda launches them and the plugins name them; a cubin of one head size has only those of that size."""
    append = compiler.compile_stem("append_kv", "sm_90")
    assert {used.kernel for used in append.resources} == {
        f"append_kv_{norm}{types}" for norm in ("", "normed_") for types in ("bf16", "bf16_e4m3", "fp16", "fp16_e4m3")
    }
    attention = compiler.compile_stem("verify_attention", "sm_90", defines=ONE_HEAD)
    assert {used.kernel for used in attention.resources} == {
        *(f"verify_attention_{t}_h64_m{m}" for t in ("bf16", "bf16_e4m3", "fp16", "fp16_e4m3") for m in (16, 64)),
        *(f"verify_attention_sinks_{t}_h64_m{m}" for t in ("bf16", "bf16_e4m3") for m in (16, 64)),
        "verify_attention_combine_sinks_bf16",
        "verify_attention_combine_bf16",
        "verify_attention_combine_fp16",
    }


def test_a_change_is_compiled_and_the_same_is_not(one_kernel, monkeypatch):
    first = compiler.compile_stem("twice", "sm_80", defines={"FACTOR": 2})
    changed = compiler.compile_stem("twice", "sm_80", defines={"FACTOR": 3})
    (one_kernel.parent / "other.cuh").write_text("// of another kernel")
    assert compiler.compile_stem("twice", "sm_80", defines={"FACTOR": 2}) == first
    (one_kernel.parent / "outer.cuh").write_text('#include "inner.cuh"\n')
    (one_kernel.parent / "inner.cuh").write_text("// a header\n")
    one_kernel.write_text('#include "outer.cuh"\n' + KERNEL)
    included = compiler.compile_stem("twice", "sm_80", defines={"FACTOR": 2})
    (one_kernel.parent / "inner.cuh").write_text("// a changed header\n")
    header = compiler.compile_stem("twice", "sm_80", defines={"FACTOR": 2})
    assert len({first.path, changed.path, included.path, header.path}) == 4
    assert [used.kernel for used in first.resources] == ["twice"]
    assert compiler.broken_limits(first) == []

    monkeypatch.setattr(compiler, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert compiler.compile_stem("twice", "sm_80", defines={"FACTOR": 2}) == header


def test_ptx_names_its_architecture(one_kernel):
    compiled = compiler.compile_stem("twice", "sm_90", "ptx", {"FACTOR": 2})
    text = compiled.path.read_text()
    assert ".target sm_90" in text
    assert ".entry twice(" in text


def test_a_broken_limit_is_named(one_kernel):
    one_kernel.write_text(KERNEL.replace("registers <= 32", "registers <= 2"))
    compiled = compiler.compile_stem("twice", "sm_90", defines={"FACTOR": 2})
    (sentence,) = compiler.broken_limits(compiled)
    assert sentence.startswith("twice (sm_90): registers ")
    one_kernel.write_text(KERNEL.replace("// limits:", "// no limits:"))
    compiled = compiler.compile_stem("twice", "sm_90", defines={"FACTOR": 2})
    assert compiler.broken_limits(compiled) == ["twice (sm_90) has no limit stated in twice.cu"]


def test_a_compiler_s_error_is_passed_on(one_kernel):
    with pytest.raises(FaserError, match=r"(?s)nvcc failed on twice.cu for sm_90: .*FACTOR"):
        compiler.compile_stem("twice", "sm_90")
    assert list((one_kernel.parent / "cache").iterdir()) == []


def test_the_report_has_every_kernel(one_kernel, capsys, tmp_path):
    one_kernel.write_text(KERNEL.replace("FACTOR", "2"))
    report = tmp_path / "report.json"
    assert compiler.main(["--arch", "sm_90", "--jobs", "1", "--report", str(report)]) == 0
    (row,) = json.loads(report.read_text())
    assert (row["stem"], row["arch"], row["kernel"], row["spill_bytes"]) == ("twice", "sm_90", "twice", 0)
    assert "twice" in capsys.readouterr().out
    one_kernel.write_text(KERNEL.replace("FACTOR", "2").replace("registers <= 32", "registers <= 2"))
    assert compiler.main(["--arch", "sm_90", "--jobs", "1"]) == 1


def test_the_report_is_of_what_the_definitions_make(one_kernel, capsys):
    compiled = ["--arch", "sm_90", "--jobs", "1", "--define"]
    assert compiler.main([*compiled, "FACTOR=3"]) == 0
    (path,) = (one_kernel.parent / "cache").glob("*.cubin")
    assert path == compiler.compile_stem("twice", "sm_90", defines={"FACTOR": 3}).path
    assert compiler.main([*compiled, "FACTOR"]) == 2
    assert "--define is 'FACTOR'; it must be like FASER_HEAD_DIM=128" in capsys.readouterr().err


def test_ptxas_words_are_read():
    one, two = compiler.parse_resources(PTXAS_LOG)
    assert one == compiler.Resources("one", 168, 28 + 36, 35328)
    assert two == compiler.Resources("two", 12, 0, 0)


def test_without_nvcc_the_wheels_are_named(monkeypatch):
    monkeypatch.setattr(compiler, "_wheel_roots", list)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    compiler.find_nvcc.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"nvcc was not found: .*nvidia-cuda-nvcc nvidia-cuda-crt"):
            compiler.find_nvcc()
    finally:
        compiler.find_nvcc.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "sm_90"), "stem 'nothing' is unknown; plugins/cuda has accept, append_kv"),
        (("append_kv", "90"), "arch is '90'; it must be like sm_90"),
        (("append_kv", "sm_90", "fatbin"), "kind is 'fatbin'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        compiler.compile_stem(*arguments)


def test_a_driver_that_is_older_than_nvcc_is_named(nvcc):
    compiler.check_driver(13000)
    compiler.check_driver(14010)
    with pytest.raises(ConfigError, match=r"^the NVIDIA driver is for CUDA 12\.8, nvcc 13\.\d+ makes kernels for"):
        compiler.check_driver(12080)


def test_without_a_driver_one_sentence_says_so():
    try:
        arch = device_arch()
    except ConfigError as error:
        assert str(error).count(".") <= 3  # noqa: PT017
        assert "install" in str(error) or "nvidia-smi" in str(error)  # noqa: PT017
    else:
        assert arch.startswith("sm_")
