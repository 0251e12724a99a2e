"""Phrases of the TransferQueue report in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_profiler.reading.formats.tq_log import Note

__all__ = ["PHRASES", "note_text", "phrase"]

# Data-quality warnings first, then findings, each with the guide's advice.
_ENGLISH = {
    "doubled": "{number} lines occur more than once in the logs; each is counted once",
    "missing": (
        "{number} lines are missing: Ray merged similar lines of several processes into "
        "one ([repeated Nx across cluster]) {times} times ({ends} of the missing lines are ends "
        "of calls). Counts and totals are too low accordingly. Set RAY_DEDUP_LOGS=0 for the run, "
        "or analyze its run directory, which has all calls"
    ),
    "unreadable": "{number} unreadable lines were left out:",
    "line": "  {line}",
    "more": "  and {number} more like these",
    "unfinished": (
        "{number} calls of {func} did not end; their last line is {stage}. They are "
        "counted as calls, but excluded from times"
    ),
    "open_transfers": "{number} gets and puts did not end; they are excluded from times and rates",
    "estimated": (
        "{number} calls lack stage lines: get, compute and put were derived from "
        "the percentages in the last line, with a resolution of 0.01 % of the call"
    ),
    "verl_rows": (
        "{number} calls are known only from verl's own cost time lines: get and put are "
        "exact, compute and total times have the log's resolution of 1 ms, and functions "
        "without put have no total"
    ),
    "verl_left_out": (
        "{number} calls in verl's own cost time lines were also traced; they are counted once"
    ),
    "inferred_steps": (
        "{number} calls and transfers have no step; each was assigned to the step during which "
        "it ended, by the log's step: lines"
    ),
    "unplaced": (
        "{number} timestamps are from the processes' own clocks, which differ between hosts: "
        "their lines have no time of day"
    ),
    "sampled": (
        "{func}: 1 in {number} calls was traced. Counts, totals and shares are scaled "
        "accordingly; quantiles are those of the traced calls"
    ),
    "both": (
        "A run directory and a log were given; they may contain the same calls and are shown separately"
    ),
    "overhead": (
        "{func}: get and put take {overhead_share} of its time ({tq_s} of {total_s}; get "
        "{get_share}, put {put_share}), more than {threshold}; {of_all_share} of the time of all "
        "traced functions"
    ),
    "overhead.advice": (
        "check the storage backend's settings; use larger batches, so that there are fewer "
        "transfers; consider compressing the data"
    ),
    "alone": "with concurrent compute: only {alone_share} of the busy wall-clock time",
    "unstable": (
        "{func}: {stage} times vary: p50 {p50_s}, p95 {p95_s}, max {max_s} over {calls} calls "
        "(standard deviation {variation} of the mean)"
    ),
    "worst": "longest in step {worst_step}: {worst_s} on average",
    "unstable.advice": (
        "the cause is not measured: check below when it happened, and what else used network and "
        "storage at that time"
    ),
    "low_throughput": (
        "{event}: {mib_per_s} MiB/s over {calls} calls and {size_bytes}; below {threshold} MiB/s "
        "is poor ({poor_share} of the calls are)"
    ),
    "low_throughput.advice": (
        "what limits the rate is not measured: check network bandwidth, the storage's IOPS, and "
        "how the data is serialized"
    ),
    "small_transfers": (
        "{event}: {mib_per_s} MiB/s, with {mean_bytes} per call and p50 {p50_s}: calls this small "
        "do not measure the bandwidth"
    ),
    "small_transfers.advice": "move more data per call: larger batches, fewer transfers",
    "failed": "{func}: {failed} of {calls} calls ended with an error",
    "failed.advice": "check the exceptions in the log; times of failed calls are included",
}

_CHINESE = {
    "doubled": "{number} 行日志完全重复,只计一次",
    "missing": (
        "缺少 {number} 行日志:Ray 将多个进程的相似行合并为一行([repeated Nx across cluster]),共"
        " {times} 处(其中函数结束行:{ends})。调用次数和总耗时因此偏低。请在运行时设置 "
        "RAY_DEDUP_LOGS=0,或直接分析运行目录(其中没有丢失)"
    ),
    "unreadable": "{number} 行无法解析,未计入:",
    "line": "  {line}",
    "more": "  以及另外 {number} 行",
    "unfinished": (
        "{func} 有 {number} 次调用没有结束行(最后一行为 {stage}),计入调用次数,但不计入耗时"
    ),
    "open_transfers": "{number} 次 GET/PUT 没有结束行,不计入耗时和吞吐量",
    "estimated": "{number} 次调用缺少阶段日志:GET/COMPUTE/PUT 耗时由结束行的占比推算(精度 0.01%)",
    "verl_rows": (
        "{number} 次调用仅来自 verl 自带的 cost time 日志:GET/PUT 耗时准确,COMPUTE 和总耗时按日"
        "志时间推算(毫秒精度),没有 PUT 的函数没有总耗时"
    ),
    "verl_left_out": "verl 自带 cost time 日志中的 {number} 次调用已有追踪日志,不重复计入",
    "inferred_steps": "{number} 次调用没有 step 字段,按日志中的 step: 行推断所属训练步",
    "unplaced": "{number} 个时间点只有进程自身的时钟(日志行没有日期时间),不同主机之间不可比较",
    "sampled": (
        "{func}:每 {number} 次调用记录 1 次。次数、总耗时和占比已按此放大;分位数为已记录调用的统计"
    ),
    "both": "同时给出了运行目录和日志:二者可能包含相同的调用,因此分开统计",
    "overhead": (
        "{func}:TQ总开销 {overhead_share}(GET {get_share},PUT {put_share};{tq_s} / {total_s}),"
        "超过 {threshold};占全部函数耗时的 {of_all_share}"
    ),
    "overhead.advice": (
        "检查存储后端配置(Redis/分布式存储);优化批次大小(batch_size),减少传输次数;考虑数据压缩"
    ),
    "alone": "期间仍有计算在进行:按时钟时间只占 {alone_share}",
    "unstable": (
        "{func}:{stage} 耗时波动大:{calls} 次调用 p50 {p50_s},p95 {p95_s},最大 {max_s}(标准差为"
        "均值的 {variation})"
    ),
    "worst": "最慢的是第 {worst_step} 步:平均 {worst_s}",
    "unstable.advice": "网络或存储可能不稳定:对照下方各训练步与时间段,查看当时的其他负载",
    "low_throughput": (
        "{event}:吞吐量 {mib_per_s} MiB/s({calls} 次调用,共 {size_bytes});低于 {threshold} MiB/s "
        "可能有性能问题(占调用的 {poor_share})"
    ),
    "low_throughput.advice": "可能是存储后端瓶颈:检查网络带宽;检查存储IOPS;优化数据序列化方式",
    "small_transfers": (
        "{event}:吞吐量 {mib_per_s} MiB/s,但每次仅传输 {mean_bytes}(p50 {p50_s}):如此小的传输"
        "不能反映带宽"
    ),
    "small_transfers.advice": "优化批次大小(batch_size),减少传输次数",
    "failed": "{func}:{calls} 次调用中有 {failed} 次出错",
    "failed.advice": "请在日志中查找异常;其耗时已计入统计",
}

# By language, then by key.
PHRASES: dict[str, dict[str, str]] = {"en": _ENGLISH, "zh": _CHINESE}


def note_text(note: Note, language: str = "en") -> str:
    """Return a note as a sentence."""
    return phrase(note.kind, note.values, language)


def phrase(kind: str, values: Mapping[str, Any], language: str = "en") -> str:
    """Return a formatted phrase."""
    return PHRASES[language][kind].format_map(values)
