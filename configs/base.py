"""Every field of a run, once, with its default. A family's file changes only what differs (`configs/cubit.py:125m`)."""

import ml_collections
from ml_collections import config_dict

# The papers' sizes (arXiv 2605.06501, table of model settings): num_layers, model_dim, num_heads, head_dim, mlp_dim.
SIZES = {
    "tiny": (4, 128, 4, 32, 384),
    "125m": (12, 768, 12, 64, 2048),
    "350m": (24, 1024, 16, 64, 2816),
    "1p3b": (24, 2048, 16, 128, 5632),
}


def get_config(size="125m"):
    """The fields shared by every family at one size; data, tokens, optimizer and width are equal across families."""
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}: choose one of {', '.join(SIZES)}")
    num_layers, model_dim, num_heads, head_dim, mlp_dim = SIZES[size]
    tiny = size == "tiny"
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.num_steps = 450 if tiny else 20_000
    config.batch_size = 8 if tiny else 256  # rows a step, over all devices and hosts
    config.accumulation_steps = 1  # micro-batches a step; batch_size must be a multiple
    config.seq_len = 256 if tiny else 2048
    config.log_every = 10 if tiny else 50
    config.eval_every = 225 if tiny else 1000
    config.checkpoint_every = 100 if tiny else 1000
    config.keep_checkpoints = 2  # the last ones
    config.keep_best = 0  # besides, those with the lowest held-out loss; an evaluation that is among them is saved
    config.diagnostics_every = 100 if tiny else 1000  # learned ridge, rescale, smallest diagonal, energies; 0 is never
    config.init_from = config_dict.placeholder(str)  # a workdir whose last parameters this run starts from, at step 0
    config.max_skipped_updates = 10  # non-finite losses or gradients in a row before the run stops

    config.profile = profile = ml_collections.ConfigDict()  # jax.profiler writes some steps to workdir/profile
    profile.first_step = 0  # counted from 1; 0 is never
    profile.num_steps = 3

    config.model = model = ml_collections.ConfigDict()
    model.vocab_size = 2048 if tiny else 32_768
    model.num_layers = num_layers
    model.model_dim = model_dim
    model.num_heads = num_heads
    model.head_dim = head_dim
    model.mlp_dim = mlp_dim
    model.mixers = ("attention",)  # one name, or a pattern repeated over the layers; its length divides num_layers
    model.mlp = "gated"
    model.window = config_dict.placeholder(int)  # sliding window in tokens; None sees everything
    model.rope_theta = 10_000.0
    model.norm_eps = 1e-5
    model.tie_embeddings = False
    model.dropout = 0.0
    model.dtype = "float32" if tiny else "bfloat16"  # activations; parameters and the solve stay float32
    model.param_dtype = "float32"
    model.remat = "none" if tiny else "full"  # none | full | dots
    model.scan_layers = True
    model.implementation = config_dict.placeholder(str)  # None | reference | xla | pallas
    # Options of a mixer or MLP are the fields of its module in cubit_jax/layers; only those that differ from the
    # module's own default need to stand in a family's file.
    model.options = ml_collections.ConfigDict()

    config.optimizer = optimizer = ml_collections.ConfigDict()
    optimizer.learning_rate = 4e-3 if tiny else 6e-4
    optimizer.schedule = "cosine"  # cosine | wsd
    optimizer.warmup_steps = 40 if tiny else 1000
    optimizer.decay_fraction = 0.2  # of num_steps, at the end; wsd only
    optimizer.end_fraction = 0.1  # last learning rate as a share of learning_rate
    optimizer.b1 = 0.9
    optimizer.b2 = 0.95
    optimizer.eps = 1e-8
    optimizer.weight_decay = 0.1  # matrices only
    optimizer.clip_norm = 1.0

    config.data = data = ml_collections.ConfigDict()
    # stdlib: this Python's own source code | files: text files by glob | tfds: a TFDS directory | prepared: what the
    # program prepare wrote
    data.source = "stdlib"
    data.path = config_dict.placeholder(str)  # the glob, or the directory
    data.heldout_path = config_dict.placeholder(str)  # None holds out a share of `path` by a hash of the names
    data.heldout_fraction = 0.05
    data.text_field = "text"  # of .jsonl, .parquet and TFDS records
    data.tokenizer = config_dict.placeholder(str)  # a tokenizer.json; None trains a byte-level BPE on the training part
    data.num_workers = 0  # grain worker processes that tokenize; the stream does not depend on it

    config.mesh = mesh = ml_collections.ConfigDict()  # sizes of the device mesh; -1 is whatever is left
    # The state takes 12 bytes a parameter and gradients 4: whole on each device while that is a small part of 16 GB.
    # Otherwise over all devices, 1 to 256; data=-1 and fsdp=16 exchange less on many (docs/plan.md).
    whole = size != "1p3b"
    mesh.replica = 1
    mesh.data = -1 if whole else 1
    mesh.fsdp = 1 if whole else -1
    mesh.tensor = 1
    mesh.context = 1
    return config
