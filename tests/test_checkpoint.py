"""Checkpoints: every encoding against the libraries it comes from; conversion; damage."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mxmoe import _C, quantize
from mxmoe.__main__ import main
from mxmoe.backends.host import use_isa
from mxmoe.checkpoint import Checkpoint, convert
from mxmoe.checkpoint.encodings import ENCODINGS, WRITTEN, encode_int4, irreproducible_groups
from mxmoe.checkpoint.shards import read_header
from tests.checkpoint_cases import CASES, decompress, random_matrix, write

EXPERT = "model.layers.0.mlp.experts.{}.gate_proj.weight"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("encoding", CASES)
def test_weights_are_read_as_the_library_of_their_format_reads_them(encoding, tmp_path):
    case = CASES[encoding]()
    names = list(case.stored)
    shards = [{name: case.stored[name] for name in names[:1]}, {name: case.stored[name] for name in names[1:]}]  # scales elsewhere
    checkpoint = Checkpoint(write(tmp_path / "in", shards))
    assert list(checkpoint.weights) == [case.name]
    assert checkpoint.weights[case.name].encoding == encoding
    assert checkpoint.weights[case.name].shape == tuple(case.expected.shape)
    assert torch.equal(checkpoint.read(case.name, torch.float32).to(case.expected.dtype), case.expected)


@pytest.mark.parametrize("encoding", WRITTEN)
def test_written_weights_are_read_back_by_compressed_tensors(encoding, tmp_path):
    weights = {EXPERT.format(e): random_matrix(16, 128).bfloat16() for e in range(2)} | {"lm_head.weight": torch.randn(8, 16)}
    source = write(tmp_path / "in", [weights], {"hidden_size": 128})
    report = convert(source, tmp_path / "out", encoding)
    stored = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    checkpoint = Checkpoint(tmp_path / "out")
    assert torch.equal(stored["lm_head.weight"], weights["lm_head.weight"])
    for name in list(weights)[:2]:
        parts = {suffix: stored[name + suffix] for suffix in ENCODINGS[encoding].suffixes}
        theirs = decompress(encoding, parts)
        assert torch.equal(checkpoint.read(name, torch.float32).to(theirs.dtype), theirs)
        assert (theirs.float() - weights[name].float()).norm() < 0.15 * weights[name].float().norm()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    group = QuantizationConfig.model_validate(config["quantization_config"]).config_groups["group_0"]
    assert group.weights.num_bits == ENCODINGS[encoding].scheme["num_bits"]
    assert config["hidden_size"] == 128
    assert report.encoded == 2
    assert report.bytes_written == sum(t.nbytes for t in stored.values())


@pytest.mark.parametrize("encoding", ["mxfp8", "nvfp4", "mxfp4"])
def test_row_copies_come_back_as_they_were_written(encoding, tmp_path):
    w = random_matrix(16, 128).bfloat16()
    convert(write(tmp_path / "in", [{EXPERT.format(0): w}]), tmp_path / "out", encoding)
    copy, expected = Checkpoint(tmp_path / "out").read_mx(EXPERT.format(0)), quantize(w, encoding, scope="tensor")
    assert torch.equal(copy.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(copy.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    if encoding == "nvfp4":
        assert torch.allclose(copy.global_scale, expected.global_scale, rtol=2**-23)


SHAPE = dict(
    vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=64, initializer_range=0.1,
)  # fmt: skip
MOE = transformers.Qwen3MoeConfig(**SHAPE, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
DENSE = transformers.Qwen3Config(**SHAPE)


@pytest.mark.parametrize(("encoding", "config"), [("int4", MOE), ("mxfp4", MOE), ("mxfp8", DENSE), ("nvfp4", DENSE)])
def test_transformers_loads_what_is_written(encoding, config, tmp_path):
    """Logits are those of the same weights dequantized here. (Of routed experts, transformers 5.24 reads neither mxfp8's blocks nor
    nvfp4's global scale.)"""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "low", encoding, targets=r"(gate|up|down)_proj\.weight$")
    convert(tmp_path / "low", tmp_path / "out", "bf16")
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        low, out, source = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).eval()(ids).logits
            for name in ("low", "out", "in")
        )
    assert torch.equal(low, out)
    assert not torch.equal(source, out)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["kimi", "half"]), exponent=st.integers(-20, 20))
def test_int4_is_lossless_through_fp32_and_bf16(seed, kind, exponent):
    """Weights on the grid of Kimi K2 (scale max / 7, codes to 7) and of round-to-nearest over [-8, 7] (scale max / 7.5)."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(4, 96, generator=generator) * 2.0**exponent
    groups = w.view(4, 3, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / (7 if kind == "kimi" else 7.5)).bfloat16().float()
    low = -7 if kind == "kimi" else -8
    on_grid = ((groups / scale).round().clamp(low, 7) * scale).view(4, 96)
    for given_weights in (on_grid, on_grid.bfloat16()):
        parts = encode_int4(given_weights)
        back = ENCODINGS["int4"].decode(parts, given_weights.dtype)
        assert torch.equal(back, given_weights)
        assert irreproducible_groups(given_weights, parts) == 0
    assert torch.equal(encode_int4(on_grid)["_scale"].float(), scale.squeeze(-1)) or kind == "half"


def test_int4_says_which_groups_it_rounds(tmp_path, capsys):
    on_grid, off_grid = torch.arange(-7.0, 25.0).clamp(max=7), torch.linspace(-1, 1, 32)
    w = torch.stack([torch.cat([on_grid, off_grid]), torch.cat([off_grid, off_grid])])
    assert irreproducible_groups(w, encode_int4(w)) == 3
    source = write(tmp_path / "in", [{EXPERT.format(0): w}])
    assert convert(source, tmp_path / "out", "int4").irreproducible == {EXPERT.format(0): 3}
    assert main(["convert", str(source), str(tmp_path / "again"), "--to", "int4"]) == 0
    assert "no INT4 scale reproduces 3 groups" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"int4 has no code for NaN or Inf"):
        encode_int4(torch.full((1, 32), torch.inf))


@pytest.mark.parametrize("isa", _C.isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int4_is_the_same_on_every_instruction_set(isa, dtype):
    rows, cols = 37, 160
    q, scale = torch.randint(-8, 8, (rows, cols)), torch.rand(rows, cols // 32).to(dtype)
    words = (q.view(rows, -1, 8) + 8) << torch.arange(0, 32, 4)
    parts = {"_packed": words.sum(-1).to(torch.int32), "_scale": scale, "_shape": torch.tensor([rows, cols])}
    expected = q.float() * scale.float().repeat_interleave(32, 1)
    with use_isa(isa):
        for out in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(ENCODINGS["int4"].decode(parts, out), expected.to(out))


def test_fp8_tails_are_scaled_by_their_own_blocks(tmp_path):
    """200 x 300: blocks of 72 rows and 44 columns at the edges, against a loop over elements' blocks."""
    w, scale = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    source = write(tmp_path / "in", [{"a.weight": w, "a.weight_scale_inv": scale}])
    rows, cols = torch.arange(200) // 128, torch.arange(300) // 128
    assert torch.equal(Checkpoint(source).read("a.weight", torch.float32), w.float() * scale[rows][:, cols])


def mixed(path):
    """A language model's part of a larger one: INT4 experts, FP8 attention, plain rest, FP32 selection bias."""
    int4 = {
        f"language_model.{k}".replace("experts.0", f"experts.{e}"): v for e in range(3) for k, v in CASES["int4"]().stored.items()
    }
    fp8 = {f"language_model.{k}": v for k, v in CASES["fp8_block"]().stored.items()}
    plain = {"language_model.model.norm.weight": torch.randn(8).bfloat16(), "vision_tower.w": torch.randn(4, 4)}
    plain["language_model.model.layers.0.mlp.gate.e_score_correction_bias"] = torch.randn(3)
    quantization = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}
    path = write(path, [int4, fp8, plain], {"text_config": {"hidden_size": 8, "quantization_config": quantization}})
    (path / "tokenizer.json").write_text("{}")
    return path


def test_what_is_no_target_keeps_its_values(tmp_path):
    source = Checkpoint(mixed(tmp_path / "in"))
    convert(source.path, tmp_path / "out", "mxfp8")
    out = Checkpoint(tmp_path / "out")
    assert {w.encoding for name, w in out.weights.items() if ".experts." in name} == {"mxfp8"}
    for name, weight in source.weights.items():
        if ".experts." not in name:
            dtype = source.read(name).dtype
            assert out.weights[name].encoding == "plain"
            assert torch.equal(out.read(name), source.read(name))
            assert out.read(name).dtype == dtype, name
        else:
            expected = quantize(source.read(name, torch.float32), "mxfp8").dequantize()  # rounded once
            assert torch.equal(out.read(name, torch.float32), expected)
        assert out.weights[name].shape == weight.shape
    assert "quantization_config" in out.config["text_config"]
    assert "quantization_config" not in out.config
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    expected = {n.removeprefix("language_model."): w.shape for n, w in out.weights.items() if n.startswith("language_model.")}
    out.check(expected, prefix="language_model.")


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_interrupted_conversions_go_on_to_the_same_bytes(tmp_path):
    source, generator = mixed(tmp_path / "in"), random.Random(0)
    convert(source, tmp_path / "whole", "nvfp4", max_shard_bytes=1500)
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 4
    for run in range(8):
        target, calls, at = tmp_path / f"out{run}", 0, generator.randrange(1, 9)

        def stop(done, total, at=at):
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(source, target, "nvfp4", max_shard_bytes=1500, progress=stop)
        assert not target.exists()
        finished = {file: file.stat().st_mtime_ns for file in (tmp_path / f"out{run}.partial").glob("*.safetensors")}
        convert(source, target, "nvfp4", max_shard_bytes=1500)
        assert content(target) == content(tmp_path / "whole")
        assert all((target / file.name).stat().st_mtime_ns == mtime for file, mtime in finished.items())
        assert not list(tmp_path.glob("*.partial"))


def test_killed_conversions_go_on_to_the_same_bytes(tmp_path):
    weights = {EXPERT.format(e): torch.randn(512, 1024).bfloat16() for e in range(40)}
    source = write(tmp_path / "in", [weights])
    convert(source, tmp_path / "whole", "mxfp8", max_shard_bytes=2_000_000)
    target = tmp_path / "out"
    command = [sys.executable, "-m", "mxmoe", "convert", str(source), str(target), "--to", "mxfp8", "--max-shard-gb", "0.002"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 60
    while len(list(partial.glob("*.safetensors"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not target.exists()
    convert(source, target, "mxfp8", max_shard_bytes=2_000_000)
    assert content(target) == content(tmp_path / "whole")


def test_conversions_that_cannot_be_are_refused(tmp_path, capsys):
    source = write(tmp_path / "in", [{EXPERT.format(0): torch.randn(4, 40), EXPERT.format(1): torch.randn(4, 64)}])
    with pytest.raises(ValueError, match=r"experts.0.gate_proj.weight in .* cannot be written as mxfp8: .* multiple of 32"):
        convert(source, tmp_path / "out", "mxfp8")
    with pytest.raises(ValueError, match=r"to must be one of 'bf16'"):
        convert(source, tmp_path / "out", "fp8_block")
    with pytest.raises(ValueError, match=r"max_shard_bytes must be positive, got 0"):
        convert(source, tmp_path / "out", "bf16", max_shard_bytes=0)
    with pytest.raises(ValueError, match=r"targets must be a regular expression, got '\('"):
        convert(source, tmp_path / "out", "bf16", targets="(")
    (source / "pytorch_model.bin").write_text("weights of another format")
    convert(source, tmp_path / "out", "bf16")
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    with pytest.raises(ValueError, match=r"target must not exist, got"):
        convert(source, tmp_path / "out", "bf16")
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "bf16"]) == 1
    assert "target must not exist" in capsys.readouterr().err

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "other", "bf16", progress=stop)
    with pytest.raises(ValueError, match=r"other.partial holds an unfinished conversion of something else"):
        convert(source, tmp_path / "other", "mxfp4", targets="experts.1")
    stacked = write(tmp_path / "stacked", [CASES["mxfp4_stacked"]().stored])
    with pytest.raises(ValueError, match=r"cannot be written as nvfp4: it must be a matrix .* got shape \(3, 64, 8\)"):
        convert(stacked, tmp_path / "nv", "nvfp4", targets="experts")


def test_two_conversions_do_not_write_the_same_files(tmp_path):
    source = write(tmp_path / "in", [{EXPERT.format(0): torch.randn(4, 64)}])

    def again(done, total):
        with pytest.raises(ValueError, match=r"another process is writing .*out.partial"):
            convert(source, tmp_path / "out", "bf16")

    convert(source, tmp_path / "out", "bf16", progress=again)
    assert Checkpoint(tmp_path / "out").weights


def test_sources_that_change_are_noticed(tmp_path):
    source = write(tmp_path / "in", [{EXPERT.format(e): torch.randn(4, 64) for e in range(4)}])

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", "bf16", progress=stop)
    save_file({EXPERT.format(e): torch.randn(4, 64) for e in range(4)}, source / "model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match=r"holds an unfinished conversion of something else"):
        convert(source, tmp_path / "out", "bf16")


def two_files(path):
    return write(path, [{"a.weight": torch.randn(8, 8), "b.weight": torch.randn(4)}, {"c.weight": torch.randn(4)}])


def edit_header(file, old, new):
    """The first `old` in the header of a file replaced."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].decode().replace(old, new, 1).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def edit_index(source, changes):
    """Other files for names; None: the name goes."""
    index = json.loads((source / INDEX).read_text())
    placed = index["weight_map"] | changes
    index["weight_map"] = {name: file for name, file in placed.items() if file}
    (source / INDEX).write_text(json.dumps(index))


FIRST, SECOND, INDEX = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"


def resize(file, by):
    os.truncate(file, file.stat().st_size + by)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: resize(s / FIRST, -4), rf"{FIRST} is truncated: \w\.weight ends at byte"),
        (lambda s: os.truncate(s / FIRST, 40), rf"{FIRST} is truncated or not a safetensors file"),
        (lambda s: os.truncate(s / FIRST, 3), rf"{FIRST} is truncated or not a safetensors file"),
        (lambda s: resize(s / FIRST, 4), rf"{FIRST} must end at byte \d+ with its last tensor"),
        (lambda s: edit_header(s / FIRST, "[8,8]", "[8,9]"), rf"{FIRST}.*a.weight is mis-shaped: F32 \[8, 9\]"),
        (lambda s: edit_header(s / FIRST, "b.weight", "a.weight"), rf"{FIRST}.*a.weight appears twice"),
        (lambda s: edit_header(s / FIRST, '"F32"', '"F31"'), rf"{FIRST}.*weight has dtype 'F31'"),
        (lambda s: edit_header(s / FIRST, "[8,8]", "[-8,-8]"), rf"{FIRST}.*a.weight has shape \[-8, -8\]"),
        (lambda s: edit_header(s / FIRST, '"a.weight":', '"a.weight"'), rf"{FIRST} has a damaged header"),
        (lambda s: edit_index(s, {"c.weight": None, "e.weight": SECOND}), rf"c.weight in .*{SECOND} is unexpected: .* nowhere"),
        (lambda s: edit_index(s, {"b.weight": SECOND}), rf"b.weight in .*{FIRST} is unexpected: .* in {SECOND}"),
        (lambda s: edit_index(s, {"d.weight": SECOND}), rf"d.weight is missing: .*{SECOND}"),
        (lambda s: save_file({"b.weight": torch.ones(4)}, s / SECOND), rf"b.weight is duplicated: in .*{FIRST} and in .*{SECOND}"),
        (lambda s: (s / INDEX).write_text("{"), rf"{INDEX} is damaged"),
        (lambda s: (s / INDEX).write_text("[]"), rf"{INDEX} is damaged"),
        (lambda s: (s / "config.json").write_text("{"), r"config.json is damaged"),
        (lambda s: (s / "config.json").write_text("[]"), r"config.json must hold an object, got list"),
    ],
)
def test_damage_is_named_with_its_file(change, message, tmp_path):
    source = two_files(tmp_path / "in")
    change(source)
    with pytest.raises(ValueError, match=message):
        Checkpoint(source)


def test_missing_files_are_named(tmp_path):
    source = two_files(tmp_path / "in")
    (source / SECOND).unlink()
    with pytest.raises(FileNotFoundError, match=SECOND):
        Checkpoint(source)
    with pytest.raises(FileNotFoundError, match=r"no safetensors checkpoint at .*nothing"):
        Checkpoint(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("stored", r"message"),
    [
        ({"a.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn)}, r"a.weight_scale_inv is missing, which a.weight needs"),
        ({"a.weight_scale_inv": torch.ones(1, 1)}, r"a.weight_scale_inv .* is unexpected: no quantized weight belongs to it"),
        (
            {"a.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 1)},
            r"a.weight .*_scale_inv must be float32 or bfloat16 \[1, 1\], got float32 \[2, 1\]",
        ),
        ({"a.weight_packed": torch.zeros(4, 8, dtype=torch.int32)}, r"a.weight_scale is missing"),
        ({"a.weight_packed": torch.zeros(4, 8, dtype=torch.uint8), "a.weight_scale": torch.ones(4, 1).to(torch.float8_e4m3fn)},
         "a.weight_global_scale is missing"),
        (CASES["int4"]().stored | {EXPERT.format(0): torch.ones(1)}, r"gate_proj.weight is duplicated"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(stored, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Checkpoint(write(tmp_path / "in", [stored]))


def test_weights_that_disagree_with_their_shape_are_named_when_read(tmp_path):
    case = CASES["int4"]()
    stored = case.stored | {f"{case.name}_shape": torch.tensor([24, 95])}
    checkpoint = Checkpoint(write(tmp_path / "in", [stored]))
    with pytest.raises(ValueError, match=r"gate_proj.weight in .* stored as int4: _shape must hold \[24, 96\], got \[24, 95\]"):
        checkpoint.read(case.name)


@pytest.mark.parametrize(
    ("weight", "to", "message"),
    [
        (torch.ones(4, 64, dtype=torch.int32), "mxfp8", r"experts.0.up_proj.weight in .* must hold torch.float32"),
        (torch.ones(4, 64, dtype=torch.float64), "nvfp4", r"experts.0.up_proj.weight in .* got torch.float64"),
        (torch.full((4, 64), torch.nan), "int4", r"experts.0.up_proj.weight in .* no code for NaN"),
    ],
)
def test_values_that_cannot_be_encoded_are_named(weight, to, message, tmp_path):
    write(tmp_path / "in", [{"model.layers.0.mlp.experts.0.up_proj.weight": weight}])
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "in", tmp_path / "out", to)


def test_config_without_a_text_part_and_endless_files(tmp_path, capsys):
    write(tmp_path / "in", [{"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(4, 64)}])
    (tmp_path / "in" / "config.json").write_text('{"text_config": null}')
    arguments = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "mxfp8"]
    assert main([*arguments, "--max-shard-gb", "inf"]) == 1
    assert "must be greater than 0 and finite, got inf" in capsys.readouterr().err
    assert main(arguments) == 0


def test_other_block_sizes_are_refused(tmp_path):
    fp8 = write(tmp_path / "a", [CASES["fp8_block"]().stored], {"quantization_config": {"weight_block_size": [64, 64]}})
    with pytest.raises(ValueError, match=r"config.json: weight_block_size must be \[128, 128\], got \[64, 64\]"):
        Checkpoint(fp8)
    groups = {"config_groups": {"g": {"weights": {"symmetric": False}}}}
    with pytest.raises(ValueError, match=r"config.json: symmetric of packed weights must be True, got False"):
        Checkpoint(write(tmp_path / "b", [CASES["int4"]().stored], {"quantization_config": groups}))


def test_check_names_all_faults(tmp_path):
    checkpoint = Checkpoint(two_files(tmp_path / "in"))
    checkpoint.check({"a.weight": (8, 8), "b.weight": (4,), "c.weight": (4,)})
    message = (
        rf"d.weight is missing; c.weight in .*{SECOND} is unexpected; a.weight in .*{FIRST} must have shape \(8, 9\), got \(8, 8\)"
    )
    with pytest.raises(ValueError, match=message):
        checkpoint.check({"a.weight": (8, 9), "b.weight": (4,), "d.weight": (1,)})
    with pytest.raises(KeyError, match=r"has no weight 'z'"):
        checkpoint.read("z")
    with pytest.raises(ValueError, match=r"the encoding of a.weight must be one of"):
        checkpoint.read_mx("a.weight")


def test_files_that_shrink_while_open_are_named(tmp_path):
    checkpoint = Checkpoint(two_files(tmp_path / "in"))
    os.truncate(tmp_path / "in" / SECOND, 20)
    with pytest.raises(ValueError, match=rf"c.weight .* in .*{SECOND} is truncated"):
        checkpoint.read("c.weight")


@settings(max_examples=30)
@given(data=st.data())
def test_files_written_here_are_read_by_the_library(data, tmp_path_factory):
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool])
    shapes = st.lists(st.integers(0, 5), max_size=3)
    path = tmp_path_factory.mktemp("files")
    weights = {
        f"w{i}": torch.randn(data.draw(shapes)).to(data.draw(dtypes)) for i in range(data.draw(st.integers(1, 5)))
    }  # fmt: skip
    weights = {name: t if t.dtype != torch.float8_e4m3fn else t.view(torch.uint8) for name, t in weights.items()}
    convert(write(path / "in", [weights]), path / "out", "bf16", max_shard_bytes=data.draw(st.integers(1, 100)))
    index = json.loads((path / "out" / "model.safetensors.index.json").read_text())
    for name, t in weights.items():
        file = path / "out" / index["weight_map"][name]
        assert torch.equal(load_file(file)[name], t)
        assert read_header(file)[name].start % t.element_size() == 0
