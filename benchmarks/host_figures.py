"""Blocks of docs/performance.md that are measured on a CPU: the service and the tiers."""

from figures import K, RESULTS, context, load, newest, number, percent, spread, table, times


def service_block(_):
    path = newest("service", "cpu")
    document = load(path)
    return (f"`benchmarks/results/{path.name}`, {document['date']}, by `{document['command']}`: {document['hardware']}, load average "
            f"{document['load_at_start']:.1f} at the start and {document['load_at_end']:.1f} at the end.")


def service(_):
    """Rows of kvtier-service-bench: what was measured, what it is held against, and their ratio."""
    entries = [entry for entry in load(newest("service", "cpu"))["rows"] if "error" not in entry]
    has_client_rows = any(entry["what"] == "client_over_messages" for entry in entries)

    def row(row):
        size = f", {row['page_bytes'] // K:,} KiB" if "page_bytes" in row else ""
        rate = [f"{number(row['gbps'])} GB/s", f"{number(row['baseline_gbps'])} GB/s"] if "gbps" in row else None
        what = row["what"]
        if what == "shared_memory_over_memcpy":
            return (f"random pages{size}, shared memory: share of memcpy", "60 %", "85 %", *rate, spread(row, "share", percent))
        if what == "frames_over_sendmsg":
            return (f"random pages{size}, frames: share of sendmsg of the same pages", "75 %", "90 %", *rate,
                    spread(row, "share", percent))
        if what == "shared_memory_over_redis":
            return (f"random pages{size}, shared memory: times Redis GET in pipelines of 32", "3x", "6x", *rate,
                    spread(row, "times", times))
        if what in ("client_over_messages", "raw_stream_over_messages", "bare_stream_over_messages"):
            cpu = (f"; {row['cpu_seconds_per_gb']:.2f} CPU seconds per GB of both sides against "
                   f"{row['baseline_cpu_seconds_per_gb']:.2f}" if "cpu_times" in row else "")
            several = row.get("streams", 1) > 1
            messages = f"in messages of protobuf, {row['streams']} streams at a time" if several else "in messages of protobuf, one stream"
            if what == "client_over_messages":
                # What a program gets of either, the library and a service as gRPC's guide has it.
                marks = ("", "") if several else ("1.5x", "2x")
                return (f"random pages{size}, the client library's ReadPages as it comes: times the same {messages}{cpu}", *marks, *rate,
                        spread(row, "times", times))
            streams = f"{row['streams']} streams at a time" if several else "one stream"
            if what == "bare_stream_over_messages":
                return (f"the same bytes over and over, ByteBuffer, dropped, {streams}: times random pages{size} {messages}{cpu}", "", "",
                        *rate, spread(row, "times", times))
            marks = ("", "") if several or has_client_rows else ("1.5x", "2x")
            return (f"random pages{size}, ReadPages, {streams}: times the same {messages}{cpu}", *marks, *rate, spread(row, "times", times))
        if what == "overload_over_peak":
            return (f"{row['call']} after {context(row['tokens'])} at {row['factor']}x the rate that is served: goodput over peak; p99 "
                    f"of the refused {number(row['rejected_p99_ms'])} ms (must 10, aim 5)"
                    + (f"; the client took {percent(row['client_share_of_cpu'])} of the cores" if "client_share_of_cpu" in row else ""),
                    "85 %", "95 %",
                    f"{number(row['calls_per_second'])} calls/s", f"{number(row['baseline_calls_per_second'])} calls/s",
                    spread(row, "share", percent))
        if what == "unary_over_echo":
            return (f"{row['call']}, p50: times an empty call", "1.3x", "1.1x", f"{number(row['p50_us'])} us",
                    f"{number(row['baseline_p50_us'])} us", times(row["times"]))
        if what == "lookup_timing":
            marks = ("0.55 at most", "") if row["by"] == "another tenant" else ("", "")
            return (f"lookup of hashes that {row['by']} has stored: AUC of its time against that of hashes which no tenant has", *marks,
                    f"{row['p50_us']:.2f} us", f"{row['baseline_p50_us']:.2f} us",
                    f"{row['auc']:.3f} ({row['auc_least']:.3f} to {row['auc_most']:.3f})")
        if what == "wakeup_by_eventfd_over_frame":
            return (f"wake-up by eventfd instead of a frame, the client spins {row['client_spins_us']} us: p50", "", "",
                    f"{number(row['p50_us'])} us", f"{number(row['baseline_p50_us'])} us", times(row["times"]))
        over = {"decode_shared_memory_over_embedded": ("shared memory", "25 %", "10 %"),
                "decode_grpc_over_embedded": ("gRPC", "", "")}[what]
        return (f"token of needle-llama after {context(row['tokens'])}, {over[0]}: overhead over embedded", *over[1:],
                f"{number(row['token_ms'])} ms", f"{number(row['baseline_token_ms'])} ms", percent(row["overhead"]))

    return table(["what", "must", "aim", "service", "held against", "ratio"],
                 [row(entry) for entry in entries])


def tiers_path():
    files = sorted(RESULTS.glob("*-cpu-tiers.json"))
    return files[-1] if files else None


def tiers_block(_):
    path = tiers_path()
    if path is None:
        return "Not measured: no run of `kvtier-tier-bench` is committed."
    document = load(path)
    reads = next(row for row in document["rows"] if row["what"] == "file_tier_over_fio")
    way = reads["path"].split(": ", 1)[1].split(", ")
    return (f"`benchmarks/results/{path.name}`, {document['date']}, by `{document['command']}`: {document['hardware']}, {document['fio']}, "
            f"load average {document['load_at_start']:.1f} at the start and {document['load_at_end']:.1f} at the end; {way[0]}, {way[1]}, "
            f"{reads['depth']} transfers in flight.")


def tiers(_):
    """Rows of kvtier-tier-bench."""
    def row(row):
        size = f"{row['page_bytes'] // K:,} KiB"
        what = row["what"]
        rates = [f"{number(row[key])} GB/s" for key in ("gbps", "baseline_gbps") if key in row]
        if what == "file_tier_over_fio":
            return (f"pages of {size} out of the file tier: share of fio's random reads of the same files", "80 %", "95 %", *rates,
                    spread(row, "share", percent))
        if what == "call_restore":
            return (f"pages of {size} that `fetch` brings back from the disk cache, in place of others: share of fio", "", "", *rates,
                    percent(row["share"]))
        return (f"pages of {size} from host to host, verified: overhead over the copy", "10 %", "5 %", *rates,
                spread(row, "overhead", percent))

    path = tiers_path()
    if path is None:
        return ""
    return table(["what", "must", "aim", "kvtier", "held against", "ratio"], [row(entry) for entry in load(path)["rows"] if entry["what"] != "read_ahead"])


def oversubscription_path():
    """The newest run; of one day, that on a machine at rest."""
    files = sorted([*RESULTS.glob("*-cpu-oversubscription.json"), *RESULTS.glob("*-cpu-page-prefetch.json")])
    return files[-1] if files else None


def oversubscription_block(_):
    path = oversubscription_path()
    if path is None:
        return "Not measured: no run of `kvtier-tier-bench --only oversubscription` is committed."
    document = load(path)
    first = document["rows"][0]
    about = document.get("note") or f"load average {document['load_at_start']:.1f} at the start and {document['load_at_end']:.1f} at the end"
    return (f"`benchmarks/results/{path.name}`, {document['date']}, by `{document['command']}`: {document['hardware']}; {about}. "
            f"Each session has {first['layers']} layers, 8 KV heads and {first['context_tokens']:,} tokens.")


def oversubscription(_):
    """Rows of `kvtier-tier-bench --only oversubscription`: a line for each schedule, a column for each number of sessions."""
    path = oversubscription_path()
    if path is None:
        return ""
    rows = [row for row in load(path)["rows"] if row["budgets"] > 1]

    budgets = sorted({row["budgets"] for row in rows})

    def schedule(row):
        return (row["turn_tokens"], row["clients"], row["model_mib_per_layer"])

    def line(key):
        tokens, clients, model = key
        found = {row["budgets"]: f"{row['share']:.2f} ({row['share_median']:.2f})" for row in rows if schedule(row) == key}
        return (f"{tokens}", f"{clients}", f"{model} MiB" if model else "none", *(found.get(budget, "not run") for budget in budgets))

    lines = [line(key) for key in dict.fromkeys(schedule(row) for row in rows)]
    return table(["tokens a turn", "threads", "model's reads a layer", *(f"{budget:g}x the budget" for budget in budgets)], lines)
