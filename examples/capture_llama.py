"""A program of your own with a tape on it: `python examples/capture_llama.py MODEL.gguf LOG`."""

import sys

import llama_cpp

from kvtape.serve import capture

if len(sys.argv) != 3:
    sys.exit(__doc__)
model, log = sys.argv[1:]
llama = llama_cpp.Llama(model, n_ctx=1024, n_threads=1, n_threads_batch=1, seed=1, verbose=False)

with capture(llama, log=log, content=True, check=True) as tape:
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    for question in ("What does a KV cache hold?", "And why is it kept?"):
        messages.append({"role": "user", "content": question})
        answer = llama.create_chat_completion(messages, max_tokens=24, temperature=0.0)
        messages.append(answer["choices"][0]["message"])
        print(f"{question} {messages[-1]['content']}")
    print(f"{tape.flush()} events are safe")
