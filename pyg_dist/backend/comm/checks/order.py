"""The order of calls on wires without tags, such as nccl's: compared once a step, over a wire of the host's tensors.

Where ranks diverge on such a wire, two calls of one size exchange each other's numbers, and others wait for ever. So
each group keeps a running hash of its calls' tags, and all ranks compare them before an optimizer steps, in one sum of
eight bytes that waits for no device.
"""

from __future__ import annotations

from pyg_dist.backend import host
from pyg_dist.backend.comm.checks.calls import Call, Standing
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session.divergence import Place, different_calls, in_words
from pyg_dist.backend.session.state import current
from pyg_dist.errors import DivergenceError


def compare_order(control: Group) -> None:
    """Check that the ranks of each group have made the same calls on wires without tags (collective, all ranks).

    Nothing is sent while there were none.

    ``control`` is the group of all ranks that carries CPU tensors.

    Raises:
        DivergenceError: On every rank, naming the first call that differs.
    """
    sequences = [calls for calls in current().of(Standing).sequences.values() if calls.order]
    if not sequences:
        return
    # Of each group the first rank adds the others' numbers and these take off their own: zero if all are equal.
    share = sum(c.order * (len(c.ranks) - 1 if control.rank == c.ranks[0] else -1) for c in sequences)
    total = control.all_reduce_(host.tensor([(share + (1 << 63)) % (1 << 64) - (1 << 63)]), kind="step")
    if total.item():
        recent = {c.name: {str(call[0]): in_words(Call(*call)) for call in c.untagged} for c in sequences}
        gathered = control.gather_bytes(Place(recent=recent).to_json().encode())
        raise DivergenceError(
            different_calls([Place.parse(place) for place in gathered])
            or "Expected the same calls on every rank since the last step (got more on some): make none under is_main()"
        )
    for calls in sequences:
        calls.untagged.clear()
