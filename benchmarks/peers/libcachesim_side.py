"""Run by the interpreter of the throw-away environment, where libcachesim is: miss ratios and rates as one JSON line.

    python libcachesim_side.py TRACE.oracleGeneral SIZE,SIZE,... POLICY...

`plugin` is LRU as a Python policy by the library's own hooks.
"""

import json
import sys
import time
from collections import OrderedDict

import libcachesim as lcs

CLASSES = {
    "fifo": "FIFO",
    "lru": "LRU",
    "lfu": "LFU",
    "arc": "ARC",
    "s3fifo": "S3FIFO",
    "w-tinylfu": "WTinyLFU",
    "sieve": "Sieve",
    "opt": "Belady",
}


def plugin(size):
    return lcs.PluginCache(
        cache_size=size,
        cache_init_hook=lambda params: OrderedDict(),
        cache_hit_hook=lambda held, request: held.move_to_end(request.obj_id),
        cache_miss_hook=lambda held, request: held.__setitem__(request.obj_id, None),
        cache_eviction_hook=lambda held, request: held.popitem(last=False)[0],
        cache_remove_hook=lambda held, block: held.pop(block, None),
        cache_free_hook=lambda held: held.clear(),
        cache_name="lru-in-python",
    )


def main():
    trace, sizes, *policies = sys.argv[1:]
    for policy in policies:
        for size in map(int, sizes.split(",")):
            params = lcs.ReaderInitParam(ignore_obj_size=True)
            reader = lcs.TraceReader(
                trace=trace, trace_type=lcs.TraceType.ORACLE_GENERAL_TRACE, reader_init_params=params
            )
            cache = plugin(size) if policy == "plugin" else getattr(lcs, CLASSES[policy])(cache_size=size)
            began = time.process_time()
            miss_ratio, _ = cache.process_trace(reader)
            spent = time.process_time() - began
            print(json.dumps({"policy": policy, "size": size, "miss_ratio": miss_ratio, "cpu_s": spent}), flush=True)


main()
