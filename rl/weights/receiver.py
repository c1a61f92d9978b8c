"""The sampler's side: what is new is fetched and checked while sampling goes on, then applied as a whole or not at all."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from mxmoe import delta
from mxmoe.delta import Delta
from rl.weights import version as v
from rl.weights.store import Store
from rl.weights.version import VersionError


@dataclass
class Update:
    """Versions fetched and checked, to be applied one after the other. base: what the first starts from, None: it is whole."""

    base: int | None
    steps: list[tuple[v.Manifest, dict[str, Tensor] | dict[str, Delta]]]

    @property
    def version(self) -> int:
        return self.steps[-1][0].version


class Receiver:
    """Keeps `state` at a version of the store.

    state: named tensors on the CPU, contiguous, changed in place. tied: names of tensors that are other tensors of the state, by
    name ({"lm_head.weight": "embed.weight"}); a version may bring them too, with the same bits.
    version: what the state holds, None: nothing of the store yet.
    """

    def __init__(self, store: Store, state: Mapping[str, Tensor], tied: Mapping[str, str] | None = None):
        for name, t in state.items():
            if t.device.type != "cpu" or not t.is_contiguous():
                raise ValueError(f"state[{name!r}] must be contiguous on the CPU, got strides {tuple(t.stride())} on {t.device}")
        self.store, self.state, self.tied = store, dict(state), dict(tied or {})
        if missing := sorted(set(self.tied.values()) - set(self.state)):
            raise ValueError(f"tied must name tensors of the state, got {', '.join(missing)}")
        self.version: int | None = None
        self._hashes: dict[str, str] = {}

    def newest(self) -> int | None:
        """The newest version of the store, None while it has none."""
        return max((n for name in self.store.names() if (n := v.version_of(name)) is not None), default=None)

    def manifest(self, version: int) -> v.Manifest:
        try:
            found = v.Manifest.from_json(self.store.read(f"{v.directory(version)}/manifest.json"))
        except FileNotFoundError as error:
            raise VersionError(f"the store has no version {version}") from error
        if found.version != version:
            raise VersionError(f"the manifest of version {version} says it is {found.version}")
        return found

    def fetch(self, version: int | None = None) -> Update | None:
        """What leads from the state's version to `version` (None: the newest), read and checked; None: nothing to do.

        The differences from here, or a whole version and those after it: whichever is fewer bytes, the other where a file of the
        first is damaged or gone. Raises VersionError for a version that is not there, cannot be reached, does not fit the state, or
        is older than the state's.
        """
        version = self.newest() if version is None else version
        if version is None or version == self.version:
            return None
        if self.version is not None and version < self.version:
            raise VersionError(f"version must be later than the state's {self.version}, got {version}")
        failures = []
        for route in self._routes(version):
            try:
                steps = [self._read(manifest, kind) for manifest, kind in route]
            except VersionError as error:
                failures.append(error)
            else:
                return Update(route[0][0].base if route[0][1] == "delta" else None, steps)
        raise failures[0]

    def _routes(self, version: int) -> list[list[tuple[v.Manifest, str]]]:
        """The ways to a version, the cheapest first: back over the differences, each whole version on the way being a start."""
        routes: list[tuple[int, list[tuple[v.Manifest, str]]]] = []
        after: list[tuple[v.Manifest, str]] = []
        cost, manifest = 0, self.manifest(version)
        while True:
            if manifest.whole:
                routes.append((cost + manifest.whole.bytes, [(manifest, "whole"), *after]))
            if not manifest.delta or manifest.base is None or manifest.base >= manifest.version:
                break
            cost, after = cost + manifest.delta.bytes, [(manifest, "delta"), *after]
            if manifest.base == self.version:
                routes.append((cost, after))
                break
            try:
                manifest = self.manifest(manifest.base)
            except VersionError:  # deleted: older than the whole versions that are kept
                break
        if not routes:
            raise VersionError(f"version {version} cannot be reached from {self.version}: no whole version on the way")
        return [route for _, route in sorted(routes, key=lambda each: each[0])]

    def _read(self, manifest: v.Manifest, kind: str) -> tuple[v.Manifest, dict]:
        self._check_names(manifest)
        name = f"{v.directory(manifest.version)}/{kind}.safetensors"
        try:
            data = self.store.read(name)
        except FileNotFoundError as error:
            raise VersionError(f"version {manifest.version} has lost its file {name}") from error
        tensors = v.unpack(data, getattr(manifest, kind), name)
        if kind == "whole":
            return manifest, v.unpack_whole(tensors, manifest)
        deltas = {name: v.unpack_delta(tensors, name, entry) for name, entry in manifest.tensors.items() if entry.changes}
        for name, found in deltas.items():
            try:
                delta.check_delta(self.state[self.tied.get(name, name)], found)
            except (ValueError, TypeError) as error:
                raise VersionError(f"version {manifest.version}, {name}: {error}") from error
        return manifest, deltas

    def _check_names(self, manifest: v.Manifest) -> None:
        expected, got = set(self.state), set(manifest.tensors)
        unexpected, missing = sorted(got - expected - set(self.tied)), sorted(expected - got)
        if unexpected or missing:
            raise VersionError(
                f"version {manifest.version} must have the tensors of the state; "
                f"missing: {', '.join(missing[:5]) or 'none'}; unexpected: {', '.join(unexpected[:5]) or 'none'}"
            )
        for name, entry in manifest.tensors.items():
            t = self.state[self.tied.get(name, name)]
            expected_kind, kind = (tuple(t.shape), v.dtype_name(t.dtype)), (entry.shape, entry.dtype)
            if expected_kind != kind:
                raise VersionError(
                    f"version {manifest.version}, {name}: expected {expected_kind[1]} of shape {expected_kind[0]}, "
                    f"got {kind[1]} of shape {kind[0]}"
                )
            if name in self.tied and entry.hash != manifest.tensors[self.tied[name]].hash:
                raise VersionError(f"version {manifest.version}: {name} is tied to {self.tied[name]}, but has other values")

    def apply(self, update: Update | None) -> int | None:
        """Change the state in place to the update's version and return it; an update applied before changes nothing.

        Every new hash is checked. Where one differs, or anything else is raised, all is taken back: state and version are what they
        were. Raises VersionError for an update that does not start from the state's version.
        """
        if update is None or update.version == self.version:
            return self.version
        if update.base is not None and update.base != self.version:
            raise VersionError(f"the update to {update.version} starts from {update.base}, but the state is at {self.version}")
        undo: list = []
        hashes = dict(self._hashes)
        try:
            for manifest, changes in update.steps:
                self._step(manifest, changes, undo)
            self._check_hashes(update.steps[-1][0], hashes)
        except BaseException:
            for take_back in reversed(undo):
                take_back()
            raise
        self._hashes, self.version = hashes, update.version
        return self.version

    def _step(self, manifest: v.Manifest, changes: Mapping, undo: list) -> None:
        for name, change in changes.items():
            if name in self.tied:
                continue
            t = self.state[name]
            if isinstance(change, Delta):
                delta.apply(t, change)
                undo.append(partial(delta.apply, t, change, backwards=True))
            else:
                undo.append(partial(t.detach().copy_, t.detach().clone()))
                t.detach().copy_(change)

    def _check_hashes(self, manifest: v.Manifest, hashes: dict[str, str]) -> None:
        """Of what changed since the state's version; what did not has the hash that was checked then."""
        for name, t in self.state.items():
            expected = manifest.tensors[name].hash
            if hashes.get(name) != expected:
                if (got := v.hash_of(t)) != expected:
                    raise VersionError(f"version {manifest.version}, {name}: expected hash {expected} after the update, got {got}")
                hashes[name] = expected
