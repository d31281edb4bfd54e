"""How users write meshes, and which device gets which stage."""

import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jpipe.mesh import AXES, make_mesh, parse_mesh


@pytest.mark.parametrize(
    ("text", "stage", "data"),
    [
        ("1", 1, 1),
        ("4", 4, 1),
        ("64", 64, 1),
        ("4x2", 4, 2),
        ("1x8", 1, 8),
        ("4X2", 4, 2),
        (" 4 x 2 ", 4, 2),
        ("04x02", 4, 2),
        ("stage=4", 4, 1),
        ("data=2", 1, 2),
        ("stage=4,data=2", 4, 2),
        ("data=2,stage=4", 4, 2),
        (" stage = 4 , data = 2 ", 4, 2),
    ],
)
def test_what_users_may_write(text, stage, data):
    assert parse_mesh(text) == {"stage": stage, "data": data, "model": 1}
    assert tuple(parse_mesh(text)) == AXES


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "four",
        "4x",
        "x4",
        "4xx2",
        "4*2",
        "4,2",
        "4 2",
        "-4",
        "+4",
        "4.0",
        "4x2x1x1",
        "stage",
        "stage=",
        "=4",
        "stage=four",
        "stage=-4",
        "stage=4,",
        "stage=4;data=2",
        "stage=4 data=2",
        "stage=4x2",
        "stage=4,2",
        "stage=4,stage=4",
        "stage=4,data=2,data=1",
    ],
)
def test_what_is_no_mesh(text):
    grammar = (
        "write 4 (stages), 4x2 (stages x data), 2x2x2 (stages x data x model) or stage=4,data=2"
    )
    message = re.escape(f"mesh={text!r} is not understood; {grammar}")
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["pipe=4", "Stage=4", "stage=4,expert=2"])
def test_unknown_axis(text):
    axis = text.split(",")[-1].split("=")[0]
    with pytest.raises(ValueError, match=f"unknown axis '{axis}'.*stage=4,data=2"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "axis"),
    [("0", "stage"), ("0x2", "stage"), ("4x0", "data"), ("stage=4,data=0", "data")],
)
def test_axis_without_devices(text, axis):
    with pytest.raises(ValueError, match=f"axis '{axis}' must have at least 1 device"):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["4x2x3", "stage=4,data=2,model=3", "model=3,stage=4,data=2"])
def test_three_axes(text):
    assert parse_mesh(text) == {"stage": 4, "data": 2, "model": 3}


def test_neighbouring_stages_get_neighbouring_devices():
    devices = jax.devices()
    mesh = make_mesh(4, 2)
    assert mesh.axis_names == ("stage", "data", "model")
    assert dict(mesh.shape) == {"stage": 4, "data": 2, "model": 1}
    for data in range(2):
        assert [d.id for d in mesh.devices[:, data, 0]] == [
            d.id for d in devices[4 * data : 4 * data + 4]
        ]


def test_devices_that_share_a_layer_are_closest():
    mesh = make_mesh(2, 2, 2)
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert ids.tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_every_mesh_has_all_axes_of_type_auto():
    for shape in ((1, 1, 1), (8, 1, 1), (1, 8, 1), (3, 2, 1), (2, 2, 2)):
        mesh = make_mesh(*shape)
        assert mesh.devices.shape == shape
        assert mesh.axis_types == (AxisType.Auto,) * 3


def test_devices_may_be_chosen():
    chosen = jax.devices()[::-1]
    mesh = make_mesh(2, 2, devices=chosen)
    np.testing.assert_array_equal(
        [[d.id for d in row] for row in mesh.devices[..., 0]],
        [[chosen[0].id, chosen[2].id], [chosen[1].id, chosen[3].id]],
    )


@pytest.mark.parametrize(
    ("shape", "devices", "message"),
    [
        ((16, 1), None, "16 stages x 1 data needs 16 devices, there are 8"),
        ((4, 4), None, "4 stages x 4 data needs 16 devices, there are 8"),
        ((2, 1), 1, "2 stages x 1 data needs 2 devices, there are 1"),
        ((4, 1, 4), None, "4 stages x 1 data x 4 model needs 16 devices, there are 8"),
    ],
)
def test_too_few_devices(shape, devices, message):
    devices = None if devices is None else jax.devices()[:devices]
    with pytest.raises(ValueError, match=message + ".*simulate_devices"):
        make_mesh(*shape, devices=devices)


@pytest.mark.parametrize(
    ("flags", "count"), [("", 3), ("--xla_force_host_platform_device_count=5", 5)]
)
def test_simulated_devices(flags, count):
    code = "import jpipe.mesh, jax; jpipe.mesh.simulate_devices(3); print(len(jax.devices()))"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [str(count)]
