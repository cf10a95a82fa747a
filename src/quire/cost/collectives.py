"""The exchanges of ranks that share a model: their number and bytes, by the layout, and their time. No torch.

Nothing else counts them. Ranks gather columns (distributed/group.py), and stages send the residual stream. In an
exchange nothing is computed, so its time is added to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from quire.distributed.layout import Grid
from quire.formats.weight_format import DTYPE_BYTES, PANEL_WIDTH
from quire.layer_spec.attention import Attention
from quire.layer_spec.feed_forward import Dense, Experts, FeedForward
from quire.model_config import ModelConfig

LOGIT_BYTES = 4  # logits are float32
# The first rank tells the others each token and whether its row has failed, as int64. One exchange for all rows.
TOLD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """The exchanges of a step, with the bytes that come to each receiver.

    Attributes:
        count: the number of exchanges of a step.
        token_bytes: bytes for a token, in all of them together.
        logit_bytes: bytes for a row of logits.
        other_bytes: bytes for a token of another lane.
    """

    count: int = 0
    token_bytes: float = 0.0
    logit_bytes: float = 0.0
    other_bytes: float = 0.0

    def __add__(self, more: Traffic) -> Traffic:
        return Traffic(
            self.count + more.count,
            self.token_bytes + more.token_bytes,
            self.logit_bytes + more.logit_bytes,
            self.other_bytes + more.other_bytes,
        )

    def num_bytes(self, num_tokens: int, num_logits: int, other_tokens: int) -> float:
        """The bytes of a step: see Load."""
        return num_tokens * self.token_bytes + num_logits * self.logit_bytes + other_tokens * self.other_bytes


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The exchanges of a step that goes through all layers.

    Attributes:
        near: those among ranks of one machine. A receiver is a rank.
        far: those with a rank of another machine. A receiver is a machine, because its ranks share one network.
    """

    near: Traffic = Traffic()
    far: Traffic = Traffic()

    def __bool__(self) -> bool:
        return bool(self.near.count or self.far.count)


NO_EXCHANGES = Exchanges()


class Link(NamedTuple):
    """What an exchange costs: `per_exchange` seconds, and `per_byte` seconds for each byte that a receiver gets."""

    per_exchange: float = 0.0
    per_byte: float = 0.0

    def seconds(self, count: int, num_bytes: float) -> float:
        """The time of some exchanges, with the bytes of all of them together."""
        return count * self.per_exchange + num_bytes * self.per_byte

    def text(self) -> str:
        """For people."""
        rate = f" and {1e-9 / self.per_byte:,.3g} GB/s" if self.per_byte else ""
        microseconds = f"{1e6 * self.per_exchange:,.2f}".rstrip("0").rstrip(".")
        return f"{microseconds} us{rate}"


class Links(NamedTuple):
    """The links between ranks of one machine, and between machines. Links that cost nothing were not measured apart."""

    near: Link = Link()
    far: Link = Link()

    def slower(self, ratio: float) -> Links:
        """The same with exchanges that take `ratio` times as long."""
        return Links(*(Link(*(ratio * each for each in link)) for link in self))


NO_LINKS = Links()


def slowest(each: Iterable[Links]) -> Links:
    """The links of ranks that wait for each other: of each kind, the most that an exchange and a byte cost."""
    found = [NO_LINKS, *each]
    return Links(*(Link(*map(max, *links)) for links in zip(*found, strict=True))) if len(found) > 1 else NO_LINKS


def exchanges(
    model: ModelConfig, grid: Grid, dtype: str, *, has_whole_experts: bool, is_native: bool = True
) -> Exchanges:
    """The exchanges of a step. Those of drafters, of a divided KV cache and of norms over all heads are not counted.

    Args:
        model: the whole model.
        dtype: the dtype of activations, a key of DTYPE_BYTES.
        has_whole_experts: whether ranks have whole experts, and not rows of all of them.
        is_native: whether our own code runs the model, and not transformers' modelling code.
    """
    near, far = Traffic(), Traffic()
    for is_far, traffic in _parts(model, grid, DTYPE_BYTES[dtype], has_whole_experts, is_native):
        if is_far:
            far += traffic
        else:
            near += traffic
    return Exchanges(near, far)


def _parts(
    model: ModelConfig, grid: Grid, size: int, has_whole_experts: bool, is_native: bool
) -> Iterator[tuple[bool, Traffic]]:
    """Some exchanges at a time, and whether ranks of several machines take part in them.

    Args:
        size: bytes of an activation.
    """
    hidden, width, num_machines = model.hidden_size, grid.width, max(grid.width // grid.num_local, 1)
    is_far = num_machines > 1
    rest = 1 - 1 / (num_machines if is_far else width)  # the share of columns that a receiver does not have
    everyone = width * grid.num_lanes  # the ranks that share experts
    are_experts_far = everyone > grid.num_local
    if width > 1:
        # Embeddings: every rank brings whole rows. Logits come to the first rank.
        yield is_far, Traffic(1, rest * width * hidden * size)
        logit_bytes = LOGIT_BYTES if is_native else size  # modelling code joins them before they become float32
        yield is_far, Traffic(2, logit_bytes=rest * model.vocab_size * logit_bytes + TOLD_BYTES)
    for part in (part for layer in model.layers for part, _ in layer.parts):
        if not is_native:
            if width > 1:
                yield is_far, _of_code(part, width, rest * size)
        elif isinstance(part, Experts):
            if everyone > 1:
                yield are_experts_far, _of_experts(part, hidden, size, grid, has_whole_experts)
        elif width > 1:  # the inputs of its last linear layer, and the outputs: see layers/joined.py
            yield is_far, Traffic(2, rest * (part.linears[-1].in_features + hidden) * size)
    for stage in range(1, grid.num_stages):
        sender = (grid.num_stages - stage) * width
        is_hop_far = grid.node(sender) != grid.node(sender - width)
        num_senders = min(width, grid.num_local) if is_hop_far else 1  # each to the rank in its place
        yield is_hop_far, Traffic(1, num_senders * hidden * size)


def _of_code(part: Attention | FeedForward, num_ranks: int, column_bytes: float) -> Traffic:
    """The exchanges of a part of a layer in transformers' modelling code: see models/transformers_layers.py.

    The results of heads and the outputs of every linear layer are joined, unless it has fewer panels than there are
    ranks. Every rank computes all experts.

    Args:
        column_bytes: bytes that come to a receiver for a column of the result.
    """
    if isinstance(part, Experts):
        return Traffic()
    widths = [size for linear in part.linears for _, size in linear.shards if size > (num_ranks - 1) * PANEL_WIDTH]
    widths += [] if isinstance(part, Dense) else [part.linears[-1].in_features]
    return Traffic(len(widths), column_bytes * sum(widths))


def _of_experts(part: Experts, hidden: int, size: int, grid: Grid, has_whole_experts: bool) -> Traffic:
    """The exchanges of a layer of experts: see "Experts" of docs/architecture.md. Lanes have equally many tokens."""
    count, num_ranks = 2, grid.width * grid.num_lanes
    num_machines = max(num_ranks // grid.num_local, 1)
    num_receivers = num_machines if num_machines > 1 else num_ranks
    if has_whole_experts:
        # Each rank sums some columns of the rows of all experts, and gets the columns of the others. Another machine
        # gets whole rows.
        num_cuts = num_ranks if num_machines == 1 else 1
        elements = part.num_active * hidden / num_cuts + hidden
    else:
        elements = part.num_active * part.expert.linears[-1].in_features + hidden
    if part.shared is not None:  # its inputs are joined by themselves
        count, elements = count + 1, elements + part.shared.linears[-1].in_features
    token_bytes = other_bytes = (1 - 1 / num_receivers) * elements * size
    if grid.num_lanes == 1:
        return Traffic(count, token_bytes)
    # At first, every rank gets the rows of the other lanes. The first rank of a lane sends its rows, so its neighbours
    # get them too. A machine gets only the rows of lanes that it does not have.
    if num_machines == 1:
        token_bytes += hidden * size if grid.width > 1 else 0
        share = 1.0
    else:
        share = grid.num_lanes * (1 - 1 / num_machines) / (grid.num_lanes - 1)
    return Traffic(count + 1, token_bytes, other_bytes=other_bytes + share * hidden * size)
