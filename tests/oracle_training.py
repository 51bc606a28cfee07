"""Exhaustive search over tiny training problems, written from the rules alone; it shares nothing with the package.

It tries every exact cover by kernels, every partition into stages, every group, replica count, split, recomputation,
micro-batch size and allowed schedule. Slow on purpose.
"""

from __future__ import annotations

import itertools
import math

import networkx as nx

from tests.oracle import covers, least_memory, partitions, quotient


def best_iteration(problem) -> float:
    """The least seconds of one iteration over all legal plans; inf if there is none."""
    best = math.inf
    for o, micro in enumerate(problem.options):
        count = problem.global_batch // micro.size
        for cover in covers(micro.forward):
            for blocks in partitions(cover):
                dag = quotient(micro.forward, [[v for k in b for v in micro.forward.kernels[k].nodes] for b in blocks])
                if not nx.is_directed_acyclic_graph(dag):
                    continue
                if len(blocks) > sum(g.num_devices for g in micro.forward.groups) * problem.most_chunks:
                    continue
                for order in nx.all_topological_sorts(dag):
                    stages = [blocks[i] for i in order]
                    best = min(best, _best_placed(problem, o, micro, stages, count))
        if problem.may_mix and "1f1b" in {s.value for s in problem.schedules}:
            legal = [list(c) for c in covers(micro.forward) if _runs_in_order(micro.forward, c)]
            best = min(best, _best_mixed(problem, micro, legal, count))
    return best


def _runs_in_order(p, cover) -> bool:
    return nx.is_directed_acyclic_graph(quotient(p, [list(p.kernels[k].nodes) for k in cover]))


def _best_mixed(problem, micro, legal, count) -> float:
    """The whole model on several groups, each with its own kernels and its share of the micro-batches."""
    p = micro.forward
    best = math.inf
    ways = [(*way, cover) for cover in legal for way in _ways(micro, problem, cover)]
    for size in range(2, len(p.groups) + 1):
        for chosen in itertools.combinations(ways, size):
            if len({w[0] for w in chosen}) < size:
                continue
            most = [p.groups[w[0]].num_devices // w[1] for w in chosen]
            for counts in itertools.product(*(range(1, m + 1) for m in most)):
                for shares in itertools.product(range(1, count + 1), repeat=size):
                    if sum(shares) == count and all(s >= c for s, c in zip(shares, counts, strict=True)):
                        best = min(best, _mixed_value(problem, micro, chosen, counts, shares))
    return best


def _mixed_value(problem, micro, chosen, counts, shares) -> float:
    p = micro.forward
    end = post = 0.0
    weight = sum(w.size_bytes for w in p.weights)
    size = weight * problem.gradient_ratio / min(w[1] for w in chosen)
    links = [p.links[a[0]][b[0]] for a in chosen for b in chosen]
    links += [x for w in chosen for x in (problem.all_reduce[w[0]].inner, problem.all_reduce[w[0]].outer)]
    reduce = max(_ring(x, size, sum(counts)) for x in links)
    for (g, degree, again, f, b, cover), r, share in zip(chosen, counts, shares, strict=True):
        into = sum(_seconds(p.host_links[g], e.size_bytes) for e in p.edges if e.src < 0 and e.dsts)
        out = sum(_seconds(p.host_links[g], e.size_bytes) for e in p.edges if e.src >= 0 and e.is_output)
        idle = p.groups[g].stage_overhead_s
        first = f + b + 2 * idle + into + out
        load = max(f + idle, into, out) + b + idle if p.overlap_transfers else first
        end = max(end, first + (math.ceil(share / r) - 1) * load)
        post = max(post, max(0.0, reduce - problem.reduce_overlap * b) + problem.update_s_per_byte[g] * weight / degree)
        kept = sum(s.size_bytes for s in micro.stashes) / degree
        live_in = sum(e.size_bytes for e in p.edges if e.src < 0 and e.dsts)
        state = (1 + problem.gradient_ratio + problem.state_ratio) * weight / degree
        need = state + least_memory(p, cover) - weight + kept + (live_in if again else 0)
        if math.ceil(need) > p.groups[g].memory_bytes:
            return math.inf
    return end + post


def _seconds(link, size) -> float:
    return link.latency_s + size / link.byte_per_s if link.byte_per_s else math.inf


def _ways(micro, problem, kernels):
    """(group, degree, recompute, forward seconds, backward seconds) of one stage."""
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
                yield (g, degree, False, sum(f), sum(b))
                if problem.may_recompute:
                    yield (g, degree, True, sum(f), sum(b) + sum(f))


def _best_placed(problem, o, micro, stages, count) -> float:
    best = math.inf
    names = {s.value for s in problem.schedules}
    groups = micro.forward.groups
    ways = [list(_ways(micro, problem, s)) for s in stages]
    for chosen in itertools.product(*ways):
        if names & {"gpipe", "1f1b"}:
            most = [groups[w[0]].num_devices // w[1] for w in chosen]
            for replicas in itertools.product(*(range(1, min(m, count) + 1) for m in most)):
                used = [0] * len(groups)
                for w, r in zip(chosen, replicas, strict=True):
                    used[w[0]] += r * w[1]
                if any(u > g.num_devices for u, g in zip(used, groups, strict=True)):
                    continue
                places = list(range(len(stages)))
                for name in names & {"gpipe", "1f1b"}:
                    best = min(best, _value(problem, micro, stages, chosen, replicas, places, count, name))
        if "interleaved" in names:
            for chunks in range(2, problem.most_chunks + 1):
                ring = len(stages) // chunks
                if (
                    len(stages) % chunks
                    or ring < 2
                    or any(chosen[i][:3] != chosen[i % ring][:3] for i in range(len(stages)))
                ):
                    continue
                for r in range(1, count // ring + 1):
                    used = [0] * len(groups)
                    for w in chosen[:ring]:
                        used[w[0]] += r * w[1]
                    if count % (r * ring) or any(u > g.num_devices for u, g in zip(used, groups, strict=True)):
                        continue
                    places = [i % ring for i in range(len(stages))]
                    best = min(
                        best, _value(problem, micro, stages, chosen, [r] * len(stages), places, count, "interleaved")
                    )
    return best


def _value(problem, micro, stages, chosen, replicas, places, count, schedule) -> float:
    p = micro.forward
    home = {v: i for i, s in enumerate(stages) for k in s for v in p.kernels[k].nodes}
    n_stages = len(stages)
    rf, sf, rb, sb, out = ([0.0] * n_stages for _ in range(5))

    for i, e in enumerate(p.edges):
        readers = {home[d] for d in e.dsts}
        if e.src < 0:
            for b in readers:
                rf[b] += _seconds(p.host_links[chosen[b][0]], e.size_bytes)
            continue
        a = home[e.src]
        for b in readers:
            if places[a] != places[b]:
                there = _seconds(p.links[chosen[a][0]][chosen[b][0]], e.size_bytes)
                sf[a] += there
                rf[b] += there
                if i not in micro.no_gradient:
                    back = _seconds(p.links[chosen[b][0]][chosen[a][0]], e.size_bytes)
                    sb[b] += back
                    rb[a] += back
        if e.is_output:
            out[a] += _seconds(p.host_links[chosen[a][0]], e.size_bytes)
    forward, backward, path = [], [], []
    for i, (g, _, _, f, b) in enumerate(chosen):
        idle = p.groups[g].stage_overhead_s
        if p.overlap_transfers:
            forward.append(max(f + idle, rf[i], sf[i] + out[i]))
            backward.append(max(b + idle, rb[i], sb[i]))
        else:
            forward.append(f + idle + rf[i] + sf[i] + out[i])
            backward.append(b + idle + rb[i] + sb[i])
        path.append(f + b + 2 * idle + rf[i] + rb[i] + out[i])
    most = [math.ceil(count / r) for r in replicas]
    load = [f + b for f, b in zip(forward, backward, strict=True)]
    held = []
    for i in range(n_stages):
        away = math.ceil(sum(replicas[i:]) / replicas[i])
        held.append(most[i] if schedule == "gpipe" else min(most[i], away))
    if schedule == "gpipe":
        pipe = sum(path) + max((n - 1) * f for n, f in zip(most, forward, strict=True))
        pipe += max((n - 1) * b for n, b in zip(most, backward, strict=True))
    elif schedule == "1f1b":
        pace = [load[i] if held[i] == most[i] else max(load[i], sum(path[i:]) / held[i]) for i in range(n_stages)]
        pipe = sum(path) + max((n - 1) * w for n, w in zip(most, pace, strict=True))
    else:
        ring = len(set(places))
        rounds = [sum(path[i : i + ring]) for i in range(0, n_stages, ring)]
        device = [[load[i] for i in range(d, n_stages, ring)] for d in range(ring)]
        pipe = max(rounds) + max(most[0] * sum(ws) - min(ws) for ws in device)
    post: dict[int, float] = {}
    peak: dict[int, float] = {}
    for d in sorted(set(places)):
        mine = [i for i in range(n_stages) if places[i] == d]
        g, degree = chosen[mine[0]][:2]
        owned, weight = set(), {i: 0 for i in mine}
        for j, w in enumerate(p.weights):
            for i in mine:
                if j not in owned and any(home[v] == i for v in w.nodes):
                    owned.add(j)
                    weight[i] += w.size_bytes
        factor = 1 + problem.gradient_ratio + problem.state_ratio
        working, stash = 0.0, []
        for i in mine:
            nodes = {v for k in stages[i] for v in p.kernels[k].nodes}
            read = sum(w.size_bytes for w in p.weights if nodes & set(w.nodes))
            kept = sum(s.size_bytes for s in micro.stashes if nodes & set(s.nodes)) / degree
            live_in = sum(e.size_bytes for e in p.edges if e.src not in nodes and nodes & set(e.dsts))
            again = chosen[i][2]
            needed = least_memory(p, list(stages[i]))
            if math.isinf(needed):
                return math.inf
            working = max(working, needed - read + (kept if again else 0))
            stash.append(live_in if again else kept)
            reduce = _reduce(problem.all_reduce[g], weight[i] * problem.gradient_ratio / degree, replicas[i])
            for w in p.weights:
                owners = {
                    places[home[v]]: min(home[u] for u in w.nodes if places[home[u]] == places[home[v]])
                    for v in w.nodes
                }
                if len(owners) > 1 and owners.get(d) == i:
                    slow = max(
                        _seconds(p.links[chosen[a][0]][chosen[b][0]], w.size_bytes)
                        for a in owners.values()
                        for b in owners.values()
                        if a != b
                    )
                    links = [
                        p.links[chosen[a][0]][chosen[b][0]] for a in owners.values() for b in owners.values() if a != b
                    ]
                    link = next(x for x in links if _seconds(x, w.size_bytes) == slow)
                    reduce += _ring(link, w.size_bytes * problem.gradient_ratio, len(owners))
            shown = max(0.0, reduce - problem.reduce_overlap * chosen[i][4])
            post[d] = post.get(d, 0.0) + shown + problem.update_s_per_byte[g] * weight[i] / degree
        if schedule == "interleaved":
            flight = _interleaved_peak(d, len(set(places)), most[0], stash)
        else:
            flight = held[mine[0]] * stash[0]
        peak[d] = factor * sum(weight.values()) / degree + working + flight
        if math.ceil(peak[d]) > p.groups[g].memory_bytes:
            return math.inf
    return pipe + max(post.values())


def _ring(link, size, members) -> float:
    return 0.0 if members < 2 else 2 * (members - 1) * (link.latency_s + size / members / link.byte_per_s)


def _reduce(a, size, devices) -> float:
    return _ring(a.inner, size, min(devices, a.num_inside)) + _ring(a.outer, size, -(-devices // a.num_inside))


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
