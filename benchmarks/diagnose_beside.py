"""The job of `diagnosis.py`'s simulated causes: it issues work to a device that is not there, and waits for it.

What its GPU does is told by the stub driver alone (`diagnose_driver.py`); the job only prints steps and losses, with a
thread that computes a little and rests while "the GPU works".
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
    began = said = time.perf_counter()
    step = 0
    while (now := time.perf_counter()) - began < asked.seconds:
        issue()
        step += 1
        synchronize(now + 0.04)
        if now - said > 0.5:
            said = now
            print(f"step {step} loss: {0.3 + 1 / (1 + step / 30):.4f}", flush=True)


if __name__ == "__main__":
    main()
