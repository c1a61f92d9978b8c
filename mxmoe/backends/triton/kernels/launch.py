"""What launches share: the copies that a verb makes in place of its output, and how many tiles of rows there are."""

from dataclasses import dataclass

import triton
from torch import Tensor

from mxmoe import layout
from mxmoe.backends.triton.kernels.target import group_slots, raw
from mxmoe.formats import FORMATS


@dataclass(frozen=True)
class Copies:
    """`copies` of the contract (mxmoe/backends), or none, and the padded rows P of a column copy."""

    max: float = 0.0
    floor: bool = False
    row: tuple[Tensor | None, Tensor | None] = (None, None)
    column: tuple[Tensor | None, Tensor | None] = (None, None)
    padded: int = 0

    @staticmethod
    def of(copies, offs: Tensor | None, num_rows: int) -> "Copies":
        if copies is None:
            return Copies()
        format, scale_mode, row, column = copies
        row, column = (tuple(map(raw, (copy or (None, None))[:2])) for copy in (row, column))
        padded = 0 if column[0] is None else padded_length(num_rows, offs)
        return Copies(FORMATS[format].max, scale_mode == "floor", row, column, padded)

    def arguments(self, offs: Tensor | None) -> dict:
        """Of a kernel that may make them, and of its groups."""
        num_groups, slots = group_slots(offs)
        return dict(
            row_values=self.row[0], row_scales=self.row[1], column_values=self.column[0], column_scales=self.column[1],
            P=self.padded, MAX=self.max, FLOOR=self.floor, num_groups=num_groups, EP=slots,
        )  # fmt: skip


def padded_length(num_rows: int, offs: Tensor | None) -> int:
    """Rows that a column copy has room for."""
    return num_rows if offs is None else layout.padded_rows(num_rows, len(offs))


def row_tiles(num_rows: int, offs: Tensor | None, config: dict) -> int:
    """Tiles that hold every row, each group's rows in tiles of its own."""
    return triton.cdiv(num_rows + 127 * group_slots(offs)[0], config["BR"])
