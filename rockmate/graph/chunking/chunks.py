"""Rewrites a captured step in chunks of its loss block and of its feed-forward blocks.

`Chunks` has the numbers of chunks and the form of the loss block. `unroll` defines the forms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from typing import Literal

from rockmate.capture.roles import Capture, copied_capture
from rockmate.graph.chunking.blocks import Blocks, find_blocks
from rockmate.graph.chunking.calls import sum_losses
from rockmate.graph.chunking.forms import InseparableError
from rockmate.graph.chunking.region import Refusal, region_of
from rockmate.graph.chunking.unroll import Unroller


@dataclass(frozen=True, slots=True)
class Chunks:
    """Numbers of chunks of a step. The sizes of the chunks of a block differ by at most one row.

    Attributes:
        number: number of chunks of the loss block. 1 leaves it whole.
        form: form of the loss block.
        layers: number of chunks of each feed-forward block. Their form is "recompute". 1 leaves
            them whole.
    """

    number: int
    form: Literal["recompute", "at_once"]
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.number} {self.form}" + (
            f", {self.layers} in layers" if self.layers > 1 else ""
        )

    def describe(self) -> str:
        """Describes the chunks for a person."""
        how = (
            "gradients computed in the forward, scaled in the backward"
            if self.form == "at_once"
            else "forward and backward each by chunks"
        )
        of_loss = f"in {self.number} chunks of its rows; {how}" if self.number > 1 else "whole"
        return of_loss + (f"; feed-forward blocks in {self.layers}" if self.layers > 1 else "")

    @classmethod
    def parse(cls, text: str) -> Chunks:
        """Reads the text of `str(chunks)`.

        Raises:
            ValueError: the text has another format.
        """
        match = re.fullmatch(r"([1-9]\d*) (recompute|at_once)(?:, ([1-9]\d*) in layers)?", text)
        if match is None or (match[1] == "1" and match[3] in (None, "1")):
            msg = (
                f"loss_chunks is {text!r}. Write '8 recompute', '8 at_once' or '8 recompute, 4 in "
                "layers', with numbers of at least 2"
            )
            raise ValueError(msg)
        return cls(int(match[1]), match[2], int(match[3] or 1))  # pyright: ignore[reportArgumentType]


def chunk_loss_block(
    capture: Capture, chunks: Chunks, *, returned_gradients: bool = False
) -> Capture | Refusal:
    """Returns the captured step in chunks, or the reason why it cannot run in chunks.

    Args:
        capture: the step. It is not changed.
        chunks: the numbers of chunks and the form.
        returned_gradients: whether the backward returns the gradients of parameters. They are then
            accumulated over all chunks before they are returned.
    """
    copied = copied_capture(capture)
    if chunks.number > 1:
        sum_losses(copied.joint.graph)
    at_once = chunks.form == "at_once"
    found = find_blocks(copied, at_once=at_once, least_bytes=0 if chunks.layers > 1 else inf)
    losses = found.losses if chunks.number > 1 else {}
    if chunks.number > 1 and isinstance(found.loss, Refusal):
        return found.loss
    for product, block in (*found.feed_forward.items(), *losses.items()):
        if isinstance(block, Refusal):
            continue
        number, form = chunks.layers, "recompute"
        if product in losses:
            fitting = chunks.number if block is found.loss else min(chunks.number, block.num_rows)
            number, form = fitting, chunks.form
        region = region_of(copied, product, at_once=form == "at_once")
        if isinstance(region, Refusal):
            return region
        if number > region.num_rows:
            reason = f"{region.num_rows} rows cannot be split into {number} chunks"
            return Refusal(call="", module=region.name, reason=reason, block=region.name)
        unroller = Unroller(copied, region, number, returned_gradients=returned_gradients)
        try:
            copied = unroller.run(form)
        except InseparableError as error:
            return Refusal.of(error, region.name)
    return copied


def separable_blocks(capture: Capture, *, least_bytes: int = 0) -> Blocks:
    """Finds the blocks that `chunk_loss_block` can run in chunks.

    Args:
        capture: the step. It is not changed.
        least_bytes: as for `find_blocks`.
    """
    copied = copied_capture(capture)
    sum_losses(copied.joint.graph)
    return find_blocks(copied, least_bytes=least_bytes)
