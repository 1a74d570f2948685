"""How parameters and the training state lie on the mesh, by the path of each array."""

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Rules = tuple[tuple[str, P], ...]

# The first pattern found in a parameter's path decides. A spec names the axes of one layer's array; the leading layer
# axis of scanned layers is never split. There is no rule for "any other matrix": a layer with parameters of other names
# states its own (Layer.partition_rules).
RULES = (
    (r"\bembed/embedding$", P("tensor", "fsdp")),  # [V, D]
    (r"\blm_head/kernel$", P("fsdp", "tensor")),  # [D, V]
    (r"\b[qkvrw]_proj/kernel$", P("fsdp", "tensor", None)),  # [D, H, K]
    (r"\bo_proj/kernel$", P("tensor", None, "fsdp")),  # [H, K, D]
    (r"\b(up|gate)_proj/kernel$", P("fsdp", "tensor")),  # [D, F]
    (r"\bdown_proj/kernel$", P("tensor", "fsdp")),  # [F, D]
    (r"\b(lrr|beta)_proj/kernel$", P("fsdp", None)),  # [D, H]
    (r"\bprecond_[uv]$", P("fsdp", None)),  # [D, R]
    (r"\b(diag|attention_diag)$", P(None, None)),  # [H, D], or [D] when the heads share it
    (r"\b(lrr_low|lrr_range|reference_scale|log_ridge|beta_proj/bias)$", P(None)),  # [H]
    (r"(_norm/scale|\bprecond_d)$", P(None)),  # [D]
    (r"\bstep_size$", P()),
)


def parameter_spec(path: str, ndim: int, rules: Rules = ()) -> P:
    """The PartitionSpec of one parameter, by the first rule that its path matches.

    Args:
      path: "layers/mixer/q_proj/kernel"; whatever stands before the parameter's own name is ignored.
      ndim: its number of dimensions; one more than the rule's is the leading axis of scanned layers.
      rules: further ones, which go before RULES: those of a model's layers, `model_config.partition_rules`.

    Raises:
      ValueError: no rule matches, or the rule is for another number of dimensions.
    """
    for pattern, spec in (*rules, *RULES):
        if re.search(pattern, path):
            if path.endswith("diag") and ndim == 1:
                return P(None)
            if ndim not in (len(spec), len(spec) + 1):
                raise ValueError(f"parameter {path} has {ndim} dimensions, its sharding rule {spec} has {len(spec)}")
            return P(*(None,) * (ndim - len(spec)), *spec)
    raise ValueError(
        f"parameter {path} has no sharding rule: give the layer that makes it a line in its partition_rules "
        "(cubit_jax/layers/common.py)"
    )


def state_shardings(mesh: Mesh, state: Any, rules: Rules = ()) -> Any:
    """NamedSharding of every array in a training state: moments lie where their parameters do, scalars everywhere.

    Args:
      mesh: the device mesh.
      state: pytree of arrays or shapes whose paths end in parameter paths (params, Adam's mu and nu), plus scalars.
      rules: as of `parameter_spec`.
    """

    def one(path, leaf):
        path = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = parameter_spec(path, leaf.ndim, rules) if leaf.ndim or "params" in path.split("/") else P()
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, state)
