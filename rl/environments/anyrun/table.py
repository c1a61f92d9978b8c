"""The environments the scheduler knows, in columns: about 100 bytes each beside their key."""

import numpy as np

from rl.environments.anyrun.nodes import grown

FREE, QUEUED, STARTING, RUNNING, STOPPING = range(5)
STATES = ("free", "queued", "starting", "running", "stopping")
SLOT_BITS = 24  # of an id; the rest counts, so that no id comes back
NEVER = np.inf


class Table:
    """Slots. An environment's id is `count << 24 | slot`; a placement is its attempt on a node, with a number of its own."""

    def __init__(self, room: int = 1024):
        self.state = np.zeros(room, np.uint8)
        self.id, self.placement, self.parent = np.full((3, room), -1, np.int64)  # -1: none
        self.node, self.tenant, self.shape, self.attempts = np.full((4, room), -1, np.int32)
        self.reports = np.zeros(room, np.int64)  # of the node when it was placed there
        self.deadline, self.lease, self.last, self.since = np.full((4, room), NEVER)  # of this state; s; of all; RUNNING since
        self.peak = np.zeros(room, bool)  # the start's peak is still reserved
        self.key: list[str | None] = [None] * room
        self.unused = list(range(room - 1, -1, -1))
        self.count = 0  # of ids given
        self.end = 0  # no slot from here on was ever used

    def __len__(self):
        return len(self.state) - len(self.unused)

    def new(self, key: str | None) -> int:
        """A QUEUED slot with an id of its own."""
        if not self.unused:
            room = len(self.state)
            for name, column in vars(self).items():
                if isinstance(column, np.ndarray):
                    setattr(self, name, grown(column, 2 * room))
            self.deadline[room:] = NEVER
            self.key += [None] * room
            self.unused = list(range(2 * room - 1, room - 1, -1))
        slot = self.unused.pop()
        self.end = max(self.end, slot + 1)
        self.count += 1
        self.id[slot] = self.count << SLOT_BITS | slot
        self.state[slot], self.key[slot] = QUEUED, key
        self.parent[slot] = -1
        self.attempts[slot], self.deadline[slot], self.since[slot], self.peak[slot] = 0, NEVER, NEVER, False
        return slot

    def drop(self, slot: int):
        self.state[slot], self.deadline[slot], self.key[slot] = FREE, NEVER, None
        self.id[slot] = self.placement[slot] = self.node[slot] = -1
        self.unused.append(slot)

    def slot(self, env: int) -> int | None:
        """The slot of an id that is still in use."""
        slot = env & ((1 << SLOT_BITS) - 1)
        return slot if env >= 0 and slot < self.end and self.id[slot] == env else None

    def due(self, now: float) -> list[int]:
        """Slots whose deadline has passed."""
        return np.flatnonzero(self.deadline[: self.end] <= now).tolist()

    def on(self, node: int) -> list[int]:
        """Slots with a placement on this node, oldest first."""
        slots = np.flatnonzero(self.node[: self.end] == node)
        return slots[np.argsort(self.id[slots])].tolist()
