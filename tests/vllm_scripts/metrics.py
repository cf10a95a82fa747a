"""Every metric of an engine in the script's process."""

import sys

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector


def main():
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    llm = LLM(model=sys.argv[1], disable_log_stats=False, speculative_config=speculation)
    llm.generate(["Hello", "World"], SamplingParams(max_tokens=5, ignore_eos=True))
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram) = {metric.sum} in {metric.count}, {len(metric.buckets)} buckets")


if __name__ == "__main__":
    main()
