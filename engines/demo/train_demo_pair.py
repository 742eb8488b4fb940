"""Train the demo pair: a small Llama target on Python's standard library, and a draft distilled from it.

Needs PyTorch, tokenizers and safetensors, and no network. Writes two bf16 checkpoints in Hugging Face format
that share one BPE tokenizer, and metrics.json with what was measured on held-out files.

    python train_demo_pair.py --out pair --target-minutes 60 --draft-minutes 15
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT = "<|endoftext|>"
RMS_NORM_EPS = 1e-5
# Generated tables, data of other languages and files that are no prose of programmers.
SKIPPED = (
    "site-packages",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "idlelib/help",
    "test_unicode",
    "cjkencodings",
    "__pycache__",
    "turtledemo",
)


@dataclass(frozen=True)
class Sizes:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, kv_size = sizes.hidden, sizes.kv_heads * sizes.head_dim
        self.sizes = sizes
        self.norm1, self.norm2 = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_size, bias=False)
        self.v = nn.Linear(hidden, kv_size, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, sizes.inner, bias=False)
        self.up = nn.Linear(hidden, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        sizes = self.sizes

        def split(t: Tensor, num_heads: int) -> Tensor:
            return t.view(batch, length, num_heads, sizes.head_dim).transpose(1, 2)

        def rotate(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat([-second, first], -1) * sin

        h = F.rms_norm(x, (hidden,), self.norm1, RMS_NORM_EPS)
        group = sizes.heads // sizes.kv_heads
        q = rotate(split(self.q(h), sizes.heads))
        k = rotate(split(self.k(h), sizes.kv_heads)).repeat_interleave(group, 1)
        v = split(self.v(h), sizes.kv_heads).repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, hidden))
        h = F.rms_norm(x, (hidden,), self.norm2, RMS_NORM_EPS)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.hidden))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, 0, 0.02 / (math.sqrt(2 * sizes.layers) if residual else 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, length, vocab] of ids [batch, length]."""
        dim = self.sizes.head_dim
        inv_freq = self.sizes.rope_theta ** (-torch.arange(0, dim, 2).float() / dim)
        angle = torch.outer(torch.arange(ids.shape[1]).float(), inv_freq)
        x = self.embed(ids)
        cos, sin = (torch.cat([part, part], -1).to(x.dtype) for part in (angle.cos(), angle.sin()))
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.rms_norm(x, (self.sizes.hidden,), self.norm, RMS_NORM_EPS) @ self.embed.weight.T

    def save(self, directory: Path, tokenizer: Tokenizer) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        weights = {"model.embed_tokens.weight": self.embed.weight, "model.norm.weight": self.norm}
        for i, block in enumerate(self.blocks):
            layer = f"model.layers.{i}."
            weights[layer + "input_layernorm.weight"] = block.norm1
            weights[layer + "post_attention_layernorm.weight"] = block.norm2
            for name in "qkvo":
                weights[f"{layer}self_attn.{name}_proj.weight"] = getattr(block, name).weight
            for name in ("gate", "up", "down"):
                weights[f"{layer}mlp.{name}_proj.weight"] = getattr(block, name).weight
        bf16 = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
        save_file(bf16, directory / "model.safetensors", {"format": "pt"})
        sizes = self.sizes
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.inner,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "rms_norm_eps": RMS_NORM_EPS,
            "rope_theta": sizes.rope_theta,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }
        generation = {"bos_token_id": 0, "eos_token_id": 0}
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
        }
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=2))
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
        tokenizer.save(str(directory / "tokenizer.json"))


def orthogonalize(gradient: Tensor) -> Tensor:
    """Newton-Schulz iteration of the Muon optimizer (Jordan 2024)."""
    x = (gradient / (gradient.norm() + 1e-7)).bfloat16()
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if flip else x).float()


class Optimizer:
    """Muon for the matrices of the blocks, AdamW for the rest."""

    def __init__(self, model: Llama, lr: float = 0.02, adam_lr: float = 3e-3) -> None:
        self.matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        ids = {id(p) for p in self.matrices}
        rest = [p for p in model.parameters() if id(p) not in ids]
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.momentum = [torch.zeros_like(p) for p in self.matrices]
        self.lr, self.adam_lr = lr, adam_lr

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()
        self.adam.zero_grad()
        lr = self.lr * factor
        for p, momentum in zip(self.matrices, self.momentum, strict=True):
            momentum.mul_(0.95).add_(p.grad)
            update = orthogonalize(p.grad + 0.95 * momentum)
            p.mul_(1 - lr * 0.02).add_(update, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)
            p.grad = None


def read_corpus(vocab: int) -> tuple[Tokenizer, Tensor, Tensor]:
    """Return (tokenizer, training ids, held-out ids); every 20th file is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not any(part in str(path) for part in SKIPPED) and path.stat().st_size < 400_000
    )
    random.Random(0).shuffle(files)
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in files]
    held_out = texts[::20]
    kept = [text for i, text in enumerate(texts) if i % 20]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, special_tokens=[END_OF_TEXT])
    tokenizer.train_from_iterator(kept, trainer)

    def encode(part: list[str]) -> Tensor:
        return torch.tensor([i for encoding in tokenizer.encode_batch(part) for i in [0, *encoding.ids]])

    training, validation = encode(kept), encode(held_out)
    megabytes = sum(map(len, texts)) / 1e6
    print(
        f"{len(files)} files, {megabytes:.1f} MB, {len(training) / 1e6:.2f}M training and "
        f"{len(validation) / 1e6:.2f}M held-out tokens",
        flush=True,
    )
    return tokenizer, training, validation


def draw(data: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Random windows: inputs and the tokens that follow them, both [batch, length]."""
    starts = torch.randint(0, len(data) - length - 1, (batch,))
    windows = torch.stack([data[start : start + length + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def train(model: Llama, data: Tensor, minutes: float, batch: int, length: int, teacher: Llama | None = None) -> int:
    """Train for some time, with a teacher mostly on its distribution -> number of tokens seen."""
    optimizer, start, step = Optimizer(model), time.time(), 0
    while (elapsed := time.time() - start) < minutes * 60:
        left = 1 - elapsed / (minutes * 60)
        x, y = draw(data, batch, length)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        logits = logits.float().flatten(0, 1)
        loss = total = F.cross_entropy(logits, y.flatten())
        if teacher is not None:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                target = teacher(x).float().flatten(0, 1).softmax(-1)
            total = 0.3 * loss + 0.7 * F.cross_entropy(logits, target)
        total.backward()
        optimizer.step(min(1, (step + 1) / 50) * min(1, max(0.02, left / 0.5)))
        step += 1
        if step % 20 == 0:
            speed = step * batch * length / elapsed
            print(
                f"{elapsed / 60:.1f} min, step {step}, loss {loss.item():.3f}, {speed:.0f} tokens/s",
                flush=True,
            )
    return step * batch * length


@torch.no_grad()
def measure(target: Llama, draft: Llama, data: Tensor) -> dict[str, float | list[float]]:
    """Perplexities, and how often the target would keep the draft's proposals."""
    torch.manual_seed(1)
    x, y = draw(data, 32, 512)
    p, q = target(x).float(), draft(x).float()
    text = {
        "target_perplexity": math.exp(F.cross_entropy(p.flatten(0, 1), y.flatten())),
        "draft_perplexity": math.exp(F.cross_entropy(q.flatten(0, 1), y.flatten())),
        "greedy_agreement_on_text": (p.argmax(-1) == q.argmax(-1)).float().mean().item(),
        "sampled_acceptance_on_text": torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean().item(),
    }
    prompt_len = 64
    x = draw(data, 16, prompt_len)[0]
    for _ in range(160):
        x = torch.cat([x, target(x)[:, -1].argmax(-1, keepdim=True)], 1)
    kept = target(x)[:, prompt_len - 1 : -1].argmax(-1) == draft(x)[:, prompt_len - 1 : -1].argmax(-1)
    by_request = [round(share, 2) for share in kept.float().mean(1).tolist()]
    return text | {
        "greedy_acceptance_on_own_output": kept.float().mean().item(),
        "per_request": by_request,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_pair"))
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--target-minutes", type=float, default=60)
    parser.add_argument("--draft-minutes", type=float, default=15)
    parser.add_argument("--draft-layers", type=int, default=3)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer, training, validation = read_corpus(options.vocab)
    target = Llama(Sizes(options.vocab, hidden=256, layers=8, heads=4, kv_heads=2, inner=704))
    draft = Llama(Sizes(options.vocab, hidden=128, layers=options.draft_layers, heads=2, kv_heads=2, inner=384))
    num_seen = {}
    for name, model, minutes, teacher in (
        ("target", target, options.target_minutes, None),
        ("draft", draft, options.draft_minutes, target),
    ):
        num_seen[name] = train(model, training, minutes, options.batch, options.length, teacher)
        model.save(options.out / name, tokenizer)
    metrics = measure(target, draft, validation) | {
        "target_sizes": asdict(target.sizes),
        "draft_sizes": asdict(draft.sizes),
        "target_parameters": sum(p.numel() for p in target.parameters()),
        "draft_parameters": sum(p.numel() for p in draft.parameters()),
        "target_tokens_seen": num_seen["target"],
        "draft_tokens_seen": num_seen["draft"],
        "training_tokens": len(training),
        "held_out_tokens": len(validation),
    }
    (options.out / "metrics.json").write_text(json.dumps(metrics, indent=2))
    print(json.dumps(metrics))


if __name__ == "__main__":
    main()
