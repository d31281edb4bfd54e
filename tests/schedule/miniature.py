"""An executor in miniature, to see whether a table computes the right gradients.

Virtual stage v maps x to w_v x^2 in a finite field, so every wrong input shows, and it folds the
gradients of w_v so that their order shows too.
"""

from jpipe.schedule import (
    Op,
    assign_slots,
)

F, B = int(Op.FORWARD), int(Op.BACKWARD)

FIELD, FOLD = 2**31 - 1, 1_000_003


def weight(v):
    return 3 + 2 * v


def forward(v, x):
    return weight(v) * x * x % FIELD


def backward(v, x, g):
    """The gradient of the input, and the term of the weight."""
    return 2 * weight(v) * x * g % FIELD, x * x * g % FIELD


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
            g, term = backward(v, xs[v], g)
            totals[v] = fold(totals[v], term)
    return totals


def executed_gradients(schedule):
    """What an executor computes that knows nothing but the table."""
    P, last = schedule.num_stages, schedule.num_chunks * schedule.num_stages - 1
    slots = assign_slots(schedule)
    stash = [[0] * n for n in slots.per_stage]
    top = [{} for _ in range(P)]
    totals = [1] * (last + 1)
    outbox, on_the_way = [0] * P, [[0] * P for _ in range(schedule.hop)]
    for t in range(schedule.num_ticks):
        inbox = on_the_way.pop(0)
        for s in range(P):
            op, i, c = schedule.op[t, s], int(schedule.microbatch[t, s]), schedule.chunk[t, s]
            v, slot = int(c) * P + s, slots.slot[t, s]
            if op == F:
                x = i + 5 if v == 0 else inbox[s]
                stash[s][slot] = x
                outbox[s] = forward(v, x)
                if v == last:
                    top[s][i] = outbox[s]
            elif op == B:
                g = top[s][i] if v == last else inbox[s]
                outbox[s], term = backward(v, stash[s][slot], g)
                totals[v] = fold(totals[v], term)
        arrives = [0] * P
        for a, b in schedule.routes[schedule.route[t]]:
            arrives[b] = outbox[a]
        on_the_way.append(arrives)
    return totals
