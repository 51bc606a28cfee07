"""Exhaustive search over tiny training problems, written from the rules alone; it shares nothing with the package.

It tries every exact cover by kernels, every partition into stages, every group, replica count, split, recomputation,
micro-batch size and allowed schedule, and replicas of a stage on several groups with every share of the micro-batches.
Slow on purpose.
"""

from __future__ import annotations

import itertools
import math

import networkx as nx

from tests.oracle import covers, least_memory, partitions, quotient


def best_iteration(problem) -> float:
    """The least seconds of one iteration over all legal plans; inf if there is none."""
    best = math.inf
    for micro in problem.options:
        p, count = micro.forward, problem.global_batch // micro.size
        kernels: dict[frozenset, set] = {}  # nodes of a stage -> every way to run them by kernels
        orders = set()
        for cover in covers(p):
            for blocks in partitions(cover):
                dag = quotient(p, [[v for k in b for v in p.kernels[k].nodes] for b in blocks])
                if not nx.is_directed_acyclic_graph(dag):
                    continue
                if len(blocks) > sum(g.num_devices for g in p.groups) * problem.most_chunks:
                    continue
                nodes = [frozenset(v for k in b for v in p.kernels[k].nodes) for b in blocks]
                for block, inside in zip(blocks, nodes, strict=True):
                    kernels.setdefault(inside, set()).add(tuple(block))
                orders |= {tuple(nodes[i] for i in order) for order in nx.all_topological_sorts(dag)}
        ways = {inside: [w for c in sorted(kernels[inside]) for w in _ways(micro, problem, c)] for inside in kernels}
        best = min([best, *(_best_placed(problem, micro, order, ways, count) for order in orders)])
    return best


def _seconds(link, size) -> float:
    return link.latency_s + size / link.byte_per_s if link.byte_per_s else math.inf


def _ways(micro, problem, kernels):
    """(group, degree, recompute, forward seconds, backward seconds, kernels) of one stage."""
    for g, group in enumerate(micro.forward.groups):
        if any(g not in micro.forward.pins.get(v, {g}) for k in kernels for v in micro.forward.kernels[k].nodes):
            continue
        rows = [(1, [micro.forward.kernels[k].time_s[g] for k in kernels], [micro.backward_s[k][g] for k in kernels])]
        rows += [
            (s.degree, [s.forward_s[k] for k in kernels], [s.backward_s[k] for k in kernels])
            for s in micro.splits
            if s.group == g and all(math.isfinite(micro.forward.kernels[k].time_s[g]) for k in kernels)
        ]
        for degree, f, b in rows:
            if degree <= group.num_devices and math.isfinite(sum(f) + sum(b)):
                yield (g, degree, False, sum(f), sum(b), kernels)
                if problem.may_recompute:
                    again = micro.repeat_ratio[g] if micro.repeat_ratio else 1.0
                    yield (g, degree, True, sum(f), sum(b) + again * sum(f), kernels)


def _teams(problem, ways, count):
    """Every set of replicas of one stage: [(way, replicas, share)], on one group or with unlike ones."""
    groups = problem.options[0].forward.groups
    for way in ways:
        for r in range(1, min(groups[way[0]].num_devices // way[1], count) + 1):
            yield [(way, r, count)]
    for size in range(2, len(groups) + 1) if problem.may_mix else ():
        for chosen in itertools.combinations(ways, size):
            if len({w[0] for w in chosen}) < size:
                continue
            for counts in itertools.product(*(range(1, groups[w[0]].num_devices // w[1] + 1) for w in chosen)):
                for shares in itertools.product(range(1, count + 1), repeat=size):
                    if sum(shares) == count and all(s >= c for s, c in zip(shares, counts, strict=True)):
                        yield list(zip(chosen, counts, shares, strict=True))


def _best_placed(problem, micro, stages, ways, count) -> float:
    """The best over all devices and replicas of `stages`, each a set of nodes, in order."""
    best = math.inf
    names = {s.value for s in problem.schedules}
    groups = micro.forward.groups

    def linear(teams, used):
        nonlocal best
        if len(teams) == len(stages):
            for name in names - {"interleaved"}:
                best = min(best, _value(problem, micro, stages, teams, list(range(len(stages))), count, name))
            return
        for team in _teams(problem, ways[stages[len(teams)]], count):
            now = list(used)
            for way, r, _ in team:
                now[way[0]] += r * way[1]
            if all(u <= g.num_devices for u, g in zip(now, groups, strict=True)):
                linear([*teams, team], now)

    if names - {"interleaved"}:
        linear([], [0] * len(groups))
    for chunks in range(2, problem.most_chunks + 1) if "interleaved" in names else ():
        ring = len(stages) // chunks
        if len(stages) % chunks or ring < 2:
            continue
        for chosen in itertools.product(*(ways[s] for s in stages)):
            if any(chosen[i][:3] != chosen[i % ring][:3] for i in range(len(stages))):
                continue
            for r in range(1, count // ring + 1):
                used = [0] * len(groups)
                for w in chosen[:ring]:
                    used[w[0]] += r * w[1]
                if count % (r * ring) or any(u > g.num_devices for u, g in zip(used, groups, strict=True)):
                    continue
                places = [i % ring for i in range(len(stages))]
                teams = [[(w, r, count)] for w in chosen]
                best = min(best, _value(problem, micro, stages, teams, places, count, "interleaved"))
    return best


def _value(problem, micro, stages, teams, places, count, schedule) -> float:
    """Seconds of an iteration of the teams of each stage, inf where one does not fit."""
    p = micro.forward
    home = {v: i for i, nodes in enumerate(stages) for v in nodes}
    parts = [(i, *part) for i, team in enumerate(teams) for part in team]
    rf, sf, rb, sb, out = ([0.0] * len(parts) for _ in range(5))

    def of(stage):
        return [(j, part[1][0], part[3] / count) for j, part in enumerate(parts) if part[0] == stage]

    for n, e in enumerate(p.edges):
        for b in {home[d] for d in e.dsts}:
            for y, gy, part_y in of(b):
                if e.src < 0:
                    rf[y] += _seconds(p.host_links[gy], e.size_bytes)
                    continue
                for x, gx, part_x in of(home[e.src]) if places[home[e.src]] != places[b] else ():
                    there = _seconds(p.links[gx][gy], e.size_bytes)
                    back = _seconds(p.links[gy][gx], e.size_bytes) if n not in micro.no_gradient else 0.0
                    sf[x] += there * part_y
                    rf[y] += there * part_x
                    sb[y] += back * part_x
                    rb[x] += back * part_y
        if e.src >= 0 and e.is_output:
            for x, gx, _ in of(home[e.src]):
                out[x] += _seconds(p.host_links[gx], e.size_bytes)
    forward, backward, path = [], [], []
    for i, (_, (g, _, _, f, b, _), _, _) in enumerate(parts):
        idle = p.groups[g].stage_overhead_s
        if p.overlap_transfers:
            forward.append(max(f + idle, rf[i], sf[i] + out[i]))
            backward.append(max(b + idle, rb[i], sb[i]))
        else:
            forward.append(f + idle + rf[i] + sf[i] + out[i])
            backward.append(b + idle + rb[i] + sb[i])
        path.append(f + b + 2 * idle + rf[i] + rb[i] + out[i])
    load = [f + b for f, b in zip(forward, backward, strict=True)]
    most = [math.ceil(share / r) for _, _, r, share in parts]
    held = _held(teams, count, schedule == "wavelet") if schedule in ("1f1b", "wavelet") else most
    if schedule == "interleaved":
        ring = len(set(places))
        rounds = [sum(path[i : i + ring]) for i in range(0, len(stages), ring)]
        device = [[load[i] for i in range(d, len(stages), ring)] for d in range(ring)]
        pipe = max(rounds) + max(most[0] * sum(ws) - min(ws) for ws in device)
    else:
        first = [min(path[j] for j, _, _ in of(i)) for i in range(len(stages))]
        late = [path[j] - first[part[0]] for j, part in enumerate(parts)]
        if schedule == "gpipe":
            pipe = sum(first) + max((n - 1) * f for n, f in zip(most, forward, strict=True))
            pipe += max((n - 1) * b + x for n, b, x in zip(most, backward, late, strict=True))
        else:
            trip = [path[j] + sum(first[part[0] + 1 :]) for j, part in enumerate(parts)]
            pace = [w if h == n else max(w, t / h) for w, h, n, t in zip(load, held, most, trip, strict=True)]
            pipe = sum(first) + max((n - 1) * w + x for n, w, x in zip(most, pace, late, strict=True))
    pipe = max([pipe, *(count * s for s in _micro_batch_on_wires(micro, p, parts, places, home, count))])
    post = _after(problem, micro, stages, teams, places, parts, home, held, schedule)
    return pipe + post


def _held(teams, count, waves=False) -> list[int]:
    """By part: play the dealing; a replica may have what came to it since the pass `lag` micro-batches ago.

    Two waves: of the micro-batches on their way, one for each replica of the widest stage, or on early stages two.
    """
    apart = [team[0][1] if len(team) == 1 else math.ceil(count / min(n // r for _, r, n in team)) for team in teams]
    held = []
    for i, team in enumerate(teams):
        lag = sum(apart[i:]) - 1 if i + 1 < len(teams) else 0
        if waves and i + 1 < len(teams):
            lag = min(lag, max(apart) * (1 + (i + 1 <= len(teams) // 2)) - 1)
        turns = []
        for j, (_, r, share) in enumerate(team):
            for k in range(r):
                own = len(range(k, share, r))
                turns += [((2 * n + 1) / own, j, k) for n in range(own)]
        order = [(j, k) for _, j, k in sorted(turns)]
        for j, (_, r, _) in enumerate(team):
            most = 0
            for k in range(r):
                mine = [m for m, who in enumerate(order) if who == (j, k)]
                most = max([most, *(sum(m <= x <= m + lag for x in mine) for m in mine)])
            held.append(most)
    return held


def _after(problem, micro, stages, teams, places, parts, home, held, schedule) -> float:
    """Seconds after the last backward pass; inf where a device has too little memory."""
    p = micro.forward
    after: dict[tuple[int, int], float] = {}
    on_wires = _on_wires(problem, p, stages, teams, places, home)
    for d in sorted(set(places)):
        mine = [i for i in range(len(stages)) if places[i] == d]
        owned, weight = set(), {i: [] for i in mine}
        updated = {
            i: [
                (w.is_whole, w.size_bytes + w.update_bytes)
                for w in p.weights
                if w.nodes and min(home[v] for v in w.nodes) == i
            ]
            for i in mine
        }
        for j, w in enumerate(p.weights):
            for i in mine:
                if j not in owned and any(home[v] == i for v in w.nodes):
                    owned.add(j)
                    weight[i].append((w.is_whole, w.size_bytes))
        line_s, waiting = _waits(on_wires, mine)
        for n in range(len(teams[mine[0]])):
            g, degree = teams[mine[0]][n][0][:2]
            part = {True: 1.0, False: 1.0 / degree}  # of weights and stashes that are whole, and of others
            working, stash, total = 0.0, [], 0.0
            alone = {
                i: _team_reduce(problem, p, teams[i], weight[i]) + _tied(problem, p, teams, places, home, i, d)
                for i in mine
            }
            late = max(0.0, line_s - sum(alone.values()))
            for i in mine:
                (_, _, again, _, b, kernels), r, _ = teams[i][n]
                read = sum(w.size_bytes for w in p.weights if stages[i] & set(w.nodes))
                kept = sum(part[s.is_whole] * s.size_bytes for s in micro.stashes if stages[i] & set(s.nodes))
                live_in = sum(e.size_bytes for e in p.edges if e.src not in stages[i] and stages[i] & set(e.dsts))
                needed = least_memory(p, list(kernels))
                if math.isinf(needed):
                    return math.inf
                working = max(working, needed - read + (kept if again else 0))
                stash.append(live_in if again else kept)
                reduce = alone[i] + (late if i == waiting else 0.0)
                shown = max(0.0, reduce - problem.reduce_overlap * b)
                total += shown + problem.update_s_per_byte[g] * sum(part[w] * x for w, x in updated[i])
            after[d, n] = total
            if schedule == "interleaved":
                flight = _interleaved_peak(d, len(set(places)), math.ceil(teams[0][0][2] / r), stash)
            else:
                flight = held[[i for i, part in enumerate(parts) if part[0] == mine[0]][n]] * stash[0]
            factor = 1 + problem.gradient_ratio + problem.state_ratio
            state = factor * sum(part[w] * x for own in weight.values() for w, x in own)
            if math.ceil(state + working + flight) > p.groups[g].memory_bytes:
                return math.inf
    return max(after.values())


def _team_reduce(problem, p, team, weights) -> float:
    """One group by its own network, several in a ring at the pace of the slowest link.

    Inside machines a device passes on its own gradients, between them all of a replica's share the link.
    """
    degree = min(w[1] for w, _, _ in team)
    own = sum(x if whole else x / degree for whole, x in weights) * problem.gradient_ratio
    size = sum(x for _, x in weights) * problem.gradient_ratio
    if len(team) == 1:
        net, inside = problem.all_reduce[team[0][0][0]], 1
        while (inside + 1) * degree <= net.num_inside:
            inside += 1
        return _ring(net.inner, own, min(team[0][1], inside)) + _ring(net.outer, size, -(-team[0][1] // inside))
    ways = [(p.links[a[0]][b[0]], size) for a, _, _ in team for b, _, _ in team]
    for w, _, _ in team:
        ways += [(problem.all_reduce[w[0]].inner, own), (problem.all_reduce[w[0]].outer, size)]
    return max(_ring(x, bytes_, sum(r for _, r, _ in team)) for x, bytes_ in ways)


def _tied(problem, p, teams, places, home, i, d) -> float:
    total = 0.0
    for w in p.weights:
        owners = {places[home[v]]: min(home[u] for u in w.nodes if places[home[u]] == places[home[v]]) for v in w.nodes}
        if len(owners) > 1 and owners.get(d) == i:
            links = [
                p.links[x[0][0]][y[0][0]]
                for a in owners.values()
                for b in owners.values()
                if a != b
                for x in teams[a]
                for y in teams[b]
            ]
            slow = max(links, key=lambda x: _seconds(x, w.size_bytes))
            total += _ring(slow, w.size_bytes * problem.gradient_ratio, len(owners))
    return total


def _micro_batch_on_wires(micro, p, parts, places, home, count):
    """Seconds of each wire that one micro-batch takes, there and back; each pair of parts as its shares say."""
    moved = []  # (way, bytes)
    for n, e in enumerate(p.edges):
        makers = [(-1, 1.0)] if e.src < 0 else [(w[0], x / count) for i, w, _, x in parts if i == home[e.src]]
        for b in {home[d] for d in e.dsts}:
            if e.src >= 0 and places[b] == places[home[e.src]]:
                continue
            for i, w, _, x in parts:
                for g, part in makers if i == b else ():
                    moved.append(((g, w[0]), e.size_bytes * part * x / count))
                    if e.src >= 0 and n not in micro.no_gradient:
                        moved.append(((w[0], g), e.size_bytes * part * x / count))
        moved += [((g, -1), e.size_bytes * part) for g, part in makers if e.is_output and e.src >= 0]
    return [sum(size for way, size in moved if way in wire.ways) / wire.byte_per_s for wire in p.wires]


def _on_wires(problem, p, stages, teams, places, home):
    """By wire: [(bytes over it / its rate, the stages whose devices are in that ring)]."""
    rings = []
    for i, team in enumerate(teams):
        read = sum(w.size_bytes for w in p.weights if stages[i] & set(w.nodes))
        groups = [way[0] for way, _, _ in team]
        rings.append((read, sum(r for _, r, _ in team), [i], list(itertools.combinations(groups, 2))))
    for w in p.weights:
        first = {}
        for i in sorted({home[v] for v in w.nodes}):
            first.setdefault(places[i], i)
        owners = sorted(first.values())
        pairs = [(x[0][0], y[0][0]) for a, b in itertools.combinations(owners, 2) for x in teams[a] for y in teams[b]]
        rings.append((w.size_bytes, len(owners), owners, pairs))
    out = []
    for wire in p.wires:
        loads = []
        for size, n, members, pairs in rings:
            passes = max([0, *(((a, b) in wire.ways) + ((b, a) in wire.ways) for a, b in pairs if a != b)])
            moved = passes * 2 * (n - 1) / max(1, n) * size * problem.gradient_ratio
            if moved > 0:
                loads.append((moved / wire.byte_per_s, members))
        out.append(loads)
    return out


def _waits(on_wires, mine):
    """The most that any wire of these stages' rings is busy with rings, and the first stage that has one."""
    crossed = [loads for loads in on_wires if any(set(mine) & set(members) for _, members in loads)]
    waiting = [i for loads in crossed for _, members in loads for i in members if i in mine]
    return max((sum(s for s, _ in loads) for loads in crossed), default=0.0), min(waiting, default=None)


def _ring(link, size, members) -> float:
    return 0.0 if members < 2 else 2 * (members - 1) * (link.latency_s + size / members / link.byte_per_s)


def _interleaved_peak(device, ring, count, stash) -> float:
    """Walk the order: the k-th forward is of chunk k // ring mod v; backward passes take chunks from the last."""
    v = len(stash)
    total = count * v
    warm = min(total, 2 * (ring - 1 - device) + (v - 1) * ring)
    held = top = 0.0
    for k in range(total + warm):
        if k < total:
            held += stash[k // ring % v]
            top = max(top, held)
        if k >= warm:
            held -= stash[v - 1 - (k - warm) // ring % v]
    return top
