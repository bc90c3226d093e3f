"""Plots of docs/quality.md, by matplotlib; report.py and real_model.py call them, from where whole_file.py is found."""

import io

from whole_file import write_whole


def title(row):
    return f"{row['selector']}, {row['settings']}" if row["settings"] else row["selector"]


def selectors(report):
    """Returns the rows of each selector by sparsity, in the order of the report."""
    found = {}
    for row in report["rows"]:
        found.setdefault(title(row), {})[row["sparsity"]] = row
    return found


def closest(values, wanted):
    return min(values, key=lambda value: abs(value - wanted))


CHOSEN = ("exact, q.k", "norm_aware, 256 planes", "norm_aware, 128 planes", "soft_collision, calibrated", "soft_collision, linear",
          "hard_lsh, P 2, L 300", "pqcache, m 16, b 8", "pqcache, m 2, b 6", "rabitq, 1 bit", "quest, pages of 16",
          "double_sparsity, 16 channels", "magicpig, K 10, L 150", "vattention, 5 % at 95 %", "h2o, recorded steps", "streaming, window",
          "random")
OURS = ("norm_aware", "soft_collision")


def plotting():
    import matplotlib  # pylint: disable=import-outside-toplevel
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "kvtier"  # the same file from the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot  # pylint: disable=import-outside-toplevel
    return pyplot


def draw_lines(pyplot, axes, found, metric, label):
    """Draws a metric over sparsity, a line for each chosen selector."""
    for name, color in zip(CHOSEN, pyplot.get_cmap("tab20").colors):
        rows = found.get(name)
        if rows is None:
            continue
        sparsities = sorted(rows)
        axes.plot(sparsities, [rows[s][metric] for s in sparsities], label=name, marker="o", markersize=3, color=color,
                  linewidth=2.2 if name.startswith(OURS) else 1.2,
                  linestyle="--" if name.startswith(("exact", "random", "streaming")) else "-")
    axes.set_xscale("log")
    axes.set_xticks(sparsities, [f"{s:g}x" for s in sparsities])
    axes.minorticks_off()
    axes.set_xlabel("sparsity")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)


def save(pyplot, figure, path):
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    path.parent.mkdir(exist_ok=True)
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    write_whole(path, "".join(f"{line.rstrip()}\n" for line in svg.getvalue().decode().splitlines()))
    pyplot.close(figure)


def draw_answers(report, path):
    """Draws questions wholly right, and the divergence from dense attention, over sparsity; one set per query head."""
    pyplot = plotting()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 7))
    found = selectors({"rows": [row for row in report["rows"] if row["selection"] == "per_query_head"]})
    draw_lines(pyplot, left, found, "exact", "share of questions wholly right")
    draw_lines(pyplot, right, found, "kl", "KL divergence from dense attention")
    right.set_yscale("log")
    figure.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    save(pyplot, figure, path)


def methods_of(rows):
    """Returns the rows of each (selection, rule, code, bits) by sparsity, dense left out."""
    found = {}
    for row in rows:
        if row["sparsity"]:
            found.setdefault((row["selection"], row["rule"], row["code"], row["sketch_bits"]), {})[row["sparsity"]] = row
    return dict(sorted(found.items()))


def draw_rules(report, path):
    """Draws the divergence from dense attention of both rules and codes: over sparsity at 256 bits, and over bits at 50x."""
    pyplot = plotting()
    figure, every = pyplot.subplots(2, 2, figsize=(13, 9), sharey="row")
    found = methods_of(report["rules"])
    colors = {("top_k", "sign"): "tab:red", ("top_k", "scalar"): "tab:orange", ("priority", "sign"): "tab:cyan", ("priority", "scalar"): "tab:blue"}
    for (left, right), selection in zip(every, ("per_kv_head", "per_query_head")):
        for (rule, code), color in colors.items():
            style = {"color": color, "marker": "o", "markersize": 4, "label": f"{rule.replace('_', '-')}, {code}",
                     "linestyle": "-" if rule == "priority" else "--"}
            rows = found[selection, rule, code, 256]
            left.plot(list(rows), [row["kl"] for row in rows.values()], **style)
            bits = [key[3] for key in found if key[:3] == (selection, rule, code)]
            right.plot(bits, [found[selection, rule, code, b][50]["kl"] for b in bits], **style)
        left.set_xscale("log")
        left.set_xticks(sorted(rows), [f"{s:g}x" for s in sorted(rows)])
        left.set(xlabel="sparsity, 256 bits", ylabel="KL divergence from dense attention")
        left.set_title(f"a set per {selection[4:].replace('_', ' ').replace('kv', 'KV')}")
        right.set_xscale("log", base=2)
        right.set_xticks((64, 128, 256, 512), ("64", "128", "256", "512"))
        right.set(xlabel="bits of a key, at 50x")
        for axes in (left, right):
            axes.set_yscale("log")
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    figure.legend(*every[0][0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=9, frameon=False)
    save(pyplot, figure, path)


def draw_masses(report, path):
    """Draws attention mass over sparsity, and over bits at one sparsity."""
    pyplot = plotting()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 7))
    found = selectors(report)
    draw_lines(pyplot, left, found, "attention_mass", "attention mass kept")

    sparsities = sorted({row["sparsity"] for row in report["rows"]})
    wanted = closest(sparsities, 20)
    crowded = ("256 planes, query in float", "256 planes, no value norm", "q.k, ln |v|", "no value norm, orthogonal")
    for name, rows in found.items():
        row = rows[wanted]
        if row["bits_per_token"] <= 0 or row["selector"] == "h2o" or row["settings"] in crowded:
            continue
        mine = row["selector"] in OURS
        right.scatter(row["bits_per_token"], row["attention_mass"], marker="o" if mine else "x",
                      color="tab:blue" if mine else "tab:red")
        right.annotate(name, (row["bits_per_token"], row["attention_mass"]), fontsize=6, xytext=(4, 3),
                       textcoords="offset points")
    right.set_xscale("log", base=2)
    right.set_xlabel(f"bits per token and KV head, at {wanted:g}x")
    right.set_ylabel("attention mass kept")
    right.grid(alpha=0.3)
    right.set_xlim(right=6000)
    figure.legend(loc="lower center", ncols=4, fontsize=8, frameon=False)
    save(pyplot, figure, path)


def draw_ranking(report, path):
    """Draws precision, Jaccard index and NDCG over sparsity."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(1, 3, figsize=(15, 6))
    for panel, metric, label in zip(axes, ("precision", "jaccard", "ndcg"), ("precision", "Jaccard index", "NDCG")):
        draw_lines(pyplot, panel, selectors(report), metric, label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    save(pyplot, figure, path)


def drawn_by(painter, report, path):
    """Returns whether there is matplotlib to draw with."""
    try:
        painter(report, path)
    except ImportError:
        return False
    return True
