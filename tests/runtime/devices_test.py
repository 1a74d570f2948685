"""The table of devices: one entry per kind, and nothing known of other devices."""

import collections

from cubit_jax.runtime.devices import DEVICES, peak_flops


def test_a_kind_stands_in_one_entry():
    kinds = collections.Counter(kind for device in DEVICES.values() for kind in device.kinds)
    assert kinds and max(kinds.values()) == 1


def test_peak_is_found_by_every_kind_of_a_device():
    assert peak_flops("TPU v5 lite") == peak_flops("TPU v5e") == 197e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 != peak_flops("NVIDIA H100 80GB HBM3")
    assert peak_flops("cpu") is None
