# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine under the command of `peers.py`; runs in vLLM's own environment and needs nothing of AdaFlash.

Reads JSON lines: {"prompts": [[ids]], "max_tokens": N, "batch_size": B}; answers each with one line
`RESULT {"seconds": s, "token_ids": [[ids]]}`. vLLM's own output on stdout has no such prefix.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    """Load the engine, say `RESULT {"version": ...}`, then serve passes until stdin ends."""
    import vllm

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--speculative", help="speculative_config as JSON")
    args = parser.parse_args()
    llm = LLM(
        model=args.model,
        dtype="float32",
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.2,  # Of the memory; its default asks for 92 % to be free beside the other systems.
        speculative_config=json.loads(args.speculative) if args.speculative else None,
    )
    _answer({"version": vllm.__version__})
    for line in sys.stdin:
        command = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=command["max_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
        token_ids, started = [], time.perf_counter()
        for first in range(0, len(prompts), command["batch_size"]):
            outputs = llm.generate(prompts[first : first + command["batch_size"]], params, use_tqdm=False)
            token_ids += [list(output.outputs[0].token_ids) for output in outputs]
        _answer({"seconds": time.perf_counter() - started, "token_ids": token_ids})


def _answer(value: dict[str, object]) -> None:
    print("RESULT " + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
