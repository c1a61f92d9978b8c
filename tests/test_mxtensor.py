"""MXTensor as plain data: checks, pytree, copies, pickle, files."""

import copy
import doctest
import io
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import mxmoe
from mxmoe import MXTensor, formats, load_mxtensors, save_mxtensors
from mxmoe.formats import FORMATS
from tests.helpers import FORMAT_NAMES, Backend, differences

REFERENCE = Backend("reference")
OFFS = torch.tensor([10, 10, 40], dtype=torch.int32)


def examples() -> dict[str, MXTensor]:
    """Every format, axis, scope, grouping and scale layout."""
    x = torch.randn(48, 64)
    made = {f"{f}-{axis}": REFERENCE.quantize(x, f, axis, scope="tensor") for f in FORMAT_NAMES for axis in ("row", "column")}
    made["row scope"] = REFERENCE.quantize(x, "nvfp4")
    made["groups"] = REFERENCE.quantize(x, "nvfp4", "column", offs=OFFS, scope="group")
    made["stack"] = REFERENCE.quantize(torch.randn(3, 20, 30), "nvfp4", scope="group")
    for name in ("mxfp8-row", "groups", "stack"):
        t = made[name]
        made[f"{name} blocked"] = t.replace(scales=REFERENCE.swizzle(t).view(t.scales.dtype), scale_layout="blocked")
    return made


EXAMPLES = tuple(examples())


@pytest.fixture(params=EXAMPLES)
def t(request) -> MXTensor:
    return examples()[request.param]


def same(a: MXTensor, b: MXTensor) -> bool:
    fields = ("format", "axis", "shape", "scope", "scale_layout")
    offs_equal = (a.offs is None) == (b.offs is None) and (a.offs is None or torch.equal(a.offs, b.offs))
    dtypes_equal = (a.values.dtype, a.scales.dtype) == (b.values.dtype, b.scales.dtype)
    return offs_equal and dtypes_equal and all(getattr(a, f) == getattr(b, f) for f in fields) and differences(a, b) == 0


def test_docstring_example():
    (example,) = doctest.DocTestFinder(recurse=False).find(MXTensor, globs={"torch": torch, "mxmoe": mxmoe})
    result = doctest.DocTestRunner().run(example)
    assert (result.failed, result.attempted) == (0, 6)


def test_pickle_deepcopy_and_torch_load(t):
    assert same(t, pickle.loads(pickle.dumps(t)))
    copied = copy.deepcopy(t)
    assert same(t, copied)
    assert copied.values.data_ptr() != t.values.data_ptr()
    file = io.BytesIO()
    torch.save({"t": [t]}, file)
    file.seek(0)
    assert same(t, torch.load(file, weights_only=True)["t"][0])


def test_l15_file_round_trip(t, tmp_path):
    t.save(tmp_path / "one.safetensors")
    assert same(t, MXTensor.load(tmp_path / "one.safetensors"))


def test_one_file_holds_several(tmp_path):
    made = examples()
    save_mxtensors(tmp_path / "all.safetensors", made)
    loaded = load_mxtensors(tmp_path / "all.safetensors")
    assert list(loaded) == list(made)
    assert all(same(made[name], loaded[name]) for name in made)
    with pytest.raises(ValueError, match=r"all\.safetensors must hold one MXTensor, got \['groups'"):
        MXTensor.load(tmp_path / "all.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["all.safetensors"]


def test_pytree(t):
    leaves, spec = pytree.tree_flatten(t)
    assert len(leaves) == 2 + (t.global_scale is not None) + (t.offs is not None)
    assert same(t, pytree.tree_unflatten(leaves, spec))
    assert "values" in pytree.keystr(pytree.tree_flatten_with_path(t)[0][0][0])
    shapes = pytree.tree_map(lambda leaf: tuple(leaf.shape), t)  # not tensors: not checked
    assert shapes.values == tuple(t.values.shape)
    assert "values=(" in repr(shapes)


def test_to_device_and_sizes(t):
    moved = t.to("meta")
    assert moved.device.type == "meta"
    assert moved.scales.device.type == "meta"
    assert t.nbytes == moved.nbytes == sum(p.nbytes for p in (t.values, t.scales, t.global_scale) if p is not None)
    assert same(t.to("cpu"), t)


def test_repr_is_short():
    made = examples()
    assert repr(made["mxfp8-row"]) == "MXTensor(mxfp8, row, shape (48, 64), plain scales, 3168 bytes, cpu)"
    groups = "MXTensor(nvfp4, column, scope group, shape (48, 64), 3 groups, blocked scales, 15372 bytes, cpu)"
    assert repr(made["groups blocked"]) == groups


def test_dequantize_takes_the_dtype():
    x = torch.randn(8, 32)
    t = mxmoe.quantize(x, "mxfp8", backend="reference")
    y = t.dequantize(backend="reference")
    assert torch.equal(y, REFERENCE.dequantize(t))
    assert torch.equal(t.dequantize(torch.bfloat16, backend="reference"), y.bfloat16())


def test_compiles_whole():
    def round_trip(x):
        return mxmoe.quantize(x, "nvfp4", backend="reference").dequantize(backend="reference") * 2

    x = torch.randn(4, 32)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), round_trip(x))


def test_bytes_are_accepted_as_uint8():
    t = REFERENCE.quantize(torch.randn(4, 32), "mxfp8")
    as_bytes = t.replace(values=t.values.view(torch.uint8), scales=t.scales.view(torch.uint8))
    assert torch.equal(REFERENCE.dequantize(as_bytes), REFERENCE.dequantize(t))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": "mxfp6"}, ValueError, "format must be one of 'mxfp8'.*got 'mxfp6'"),
        ({"axis": "rows"}, ValueError, "axis must be one of 'row', 'column', got 'rows'"),
        ({"scope": "block"}, ValueError, "scope must be one of"),
        ({"scale_layout": "tiled"}, ValueError, "scale_layout must be one of 'plain', 'blocked', got 'tiled'"),
        ({"shape": (48,)}, ValueError, r"shape must have 2 or 3 dimensions, got \(48,\)"),
        ({"shape": (48, 96)}, ValueError, r"values must have shape \(48, 96\), got \(48, 64\)"),
        ({"scales": torch.zeros(48, 3, dtype=torch.uint8)}, ValueError, r"scales must have shape \(48, 2\), got \(48, 3\)"),
        ({"scale_layout": "blocked"}, ValueError, "scales must have 1 dimensions"),
        ({"values": torch.zeros(48, 64)}, TypeError, "values must be float8_e4m3fn or uint8, got float32"),
        ({"values": [1.0]}, TypeError, "values must be a torch.Tensor, got list"),
        ({"global_scale": torch.ones(48)}, ValueError, "global_scale must be None for format 'mxfp8', got Tensor"),
        ({"offs": torch.ones(2)}, TypeError, "offs must be int32, got float32"),
        ({"scales": torch.zeros(48, 2, dtype=torch.uint8, device="meta")}, ValueError, "scales must be on cpu .* got meta"),
    ],
)
def test_parts_that_do_not_fit_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        examples()["mxfp8-row"].replace(**changes)


def test_nvfp4_needs_its_global_scale():
    t = examples()["row scope"]
    with pytest.raises(ValueError, match="global_scale must be a tensor for format 'nvfp4', got NoneType"):
        t.replace(global_scale=None)
    with pytest.raises(ValueError, match="scope 'group' needs offs or a 3-D shape"):
        t.replace(scope="group")
    with pytest.raises(ValueError, match=r"global_scale must have shape \(1,\), got \(48,\)"):
        t.replace(scope="tensor")


def test_damaged_and_foreign_files_are_named(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "t.safetensors"
    with pytest.raises(FileNotFoundError, match=r"no MXTensor file at .*t\.safetensors"):
        MXTensor.load(path)
    examples()["groups"].save(path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    for damaged, message in (
        (b"", "damaged or not a safetensors file"),
        (whole[: len(whole) // 2], "damaged or not a safetensors file"),
        (b"hello, world" * 10, "damaged or not a safetensors file"),
        (bytes(flipped), "damaged: checksum of tensor"),
        (whole.replace(b"mxmoe.mxtensors", b"other.mxtensors"), "not a file of MXTensors"),
        (whole.replace(b'\\"crc32\\"', b'\\"crc33\\"'), "damaged"),
        (whole.replace(b'\\"axis\\": \\"column\\"', b'\\"axis\\": \\"columm\\"'), "damaged: axis must be one of"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"t\.safetensors is .*{message}"):
            MXTensor.load(path)
        assert path.read_bytes() == damaged  # left untouched
    save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(ValueError, match=r"t\.safetensors is not a file of MXTensors"):
        MXTensor.load(path)


def test_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "t.safetensors"
    t = examples()["mxfp8-row"]
    t.save(path)
    with pytest.raises(TypeError):
        save_mxtensors(path, {"a": t.replace(shape=(48, object()))})
    assert same(t, MXTensor.load(path))


def test_formats_are_the_documented_ones():
    assert {f.name: (f.element, f.block, f.max, f.bits, f.scale_element) for f in FORMATS.values()} == {
        "mxfp8": ("e4m3", 32, 448.0, 8, "e8m0"),
        "mxfp8_e5m2": ("e5m2", 32, 57344.0, 8, "e8m0"),
        "mxfp4": ("e2m1", 32, 6.0, 4, "e8m0"),
        "nvfp4": ("e2m1", 16, 6.0, 4, "e4m3"),
    }
    assert formats.MXTensor is MXTensor
