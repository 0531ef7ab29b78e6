"""Memory of masked attention beside plain causal attention, and time of a sliding window.

    python benchmarks/masks.py --json masks.json
    python benchmarks/masks.py --seq 8192 --cases causal softcap

One training step of a tiny decoder per case, each in a fresh process with an empty compiler
cache. ``peak`` is resident memory above the loaded model, compiling included. Window: the second
step's time at half and at full length; work in proportion to S * w doubles, S * S quadruples.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

WINDOW, DOCUMENT = 1024, 4096
SHAPE = dict(
    vocab_size=4096,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1 << 20,
    use_cache=False,
    pad_token_id=0,
)
CASES: dict[str, dict[str, Any]] = {
    "causal": dict(model="llama"),
    "padded": dict(model="llama"),
    "packed": dict(model="llama"),
    "window": dict(model="mistral", sliding_window=WINDOW),
    "gemma2": dict(
        model="gemma2",
        attention="eager",
        attn_logit_softcapping=None,
        layer_types=["full_attention"] * 2,
    ),
    "softcap": dict(
        model="gemma2", attention="eager", layer_types=["full_attention"] * 2
    ),
    "falcon": dict(model="falcon", num_kv_heads=2, new_decoder_architecture=True),
    "alibi": dict(
        model="falcon",
        attention="eager",
        alibi=True,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
}
# What a case is compared with: the same model without the mask or score arithmetic.
PLAIN = {"gemma2": "gemma2", "softcap": "gemma2", "falcon": "falcon", "alibi": "falcon"}


def worker(case: str, length: int, steps: int) -> dict[str, float]:
    """Train ``steps`` steps of one case in this process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import fpdt_compile

    changes = dict(CASES[case])
    name, attention = changes.pop("model"), changes.pop("attention", "sdpa")
    default = AutoConfig.for_model(name)
    known = {*default.to_dict(), *(default.attribute_map or {})}
    sizes = {key: value for key, value in SHAPE.items() if key in known}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**sizes, **changes})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention
    ).train()
    ids = torch.randint(3, SHAPE["vocab_size"], (1, length))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if case == "padded":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][:, -length // 8 :] = 0
    elif case == "packed":
        inputs["position_ids"] = (torch.arange(length) % DOCUMENT)[None]
    fpdt_compile.optimize(model, strict=True)
    loaded, times = peak(), []
    for _ in range(steps):
        start = time.perf_counter()
        model(**inputs).loss.backward()
        times.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return {"peak": peak() - loaded, "step": times[-1]}


def peak() -> float:
    """Peak resident memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(case: str, length: int, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--worker", case, str(length), str(steps)]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq", type=int, default=32768)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", help="write the numbers there too")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        case, length, steps = options.worker
        print(json.dumps(worker(case, int(length), int(steps))))
        return
    found: dict[str, Any] = {}
    for case in options.cases:
        found[case] = measure(case, options.seq, 1)
        plain = PLAIN.get(case, "causal")
        ratio = found[case]["peak"] / found[plain]["peak"]
        print(
            f"{case:8} {found[case]['peak']:7.0f} MiB  {ratio:.2f} of {plain}  "
            f"first step {found[case]['step']:.1f} s",
            flush=True,
        )
    for case in ("window", "causal"):
        if case in options.cases:
            half, full = (
                measure(case, n, 2)["step"] for n in (options.seq // 2, options.seq)
            )
            found[f"{case} time"] = {"half": half, "full": full}
            print(
                f"{case:8} second step {half:.2f} s at S / 2, {full:.2f} s at S: {full / half:.2f}"
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
