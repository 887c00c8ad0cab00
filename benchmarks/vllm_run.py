"""One vLLM engine in a process of its own: reads a request as JSON, prints what it generated as JSON.

{"engine": {"model": FOLDER, ...}, "batches": [[PROMPT, ...], ...], "sampling": {"max_tokens": 8}}
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

# Before anything that may load another SYCL runtime.
import kvcache_dpex  # noqa: F401


def loss_of(prompt_logprobs, token_ids):
    """The mean loss of a prompt's tokens but the first."""
    pairs = list(zip(prompt_logprobs, token_ids))[1:]
    return -sum(found[token].logprob for found, token in pairs) / len(pairs)


def main():
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    request = json.loads(sys.argv[1])
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "disable_log_stats": False,
        **request["engine"],
    }
    if "kv_transfer_config" in engine:
        engine["kv_transfer_config"] = KVTransferConfig(**engine["kv_transfer_config"])
    llm = LLM(**engine)
    tokens, cached, seconds, losses = [], [], [], []
    for batch in request["batches"]:
        prompts = batch.pop("prompts")
        sampling = SamplingParams(**{"temperature": 0, "ignore_eos": True, **batch})
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        tokens.append([list(each.outputs[0].token_ids) for each in outputs])
        cached.append([each.num_cached_tokens for each in outputs])
        if sampling.prompt_logprobs is not None:
            losses.append([loss_of(each.prompt_logprobs, each.prompt_token_ids) for each in outputs])
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    config = llm.llm_engine.vllm_config.cache_config
    found = {
        "tokens": tokens,
        "cached": cached,
        "seconds": seconds,
        "losses": losses,
        "preemptions": counters.get("vllm:num_preemptions"),
        "capacity": config.num_gpu_blocks * config.block_size,
    }
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
