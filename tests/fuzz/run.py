"""Fuzz the targets of a group under limits of memory and CPU time, in a process of their own.

    python -m tests.fuzz.run bodies --examples 100000

Exits with status 0 when every input was parsed or refused. An input that exceeds the limits, or raises anything but a
ShoalError, is printed by hypothesis or ends the process.
"""

import argparse
import logging
import resource

from hypothesis import HealthCheck, given, settings

from shoal.audio.sandbox.worker import address_space_bytes
from shoal.errors import ShoalError
from tests.fuzz.targets import GROUPS, Target, check_error

# Beyond what the imports need. Recordings are decoded in a process with limits of its own; the threads that watch it
# reserve address space.
MEMORY_BYTES = {"bodies": 192 << 20, "recordings": 1 << 30, "texts": 192 << 20}
CPU_SECONDS_PER_EXAMPLE = 0.5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--random", action="store_true", help="other inputs in every run")
    arguments = parser.parse_args()
    logging.disable()  # the parser of forms warns about each
    targets = GROUPS[arguments.group]()
    limit(MEMORY_BYTES[arguments.group], arguments.examples * len(targets))
    for name, target in targets.items():
        fuzz(target, arguments.examples, derandomize=not arguments.random)
        print(name, "held", flush=True)


def limit(memory_bytes: int, examples: int) -> None:
    used = address_space_bytes()
    if used is not None:
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, resource.RLIM_INFINITY))
    seconds = 30 + int(CPU_SECONDS_PER_EXAMPLE * examples)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def fuzz(target: Target, examples: int, *, derandomize: bool) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=derandomize,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=target.inputs)
    def check(data: bytes) -> None:
        try:
            target.run(data)
        except ShoalError as error:
            check_error(error)

    check()


if __name__ == "__main__":
    main()
