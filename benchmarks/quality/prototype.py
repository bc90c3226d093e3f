#!/usr/bin/env python3
"""Measures codes, options and phases of selections on recorded steps, by docs/algorithm.md in numpy: the error of the
attention's output, and the attention mass that top-k keeps. Shares no code with the library, and bounds it: `exact`
has the true logits.

    benchmarks/quality/prototype.py TRACE --rows 768,232,76 --every 16 --json FILE
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import struct
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from whole_file import write_whole  # noqa: E402

STEPS = {1: 1.596, 2: 0.9957, 3: 0.586, 4: 0.3352}  # of the quantiser, by bits
BITS = 256
GOLDEN = 0x9E3779B9
SECOND = 0x85EBCA6B


class Trace:
    """A file of `kvtier-llama record`, or of one layer under plain names."""

    def __init__(self, path):
        self.file = open(path, "rb")  # noqa: SIM115: for the life of the program
        size = struct.unpack("<Q", self.file.read(8))[0]
        self.header = json.loads(self.file.read(size))
        self.begin = 8 + size
        named = {int(name.split(".")[1]) for name in self.header if name.startswith("layers.")}
        self.layers = sorted(named) or [None]

    def read(self, layer, name):
        entry = self.header[name if layer is None else f"layers.{layer}.{name}"]
        low, high = entry["data_offsets"]
        self.file.seek(self.begin + low)
        words = np.frombuffer(self.file.read(high - low), np.uint16).astype(np.uint32)
        assert entry["dtype"] == "BF16", entry
        return (words << 16).view(np.float32).reshape(entry["shape"])


def mix(x):
    x = x ^ x >> np.uint32(16)
    x = x * np.uint32(0x21F0AAAD)
    x = x ^ x >> np.uint32(15)
    x = x * np.uint32(0xD35A2D97)
    return x ^ x >> np.uint32(15)


def log_uniforms(layer, head, tokens, second=False):
    """ln u of tokens, of seed 0."""
    with np.errstate(over="ignore"):
        zero = np.zeros(1, np.uint32)
        key = mix(zero ^ mix(zero ^ mix(zero + np.uint32(layer + 1))))
        if second:
            key = mix(key ^ np.uint32(SECOND))
        key = mix(key + np.uint32(GOLDEN * head & 0xFFFFFFFF))
        bits = mix(tokens.astype(np.uint32) * np.uint32(GOLDEN) ^ key)
    return np.log((bits.astype(np.float64) + 1) / 2**32)


def rotation(d, seed):
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


def hadamard(d):
    matrix = np.ones((1, 1))
    while len(matrix) < d:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    assert len(matrix) == d, "a power of two"
    signs = np.random.default_rng(0).choice([-1.0, 1.0], d)
    return (matrix * signs / np.sqrt(d)).astype(np.float32)


def log_sum(x):
    most = x.max(-1, keepdims=True)
    return most + np.log(np.exp(x - most).sum(-1, keepdims=True))


def rounded(weights, bits):
    if bits == 0:
        return weights
    most = np.maximum(np.abs(weights).max(-1, keepdims=True), 1e-30)
    levels = 2 ** (bits - 1) - 1
    return np.rint(levels * weights / most) * most / levels


class Code:
    """Keys in a rotation, quantised to some bits a coordinate."""

    def __init__(self, keys, turn, bits):
        self.turned = keys @ turn.T
        self.norm = np.maximum(np.linalg.norm(keys, axis=1), 1e-6)
        self.bits = bits
        y = np.sqrt(keys.shape[1]) * self.turned / self.norm[:, None]
        half = 2 ** (bits - 1)
        self.codes = np.clip(np.floor(y / STEPS[bits]), -half, half - 1)
        self.levels = self.codes + 0.5
        self.agreement = (self.levels * y).mean()
        self.y = y

    def factor(self):
        return self.norm**2 / np.maximum((self.levels * self.turned).sum(1), 1e-9)

    def estimate(self, query):
        return query @ self.levels.T * self.factor()

    def estimate_of_prefix(self, query, bits):
        width = 2 ** (self.bits - bits)
        levels = (np.floor(self.codes / width) + 0.5) * width
        gain = self.agreement / (levels * self.y).mean()
        return query @ levels.T * self.factor() * gain


def estimates(query, keys, every_key):
    """Logits times sqrt(d) of `keys [n, d]` by each method, for `query [heads, steps, d]`."""
    d = keys.shape[1]
    bits = BITS // d
    turn = rotation(d, 0)
    code, half = Code(keys, turn, bits), Code(keys, turn, bits // 2)
    turned = query @ turn.T
    four = rounded(turned, 4)
    mean = every_key.mean(0)
    to_mean = (query @ mean)[..., None]
    planes = np.concatenate([rotation(d, seed) for seed in range(bits)]) * np.sqrt(d)
    signs = np.where(keys @ planes.T >= 0, 1.0, -1.0).astype(np.float32)
    scale = np.sqrt(np.pi / 2) / BITS / (1 + 1 / (4 * d))
    fast = hadamard(d)
    return {
        "exact": query @ keys.T,
        "sign 256": rounded(query @ planes.T, 4) @ signs.T * scale * code.norm,
        "scalar 256": code.estimate(four),
        "scalar 256, query of 5 bits": code.estimate(rounded(turned, 5)),
        "scalar 256, query of 8 bits": code.estimate(rounded(turned, 8)),
        "scalar 256, Hadamard rotation": Code(keys, fast, bits).estimate(rounded(query @ fast.T, 4)),
        "scalar 256, centred keys": Code(keys - mean, turn, bits).estimate(four) + to_mean,
        "scalar 128": half.estimate(four),
        "scalar 128, centred keys": Code(keys - mean, turn, bits // 2).estimate(four) + to_mean,
        "first 128 bits of scalar 256": code.estimate_of_prefix(four, bits // 2),
    }


def by_priority(log_shares, log_u, k):
    """Ids `[steps, k]` and biases."""
    ranks = log_shares - log_u
    ids = np.argpartition(-ranks, k, axis=-1)[:, : k + 1]
    own = np.take_along_axis(ranks, ids, -1)
    cut = own.min(-1, keepdims=True)
    keep = np.ones(own.shape, bool)
    keep[np.arange(len(own)), own.argmin(-1)] = False
    ids = ids[keep].reshape(len(own), k)
    return ids, np.maximum(0.0, cut - np.take_along_axis(log_shares, ids, -1))


def by_two_phases(coarse, fine, log_u, log_u_second, k, candidates):
    ids, bias = by_priority(coarse, log_u, min(candidates * k, coarse.shape[-1] - 1))
    weights, first = np.full(coarse.shape, -1e30), np.zeros(coarse.shape)
    np.put_along_axis(weights, ids, np.take_along_axis(fine, ids, -1) + bias, -1)
    np.put_along_axis(first, ids, bias, -1)
    ids, bias = by_priority(weights, log_u_second, k)
    return ids, bias + np.take_along_axis(first, ids, -1)


def best(log_shares, k):
    ids = np.argpartition(-log_shares, k - 1, axis=-1)[:, :k]
    return ids, np.zeros(ids.shape)


def best_and_uniform(log_shares, k, random):
    """Half of the rows the best, half a uniform sample of the others, as vAttention has them."""
    top, _ = best(log_shares, k // 2)
    chance = random.random(log_shares.shape)
    np.put_along_axis(chance, top, 2.0, -1)
    others = np.argpartition(chance, k - k // 2, axis=-1)[:, : k - k // 2]
    bias = np.log((log_shares.shape[-1] - k // 2) / (k - k // 2))
    biases = np.concatenate([np.zeros(top.shape), np.full(others.shape, bias)], -1)
    return np.concatenate([top, others], -1), biases


def shared(log_shares, normalisers):
    """ln p of a KV head from those of its query heads."""
    values = log_shares - normalisers
    most = values.max(0)
    return most + np.log(np.exp(values - most).mean(0))


class Head:
    """The query heads of one KV head over some steps; `always` are attended by all."""

    def __init__(self, query, keys, values, context, steps, always):
        d = keys.shape[1]
        self.values, self.eligible = values, np.arange(always, context - always)
        visible = np.arange(len(keys)) <= (context + steps)[:, None]
        logits = np.where(visible, query @ keys.T / np.sqrt(d), -np.inf)
        self.logits = logits[:, :, self.eligible]
        logits_of_rest = logits.copy()
        logits_of_rest[:, :, self.eligible] = -np.inf
        self.rest = logits_of_rest
        shares = np.exp(logits - log_sum(logits))
        self.shares = shares[:, :, self.eligible]
        self.static_share = 1.0 - self.shares.sum(-1)
        self.dense = shares @ values

    def error(self, head, ids, bias):
        chosen = np.take_along_axis(self.logits[head], ids, -1) + bias
        most = np.maximum(chosen.max(-1), self.rest[head].max(-1))[:, None]
        weights, rest = np.exp(chosen - most), np.exp(self.rest[head] - most)
        total = weights.sum(-1) + rest.sum(-1)
        rows = self.values[self.eligible][ids]
        out = (rest @ self.values + np.einsum("sk,skd->sd", weights, rows)) / total[:, None]
        dense = self.dense[head]
        return float((np.linalg.norm(out - dense, axis=-1) / np.linalg.norm(dense, axis=-1)).mean())

    def mass(self, head, ids):
        return float((self.static_share[head] + np.take_along_axis(self.shares[head], ids, -1).sum(-1)).mean())


class Measured:
    """Means by (what, sets, method, k), of layers and of all."""

    def __init__(self):
        self.values = {}

    def add(self, what, sets, method, k, layer, value):
        layers = self.values.setdefault((what, sets, method, k), {})
        layers.setdefault(str(layer), []).append(value)

    def rows(self):
        for (what, sets, method, k), layers in self.values.items():
            means = {layer: round(float(np.mean(values)), 6) for layer, values in layers.items()}
            mean = round(float(np.mean(list(means.values()))), 6)
            yield {"what": what, "sets": sets, "method": method, "k": k, "mean": mean, "layers": means}


def measure_head(measured, head, found, log_values, layer, first_head, rows):
    heads = range(len(head.logits))
    number = 0 if layer is None else layer
    random = np.random.default_rng(number * 1000 + first_head)
    scores = {name: logits + log_values for name, logits in found.items()}
    sums = {name: log_sum(score) for name, score in scores.items()}
    sets = [("per query head", first_head + h, [h], lambda name, h=h: scores[name][h]) for h in heads]
    sets.append(("per KV head", first_head // len(heads), list(heads),
                 lambda name: shared(scores[name], sums[name])))
    fine, coarse = "scalar 256", "first 128 bits of scalar 256"
    for kind, index, members, share in sets:
        u, second = (log_uniforms(number, index, head.eligible, again)[None] for again in (False, True))
        for k in rows:
            taken = {}
            for name in scores:
                taken[f"priority, {name}"] = by_priority(share(name), u, k)
                taken[f"top-k, {name}"] = best(share(name), k)
            both = (share(coarse), shared(scores[fine], sums[coarse]) if len(members) > 1 else share(fine))
            for candidates in (4, 8):
                taken[f"two phases, {candidates} k candidates"] = by_two_phases(*both, u, second, k, candidates)
            taken["half top-k, half uniform, exact"] = best_and_uniform(share("exact"), k, random)
            for method, (ids, bias) in taken.items():
                for h in members:
                    measured.add("output error", kind, method, k, layer, head.error(h, ids, bias))
                    if method.startswith("top-k"):
                        measured.add("attention mass", kind, method, k, layer, head.mass(h, ids))


def measure(trace, rows, every, always):
    measured = Measured()
    for layer in trace.layers:
        keys, values, queries = (trace.read(layer, name) for name in "kvq")
        steps = np.arange(0, queries.shape[1], every)
        context = keys.shape[1] - queries.shape[1]
        group = queries.shape[0] // len(keys)
        for kv_head, (own_keys, own_values) in enumerate(zip(keys, values)):
            query = queries[kv_head * group : (kv_head + 1) * group][:, steps]
            head = Head(query, own_keys, own_values, context, steps, always)
            chosen = own_keys[head.eligible]
            found = estimates(query, chosen, own_keys[:context])
            found = {name: dots / np.sqrt(keys.shape[2]) for name, dots in found.items()}
            for name, logits in found.items():
                difference = logits - head.logits
                difference -= difference.mean(-1, keepdims=True)
                measured.add("logit error", "", name, 0, layer, float(np.sqrt((difference**2).mean())))
            norms = np.maximum(np.linalg.norm(own_values[head.eligible], axis=1), 2.0**-24)
            measure_head(measured, head, found, np.log(norms), layer, kv_head * group, rows)
        print(f"layer {layer}", file=sys.stderr, flush=True)
    return list(measured.rows())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--rows", default="768,232,76", help="rows taken, beside those always attended (%(default)s)")
    parser.add_argument("--every", type=int, default=16, help="of the steps, each so many-th (%(default)s)")
    parser.add_argument("--always", type=int, default=64, help="first tokens, and last of the context (%(default)s)")
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    rows = [int(k) for k in arguments.rows.split(",")]
    found = measure(Trace(arguments.trace), rows, arguments.every, arguments.always)
    report = {"command": " ".join(["benchmarks/quality/prototype.py", *sys.argv[1:]]),
              "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
              "hardware": f"{os.cpu_count()} cores, {platform.machine()}", "numpy": np.__version__, "rows": found}
    lines = ",\n".join(json.dumps(row) for row in report.pop("rows"))
    head = json.dumps(report, indent=1).removesuffix("\n}")
    write_whole(arguments.json, f'{head},\n "rows": [\n{lines}\n]}}\n')
    for row in found:
        print(f"{row['what']:15} {row['sets']:15} {row['method']:42} {row['k']:5} {row['mean']:.4f}")


if __name__ == "__main__":
    main()
