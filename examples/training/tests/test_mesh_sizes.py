"""--mesh without a framework: it takes what `spmd.parse_mesh` takes, and refuses before imports."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd_core as spmd
from examples.gpt2 import config as gpt2
from examples.llama_serving import config as serving
from examples.llama_tp import config as llama
from examples.resnet_spatial import config as resnet
from examples.training.knobs import KnobError
from examples.training.mesh_sizes import check_axes, check_heads, mesh_sizes, num_devices

PARTS = st.one_of(
    st.builds(
        "{}{}{}".format,
        st.sampled_from(["x", "y", " z ", ""]),
        st.sampled_from(["=", " = ", "", "=="]),
        st.sampled_from(["1", "2", "4", " 8", "08", "0", "-1", "*", "-2", "2.0", "1e1", "x", ""]),
    ),
    st.text(max_size=4),
)


@given(st.lists(PARTS, min_size=1, max_size=3).map(",".join), st.sampled_from([1, 2, 8]))
def test_it_takes_what_the_library_takes(text: str, devices: int) -> None:
    taken: Any = None
    try:
        taken = spmd.parse_mesh(text, devices).shape()
    except spmd.errors.MeshError:
        if text:  # which is no mesh, for one device
            with pytest.raises(KnobError, match=r"; got .*\. (Write|Rename|Give|Pass) "):
                mesh_sizes(text, num_emulated=devices)
        return
    assert mesh_sizes(text, num_emulated=devices) == taken
    unknown = mesh_sizes(text)
    assert devices % num_devices(unknown) == 0 and unknown.keys() == taken.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=3", "got 'fsdp=3', which takes 3, and 8 CPU devices. Pass --devices 3, which emul"),
        ("fsdp=3,tensor=*", "which takes a multiple of 3, and 8 CPU devices. Pass --devices 9, or"),
        ("fsdp=*,tensor=-1", "one axis of --mesh may take the rest of the devices; got fsdp and"),
        ("fsdp=0", "got 'fsdp=0' in 'fsdp=0'. Write for instance --mesh data=8."),
        ("fsdp=8,", "got '' in 'fsdp=8,'. Write for instance --mesh data=8."),
    ],
)
def test_what_is_no_mesh_of_the_emulated_devices(text: str, message: str) -> None:
    with pytest.raises(KnobError, match=re.escape(message)):
        mesh_sizes(text, num_emulated=8)


def test_axes_and_heads() -> None:
    check_axes("", {}, ["data"])
    check_axes("data=*", mesh_sizes("data=*"), ["data"])
    with pytest.raises(KnobError, match=r"^mesh axes must be among data; got \['zz'\] in 'zz=8'"):
        check_axes("zz=8", mesh_sizes("zz=8"), ["data"])
    check_heads(4, 12, of="small", other="another preset")
    message = r"got tensor=8 for the 4 heads of small\. Pass one of tensor=1, 2, 4, or another pre"
    with pytest.raises(KnobError, match=message):
        check_heads(8, 4, of="small", other="another preset")


@pytest.mark.parametrize("text", ["zz=8", "data=0", "data=3", "data=x", "data=8,data=1", "data=16"])
def test_every_recipe_refuses_a_mesh_before_it_imports_a_framework(text: str) -> None:
    """Its check of options is what `begin_command` calls before the imports."""
    for config, check in (
        (gpt2.TrainConfig, gpt2.with_defaults),
        (llama.TrainConfig, llama.check_options),
        (resnet.TrainConfig, resnet.with_defaults),
        (serving.ServeConfig, serving.checked),
    ):
        given_: dict[str, Any] = {"devices": 8, "mesh": text}
        if config is serving.ServeConfig:
            given_ |= {"model": "/", "mesh": text.replace("data", "tensor")}
        with pytest.raises(KnobError, match=r"; got .*\. (Write|Rename|Pass) "):
            check(config(**given_))  # type: ignore[arg-type]
    # What only the devices can tell waits for them.
    gpt2.with_defaults(gpt2.TrainConfig(mesh="fsdp=3", batch=6))
    llama.check_options(llama.TrainConfig(mesh="tensor=*"))
    resnet.with_defaults(resnet.TrainConfig(mesh="height=3"))


def test_what_a_mesh_splits_must_divide_before_the_imports() -> None:
    on_8: dict[str, Any] = {"devices": 8}
    for message, check, config in (
        ("got 12 for 8", gpt2.with_defaults, gpt2.TrainConfig(mesh="fsdp=*", batch=12, **on_8)),
        (
            "got 9 of 8. Pass at most 8",
            gpt2.with_defaults,
            gpt2.TrainConfig(mesh="fsdp=9", mesh_devices=9, **on_8),
        ),
        (
            "tensor=8 for the 12 heads",
            llama.check_options,
            llama.TrainConfig(mesh="tensor=8", **on_8),
        ),
        (
            "got 1022 tokens for 4",
            llama.check_options,
            llama.TrainConfig(mesh="data=4,context=2", seq=1022, batch=8, **on_8),
        ),
        (
            "got 60 for data=8",
            resnet.with_defaults,
            resnet.TrainConfig(mesh="data=8", batch=60, **on_8),
        ),
        (
            "got 4 for height=8",
            resnet.with_defaults,
            resnet.TrainConfig(mesh="height=8", image_size=4, **on_8),
        ),
    ):
        with pytest.raises(KnobError, match=re.escape(message)):
            check(config)  # type: ignore[arg-type]
    # The sizes of a model's folder are not known before it is read.
    llama.check_options(llama.TrainConfig(mesh="tensor=8", weights="folder", **on_8))
