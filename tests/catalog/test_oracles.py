"""The catalogue agrees with the TPU compiler's topologies and JAX's table of chips."""

import json
import subprocess
import sys

import pytest

from tpuswarm import catalog

pytest.importorskip("libtpu", reason="libtpu is for Linux on x86-64")

TYPES = [
    "v2-8", "v3-32", "v4-8", "v4-32", "v5e-1", "v5e-8", "v5e-16", "v5p-8", "v6e-8", "v6e-16", "tpu7x-2", "tpu7x-16",
]  # fmt: skip
"""A single host and several, of each generation."""

COMPILE = """
import json, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
for name, options in json.load(sys.stdin):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    too_large = jax.ShapeDtypeStruct((2**40,), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    try:
        jax.jit(lambda x: x + 1).lower(too_large).compile()
    except jax.errors.JaxRuntimeError as error:
        granted = float(re.search(r"exceeds available HBM \\(([0-9.]+)G\\)", str(error))[1])
    hosts = {device.process_index for device in devices}
    print(json.dumps([len(devices), len(hosts), devices[0].device_kind, devices[0].num_cores, granted]))
"""


@pytest.mark.slow
def test_tpu_compiler_sees_the_same_devices_hosts_kinds_and_memory():
    tpus = [catalog.find(name) for name in TYPES]
    assert {tpu.generation for tpu in tpus} == set(catalog.generations())
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps([tpu.compiler for tpu in tpus]),
        env={"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for tpu, line in zip(tpus, done.stdout.splitlines(), strict=True):
        devices, hosts, kind, cores, granted = json.loads(line)
        assert (devices, hosts) == (tpu.devices, tpu.hosts), tpu.name
        assert kind == tpu.generation.device_kind and catalog.generation_of(kind) is tpu.generation
        assert cores * devices == tpu.cores, tpu.name
        assert granted == tpu.generation.figures["compiler_hbm_gib_per_device"].value, tpu.name


@pytest.mark.parametrize("generation", catalog.generations(), ids=lambda generation: generation.name)
def test_jax_has_the_same_figures_for_a_chip(generation: catalog.Generation):
    from jax._src.pallas.mosaic import tpu_info

    cores = generation.cores_per_chip // generation.devices_per_chip
    for kind in generation.device_kinds:
        version = tpu_info.chip_version_from_device_kind(kind)
        info = tpu_info.get_tpu_info_for_chip(version, cores)  # figures of one core
        assert version.num_physical_tensor_cores_per_chip == generation.cores_per_chip
        assert info.mxu_column_size == generation.matrix_unit
        for name, value in {
            "peak_bf16": info.bf16_ops_per_second,
            "bandwidth": info.mem_bw_bytes_per_second,
            "hbm_gib": info.hbm_capacity_bytes / 2**30,
        }.items():
            figure, expected = generation.figures[name], value * generation.cores_per_chip
            values = [found.value for found in (figure, *figure.other)]
            assert any(found == pytest.approx(expected, rel=1e-3) for found in values), (name, values, expected)
    assert generation.compiler_hbm_bytes == pytest.approx(generation.hbm_bytes_per_device, rel=0.07)
