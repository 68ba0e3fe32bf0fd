"""NVIDIA's Xid errors: number → its meaning, its usual origin, what to do. Data only.

After NVIDIA's "XID Errors" (docs.nvidia.com/deploy/xid-errors, the tables of common and of all Xids), rephrased.
"""

from typing import Literal

import msgspec


class Xid(msgspec.Struct, frozen=True):
    """origin: where the error mostly comes from."""

    meaning: str
    origin: Literal["program", "machine", "either"]
    fix: str


_FIX_PROGRAM = "look for an index out of range: run again with CUDA_LAUNCH_BLOCKING=1, or with compute-sanitizer"
_FIX_REPLACE = "use another machine, and report this one (nvidia-bug-report.sh)"
_FIX_RESET = "restart the machine or reset the GPU; if it comes again, use another machine"
_FIX_LINK = "check NVLink (nvidia-smi nvlink -s); " + _FIX_REPLACE

XIDS: dict[int, Xid] = {
    8: Xid("the GPU stopped processing", "either", _FIX_RESET),
    13: Xid("a kernel used an invalid address or instruction", "program", _FIX_PROGRAM),
    31: Xid("a kernel accessed memory that is not its own (page fault)", "program", _FIX_PROGRAM),
    32: Xid("the command stream to the GPU is damaged", "machine", _FIX_RESET),
    38: Xid("the driver's firmware failed", "machine", "install a newer driver"),
    43: Xid("the program's GPU work was stopped after an error of its own", "program", _FIX_PROGRAM),
    45: Xid("the program's GPU work was cleaned up after it was ended, or after an earlier error", "program",
            "look for the Xid before it, or for what ended the job"),
    48: Xid("an uncorrectable memory error (double-bit ECC)", "machine", _FIX_RESET),
    61: Xid("the GPU's micro-controller stopped (old drivers)", "machine", _FIX_RESET),
    62: Xid("the GPU's micro-controller halted (new drivers)", "machine", _FIX_RESET),
    63: Xid("memory rows were retired or remapped", "machine", "restart the machine soon, so that it takes effect"),
    64: Xid("memory rows could not be retired or remapped", "machine", _FIX_REPLACE),
    68: Xid("the video processor failed", "either", "install a newer driver; use --jpeg-decoder cpu meanwhile"),
    69: Xid("the graphics engine failed", "either", _FIX_RESET),
    74: Xid("an error of NVLink", "machine", _FIX_LINK),
    79: Xid("the GPU has fallen off the bus", "machine", _FIX_REPLACE),
    92: Xid("many corrected memory errors", "machine", "observe it; if it continues, " + _FIX_REPLACE),
    94: Xid("a memory error that was contained in one program", "machine",
            "continue the run from its checkpoint; reset the GPU when it is free"),
    95: Xid("a memory error that was not contained", "machine", _FIX_RESET),
    109: Xid("a switch of contexts timed out", "either", _FIX_RESET),
    110: Xid("a security fault", "machine", _FIX_RESET),
    119: Xid("the GPU's system processor (GSP) did not answer", "machine",
             _FIX_RESET + "; a newer driver, or GSP switched off (NVreg_EnableGpuFirmware=0)"),
    120: Xid("the GPU's system processor (GSP) failed", "machine", _FIX_RESET + "; a newer driver"),
    121: Xid("the link to the processor (C2C) had errors", "machine", _FIX_RESET),
    137: Xid("a fault in NVLink traffic, caused by another GPU or by the program", "either", _FIX_LINK),
    140: Xid("an unrecovered memory error", "machine", _FIX_RESET),
    143: Xid("the GPU could not be started", "machine", _FIX_REPLACE),
    144: Xid("an error of NVLink (link)", "machine", _FIX_LINK),
    145: Xid("an error of NVLink (link)", "machine", _FIX_LINK),
    149: Xid("an error of NVLink (link control)", "machine", _FIX_LINK),
    154: Xid("the driver asks for a recovery: reset, restart or a check of the machine", "machine",
             "do what the kernel's log says after the number"),
}  # fmt: skip

UNKNOWN_XID = Xid("NVIDIA's list of Xid errors has its meaning", "either", _FIX_RESET)
