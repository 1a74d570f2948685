"""Text to token ids: byte-level BPE trained here, or any Hugging Face tokenizer.json."""

import hashlib
import json
import pathlib
import re

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from cubit_jax.runtime.errors import UserError
from cubit_jax.runtime.files import write_atomically

END_OF_TEXT = "<|endoftext|>"
# The token between documents, under the names that published tokenizers give it; the first one present is used.
END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
MIN_VOCAB_SIZE = 257  # every byte, and the end of text

# Encoding a very long document takes about 150 bytes a token; pieces bound that. A single line end between two visible
# characters is where the pre-tokenizers of byte-level BPE split anyway, so the ids are the same (checked on load).
_PIECE = 2**20
_JOINT = re.compile(r"(?<=\S)\n(?=\S)")
_JOINT_PROBE = "def a(x):\n    return x\nb\n\n  c d\n1\nword word\n.\n"


class Tokenizer:
    """Byte-exact text <-> ids around a `tokenizers.Tokenizer`; picklable.

    Text never produces `end_id`, nor any other special id: a document that contains "<|endoftext|>" is encoded as
    those ordinary characters. Nothing is added at either end, padded or truncated.

    Attributes:
      vocab_size: one more than the largest id.
      end_id: the id that stands before, between and after documents.
      end_token: its name.
      digest: hash of what it does; equal ones encode equally.
    """

    def __init__(self, backend, origin="the tokenizer"):
        """Wraps `backend` (a tokenizers.Tokenizer, changed in place). Raises UserError naming `origin`."""
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

    def encode(self, text):
        """The ids of `text`, a list of int."""
        return self._encode_pieces(text, _PIECE) if self._splits_at_lines else self._encode_whole(text)

    def encode_batch(self, texts):
        """[encode(text) for text in texts] on all cores."""
        if any(len(text) > _PIECE for text in texts):
            return [self.encode(text) for text in texts]
        return [item.ids for item in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids):
        """The text of `ids`; special tokens appear by name. Bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    @property
    def digest(self):
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()

    def save(self, path):
        """Writes a tokenizer.json at once or not at all, so that a killed run leaves no half-written file."""
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


def train_tokenizer(texts, vocab_size):
    """Trains byte-level BPE: every text round-trips exactly, and equal texts give equal tokenizers.

    Args:
      texts: iterable of str.
      vocab_size: at most this many ids (fewer when the texts have not enough distinct pairs); at least 257.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"vocabulary size {vocab_size} is too small: a byte-level tokenizer needs {MIN_VOCAB_SIZE}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # Here too a literal end of text is ordinary characters, or it would split the words it touches.
    backend.encode_special_tokens = True
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)


def load_tokenizer(path):
    """Loads a tokenizer.json; UserError if it is missing, is none, or has no end-of-text token."""
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


def check_vocabulary(tokenizer, vocab_size, origin="the tokenizer"):
    """UserError unless a model of `vocab_size` can take every id. (A larger model vocabulary is fine: unused rows.)"""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"vocabulary mismatch: {origin} has {tokenizer.vocab_size} ids but the model's vocabulary is "
            f"{vocab_size}: set model.vocab_size to at least {tokenizer.vocab_size}"
        )
