"""An executor in miniature, to see whether a table computes the right gradients.

Virtual stage v maps x to w_v x^2 in a finite field, so every wrong input shows, and it folds the
gradients of w_v so that their order shows too. What nobody sent is a number as good as any other.
"""

from jpipe.schedule import (
    Op,
    assign_slots,
)
from jpipe.schedule.slots import assign_inbox, assign_weight_slots
from jpipe.schedule.table import lanes

F, B, W = int(Op.FORWARD), int(Op.BACKWARD), int(Op.WEIGHT)

FIELD, FOLD, JUNK = 2**31 - 1, 1_000_003, 271_828


def weight(v):
    return 3 + 2 * v


def forward(v, x):
    return weight(v) * x * x % FIELD


def input_gradient(v, x, g):
    return 2 * weight(v) * x * g % FIELD


def weight_gradient(x, g):
    return x * x * g % FIELD


def fold(total, term):
    return (total * FOLD + term) % FIELD


def expected_gradients(num_virtual, num_microbatches):
    totals = [1] * num_virtual
    for i in range(num_microbatches):
        xs = [i + 5]
        for v in range(num_virtual):
            xs.append(forward(v, xs[-1]))
        g = xs[-1]
        for v in reversed(range(num_virtual)):
            totals[v] = fold(totals[v], weight_gradient(xs[v], g))
            g = input_gradient(v, xs[v], g)
    return totals


def executed_gradients(schedule):
    """What an executor computes that knows nothing but the table."""
    P, last, virtual = schedule.num_stages, schedule.last, schedule.virtual_stage
    slots, inbox, weight_slots = (
        assign(schedule) for assign in (assign_slots, assign_inbox, assign_weight_slots)
    )
    stash = [[JUNK] * n for n in slots.per_stage]
    left = [[JUNK] * n for n in weight_slots.per_stage]
    letters = [[JUNK] * inbox.size for _ in range(P)]
    top = [{} for _ in range(P)]
    totals = [1] * (last + 1)
    outbox = [JUNK] * P

    def deliver(t):
        """What tick t made arrives."""
        cut = lanes(P, schedule.routes[schedule.route[t]])
        for k in range(inbox.num_lanes):
            arrives = {b: a for a, b in (cut[k] if k < len(cut) else ())}
            for s in range(P):
                sent = outbox[arrives[s]] if s in arrives else JUNK
                letters[s][inbox.write[k, t, s]] = sent

    for t in range(schedule.num_ticks):
        if t and schedule.hop == 1:
            deliver(t - 1)
        made = list(outbox)
        for s in range(P):
            op, i, v = (int(a[t, s]) for a in (schedule.op, schedule.microbatch, virtual))
            slot, arrived = slots.slot[t, s], letters[s][inbox.read[t, s]]
            if op == F:
                x = i + 5 if v == 0 else arrived
                stash[s][slot] = x
                made[s] = forward(v, x)
                if v == last:
                    top[s][i] = made[s]
            elif op == B:
                g = top[s][i] if v == last else arrived
                made[s] = input_gradient(v, stash[s][slot], g)
                if schedule.splits_backward:
                    left[s][weight_slots.slot[t, s]] = g
                else:
                    totals[v] = fold(totals[v], weight_gradient(stash[s][slot], g))
            elif op == W:
                g = left[s][weight_slots.slot[t, s]]
                totals[v] = fold(totals[v], weight_gradient(stash[s][slot], g))
        if t and schedule.hop == 2:
            deliver(t - 1)
        outbox = made
    return totals
