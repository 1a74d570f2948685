"""Causal Energy Minimization (arXiv 2605.07588): attention and gated MLP as descent on their energies.

--config=configs/cem.py:tiny                                both layers CEM, one recursion
--config=configs/cem.py:162m,mlp=gated,steps=2              CEM attention with an ordinary MLP, T = 2
--config=configs/cem.py:162m,attention=attention            ordinary attention with a CEM MLP
--config=configs/cem.py:162m,attention=attention,mlp=gated  the matched Llama baseline
"""

from configs import base

# Sizes of the CEM comparisons beside those of base, named by the parameters of their Llama baseline with the vocabulary
# of GPT-2: num_layers, model_dim, num_heads, head_dim, mlp_dim.
SIZES = {
    "86m": (12, 512, 8, 64, 1152),
    "162m": (12, 768, 12, 64, 2048),
}
_VOCAB_SIZE = 50_304  # GPT-2's, rounded up to a multiple of 64

_DESCENT = ("preconditioner", "rank", "steps", "step_size", "learn_step_size")
_OPTIONS = ("attention", "mlp", "interaction", "activation", *_DESCENT, "tokens")


def get_config(variant="125m"):
    """variant: a size and any of these, joined by commas, as in "162m,mlp=gated,steps=2".

    attention=cem|attention  mlp=cem|gated
    interaction=lowrank|diagonal|shared_diagonal  of CEM attention
    activation=silu|gelu|relu  of the CEM MLP
    preconditioner=none|diagonal|diagonal_lowrank  rank=R
    steps=T  step_size=NUMBER (where it starts; 1/T if not given)  learn_step_size=true|false
    tokens=default|chinchilla  (20 tokens a parameter of the size's Llama baseline, for every variant of the size)

    sizes: tiny | 125m | 350m | 1p3b of configs/base.py, 86m | 162m.
    """
    size, *pairs = variant.split(",")
    given = dict(_split(pair) for pair in pairs)
    config = _sized(size)
    model, options = config.model, config.model.options

    attention = _choice(given, "attention", "cem", "attention")
    mlp = _choice(given, "mlp", "cem", "gated")
    model.mixers = (attention,)
    model.mlp = mlp
    _needs(given, attention == "cem", "attention=cem", "interaction")
    _needs(given, mlp == "cem", "mlp=cem", "activation")
    _needs(given, "cem" in (attention, mlp), "attention=cem or mlp=cem", *_DESCENT)
    if attention == "cem":
        options.interaction = _choice(given, "interaction", "shared_diagonal", "diagonal", "lowrank")
    if mlp == "cem":
        options.activation = _choice(given, "activation", "silu", "gelu", "relu")
    if "cem" in (attention, mlp):
        options.num_recursions = _number(given, "steps", int, 1)
        options.preconditioner = _choice(given, "preconditioner", "none", "diagonal", "diagonal_lowrank")
        options.precondition_rank = _number(given, "rank", int, 8)
        options.step_size = _number(given, "step_size", float, 1 / max(options.num_recursions, 1))
        options.learn_step_size = _choice(given, "learn_step_size", "true", "false") == "true"
    if _choice(given, "tokens", "default", "chinchilla") == "chinchilla":
        tokens = config.batch_size * config.seq_len
        config.num_steps = -(-20 * llama_parameters(model) // tokens)
    return config


def llama_parameters(model):
    """The number of parameters of the Llama baseline with the sizes in config.model."""
    attention = 4 * model.model_dim * model.num_heads * model.head_dim
    mlp = 3 * model.model_dim * model.mlp_dim
    norms = (2 * model.num_layers + 1) * model.model_dim
    return 2 * model.vocab_size * model.model_dim + model.num_layers * (attention + mlp) + norms


def _sized(size):
    if size not in SIZES:
        if size not in base.SIZES:
            raise ValueError(f"unknown size {size!r}: choose one of {', '.join((*base.SIZES, *SIZES))}")
        return base.get_config(size)
    config = base.get_config("125m")
    model = config.model
    model.num_layers, model.model_dim, model.num_heads, model.head_dim, model.mlp_dim = SIZES[size]
    model.vocab_size = _VOCAB_SIZE
    return config


def _split(pair):
    name, equals, value = pair.partition("=")
    if name not in _OPTIONS or not equals:
        raise ValueError(f"{pair!r} must be name=value with one of the names {', '.join(_OPTIONS)}")
    return name, value


def _choice(given, name, *values):
    """The value of `name`, by default the first of the values it may have."""
    value = given.get(name, values[0])
    if value not in values:
        raise ValueError(f"{name}={value} must be one of {', '.join(values)}")
    return value


def _number(given, name, kind, default):
    try:
        return kind(given.get(name, default))
    except ValueError:
        raise ValueError(f"{name}={given[name]} must be a number ({kind.__name__})") from None


def _needs(given, met, what, *names):
    for name in names:
        if name in given and not met:
            raise ValueError(f"{name}={given[name]} has no effect without {what}")
