"""Tokenizers of the kind that SentencePiece makes."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers


def sentencepiece_backend(metaspace: bool) -> Backend:
    """Like Llama 2's (bytes for unknown characters) or like T5's (Metaspace, unknown characters dropped)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "▁t", "he", "▁the", "er", "▁▁", "in"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("e", "r"), ("▁", "▁"), ("i", "n")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=not metaspace, fuse_unk=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return backend
