"""The random model is one that our builder reads, and the bound counts what a pass reads."""

import shutil
from pathlib import Path

import pytest

from benchmarks.peers.bits.machine import Machine, measure_machine
from benchmarks.peers.bits.models import Model, write_random_checkpoint
from faser_trtllm.builder.build import BuildOptions, build_engines
from tests.support.checkpoints import make_checkpoint
from tests.support.moe_checkpoints import make_moe_checkpoint


def test_random_checkpoint(tmp_path: Path) -> None:
    tokenizer = make_checkpoint(tmp_path / "tiny") / "tokenizer.json"
    path = write_random_checkpoint(tmp_path / "random", tokenizer, (2, 128, 192, 320), max_seq_len=64)
    model = Model("random", path)
    layer = 128 * (128 + 2 * 64 + 128) + 3 * 128 * 192
    assert model.num_read(1) == model.num_read(64) == 2 * layer + 320 * 128
    assert model.num_weights() == model.num_read(1) + 320 * 128 + 5 * 128
    assert model.flop(10, 1) == 2 * (10 * 2 * layer + 320 * 128)
    built = build_engines(BuildOptions(path, None, tmp_path / "engines", max_seq_len=64))
    assert built is not None


def test_rows_of_a_mixture_share_experts(tmp_path: Path) -> None:
    """4 of 16 experts: two rows take 7 in the mean, many all, and each row computes with its own 4."""
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 320, "num_layers": 2}
    path = make_moe_checkpoint(tmp_path / "mixture", num_experts=16, top_k=4, expert_size=32, **sizes)
    model, head, expert = Model("mixture", path), 320 * 64, 3 * 64 * 32
    attention = 64 * (64 + 2 * 32 + 64) + 16 * 64  # and the router
    for num_rows, num_experts in ((1, 4), (2, 7), (200, 16)):
        assert model.num_read(num_rows) == pytest.approx(2 * (attention + num_experts * expert) + head)
    assert model.flop(10, 1) == 2 * (10 * 2 * (attention + 4 * expert) + head)


def test_bound_is_the_slower_part() -> None:
    machine = Machine(read_gb_per_s=10.0, gflop_per_s=100.0)
    assert machine.least_ms(20e6, 1e6) == (2.0, "memory")
    assert machine.least_ms(1e6, 1e9) == (10.0, "arithmetic")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_machine_without_a_compiler_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure_machine(1, (0,), tmp_path) is None
