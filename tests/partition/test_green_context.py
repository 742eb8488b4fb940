"""Shares of a GPU, through cuda-python's real bindings over a stand-in driver; on a GPU with `pytest -m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faser_trtllm.errors import FaserError
from faser_trtllm.partition.green_context import GpuPartitions, default_draft_sms
from tests.virtual_gpu.device.library import driver_library, why_not

MAKE_AND_TELL = """
import logging, sys
from faser_trtllm.errors import FaserError
from faser_trtllm.partition.green_context import GpuPartitions
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
try:
    with GpuPartitions({arguments}) as made:
        streams = {{p.stream for p in made.partitions}}
        assert len(streams) == len(made.partitions) and all(streams)
        print(made.kind, *(f"{{p.name}}={{p.num_sms}}" for p in made.partitions), sep=", ")
    made.close()
except FaserError as error:
    print(type(error).__name__, error)
"""


MAKE_AGAIN = """
from faser_trtllm.partition.green_context import GpuPartitions
first = GpuPartitions({arguments})
other = GpuPartitions({arguments})
streams = [{{p.stream for p in made.partitions}} for made in (first, other)]
print("shared", len(streams[0] & streams[1]))
first.close()
with GpuPartitions([8]) as different, GpuPartitions({arguments}) as again:
    print("kept", again.partitions == first.partitions, different.partitions == first.partitions)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the virtual GPU's libcuda.so.1, and place for the log of its calls."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "libcuda.so.1").symlink_to(driver_library())
    return folder


def tell(library: Path, arguments: str, script: str = MAKE_AND_TELL, **environment: str) -> tuple[list[str], list[str]]:
    """Return the lines that the script printed, and the driver calls."""
    log = library / "log"
    log.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", script.format(arguments=arguments)],
        env={**os.environ, "LD_LIBRARY_PATH": str(library), "LIBCUDA_LOG": str(log), **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), log.read_text().splitlines()


def test_each_pair_comes_from_one_split_and_has_the_granted_counts(library: Path) -> None:
    lines, calls = tell(library, "[32, 12, 64]")
    assert lines == [
        "green, whole=132, draft 32:100=32, target 32:100=100, draft 16:116=16, target 16:116=116, "
        "draft 64:68=64, target 64:68=68"
    ]
    assert calls.count("cuDevSmResourceSplitByCount") == 3
    assert calls.count("cuGreenCtxCreate") == calls.count("cuGreenCtxGetDevResource") == 6
    assert not [call for call in calls if call.endswith("Destroy")], "torch may still know them"


@pytest.mark.parametrize("arguments", ["[32]", "[32], plain_streams=True"])
def test_streams_that_were_given_back_are_for_the_next_who_asks_for_the_same(library: Path, arguments: str) -> None:
    lines, calls = tell(library, arguments, MAKE_AGAIN)
    assert lines == ["shared 0", "kept True False"]
    assert not [call for call in calls if call.endswith("Destroy")]


def test_a_driver_that_grants_less_is_believed_and_reported(library: Path) -> None:
    lines, _ = tell(library, "[32]", LIBCUDA_STINGY="1")
    assert lines[0] == "WARNING partition target 32:100 was granted 98 SMs, 100 were asked for"
    assert lines[1].endswith("target 32:100=98")


@pytest.mark.parametrize(
    "environment",
    [
        {"LIBCUDA_FAILS": "cuDeviceGetDevResource"},
        {"LIBCUDA_FAILS": "cuGreenCtxStreamCreate"},
        {"LIBCUDA_FAILS": "cuGreenCtxGetDevResource"},
        {"LIBCUDA_LACKS": "cuGreenCtxCreate"},
    ],
)
def test_without_green_contexts_there_are_two_streams_and_a_warning(library: Path, environment: dict[str, str]) -> None:
    lines, calls = tell(library, "[32, 16]", **environment)
    (name,) = environment.values()
    assert lines[0].startswith("WARNING green contexts cannot be made (")
    assert name in lines[0]
    assert lines[0].endswith("share all 132 SMs, on two streams")
    assert lines[1] == "streams, whole=132, draft stream=132, target stream=132"
    assert calls.count("cuGreenCtxCreate") == calls.count("cuGreenCtxDestroy")
    failed_stream = environment == {"LIBCUDA_FAILS": "cuGreenCtxStreamCreate"}
    assert calls.count("cuGreenCtxStreamCreate") == calls.count("cuStreamDestroy") + failed_stream


def test_plain_streams_are_made_where_they_are_asked_for(library: Path) -> None:
    lines, calls = tell(library, "plain_streams=True")
    assert lines == ["streams, whole=132, draft stream=132, target stream=132"]
    assert calls == ["cuStreamCreate"] * 3


def test_who_asked_for_green_contexts_by_name_gets_an_error(library: Path) -> None:
    lines, calls = tell(library, "[32], require_green=True", LIBCUDA_FAILS="cuGreenCtxCreate")
    assert lines == [
        "FaserError green contexts cannot be made: cuGreenCtxCreate failed with CUDA_ERROR_NOT_SUPPORTED; a driver for "
        "CUDA 12.4 or newer has them"
    ]
    assert calls.count("cuStreamDestroy") == 1, "the whole GPU's stream is not left behind"


def test_counts_that_cannot_be_are_refused(library: Path) -> None:
    for count in (0, 132):
        lines, calls = tell(library, f"[{count}]")
        assert lines == [
            f"ConfigError draft_sms has {count}; it must be 1 to 131, which leaves the target at least one of the "
            "GPU's 132 SMs"
        ]
        assert not calls
    lines, _ = tell(library, "[130], require_green=True")  # rounded up to more than there is
    assert lines[0].startswith("FaserError green contexts cannot be made: cuDevSmResourceSplitByCount failed with")


def test_no_pairs_are_made_where_none_are_wanted(library: Path) -> None:
    lines, calls = tell(library, "[]")
    assert lines == ["green, whole=132"]
    assert calls == ["cuStreamCreate"]


def test_default_counts_are_multiples_of_eight() -> None:
    assert default_draft_sms(132) == (32,)
    assert default_draft_sms(20) == (8,)


@pytest.mark.gpu
def test_kernels_of_both_sides_run_on_a_gpu() -> None:
    """Passed on an H100 on 2026-11-26. That they stay on their SMs is measured by the bench, not here."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU and a CUDA build of torch")
    torch.zeros(1, device="cuda")
    try:
        made = GpuPartitions(require_green=True)
    except FaserError as error:
        pytest.skip(f"this driver has no green contexts: {error}")
    with made:
        for pair in made.pairs:
            assert pair.draft.num_sms + pair.target.num_sms <= made.num_sms
            for side in (pair.draft, pair.target):
                with torch.cuda.stream(torch.cuda.ExternalStream(side.stream)):
                    x = torch.ones(1024, 1024, device="cuda")
                    assert (x @ x).sum().item() == 1024**3
        torch.cuda.synchronize()
