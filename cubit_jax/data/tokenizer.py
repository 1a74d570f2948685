"""Text to token ids and back, by any Hugging Face tokenizer.json."""

import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

import tokenizers
from absl import logging
from tokenizers import AddedToken, pre_tokenizers

from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.files import write_atomically

END_OF_TEXT = "<|endoftext|>"
# Names of the token between documents in published tokenizers. The first one that a tokenizer has is used.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
# Entries of a vocabulary that are special also where the file does not mark them as such.
_SPECIAL_NAMES = {*END_NAMES, *["<s>", "<bos>", "<pad>", "<unk>", "<mask>", "<cls>", "<sep>", "<|pad|>", "<|unk|>"]}
_SPECIAL_NAMES |= {*["[BOS]", "[PAD]", "[UNK]", "[MASK]", "[CLS]", "<|startoftext|>", "<|begin_of_text|>"]}

# Encoding takes about 150 bytes per token; long documents are encoded in pieces to bound that. The pieces end at a
# single line end between two visible characters, where the pre-tokenizers of byte-level BPE split anyway, so the ids
# are the same (checked on load).
_PIECE = 2**20
_JOINT = re.compile(r"(?<=\S)\n(?=\S)")
_JOINT_PROBE = "def a(x):\n    return x\nb\n\n  c d\n1\nword word\n.\n"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text <-> ids by a `tokenizers.Tokenizer`; picklable.

    Text never gives `end_id`: a document that contains "<|endoftext|>" is encoded as those ordinary characters, and so
    are the names of other special tokens. Nothing is added at either end, padded or truncated. Equal texts give equal
    ids: dropout of merges is switched off.

    Attributes:
      vocab_size: one more than the largest id.
      end_id: the end-of-text id, which stands before, between and after documents.
      end_token: its name; END_OF_TEXT is added where no token has one of END_NAMES.
      digest: hash of the tokenizer; equal digests encode equally.
      notes: lines for the user: what is done differently from the file, and what cannot be done.
    """

    def __init__(self, backend: tokenizers.Tokenizer, origin: str = "the tokenizer"):
        """Wraps `backend`, which is changed in place. Raises UserError naming `origin`."""
        self.notes = []
        self.end_token = next((name for name in END_NAMES if backend.token_to_id(name) is not None), None)
        if self.end_token is None:
            self.end_token = END_OF_TEXT
            self.notes.append(f"{origin} has no end-of-text token: {END_OF_TEXT} is added as one more id")
        # Published files may hold a maximum length, padding, or an end-of-text token that is not marked as special.
        backend.no_truncation()
        backend.no_padding()
        backend.add_special_tokens([AddedToken(self.end_token, special=True, normalized=False)])
        self._definition = backend.to_str()
        if getattr(backend.model, "dropout", None):
            self.notes.append(f"{origin} drops merges at random (dropout {backend.model.dropout:.3g}): switched off")
            backend.model.dropout = None
        self.end_id = backend.token_to_id(self.end_token)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self._byte_fallback = '"ByteFallback"' in self._definition
        self._backend = backend
        self._splits_at_lines = False
        self._encode_special_names_as_text(origin)
        self._splits_at_lines = self._encode_pieces(_JOINT_PROBE, 1) == self._encode_whole(_JOINT_PROBE)

    def _encode_special_names_as_text(self, origin):
        backend = self._backend
        backend.encode_special_tokens = True
        vocab = backend.get_vocab(with_added_tokens=False)
        added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        marked = [
            name for name in sorted(_SPECIAL_NAMES) if backend.token_to_id(name) is not None and name not in added
        ]
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in marked])
        names = sorted({*added, *marked})
        if not self._given_by_text(names):
            return
        # The model itself gives the id of a name that is in its vocabulary. Splitting off the first character of the
        # name, after all other splits, prevents that and leaves every other text as it was.
        if pattern := "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names if name in vocab):
            split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
            before = [backend.pre_tokenizer] if backend.pre_tokenizer else []
            backend.pre_tokenizer = pre_tokenizers.Sequence([*before, split])
        if not (given := self._given_by_text(names)):
            return
        if self.end_token in given:
            raise UserError(f"{origin} encodes the characters {self.end_token!r} in text as its end-of-text id")
        self.notes.append(f"{origin} encodes these characters in text as special tokens: {', '.join(map(repr, given))}")

    def _given_by_text(self, names):
        """The names whose characters in text give the id of a special token, other than the token of unknown text."""
        model = json.loads(self._definition)["model"]
        unknown = model.get("unk_token")
        if model.get("unk_id") is not None:
            unknown = model["vocab"][model["unk_id"]][0]
        special = {self._backend.token_to_id(name) for name in ({*names} - {unknown}) | {self.end_token}}
        found = []
        for name in names:
            texts = [name, f"{name}\n{name}", f"a {name} b", f"a{name}{name}b", "\U0010fffd"]
            found += [name] * any(special & {*ids} for ids in self.encode_batch(texts))
        return found

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        return self._encode_pieces(text, _PIECE) if self._splits_at_lines else self._encode_whole(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """[encode(text) for text in texts] on all cores."""
        if any(len(text) > _PIECE for text in texts):
            return [self.encode(text) for text in texts]
        return [item.ids for item in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens appear by name. Bytes that are not UTF-8 become U+FFFD."""
        ids = [int(i) for i in ids]
        if not self._byte_fallback:
            return self._backend.decode(ids, skip_special_tokens=False)
        # The library replaces every byte of a run of byte tokens where one of them is wrong, the good ones too.
        tokens = [token for i in ids if (token := self._backend.id_to_token(i)) is not None]
        parts = []
        for is_byte, run in itertools.groupby(tokens, key=lambda token: bool(_BYTE_TOKEN.fullmatch(token))):
            if is_byte:
                run = [bytes(int(token[3:5], 16) for token in run).decode("utf-8", "replace")]
            parts += run
        return self._backend.decoder.decode(parts)

    def restores(self, texts: Iterable[str]) -> bool:
        """Whether decoding the ids of each text gives the text back, character by character."""
        return all(self.decode(self.encode(text)) == text for text in texts)

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self._definition.encode(), digest_size=16).hexdigest()

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a tokenizer.json, whole or not at all. Loaded again it has the same digest."""
        write_atomically(path, tokenizers.Tokenizer.from_str(self._definition).to_str(pretty=True).encode())

    def _encode_whole(self, text):
        # The batch call lets other threads run meanwhile, `encode` does not; "fast" omits character offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_pieces(self, text, size):
        ids, start = [], 0
        while len(text) - start > size and (joint := _JOINT.search(text, start + size)):
            ids += self._encode_whole(text[start : joint.end()])
            start = joint.end()
        return ids + self._encode_whole(text[start:])

    def __getstate__(self):
        return self._definition

    def __setstate__(self, state):
        self.__init__(tokenizers.Tokenizer.from_str(state))


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """Loads a tokenizer.json and logs its notes. UserError if it cannot be read or is none."""
    try:
        text = pathlib.Path(path).expanduser().read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the tokenizer {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        json.loads(text)
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for a file of the wrong structure
        raise UserError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
    tokenizer = Tokenizer(backend, origin=f"tokenizer {path}")
    for note in tokenizer.notes:
        logging.info("note: %s", note)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, origin: str = "the tokenizer") -> None:
    """UserError unless a model of `vocab_size` has every id. A larger model vocabulary leaves rows unused."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"vocabulary mismatch: {origin} has {tokenizer.vocab_size} ids but the model's vocabulary is "
            f"{vocab_size}: set model.vocab_size to at least {tokenizer.vocab_size}"
        )
