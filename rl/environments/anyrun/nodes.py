"""The table of nodes and the choice of one: everything the scheduler knows about capacity, in columns.

A node takes a placement where both hold for each of the four resources, with what the start needs at its peak as `need`:

    reserved + starting + need <= overcommit * capacity      what was promised
    live     + unseen   + need <= pressure * capacity        what the node last reported, plus all that it had no time to show

`reserved` is the sum of `steady` over its environments, `starting` the sum of `peak - steady` over those that do not answer yet,
`unseen` that of all that starts, and `steady` of what was placed since its last report. Of the nodes that can, the
one with the least room left is taken (best fit), so that empty nodes stay empty; a node without the image is `image_cost` worse. A
virtual-scheduling token bucket (one time per node) limits starts per second.
"""

import numpy as np

from rl.environments.anyrun.shapes import RESOURCES, Resources

OPEN, DRAINING, GONE = range(3)
R = len(RESOURCES)


def grown(array: np.ndarray, length: int, axis: int = -1) -> np.ndarray:
    """A copy with room for `length` along `axis`, zeros at the end."""
    shape = list(array.shape)
    shape[axis] = length
    larger = np.zeros(shape, array.dtype)
    larger[tuple(slice(0, size) for size in array.shape)] = array
    return larger


class Nodes:
    """Columns indexed by node number; the number of a node that is gone is given to a later one. Arrays are (R, N) or (N,)."""

    def __init__(self, *, overcommit: tuple, pressure: tuple, creates_per_s: float, burst: int, image_cost: float):
        self.overcommit_R, self.pressure_R = np.array(overcommit), np.array(pressure)
        self.interval, self.slack, self.image_cost = 1.0 / creates_per_s, (burst - 1) / creates_per_s, image_cost
        self.names: list[str] = []
        self.number: dict[str, int] = {}  # of nodes that are not gone
        self.unused: list[int] = []
        self.images: dict[str, np.ndarray] = {}  # image -> (N,) bool: who has it
        room = 16
        self.state_N = np.full(room, GONE, np.uint8)
        self.free_RN, self.inverse_RN = np.zeros((R, room), np.int64), np.zeros((R, room))
        self.capacity_RN, self.reserved_RN, self.starting_RN, self.live_RN, self.unseen_RN = np.zeros((5, R, room), np.int64)
        self.promise_RN, self.bearable_RN = np.zeros((2, R, room), np.int64)
        self.seen_N, self.bucket_N = np.zeros((2, room))
        self.reports_N, self.failures_N, self.count_N = np.zeros((3, room), np.int64)

    def __len__(self):
        return len(self.names)

    def add(self, name: str, capacity: Resources, now: float, images=()) -> int:
        """A number for `name`, which must not be in use."""
        node = self.unused.pop() if self.unused else len(self.names)
        if node == len(self.state_N):
            for column, value in vars(self).items():
                if column.endswith("N"):
                    setattr(self, column, grown(value, 2 * node))
            self.images = {image: grown(has_N, 2 * node) for image, has_N in self.images.items()}
        self.names[node : node + 1] = [name]
        self.number[name] = node
        for has_N in self.images.values():
            has_N[node] = False
        self.live_RN[:, node] = self.failures_N[node] = 0
        capacity_R = np.array([*capacity], np.int64)
        self.capacity_RN[:, node] = capacity_R
        self.promise_RN[:, node] = (self.overcommit_R * capacity_R).astype(np.int64)
        self.bearable_RN[:, node] = (self.pressure_R * capacity_R).astype(np.int64)
        self.inverse_RN[:, node] = 1.0 / np.maximum(1, capacity_R)
        self.state_N[node], self.seen_N[node], self.bucket_N[node] = OPEN, now, -np.inf
        self.has(node, images)
        self._refresh(node)
        return node

    def has(self, node: int, images):
        """These images are on the node now."""
        for image in images:
            if image not in self.images:
                self.images[image] = np.zeros(len(self.state_N), bool)
            self.images[image][node] = True

    def close(self, node: int, state: int):
        self.state_N[node] = state
        if state == GONE:
            del self.number[self.names[node]]
            self.unused.append(node)

    def report(self, node: int, now: float, live_R):
        """The node says how much it uses."""
        self.live_RN[:, node] = live_R
        self.unseen_RN[:, node] = self.starting_RN[:, node]
        self.seen_N[node] = now
        self.reports_N[node] += 1
        self._refresh(node)

    def reserve(self, node: int, steady_R: np.ndarray, peak_R: np.ndarray, now: float):
        """A placement that starts now."""
        self.reserved_RN[:, node] += steady_R
        self.starting_RN[:, node] += peak_R - steady_R
        self.unseen_RN[:, node] += peak_R
        self.bucket_N[node] = max(self.bucket_N[node], now) + self.interval
        self.count_N[node] += 1
        self._refresh(node)

    def settle(self, node: int, steady_R: np.ndarray, peak_R: np.ndarray):
        """A start is over: what was reserved for its peak is free."""
        self.starting_RN[:, node] -= peak_R - steady_R
        self.unseen_RN[:, node] -= peak_R - steady_R
        self._refresh(node)

    def release(self, node: int, steady_R: np.ndarray, seen: bool):
        """A placement that had settled is gone. `seen`: the node has reported since it was placed."""
        self.reserved_RN[:, node] -= steady_R
        if not seen:
            self.unseen_RN[:, node] -= steady_R
        self.count_N[node] -= 1
        self._refresh(node)

    def failed(self, node: int, now: float):
        """A start failed there: the node rests, twice as long after every failure in a row, up to a minute."""
        self.failures_N[node] += 1
        self.bucket_N[node] = now + self.slack + min(60.0, 2.0 ** self.failures_N[node] / 4)

    def _refresh(self, node: int):
        promised = self.promise_RN[:, node] - self.reserved_RN[:, node] - self.starting_RN[:, node]
        bearable = self.bearable_RN[:, node] - self.live_RN[:, node] - self.unseen_RN[:, node]
        self.free_RN[:, node] = np.minimum(promised, bearable)

    def can_take(self, node: int, peak_R: np.ndarray, now: float) -> bool:
        if self.state_N[node] != OPEN or self.bucket_N[node] > now + self.slack:
            return False
        return bool((self.free_RN[:, node] >= peak_R).all())

    def pick(self, peak_R: np.ndarray, image: str, now: float) -> int | None:
        """The node with the least room left of those that can take the placement; None where none can."""
        n = len(self.names)
        can_N = (self.state_N[:n] == OPEN) & (self.bucket_N[:n] <= now + self.slack)
        for free_N, need in zip(self.free_RN, peak_R, strict=True):
            can_N &= free_N[:n] >= need
        nodes = np.flatnonzero(can_N)
        if not nodes.size:
            return None
        room = ((self.free_RN[:, nodes] - peak_R[:, None]) * self.inverse_RN[:, nodes]).sum(0)
        has_N = self.images.get(image)
        room += self.image_cost if has_N is None else np.where(has_N[nodes], 0.0, self.image_cost)
        return int(nodes[room.argmin()])

    def ever_fits(self, peak_R: np.ndarray) -> bool:
        """Whether some node that is not gone could take this if it were empty."""
        n = len(self.names)
        limit_RN = np.minimum(self.promise_RN[:, :n], self.bearable_RN[:, :n])
        return bool(((limit_RN >= peak_R[:, None]).all(0) & (self.state_N[:n] != GONE)).any())
