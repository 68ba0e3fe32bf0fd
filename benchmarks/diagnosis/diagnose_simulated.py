"""The job of `diagnose.py`'s simulated causes: it issues work to a simulated GPU, and waits for it.

The stub driver alone reports what the GPU does (`diagnose_driver.py`); the job only prints steps and losses, with a
thread that computes a little and sleeps while the GPU "works".
"""

import argparse
import math
import time


def issue() -> float:
    return sum(math.sqrt(n) for n in range(60_000))


def synchronize(until: float) -> None:
    time.sleep(max(0.0, until - time.perf_counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    asked, _ = parser.parse_known_args()
    began = printed = time.perf_counter()
    step = 0
    while (now := time.perf_counter()) - began < asked.seconds:
        issue()
        step += 1
        synchronize(now + 0.04)
        if now - printed > 0.5:
            printed = now
            print(f"step {step} loss: {0.3 + 1 / (1 + step / 30):.4f}", flush=True)


if __name__ == "__main__":
    main()
