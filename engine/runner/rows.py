"""Row-wise primitives over logits [R, vocab]. What they give for a row never depends on the other rows.

Order among tokens is always (value descending, id ascending), whatever torch does with ties on a device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

BLOCK = 256  # tokens summed in float32 before float64 takes over
_GROUP = 32  # tokens of which only the best is looked at first when the top of a row is sought
_CPU_CHUNK = 1 << 19  # elements: temporaries of a chunk stay in the CPU's cache
_GPU_CHUNK = 1 << 27  # elements: bounds temporaries to half a gigabyte of float32


def row_chunks(num_rows: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of as many rows of `width` elements as make a chunk, at least one row."""
    step = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // width)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for ascending distinct rows: x itself, not a copy, when that is all of them."""
    return x if len(rows) == len(x) else x.index_select(0, rows)


def row_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values [R], ids [R]) of each row's largest element, the lowest id among equals. NaN counts as largest."""
    if x.device.type != "cpu":
        ids = x.argmax(dim=-1)
        return x.gather(1, ids[:, None])[:, 0], ids
    # numpy's is vectorised and torch's is not: ten times faster.
    array = x.numpy()
    best = np.argmax(array, axis=-1)
    return torch.from_numpy(array[np.arange(len(best)), best]), torch.from_numpy(best)


def probabilities(x: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """softmax(x / temperature) [R, vocab]. peak [R] is each row's largest element: taking it off before the
    division leaves nothing that could overflow at any temperature."""
    return torch.sub(x, peak[:, None]).div_(temperature[:, None]).softmax(-1)


def block_sums(weights: Tensor) -> Tensor:
    """[R, ceil(vocab / BLOCK)] float64: sums of consecutive blocks, the last one perhaps shorter."""
    num_rows, vocab = weights.shape
    whole = vocab // BLOCK * BLOCK
    sums = weights[:, :whole].view(num_rows, vocab // BLOCK, BLOCK).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=1)
    return sums.double()


def top_ranked(x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` largest elements of each row in order: (values [R, width], ids [R, width], certain [R]).

    Only the first `certain` ids of a row are sure to be the right ones: of the elements equal to the last
    value, any may have made it into the window. The values are always right. A width of at least the whole
    vocabulary sorts the rows, and then all of them are certain.
    """
    vocab = x.shape[1]
    if width >= vocab:
        values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
        return values, ids, torch.full((len(x),), vocab, device=x.device)
    if 4 * width * _GROUP <= vocab:
        places = _candidates(x, width)
        values, at = x.gather(1, places).topk(width, dim=-1)
        ids = places.gather(1, at)
    else:
        values, ids = x.topk(width, dim=-1)
    values, ids = _order_ties(values, ids)
    return values, ids, (values > values[:, -1:]).sum(-1)


def _candidates(x: Tensor, width: int) -> Tensor:
    """Ids [R, about width * _GROUP] among which the `width` largest are, found by the best of each group.

    Fewer than `width` groups can hold an element larger than the width-th largest, and those groups have the
    largest bests. Groups are strided so that their bests are found by whole vectors.
    """
    vocab = x.shape[1]
    num_groups = vocab // _GROUP
    bests = x[:, : num_groups * _GROUP].view(len(x), _GROUP, num_groups).amax(1)
    groups = bests.topk(width, dim=-1, sorted=False).indices
    members = torch.arange(_GROUP, device=x.device) * num_groups
    places = (groups[:, :, None] + members).flatten(1)
    rest = torch.arange(num_groups * _GROUP, vocab, device=x.device).expand(len(x), -1)
    return torch.cat([places, rest], dim=1) if rest.shape[1] else places


def _order_ties(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row by (value descending, id ascending) through one integer key per element."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0, whose bits differ, into 0.0
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) * (1 << 32) - ids
    order = key.argsort(dim=-1, descending=True)
    return values.gather(1, order), ids.gather(1, order)
