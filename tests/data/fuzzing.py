"""Random texts, files of them, and tokenizers of four kinds, for the fuzz test."""

import gzip
import json
import random
import string

import pyarrow
import pyarrow.parquet
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

SPECIAL = ("<s>", "</s>", "<pad>", "<unk>", "<|endoftext|>", "[SEP]", "<mask>")


def make_text(rng: random.Random) -> str:
    """Empty, short, or long; of words, controls, every plane of Unicode, line ends, names of special tokens."""
    pieces = (
        lambda: " ".join("".join(rng.choices("abcde", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 30))),
        lambda: "".join(map(chr, rng.choices(range(32), k=rng.randint(1, 9)))),
        lambda: "".join(chr(_code_point(rng)) for _ in range(rng.randint(1, 12))),
        lambda: rng.choice(["\n", "\r\n", "\r", "\u2028", "\x00", "\ufeff", "\ufffd", " ", "  \n\n", "\t"]),
        lambda: rng.choice(SPECIAL),
        lambda: rng.choice(["x", "ACGT", "\u00e9", "\u65e5\u672c"]) * rng.randint(1, 3000),
        lambda: "".join(rng.choices(string.printable, k=rng.randint(1, 40))),
    )
    return "".join(rng.choice(pieces)() for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 3, 5, 8])))


def _code_point(rng):
    while 0xD800 <= (point := rng.randrange(17) << 16 | rng.randrange(1 << 16)) < 0xE000:
        pass
    return point


def write_files(rng: random.Random, folder, texts: list[str]) -> tuple[str, str]:
    """Writes texts in a random format -> (glob, damage that was done or "")."""
    kind = rng.choice(["txt", "jsonl", "jsonl.gz", "parquet"])
    damage = rng.choice(["surrogate", "utf-8", "cut", "field", "null"]) if texts and rng.random() < 0.1 else ""
    if kind == "txt":
        damage = damage and "utf-8"
        for number, text in enumerate(texts):
            content = text.encode() + (b"\xff" if damage and number == 0 else b"")
            (folder / f"{number:03}.txt").write_bytes(content)
        return str(folder / "*.txt"), damage
    path = folder / f"texts.{kind}"
    if kind == "parquet":
        damage = damage and rng.choice(["field", "null", "utf-8"])
        values = [text.encode() for text in texts]
        if damage in ("null", "utf-8"):
            values[0] = None if damage == "null" else b"\xff"
        column = pyarrow.array(values, pyarrow.binary())
        if damage != "utf-8":
            types = [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), pyarrow.binary_view(), None]
            column = column.cast(choice) if (choice := rng.choice(types)) else column.dictionary_encode()
        pyarrow.parquet.write_table(pyarrow.table({"body" if damage == "field" else "text": column}), path)
        return str(path), damage
    lines = [
        json.dumps({"n": 10 ** rng.choice([1, 20]), "text": text}, ensure_ascii=rng.random() < 0.5).encode()
        for text in texts
    ]
    bad = {
        "surrogate": b'{"text": "a\\ud83d"}',
        "utf-8": b'{"text": "\xff"}',
        "cut": b'{"text": "a',
        "field": b'{"body": "a"}',
        "null": b'{"text": null}',
    }
    if damage:
        lines[rng.randrange(len(lines))] = bad[damage]
    content = rng.choice([b"\n", b"\r\n", b"\n\n"]).join(lines)
    path.write_bytes(gzip.compress(content) if kind.endswith("gz") else content)
    return str(path), damage


def make_tokenizer(rng: random.Random, texts: list[str]) -> tokenizers.Tokenizer:
    """Words, word pieces, a unigram model or byte-fallback BPE over parts of the texts, with random special tokens."""
    sample = "".join(texts)[:5000] or "a"
    names = rng.sample(SPECIAL, rng.randint(0, len(SPECIAL)))
    characters = [c for c in dict.fromkeys(sample) if rng.random() < 0.9]
    starts = [rng.randrange(len(sample)) for _ in range(rng.randint(0, 60))]
    parts = [part for start in starts if len(part := sample[start : start + rng.randint(2, 5)]) > 1]
    words = list(dict.fromkeys(["<unk>", *names, *characters, *parts, *sample.split()[:100], "a"]))
    ids = {word: i for i, word in enumerate(words)}
    kind = rng.choice(["words", "pieces", "unigram", "bytes"])
    if kind == "words":
        backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    elif kind == "pieces":
        backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="<unk>"))
    elif kind == "unigram":
        pieces = [(word, 0.0 if word in SPECIAL else -rng.uniform(1, 9)) for word in [*words, "\u2581"]]
        backend = tokenizers.Tokenizer(models.Unigram(list(dict(pieces).items()), unk_id=0))
        backend.decoder = decoders.Metaspace()
    else:
        words = dict.fromkeys(["<unk>", *names, *(f"<0x{byte:02X}>" for byte in range(256)), *characters])
        ids = {word: i for i, word in enumerate(words)}
        more = {"dropout": rng.choice([None, None, 0.3]), "ignore_merges": rng.random() < 0.5}
        backend = tokenizers.Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True, **more))
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    splits = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits()]
    if kind == "unigram" and rng.random() < 0.7:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(["always", "never", "first"]))
    elif kind != "bytes" and rng.random() < 0.7:
        backend.pre_tokenizer = rng.choice(splits)
    if rng.random() < 0.3:
        backend.normalizer = rng.choice([normalizers.Lowercase(), normalizers.NFKC(), normalizers.StripAccents()])
    if rng.random() < 0.4:
        backend.add_tokens([AddedToken(name, special=rng.random() < 0.7) for name in rng.sample(SPECIAL, 3)])
    if rng.random() < 0.2:
        backend.enable_truncation(2)
        backend.enable_padding(length=5)
    return backend
