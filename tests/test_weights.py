"""Versions of weights in a store: published, fetched, applied, taken back; what is damaged or does not fit is refused."""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.weights import Publisher, Receiver, Store, VersionError
from rl.weights import version as v
from tests.publish_until_killed import state_of


def random_state(seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(300, 70, generator=g)
    return {
        "embed.weight": weight.bfloat16(),
        "router.bias": torch.randn(8, generator=g),
        "experts.values": (weight * 9).to(torch.float8_e4m3fn),
        "experts.scales": torch.randint(110, 130, (300, 3), generator=g, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "experts.packed": torch.randint(0, 256, (300, 35), generator=g, dtype=torch.uint8),
        "steps": torch.tensor([seed], dtype=torch.int32),
    }


def moved(state, seed, density=0.03):
    """A later version: some elements with other bits."""
    g = torch.Generator().manual_seed(seed)
    later = {}
    for name, t in state.items():
        flat = t.clone().reshape(-1)
        raw = flat.view(torch.uint8).view(flat.numel(), -1)
        chosen = torch.rand(flat.numel(), generator=g) < density
        raw[:, 0] = torch.where(chosen, raw[:, 0] ^ 1, raw[:, 0])
        later[name] = flat.view(t.shape)
    return later


def blank(state):
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}


def same(a, b):
    return all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a.keys() | b.keys())


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def published(store):
    """Versions 1 to 3 in a store: 1 whole."""
    states = [random_state()]
    states += [moved(states[-1], seed=1)]
    states += [moved(states[-1], seed=2)]
    with Publisher(store, orders={"experts.packed": "nibbles"}) as publisher:
        receipts = [publisher.publish(state, number).result() for number, state in enumerate(states, 1)]
    return SimpleNamespace(store=store, states=states, receipts=receipts)


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.3]), st.integers(1, 3)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 3),
)
def test_receivers_reach_every_version_bit_for_bit(tmp_path_factory, steps, full_every, keep, lag):
    """Whatever is skipped, deleted or joined late."""
    store = Store(tmp_path_factory.mktemp("store"))
    state, number = random_state(), 0
    follower, joined = Receiver(store, blank(state)), 0
    with Publisher(store, full_every=full_every, keep=keep) as publisher:
        for i, (density, jump) in enumerate(steps):
            state, number = moved(state, i, density), number + jump
            assert publisher.publish(state, number).result().version == number
            if i % (lag + 1) == lag:
                assert follower.apply(follower.fetch()) == number
                assert same(follower.state, state)
            late = Receiver(store, blank(state))
            joined = late.apply(late.fetch())
            assert joined == number
            assert same(late.state, state)
    wholes = [name for name in store.names() if name.endswith("whole.safetensors")]
    assert len(wholes) <= keep


def test_a_whole_version_is_an_ordinary_safetensors_file(published, tmp_path):
    (name,) = [name for name in published.store.names() if name.endswith("whole.safetensors")]
    found = safetensors.torch.load_file(tmp_path / "store" / name)
    assert same(found, published.states[0])
    assert {n: t.dtype for n, t in found.items() if n != "experts.scales"} == {
        n: t.dtype for n, t in published.states[0].items() if n != "experts.scales"
    }


def test_differences_are_smaller_than_others_codecs(store):
    """BF16 weights after a step at 1e-6: against XOR, and against 16-bit gaps with XOR, both through zstd, of the same change."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(4_000_000, generator=g) * 0.02
    before, after = weight.bfloat16(), (weight - 1e-6 * (torch.randn(weight.shape, generator=g) * 0.6).clamp(-1, 1)).bfloat16()
    with Publisher(store) as publisher:
        publisher.publish({"w": before}, 1).result()
        receipt = publisher.publish({"w": after}, 2).result()
    changed = (before.view(torch.int16) != after.view(torch.int16)).nonzero().flatten()
    assert receipt.changes == changed.numel()
    assert receipt.bytes * 8 / receipt.changes < 10
    xor = before.view(torch.int16) ^ after.view(torch.int16)
    compress = zstandard.ZstdCompressor(level=1).compress
    whole = len(compress(xor.numpy().tobytes()))
    gaps = torch.diff(changed, prepend=torch.tensor([-1])).to(torch.int16)
    sparse = len(compress(gaps.numpy().tobytes())) + len(compress(xor[changed].numpy().tobytes()))
    assert whole / receipt.bytes >= 2
    assert sparse / receipt.bytes >= 1.3


def test_a_step_that_changes_nothing_is_a_version(store):
    """W03: the version advances by what readers can find, not by being asked for."""
    state = random_state()
    receiver = Receiver(store, blank(state))
    with Publisher(store) as publisher:
        for number in (1, 2):
            publisher.publish(state, number).result()
        assert receiver.apply(receiver.fetch(1)) == 1
        update = receiver.fetch()
        assert not update.steps[0][1]
        assert receiver.apply(update) == 2


def spoil(tmp_path, name, change):
    path = tmp_path / "store" / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("at", [0, 8, 100, -1])
def test_w01_a_damaged_difference_is_refused_and_the_next_whole_version_taken(tmp_path, store, at):
    states = [random_state()]
    receiver = Receiver(store, blank(states[0]))
    with Publisher(store, full_every=2) as publisher:
        publisher.publish(states[0], 1).result()
        receiver.apply(receiver.fetch())
        states.append(moved(states[-1], 1))
        publisher.publish(states[1], 2).result()
        spoil(
            tmp_path,
            "v00000002/delta.safetensors",
            lambda data: data[:at] + bytes([data[at] ^ 1]) + (data[at + 1 :] if at >= 0 else b""),
        )
        with pytest.raises(VersionError, match="damaged"):
            receiver.fetch()
        assert receiver.version == 1
        assert same(receiver.state, states[0])
        states.append(moved(states[-1], 2))
        publisher.publish(states[2], 3).result()
        assert receiver.apply(receiver.fetch()) == 3
        assert same(receiver.state, states[2])


def test_w03_a_store_that_fails_leaves_the_version_and_loses_nothing(store, monkeypatch):
    states = [random_state()]
    states += [moved(states[-1], 1)]
    states += [moved(states[-1], 2)]
    receiver = Receiver(store, blank(states[0]))
    with Publisher(store) as publisher:
        publisher.publish(states[0], 1).result()
        write = store.write
        for broken in ("delta.safetensors", "manifest.json"):

            def fail(name, data, broken=broken):
                if name.endswith(broken):
                    raise OSError(28, "No space left on device")
                write(name, data)

            monkeypatch.setattr(store, "write", fail)
            with pytest.raises(OSError, match="No space"):
                publisher.publish(states[1], 2).result()
            assert publisher.version == 1
            assert receiver.newest() == 1
        monkeypatch.setattr(store, "write", write)
        receiver.apply(receiver.fetch())
        publisher.publish(states[2], 3).result()
        assert receiver.apply(receiver.fetch()) == 3
        assert same(receiver.state, states[2])


def test_a_write_that_dies_leaves_no_part(store, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        store.write("a/b", b"data")
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_w05_tied_tensors(store):
    weight = torch.randn(8, 4)
    state = {"embed.weight": weight, "lm_head.weight": weight.clone(), "mtp.lm_head.weight": torch.randn(8, 4)}
    with Publisher(store) as publisher:
        publisher.publish(state, 1).result()
        own = {name: torch.zeros(8, 4) for name in ("embed.weight", "mtp.lm_head.weight")}
        tied = Receiver(store, own, tied={"lm_head.weight": "embed.weight"})
        assert tied.apply(tied.fetch()) == 1
        assert torch.equal(own["embed.weight"], weight)
        assert torch.equal(own["mtp.lm_head.weight"], state["mtp.lm_head.weight"])
        with pytest.raises(VersionError, match=r"unexpected: lm_head\.weight"):
            Receiver(store, own).fetch()
        state["lm_head.weight"][0, 0] += 1
        publisher.publish(state, 2).result()
        with pytest.raises(VersionError, match=r"lm_head\.weight is tied to embed\.weight, but has other values"):
            tied.fetch()
        untied = Receiver(store, blank(state))
        untied.apply(untied.fetch())
        assert same(untied.state, state)
        with pytest.raises(VersionError, match="missing: other"):
            Receiver(store, blank(state) | {"other": torch.zeros(1)}).fetch()


def test_w09_a_failed_update_is_taken_back_and_the_next_one_goes_through(published, monkeypatch):
    receiver = Receiver(published.store, blank(published.states[0]))
    receiver.apply(receiver.fetch(1))
    update = receiver.fetch(3)
    from rl.weights import receiver as module

    whole = module.delta.apply
    calls = []

    def fail(t, change, backwards=False):
        calls.append(backwards)
        if calls.count(False) == 6 and not backwards:
            raise RuntimeError("in the middle")
        whole(t, change, backwards)

    monkeypatch.setattr(module.delta, "apply", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        receiver.apply(update)
    assert receiver.version == 1
    assert same(receiver.state, published.states[0])
    assert calls.count(True) == 5
    monkeypatch.setattr(module.delta, "apply", whole)
    assert receiver.apply(update) == 3
    assert same(receiver.state, published.states[2])


def test_weights_changed_behind_the_receiver_are_found_and_left(published):
    """The hash after the update is not the manifest's: nothing is taken for a version that it is not."""
    receiver = Receiver(published.store, blank(published.states[0]))
    receiver.apply(receiver.fetch(1))
    receiver.state["embed.weight"][0, 0] += 1
    spoiled = receiver.state["embed.weight"].clone()
    with pytest.raises(VersionError, match=r"embed\.weight: expected hash"):
        receiver.apply(receiver.fetch(2))
    assert receiver.version == 1
    assert torch.equal(receiver.state["embed.weight"], spoiled)
    fresh = Receiver(published.store, receiver.state)
    assert fresh.apply(fresh.fetch()) == 3
    assert same(fresh.state, published.states[2])


def test_w13_what_does_not_fit_is_refused_and_duplicates_change_nothing(published):
    states, store = published.states, published.store
    receiver = Receiver(store, blank(states[0]))
    receiver.apply(receiver.fetch(1))
    second, third = receiver.fetch(2), None
    other = Receiver(store, blank(states[0]))
    other.apply(other.fetch(2))
    third = other.fetch(3)
    with pytest.raises(VersionError, match="starts from 2, but the state is at 1"):
        receiver.apply(third)
    assert same(receiver.state, states[0])
    assert [receiver.apply(second), receiver.apply(second)] == [2, 2]
    assert same(receiver.state, states[1])
    with pytest.raises(VersionError, match="later than the state's 2, got 1"):
        receiver.fetch(1)
    with pytest.raises(VersionError, match="no version 9"):
        receiver.fetch(9)
    for name, t, message in [
        ("router.bias", torch.zeros(8, dtype=torch.bfloat16), r"router\.bias: expected bfloat16 of shape \(8,\), got float32"),
        (
            "embed.weight",
            torch.zeros(70, 300, dtype=torch.bfloat16),
            r"expected bfloat16 of shape \(70, 300\), got bfloat16 of shape \(300, 70\)",
        ),
    ]:
        with pytest.raises(VersionError, match=message):
            Receiver(store, blank(states[0]) | {name: t}).fetch()


def test_w11_readers_of_what_is_deleted_take_another_way(store):
    """Old versions go only by the publisher's hand; one who was about to read them starts anew."""
    state = random_state()
    slow = Receiver(store, blank(state))
    with Publisher(store, full_every=2, keep=1) as publisher:
        publisher.publish(state, 1).result()
        (route,) = slow._routes(1)
        for number in range(2, 6):
            state = moved(state, number)
            publisher.publish(state, number).result()
        with pytest.raises(VersionError, match="lost its file"):
            slow._read(*route[0])
    assert slow.apply(slow.fetch()) == 5
    assert same(slow.state, state)


def test_publishing_never_waits_and_the_newest_of_those_that_wait_is_written(store, monkeypatch):
    write, gate = store.write, threading.Event()
    monkeypatch.setattr(store, "write", lambda name, data: (gate.wait(10), write(name, data))[1])
    states = [random_state(seed) for seed in range(4)]
    with Publisher(store) as publisher:
        futures = [publisher.publish(states[0], 1)]
        while publisher._waiting:
            pass
        futures += [publisher.publish(state, number) for number, state in enumerate(states[1:], 2)]
        assert [future.done() for future in futures] == [False, True, True, False]
        states[3]["steps"].zero_()  # the learner goes on: what was handed over stays
        gate.set()
        receipts = [future.result() for future in futures]
    assert [receipt.superseded for receipt in receipts] == [False, True, True, False]
    receiver = Receiver(store, blank(states[0]))
    assert receiver.apply(receiver.fetch()) == 4
    assert receiver.state["steps"].tolist() == [3]


def test_a_publisher_goes_on_after_another(published):
    with pytest.raises(ValueError, match="got one with version 3; resume=True"):
        Publisher(published.store)
    later = moved(published.states[-1], 9)
    with Publisher(published.store, resume=True) as publisher:
        with pytest.raises(ValueError, match="version must be larger than 3, got 3"):
            publisher.publish(later, 3)
        assert publisher.publish(later, 4).result().whole
    receiver = Receiver(published.store, blank(later))
    receiver.apply(receiver.fetch(3))
    assert receiver.apply(receiver.fetch()) == 4
    assert same(receiver.state, later)


def test_errors_of_publishers_and_stores(store, tmp_path):
    with pytest.raises(ValueError, match="full_every must be a whole number from 1, got 0"):
        Publisher(store, full_every=0)
    with pytest.raises(ValueError, match="url must be a directory"):
        Store("")
    for name in ("../x", "/x", ""):
        with pytest.raises(ValueError, match="relative path inside the store"):
            store.write(name, b"")
    with Publisher(store) as publisher:
        with pytest.raises(ValueError, match="must have a tensor"):
            publisher.publish({}, 1)
        publisher.publish({"a": torch.zeros(3)}, 1).result()
        with pytest.raises(ValueError, match="others for a, b"):
            publisher.publish({"a": torch.zeros(4), "b": torch.zeros(1)}, 2)
    with pytest.raises(RuntimeError, match="closed"):
        publisher.publish({"a": torch.zeros(3)}, 2)
    with pytest.raises(ValueError, match="must be contiguous on the CPU"):
        Receiver(store, {"a": torch.zeros(2, 3).t()})
    with pytest.raises(ValueError, match="tied must name tensors of the state"):
        Receiver(store, {"a": torch.zeros(3)}, tied={"b": "c"})


@pytest.mark.parametrize(
    "spoiled", [b"", b"{", b"[]", b'{"format": "other"}', b'{"format": "mxmoe-weights-1", "tensors": {"a": {}}}']
)
def test_broken_manifests(tmp_path, published, spoiled):
    spoil(tmp_path, "v00000003/manifest.json", lambda _: spoiled)
    with pytest.raises(VersionError, match="manifest"):
        Receiver(published.store, blank(published.states[0])).fetch()


@settings(max_examples=60)
@given(st.data())
def test_planes_that_lie_are_refused(tmp_path_factory, data):
    """A file whose digest is right and whose planes are not: no byte of the state changes, nothing is read out of bounds."""
    store = Store(tmp_path_factory.mktemp("store"))
    states = [{"w": torch.randn(1000).bfloat16()}]
    states += [moved(states[0], 1, 0.1)]
    with Publisher(store) as publisher:
        for number, state in enumerate(states, 1):
            publisher.publish(state, number).result()
    name = "v00000002/delta.safetensors"
    planes = safetensors.torch.load(store.read(name))
    key = data.draw(st.sampled_from(sorted(planes)))
    plane = bytearray(zstandard.ZstdDecompressor().decompress(planes[key].numpy().tobytes()))
    at, value = data.draw(st.integers(0, len(plane) - 1)), data.draw(st.integers(0, 255))
    plane[at] = value
    if data.draw(st.booleans()):
        plane = plane[: data.draw(st.integers(0, len(plane)))]
    planes[key] = torch.frombuffer(bytearray(zstandard.ZstdCompressor().compress(bytes(plane))), dtype=torch.uint8)
    file = safetensors.torch.save(planes)
    store.write(name, file)
    manifest = json.loads(store.read("v00000002/manifest.json"))
    manifest["delta"] = vars(v.File.of(file))
    store.write("v00000002/manifest.json", json.dumps(manifest).encode())
    receiver = Receiver(store, blank(states[0]))
    receiver.apply(receiver.fetch(1))
    try:
        receiver.apply(receiver.fetch(2))
    except VersionError:
        assert receiver.version == 1
        assert same(receiver.state, states[0])
    else:
        assert same(receiver.state, states[1])


def killed_publishers(directory, kills, seed=0):
    """Publishers killed -9 at random moments, each going on after the last. Versions that a reader finds other than they were."""
    rng, wrong, told = random.Random(seed), [], 0
    for _ in range(kills):
        command = [sys.executable, "-m", "tests.publish_until_killed", str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as child:
            for _ in range(rng.randint(1, 8)):
                told = int(child.stdout.readline())
            time.sleep(rng.random() * 0.03)
            child.kill()
        store = Store(directory)
        receiver = Receiver(store, blank(state_of(1)))
        found = receiver.apply(receiver.fetch())
        if found < told or not same(receiver.state, state_of(found)):
            wrong.append((told, found))
    return wrong


def test_a_publisher_killed_at_any_moment_leaves_whole_versions(tmp_path):
    assert killed_publishers(tmp_path, 1) == []


def test_w15_a_reader_that_is_gone_holds_up_nobody(published):
    """There is no list of readers: three follow, one stops; the others reach the new version, and it does when it is back."""
    readers = [Receiver(published.store, blank(published.states[0])) for _ in range(3)]
    for reader in readers:
        assert reader.apply(reader.fetch(1)) == 1
    for reader in readers[:2]:
        assert reader.apply(reader.fetch()) == 3
        assert same(reader.state, published.states[2])
    back = Receiver(published.store, blank(published.states[0]))  # a new process, that knows nothing
    assert back.apply(back.fetch()) == 3
    assert same(back.state, published.states[2])
