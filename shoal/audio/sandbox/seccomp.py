"""Seccomp filter of the decoder process (Linux, x86-64 and arm64): allows only the system calls that decoding needs.

Resource limits alone do not prevent a process from deleting files, from signalling or tracing other processes of its
user, from executing programs, or, as root, from forking. Calls that are not allowed fail with EPERM.
"""

import ctypes
import os
import platform
import sys
from typing import NamedTuple


class Machine(NamedTuple):
    audit: int  # AUDIT_ARCH of linux/audit.h
    seccomp: int  # number of the system call
    allowed: tuple[int, ...]
    own_process: tuple[int, ...]  # allowed when the first argument is 0 or this process: prlimit64 and tgkill


MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        317,
        # read, write, close, fstat, poll, lseek, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask,
        # rt_sigreturn, pread64, readv, writev, select, sched_yield, mremap, madvise, nanosleep, getpid, exit, fcntl,
        # gettimeofday, getrlimit, getrusage, sigaltstack, setrlimit, gettid, futex, sched_getaffinity,
        # restart_syscall, clock_gettime, clock_getres, clock_nanosleep, exit_group, pselect6, ppoll, set_robust_list,
        # getrandom, membarrier, rseq
        (
            *(0, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 23, 24, 25, 28, 35, 39, 60, 72, 96, 97, 98),
            *(131, 160, 186, 202, 204, 219, 228, 229, 230, 231, 270, 271, 273, 318, 324, 334),
        ),
        (302, 234),
    ),
    "aarch64": Machine(
        0xC00000B7,
        277,
        # The same calls; arm64 has ppoll and pselect6 only.
        (
            *(25, 57, 62, 63, 64, 65, 66, 67, 72, 73, 80, 93, 94, 98, 99, 101, 113, 114, 115, 123, 124, 128, 132, 134),
            *(135, 139, 163, 164, 165, 169, 172, 178, 214, 215, 216, 222, 226, 233, 278, 283, 293),
        ),
        (261, 131),
    ),
}
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06  # codes of struct sock_filter: BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; both machines are little-endian
ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000
PR_SET_NO_NEW_PRIVS, SET_MODE_FILTER, ALL_THREADS = 38, 1, 1


class Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(Instruction)))


def restrict_system_calls() -> bool:
    """Install the filter for all threads of this process, irrevocably; return False where that is not possible."""
    machine = MACHINES.get(platform.machine()) if sys.platform == "linux" else None
    if machine is None:
        return False
    instructions = [Instruction(*each) for each in filter_for(machine, os.getpid())]
    program = Program(len(instructions), (Instruction * len(instructions))(*instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.syscall(machine.seccomp, SET_MODE_FILTER, ALL_THREADS, ctypes.byref(program)) == 0)


def filter_for(machine: Machine, pid: int) -> list[tuple[int, int, int, int]]:
    """Return the BPF program as tuples of code, jump if true, jump if false, operand."""
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, machine.audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
    ]
    for number in machine.allowed:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for number in machine.own_process:
        program += [(JUMP_EQUAL, 0, 5, number), (LOAD, 0, 0, FIRST_ARGUMENT), (JUMP_EQUAL, 1, 0, 0)]
        program += [(JUMP_EQUAL, 0, 1, pid), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, EPERM)]
    return [*program, (RETURN, 0, 0, EPERM)]
