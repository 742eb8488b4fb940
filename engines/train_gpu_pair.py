"""Train a larger pair on one GPU in under 10 minutes: a target of 31M parameters, a draft of 1.7M distilled from it.

Text: the Python sources on the machine (standard library and installed packages). Needs PyTorch, tokenizers,
safetensors and numpy, no network. Without a GPU it runs on the CPU, for trying it out. Not run on a GPU yet.

    python engines/train_gpu_pair.py --out pair                       # about 8 minutes
    python engines/train_gpu_pair.py --out pair --stop-after 4        # stops after 4 minutes; again: goes on

Writes OUT/target and OUT/draft (Hugging Face checkpoints, bf16, every file under 16 MB), OUT/metrics.json, and
OUT/work, which holds what a later run goes on from and can be deleted when all is done. The files that `faser bench`
draws its prompts from are held out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "demo")]

from train_demo_pair import END_OF_TEXT, Llama, Optimizer, Sizes, draw, measure  # noqa: E402

from faser_trtllm.profiling.prompts import HELD_OUT_STRIDE, library_files  # noqa: E402

MAX_FILE_BYTES = 16_000_000
MAX_SOURCE_BYTES = 400_000
TOKENIZER_BYTES = 30_000_000  # of text that the tokenizer is trained on
SAVE_EVERY_S = 60.0
PHASES = ("target", "draft")


def collect_texts(roots: Iterable[Path], max_bytes: int) -> tuple[list[str], list[str]]:
    """Python sources -> (training texts, held-out texts), without duplicates, at most max_bytes for training.

    Held out are the files of the standard library that benches draw prompts from, and every 20th of the others.
    """
    held_out = [read(path) for path in library_files(Path(sysconfig.get_paths()["stdlib"]))[::HELD_OUT_STRIDE]]
    seen = {digest(text) for text in held_out}
    paths = sorted({path for root in roots for path in root.rglob("*.py")})
    random.Random(0).shuffle(paths)
    training: list[str] = []
    size = 0
    for path in paths:
        if not path.is_file() or path.stat().st_size > MAX_SOURCE_BYTES:
            continue
        text = read(path)
        key = digest(text)
        if key in seen or not text.strip():
            continue
        seen.add(key)
        if len(seen) % HELD_OUT_STRIDE == 0:
            held_out.append(text)
            continue
        training.append(text)
        size += len(text)
        if size >= max_bytes:
            break
    return training, held_out


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    sample, size = [], 0
    for text in texts:
        sample.append(text)
        size += len(text)
        if size > TOKENIZER_BYTES:
            break
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def prepare(work: Path, vocab: int, roots: Sequence[Path], max_bytes: int) -> tuple[Tokenizer, Tensor, Tensor]:
    """Return (tokenizer, training ids, held-out ids), int16 or int32 on the CPU; from `work` if it has them."""
    ids_path, tokenizer_path = work / "ids.pt", work / "tokenizer.json"
    if ids_path.exists():
        ids = torch.load(ids_path, weights_only=True)
        return Tokenizer.from_file(str(tokenizer_path)), ids["training"], ids["held_out"]
    training, held_out = collect_texts(roots, max_bytes)
    tokenizer = train_tokenizer(training, vocab)

    def encode(texts: list[str]) -> Tensor:
        pieces = []
        for first in range(0, len(texts), 512):
            for encoding in tokenizer.encode_batch(texts[first : first + 512]):
                pieces.append(torch.tensor([0, *encoding.ids], dtype=torch.int16 if vocab <= 1 << 15 else torch.int32))
        return torch.cat(pieces)

    ids = {"training": encode(training), "held_out": encode(held_out)}
    tokenizer.save(str(tokenizer_path))
    write_state(ids_path, ids)
    megabytes = sum(map(len, training)) / 1e6
    say(
        f"{len(training)} files, {megabytes:.1f} MB, {len(ids['training']) / 1e6:.2f}M training and "
        f"{len(ids['held_out']) / 1e6:.2f}M held-out tokens"
    )
    return tokenizer, ids["training"], ids["held_out"]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """A file that is there is whole."""
    scratch = path.with_suffix(".tmp")
    torch.save(state, scratch)
    os.replace(scratch, path)


class Training:
    """One model's training, for a time that may be spread over several runs."""

    def __init__(self, name: str, model: Llama, work: Path, minutes: float, teacher: Llama | None = None) -> None:
        self.name, self.model, self.teacher = name, model, teacher
        self.optimizer = Optimizer(model)
        self.step, self.elapsed_s, self.num_tokens = 0, 0.0, 0
        self._path, self._total_s = work / f"{name}.pt", minutes * 60
        if self._path.exists():
            self._load()

    @property
    def done(self) -> bool:
        return self.elapsed_s >= self._total_s

    def run(self, data: Tensor, batch: int, length: int, deadline: Callable[[], bool]) -> bool:
        """Train to the end of its time; False if `deadline` came first. The state is saved either way."""
        device = next(self.model.parameters()).device.type
        last_save_s = self.elapsed_s
        while not self.done:
            start = time.monotonic()
            loss = self._one_step(data, batch, length, device)
            if device == "cuda":
                torch.cuda.synchronize()
            self.elapsed_s += time.monotonic() - start
            self.step += 1
            self.num_tokens += batch * length
            if self.step % 50 == 0:
                speed = self.num_tokens / self.elapsed_s
                say(f"{self.name}: {self.elapsed_s:.0f} s, step {self.step}, loss {loss:.3f}, {speed:.0f} tokens/s")
            if deadline():
                break
            if self.elapsed_s - last_save_s > SAVE_EVERY_S:
                self._save()
                last_save_s = self.elapsed_s
        self._save()
        return self.done

    def _one_step(self, data: Tensor, batch: int, length: int, device: str) -> float:
        left = 1 - self.elapsed_s / self._total_s
        x, y = (ids.long() for ids in draw(data, batch, length))
        with torch.autocast(device, torch.bfloat16):
            logits = self.model(x)
        logits = logits.float().flatten(0, 1)
        loss = total = F.cross_entropy(logits, y.flatten())
        if self.teacher is not None:
            with torch.no_grad(), torch.autocast(device, torch.bfloat16):
                target = self.teacher(x).float().flatten(0, 1).softmax(-1)
            total = 0.3 * loss + 0.7 * F.cross_entropy(logits, target)
        total.backward()
        self.optimizer.step(min(1, (self.step + 1) / 50) * min(1, max(0.02, left / 0.5)))
        return loss.item()

    def _save(self) -> None:
        write_state(
            self._path,
            {
                "model": self.model.state_dict(),
                "adam": self.optimizer.adam.state_dict(),
                "momentum": self.optimizer.momentum,
                "progress": [self.step, self.elapsed_s, self.num_tokens],
            },
        )

    def _load(self) -> None:
        state = torch.load(self._path, weights_only=True, map_location=next(self.model.parameters()).device)
        self.model.load_state_dict(state["model"])
        self.optimizer.adam.load_state_dict(state["adam"])
        self.optimizer.momentum = state["momentum"]
        self.step, self.elapsed_s, self.num_tokens = state["progress"]
        say(f"{self.name}: goes on from step {self.step}")


def split_checkpoint(directory: Path, max_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Turn model.safetensors into shards of less than max_bytes with their index, unless it is small enough."""
    whole = directory / "model.safetensors"
    if whole.stat().st_size < max_bytes:
        return [whole]
    shards: list[dict[str, Tensor]] = [{}]
    size = header = 4096  # a shard's JSON header comes on top of its tensors
    tensors = load_file(whole)
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size() + 128
        if nbytes + header >= max_bytes:
            raise SystemExit(f"tensor {name} has {nbytes} bytes, more than a file of {max_bytes} may hold")
        if size + nbytes >= max_bytes:
            shards.append({})
            size = header
        shards[-1][name] = tensor
        size += nbytes
    files = [directory / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, file, {"format": "pt"})
    weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    whole.unlink()
    return files


def parse_sizes(text: str, vocab: int) -> Sizes:
    """ "512,9,8,4,1408": hidden size, layers, heads, KV heads, intermediate size."""
    try:
        hidden, layers, heads, kv_heads, inner = (int(part) for part in text.split(","))
    except ValueError:
        raise SystemExit(f"sizes are {text!r}; they must be five whole numbers as in 512,9,8,4,1408") from None
    return Sizes(vocab, hidden, layers, heads, kv_heads, inner)


def say(line: str) -> None:
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the pair is written, 3 when --stop-after came first and another run is to go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_pair"))
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--target", default="512,9,8,4,1408", help="hidden,layers,heads,kv_heads,inner")
    parser.add_argument("--draft", default="128,3,2,2,384")
    parser.add_argument("--target-minutes", type=float, default=5.0, help="of training, over all runs")
    parser.add_argument("--draft-minutes", type=float, default=2.0)
    parser.add_argument("--stop-after", type=float, default=60.0, help="minutes of this run; a later one goes on")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--max-megabytes", type=float, default=200.0, help="of training text")
    parser.add_argument("--root", type=Path, action="append", help="a folder of Python sources; default: this Python's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    paths = sysconfig.get_paths()
    roots = options.root or [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    work = options.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    sizes = {name: parse_sizes(getattr(options, name), options.vocab) for name in PHASES}
    tokenizer, training_ids, held_out_ids = prepare(work, options.vocab, roots, int(options.max_megabytes * 1e6))

    def deadline() -> bool:
        return time.monotonic() - start > options.stop_after * 60

    default_device = torch.get_default_device()
    torch.set_default_device(options.device)  # what the models make on the way is made there too
    try:
        data, held_out = training_ids.to(options.device), held_out_ids.to(options.device)
        trained: dict[str, Training] = {}
        for name, minutes in zip(PHASES, (options.target_minutes, options.draft_minutes), strict=True):
            teacher = trained["target"].model if name == "draft" else None
            trained[name] = Training(name, Llama(sizes[name]), work, minutes, teacher)
            if not trained[name].run(data, options.batch, options.length, deadline):
                say("stopped as asked; run the same command again to go on")
                return 3
            trained[name].model.cpu()
            with torch.device("cpu"):
                trained[name].model.save(options.out / name, tokenizer)
            files = split_checkpoint(options.out / name)
            say(f"{name}: {len(files)} file(s), the largest {max(f.stat().st_size for f in files) / 1e6:.1f} MB")
            trained[name].model.to(options.device)
        target, draft = (trained[name].model for name in PHASES)
        found: dict[str, Any] = measure(target, draft, held_out.long())
    finally:
        torch.set_default_device(default_device)
    found |= {
        name: asdict(sizes[name])
        | {
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "tokens_seen": run.num_tokens,
            "training_s": round(run.elapsed_s, 1),
        }
        for name, run in trained.items()
    }
    found |= {"training_tokens": len(training_ids), "held_out_tokens": len(held_out_ids)}
    (options.out / "metrics.json").write_text(json.dumps(found, indent=1) + "\n")
    say(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
