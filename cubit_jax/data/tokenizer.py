"""Text to token ids and back, by any Hugging Face tokenizer.json."""

import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import AddedToken

from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.files import write_atomically

END_OF_TEXT = "<|endoftext|>"
# Names of the token between documents in published tokenizers. The first one that a tokenizer has is used.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")

# Encoding takes about 150 bytes per token; long documents are encoded in pieces to bound that. The pieces end at a
# single line end between two visible characters, where the pre-tokenizers of byte-level BPE split anyway, so the ids
# are the same (checked on load).
_PIECE = 2**20
_JOINT = re.compile(r"(?<=\S)\n(?=\S)")
_JOINT_PROBE = "def a(x):\n    return x\nb\n\n  c d\n1\nword word\n.\n"


class Tokenizer:
    """Text <-> ids by a `tokenizers.Tokenizer`; picklable.

    Text never gives `end_id`: a document that contains "<|endoftext|>" is encoded as those ordinary characters. Nothing
    is added at either end, padded or truncated.

    Attributes:
      vocab_size: one more than the largest id.
      end_id: the end-of-text id, which stands before, between and after documents.
      end_token: its name.
      digest: hash of the tokenizer; equal digests encode equally.
    """

    def __init__(self, backend: tokenizers.Tokenizer, origin: str = "the tokenizer"):
        """Wraps `backend`, which is changed in place. Raises UserError naming `origin`."""
        self.end_token = next((name for name in END_NAMES if backend.token_to_id(name) is not None), None)
        if self.end_token is None:
            raise UserError(f"{origin} has no end-of-text token: looked for {', '.join(END_NAMES)}")
        self.end_id = backend.token_to_id(self.end_token)
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        # Published files may hold a maximum length, padding, or an end-of-text token that is not marked as special.
        backend.no_truncation()
        backend.no_padding()
        backend.add_special_tokens([AddedToken(self.end_token, special=True, normalized=False)])
        backend.encode_special_tokens = True  # special names inside text are ordinary characters
        self._backend = backend
        self._splits_at_lines = True
        if self.end_id in self.encode(f"a {self.end_token} b{self.end_token}"):
            raise UserError(f"{origin} encodes the characters {self.end_token!r} in text as its end-of-text id")
        self._splits_at_lines = self._encode_pieces(_JOINT_PROBE, 1) == self._encode_whole(_JOINT_PROBE)

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
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a tokenizer.json, whole or not at all."""
        write_atomically(path, self._backend.to_str(pretty=True).encode())

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
        return self._backend.to_str()

    def __setstate__(self, state):
        self.__init__(tokenizers.Tokenizer.from_str(state))


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """Loads a tokenizer.json. UserError if it cannot be read, is none, or has no end-of-text token."""
    try:
        text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the tokenizer {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        json.loads(text)
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for a file of the wrong structure
        raise UserError(f"{path} is not a Hugging Face tokenizer.json: {error}") from error
    return Tokenizer(backend, origin=f"tokenizer {path}")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, origin: str = "the tokenizer") -> None:
    """UserError unless a model of `vocab_size` has every id. A larger model vocabulary leaves rows unused."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"vocabulary mismatch: {origin} has {tokenizer.vocab_size} ids but the model's vocabulary is "
            f"{vocab_size}: set model.vocab_size to at least {tokenizer.vocab_size}"
        )
