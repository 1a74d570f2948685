"""Wrong and unusual inputs of the programs, for experiments.mistakes: flags, config fields, data, tokenizers.

A `Case` is a command with the files that it needs, and the exit code that it must end with. In arguments {dir} is the
case's own folder and {shared} one with texts, a tokenizer, prepared data and a trained run, which `make_shared` fills.
"""

import dataclasses
import gzip
import json
import pathlib
import shutil
from collections.abc import Callable

TRAIN = (
    "--config=configs/transformer.py:tiny",
    *(
        f"--config.model.{name}"
        for name in ("num_layers=1", "model_dim=32", "num_heads=2", "head_dim=16", "mlp_dim=32")
    ),
    "--config.model.vocab_size=320",
    "--config.seq_len=64",
    "--config.num_steps=2",
    "--config.optimizer.warmup_steps=1",
    "--config.data.source=files",
    "--config.data.path={shared}/texts/*.txt",
)
RUN = "--workdir={dir}/run"


@dataclasses.dataclass(frozen=True)
class Case:
    """One command.

    Attributes:
      kind: heading of the page. what: the input in words, where the arguments do not show it.
      program: module of cubit_jax or experiments. arguments: of the command; those of TRAIN come first if micro.
      files: function of the case's folder and the shared one that makes what the command reads.
      code: the exit code that is right. says: pattern of a line that must be printed; None for an error is any line.
      environment: variables. own_process: started anew, for what is read when Python or JAX starts.
      signal: sent once the first step is printed. unprivileged: without root's rights to write anywhere.
      max_file_bytes: larger files cannot be written, as on a full disk.
    """

    kind: str
    program: str
    arguments: tuple[str, ...] = ()
    what: str = ""
    micro: bool = False
    files: Callable[[pathlib.Path, pathlib.Path], None] | None = None
    code: int = 1
    says: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    own_process: bool = False
    signal: int | None = None
    unprivileged: bool = False
    max_file_bytes: int | None = None

    @property
    def module(self) -> str:
        """What `python -m` takes."""
        return self.program if "." in self.program else f"cubit_jax.{self.program}"

    @property
    def command(self) -> tuple[str, ...]:
        """All arguments."""
        return (*TRAIN, RUN, *self.arguments) if self.micro else self.arguments


def make_shared(folder: pathlib.Path) -> list[Case]:
    """Writes the texts into `folder`; returns the commands that make prepared data and a trained run of them."""
    (folder / "texts").mkdir()
    for number in range(8):
        text = " ".join(f"sentence {n} of document {number} says hello." for n in range(40))
        (folder / "texts" / f"{number}.txt").write_text(text)
    output, texts = f"--output={folder}/prepared", f"--input={folder}/texts/*.txt"
    return [
        Case("", "train", (*TRAIN, "--workdir={shared}/run", "--config.checkpoint_every=1"), code=0),
        Case("", "prepare", (texts, output, "--train_tokenizer=320"), code=0),
    ]


def fields(kind: str, *values: str, **options) -> list[Case]:
    """A case per config field and value, each a micro run of train."""
    return [Case(kind, "train", (f"--config.{value}",), micro=True, **options) for value in values]


def write(name: str, content: str | bytes) -> Callable:
    """Writes a file of the case's folder."""

    def files(folder, shared):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return files


def chain(*makers: Callable) -> Callable:
    """Makes the files of all `makers`, in order."""

    def files(folder, shared):
        for make in makers:
            make(folder, shared)

    return files


def copy_run(folder: pathlib.Path, shared: pathlib.Path) -> None:
    """The trained run, as the case's own."""
    shutil.copytree(shared / "run", folder / "run", symlinks=True)


FLAGS = [
    Case("Flags", "train"),
    Case("Flags", "train", ("--config=configs/cubit.py:tiny",)),
    Case("Flags", "train", ("--config=configs/cubit.py:tiny", "--workdir=")),
    Case("Flags", "train", ("--confg=configs/cubit.py:tiny", RUN)),
    Case("Flags", "train", ("--config=configs/nothing.py:tiny", RUN)),
    Case("Flags", "train", ("--config=configs/cubit.py:13b", RUN)),
    Case("Flags", "train", ("--config=configs/cubit.py:tiny", RUN, "more")),
    Case("Flags", "train", ("--config=configs/cubit.py:tiny", "--workdir=gs://bucket/run")),
    *fields("Flags", "num_step=5", "optimizer.lr=1", "num_steps=ten", "num_steps=1.5", "model.mixer=cubit"),
    Case("Flags", "train", ("--num_processes=2",), micro=True),
    Case("Flags", "train", ("--coordinator_address=nowhere", "--num_processes=1", "--process_id=3"), micro=True),
    Case("Flags", "evaluate"),
    Case("Flags", "evaluate", ("--workdir={dir}/none",)),
    Case("Flags", "evaluate", ("--workdir={shared}/run", "--num_recursions=2")),
    Case("Flags", "evaluate", ("--workdir={shared}/run", "--text={dir}/*.txt")),
    Case("Flags", "generate", ("--workdir={dir}/none", "--prompt=a")),
    Case("Flags", "generate", ("--workdir={shared}/run", "--prompt=a", "--max_new_tokens=many")),
    Case("Flags", "generate", ("--workdir={shared}/run", "--prompt=a", "--max_new_tokens=-1")),
    Case("Flags", "generate", ("--workdir={shared}/run", "--prompt=a", "--temperature=-1")),
    Case("Flags", "generate", ("--workdir={shared}/run", "--prompt=a", "--top_p=2")),
    Case("Flags", "generate", ("--workdir={shared}/run", "--prompt=a", "--top_k=0")),
    Case("Flags", "generate", ("--workdir={shared}/run", "--prompt_file={dir}/none.txt")),
    Case("Flags", "prepare", ("--output={dir}/out",)),
    Case("Flags", "prepare", ("--input={dir}/*.txt", "--output={dir}/out", "--train_tokenizer=300")),
    Case("Flags", "prepare", ("--input={shared}/texts/*.txt", "--output={dir}/out", "--train_tokenizer=10")),
    Case("Flags", "prepare", ("--input={shared}/texts/*.txt", "--output={shared}/prepared", "--train_tokenizer=300")),
    Case("Flags", "prepare", ("--input=x", "--output={dir}/out", "--source=web")),
    Case("Flags", "plan", ("--config=configs/cubit.py:tiny",)),
    Case("Flags", "plan", ("--config=configs/cubit.py:tiny", "--topology=v9:2x2")),
    Case("Flags", "experiments.benchmark", ("--ops=kernel_sovle",)),
    Case("Flags", "experiments.recursion", ("--workdir={shared}/run", "--output={dir}/out")),
]
CONFIG = [
    *fields("Config fields", "num_steps=0", "batch_size=0", "batch_size=-1", "seq_len=0", "accumulation_steps=3"),
    *fields("Config fields", "log_every=0", "checkpoint_every=0", "keep_checkpoints=0"),
    *fields("Config fields", "model.num_layers=0", "model.head_dim=7", "model.mixers=cubbit", "model.mlp=gate"),
    *fields("Config fields", 'model.mixers=("cubit","attention")', "model.window=0", "model.dropout=1.0"),
    *fields("Config fields", "model.dtype=float8", "model.remat=some", "model.implementation=cuda"),
    *fields("Config fields", "model.vocab_size=100", "model.options.num_recursions=2"),
    Case("Config fields", "train", ("--config=configs/cubit.py:tiny", RUN, "--config.model.implementation=pallas")),
    Case("Config fields", "train", ("--config=configs/cubit.py:tiny", RUN, "--config.model.options.num_recursions=2")),
    Case("Config fields", "train", ("--config=configs/cubit.py:tiny", RUN, "--config.model.options.ridge_init=0.0")),
    *fields("Config fields", "optimizer.learning_rate=nan", "optimizer.clip_norm=nan", "optimizer.learning_rate=-1.0"),
    *fields("Config fields", "optimizer.schedule=linear", "optimizer.b1=1.0", "optimizer.b2=1.0"),
    *fields("Config fields", "optimizer.weight_decay=-1.0", "optimizer.end_fraction=2.0"),
    *fields("Config fields", "data.source=web", "data.heldout_fraction=0.0", "data.heldout_fraction=1.5"),
    *fields("Config fields", "mesh.data=3", "mesh.tensor=0", "data.num_workers=-1", "profile.first_step=-1"),
    *fields("Config fields", "init_from={dir}/none", "max_skipped_updates=-1"),
    Case("Config fields", "train", ("--config.mesh.fsdp=-1",), "two sizes of -1 in the mesh", micro=True),
]


def _texts(path: str, what: str, files: Callable, **options) -> Case:
    return Case("Data", "train", (f"--config.data.path={{dir}}/{path}",), what, micro=True, files=files, **options)


def _parquet(*columns: tuple[str, list]) -> Callable:
    def files(folder, shared):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_arrays(
            [pyarrow.array(values) for _, values in columns], [name for name, _ in columns]
        )
        parquet.write_table(table, folder / "a.parquet")

    return files


def _folder(folder: pathlib.Path, shared: pathlib.Path) -> None:
    shutil.copytree(shared / "texts", folder / "texts")


def _links(folder: pathlib.Path, shared: pathlib.Path) -> None:
    (folder / "loop").mkdir()
    for path in (shared / "texts").iterdir():
        shutil.copy(path, folder / "loop")
    (folder / "loop" / "latest").symlink_to(".")


def _brackets(folder: pathlib.Path, shared: pathlib.Path) -> None:
    shutil.copytree(shared / "texts", folder / "runs[1]")


_LONG = "\n".join(json.dumps({"text": f"line {n} " * 30}) for n in range(20))
_NUMBERS = "\n".join(f'{{"text": "line {n} and more of it", "n": {"9" * 5000}}}' for n in range(40))
DATA = [
    _texts("*.txt", "no file", lambda *_: None),
    _texts("texts", "a folder", _folder),
    _texts("a.txt", "an empty file", write("a.txt", "")),
    _texts("a.txt", "one file of 5 bytes", write("a.txt", "abcde")),
    _texts("a.docx", "another kind of file", write("a.docx", b"PK\x03\x04")),
    _texts("a.jsonl", "a line that is not JSON", write("a.jsonl", _LONG + "\n{broken")),
    _texts("a.jsonl", "a record without the field", write("a.jsonl", '{"content": "a"}\n')),
    _texts("a.jsonl", "a number as the text", write("a.jsonl", '{"text": 7}\n')),
    _texts("a.jsonl", "a list as a record", write("a.jsonl", '["text"]\n')),
    _texts("a.jsonl.gz", "a gzip file that was cut", write("a.jsonl.gz", gzip.compress(_LONG.encode())[:-20])),
    _texts("a.jsonl", "integers of 5,000 digits beside the text", write("a.jsonl", _NUMBERS), code=0),
    _texts("a.txt", "bytes that are not UTF-8", write("a.txt", b"\xff\xfe\x00text" * 200)),
    _texts("a.parquet", "not a parquet file", write("a.parquet", b"PAR1")),
    _texts("a.parquet", "no such column", _parquet(("body", ["a", "b"]))),
    _texts("a.parquet", "two columns of this name", _parquet(("text", ["a"]), ("text", ["b"]))),
    _texts("a.parquet", "a column of integers", _parquet(("text", [1, 2]))),
    _texts("loop/**/*.txt", "a link of the folder to itself", _links, code=0, says="links lead to"),
    _texts("runs[1]/*.txt", "brackets in the name of a folder", _brackets, code=0),
    *fields("Data", "data.heldout_path={dir}/*.txt"),
    *fields("Data", "data.heldout_path={shared}/texts/*.txt", what="training files held out"),
    Case("Data", "train", ("--config.data.path=",), "", micro=True),
    Case("Data", "train", ("--config.data.source=prepared", "--config.data.path={dir}/none"), micro=True),
    Case("Data", "train", ("--config.data.source=prepared", "--config.data.path={shared}/texts"), micro=True),
    Case("Data", "train", ("--config.data.source=tfds", "--config.data.path={dir}/none"), micro=True),
    Case(
        "Data",
        "evaluate",
        ("--workdir={shared}/run", "--text={dir}/a.jsonl"),
        "a line that is not JSON",
        files=write("a.jsonl", "{broken"),
    ),
]


def _tokenizer(what: str, files: Callable, **options) -> Case:
    return Case(
        "Tokenizers", "train", ("--config.data.tokenizer={dir}/t.json",), what, micro=True, files=files, **options
    )


def _changed(change: Callable[[dict], None]) -> Callable:
    def files(folder, shared):
        document = json.loads((shared / "run" / "tokenizer.json").read_text())
        change(document)
        (folder / "t.json").write_text(json.dumps(document))

    return files


def _lowercase(document: dict) -> None:
    document["normalizer"] = {"type": "Lowercase"}


def _dropout(document: dict) -> None:
    document["model"]["dropout"] = 0.3


def _cut(folder: pathlib.Path, shared: pathlib.Path) -> None:
    (folder / "t.json").write_text((shared / "run" / "tokenizer.json").read_text()[:500])


def _moved_tokenizer(folder: pathlib.Path, shared: pathlib.Path) -> None:
    path = folder / "run" / "config.json"
    config = json.loads(path.read_text())
    config["data"]["tokenizer"] = str(folder / "moved.json")
    path.write_text(json.dumps(config))


def _words(**special: int) -> Callable:
    vocabulary = special | {word: n for n, word in enumerate(("hello", "sentence", "document"), start=len(special))}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    document = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    return write("t.json", json.dumps(document | dict.fromkeys(parts) | {"added_tokens": []}))


TOKENIZERS = [
    _tokenizer("no file", lambda *_: None),
    _tokenizer("a folder", lambda folder, shared: (folder / "t.json").mkdir()),
    _tokenizer("not JSON", write("t.json", "hello")),
    _tokenizer("JSON, but not a tokenizer", write("t.json", '{"model": 1}')),
    _tokenizer("a file that was cut", _cut),
    _tokenizer("a word list that does not know most words", _words(**{"<unk>": 0}), code=0, says="bits per byte"),
    _tokenizer("a normaliser that makes letters small", _changed(_lowercase), code=0, says="bits per byte"),
    _tokenizer("dropout=0.3", _changed(_dropout), code=0, says="switched off"),
    Case(
        "Tokenizers",
        "train",
        ("--config.data.tokenizer={shared}/run/tokenizer.json", "--config.model.vocab_size=280"),
        "more entries than the model's vocabulary",
        micro=True,
    ),
    Case(
        "Tokenizers",
        "train",
        ("--config.data.source=prepared", "--config.data.path={dir}/data"),
        "prepared data whose tokenizer was changed",
        micro=True,
        files=chain(
            lambda folder, shared: shutil.copytree(shared / "prepared", folder / "data"),
            _changed(_lowercase),
            lambda folder, shared: shutil.copy(folder / "t.json", folder / "data" / "tokenizer.json"),
        ),
    ),
    Case(
        "Tokenizers",
        "evaluate",
        (RUN,),
        "the tokenizer that the config names was moved",
        files=chain(copy_run, _moved_tokenizer),
        code=0,
        says="^held-out part",
    ),
    Case(
        "Tokenizers",
        "evaluate",
        (RUN,),
        "the run's tokenizer is gone",
        files=chain(copy_run, lambda folder, shared: (folder / "run" / "tokenizer.json").unlink()),
    ),
]
