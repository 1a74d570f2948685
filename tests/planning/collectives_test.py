"""The bytes of every collective, from the text of a compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cubit_jax import partitioning
from cubit_jax.planning.collectives import traffic

ONE_SLICE = [0] * 8
PROGRAM = """
HloModule jit_step, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %y)
}

%condition (p: (s32[], f32[16,8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %p = (s32[], f32[16,8]) parameter(0)
  %counter = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

%body (p.1: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %p.1 = (s32[], f32[16,8]) parameter(0)
  %gathered = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%part), replica_groups=[2,4]<=[8], dimensions={0}
  %pair = (f32[4,8]{1,0}, /*index=1*/f32[3]{0}) all-reduce(%a, %b), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %t = (s32[], f32[16,8]) tuple(%i, %x)
}

%all-reduce-scatter.1 (q: f32[16,8]) -> f32[2,8] {
  %q = f32[16,8] parameter(0)
  %whole = f32[16,8] all-reduce(%q), replica_groups={}, to_apply=%add
  ROOT %part.1 = f32[2,8] dynamic-slice(%whole, %c, %z), dynamic_slice_sizes={2,8}
}

ENTRY %main (a.1: f32[16,8]) -> f32[] {
  %loop = (s32[]{:T(128)}, f32[16,8]) while(%init), condition=%condition, body=%body
  %known = (s32[], f32[16,8]) while(%init), condition=%c2, body=%body2, backend_config={"known_trip_count":{"n":"3"}}
  %fused = f32[2,8] fusion(%a.1), kind=kCustom, calls=%all-reduce-scatter.1
  %start = (f32[4,8], f32[32,8]) all-gather-start(%x), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, dimensions={0}
  %done = f32[32,8] all-gather-done(%start)
  %part.2 = ((f32[8], f32[16]), (f32[1], f32[2])) reduce-scatter-start(%x, %y), replica_groups={}, dimensions={0}
  %moved = f32[10]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{3,4}}
  %alone = f32[10]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  ROOT %r = f32[] constant(0)
}

%c2 (p.2: (s32[], f32[16,8])) -> pred[] {
  ROOT %true = pred[] constant(true)
}

%begin (u: f32[4]) -> f32[32] {
  ROOT %first = f32[32] all-gather(%u), channel_id=7, replica_groups={}, frontend_attributes={chain_id="0"}
}

%beside_a_product (u.1: f32[4]) -> f32[32] {
  ROOT %second = f32[32] all-gather(%u.1), channel_id=7, replica_groups={}, frontend_attributes={chain_id="0"}
}

%body2 (p.3: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %one = f32[32] fusion(%u), kind=kCustom, calls=%begin
  %two = f32[32] fusion(%u, %one), kind=kOutput, calls=%beside_a_product
  ROOT %swapped = f32[16]{0} all-to-all(%x), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
}
"""


def test_every_kind_by_hand_with_loops_and_groups():
    found, unknown = traffic(PROGRAM, ONE_SLICE)
    assert {kind: (value.count, value.sent) for kind, value in found.items()} == {
        "all-gather": (12 + 1 + 3, 12 * 256 * 3 // 4 + 1024 * 7 // 8 + 3 * 128 * 7 // 8),
        "reduce-scatter": (2, 64 * 7 + 12 * 7),
        "all-reduce": (12, 12 * 2 * (128 + 12) // 2),
        "all-to-all": (3, 3 * 64 // 2),
        "collective-permute": (1, 40),
    }
    assert list(found) == ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
    assert unknown == []
    assert all(value.across == 0 for value in found.values())


def test_what_crosses_slices_goes_by_the_members_of_the_groups():
    found, _ = traffic(PROGRAM, [0] * 4 + [1] * 4)
    across = {kind: value.across for kind, value in found.items()}
    # Groups of four neighbours and of two stay inside; 0 and 4 are partners of the all-to-all; 3 sends to 4.
    assert across == {
        "all-gather": (1024 + 3 * 128) * 7 // 8,
        "reduce-scatter": 64 * 7 + 12 * 7,
        "all-reduce": 0,
        "all-to-all": 96,
        "collective-permute": 40,
    }


@pytest.mark.parametrize(
    "groups, crosses",
    [
        ("mesh['a'=2,'b'=4] {'b'}", False),
        ("mesh['a'=2,'b'=4] {'a'}", True),
        ("mesh['a'=8] {'a':(1)2}", True),
        ("mesh['a'=8] {'a':(2)4}", False),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", False),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", True),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", False),
        ("[2,4]<=[8]", False),
        ("[4,2]<=[2,4]T(1,0)", True),
        ("{{0,4},{1,5},{2,6},{3,7}}", True),
        ("{}", True),
    ],
)
def test_ways_to_write_groups(groups, crosses):
    gather = f"  ROOT %r = f32[4] all-gather(%x), replica_groups={groups}, dimensions={{0}}"
    text = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n{gather}\n}}\n"
    found, _ = traffic(text, [0] * 4 + [1] * 4)
    assert (found["all-gather"].across == found["all-gather"].sent) == crosses


def test_what_a_host_sends_to_other_slices():
    send = (
        "  %sent = (f32[2,64]{1,0:T(1,128)}, u32[], token[]) send(%sum, %after), is_host_transfer=true, "
        'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    other = "  %own = (f32[64], u32[], token[]) send(%x, %after), channel_id=4, is_host_transfer=true"
    found, _ = traffic(f"ENTRY %main (x: f32[4]) -> f32[4] {{\n{send}\n{other}\n}}\n", [0] * 4 + [1] * 4)
    assert {kind: (value.count, value.sent, value.across) for kind, value in found.items()} == {
        "all-reduce": (1, 512, 512)
    }


def test_loop_of_unknown_length_is_named_and_counts_once():
    text = PROGRAM.replace('"known_trip_count":{"n":"3"}', "")
    found, unknown = traffic(text, ONE_SLICE)
    assert unknown == ["known"]
    assert found["all-to-all"].count == 1


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY"):
        traffic("nothing", ONE_SLICE)


def test_a_program_that_this_jax_compiles():
    mesh = partitioning.make_mesh({"data": 8})

    def step(x, w):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))), None

        return jax.lax.scan(layer, x, w)[0]

    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    w = jax.ShapeDtypeStruct((5, 32, 32), jnp.float32, sharding=NamedSharding(mesh, P(None, "data")))
    found, unknown = traffic(jax.jit(step).lower(x, w).compile().as_text(), ONE_SLICE)
    assert unknown == []
    assert set(found) == {"all-gather"}
    # In five turns of the loop or in one piece before it: the same bytes.
    np.testing.assert_allclose(found["all-gather"].sent, 5 * 32 * 32 * 4 * 7 / 8)


def test_collectives_of_a_shard_map_share_a_channel_and_all_count():
    mesh = partitioning.make_mesh({"data": 8})

    def exchange(x):
        x = jax.lax.all_to_all(x, "data", 1, 0, tiled=True)
        return jax.lax.all_to_all(jnp.sin(x), "data", 0, 1, tiled=True)

    def step(x):
        layer = jax.shard_map(exchange, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return jax.lax.scan(lambda x, _: (layer(x), None), x, length=5)[0]

    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    text = jax.jit(step).lower(x).compile().as_text()
    assert len(set(re.findall(r"all-to-all.*(channel_id=\d+)", text))) == 1
    found, _ = traffic(text, ONE_SLICE)
    assert set(found) == {"all-to-all"}
    np.testing.assert_allclose(found["all-to-all"].sent, 10 * 2 * 32 * 4 * 7 / 8)


@pytest.mark.parametrize(
    "old, new",
    [('chain_id="0"', 'chain_id="1"'), ("channel_id=7", "channel_id=8"), (', frontend_attributes={chain_id="0"}', "")],
)
def test_collectives_in_several_fusions_count_once_only_as_parts_of_one(old, new):
    text = PROGRAM.replace(old, new, 1)  # in the first of the two
    assert traffic(text, ONE_SLICE)[0]["all-gather"].count == 12 + 1 + 3 * 2


def test_loop_without_collectives_may_have_any_length():
    text = re.sub(r"%alone = .*", "%long = f32[4] while(%x), condition=%c2, body=%begin_nothing", PROGRAM)
    text += "\n%begin_nothing (u.2: f32[4]) -> f32[4] {\n  ROOT %x.1 = f32[4] parameter(0)\n}\n"
    assert traffic(text, ONE_SLICE) == traffic(PROGRAM, ONE_SLICE)
