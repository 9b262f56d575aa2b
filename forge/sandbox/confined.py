"""What a sandboxed process runs first: it gives up its powers for good, then runs the program it was given.

A script of its own that imports the standard library alone, so that it starts in tens of milliseconds and nothing of
Forge is within the program's reach. Arguments: the program's file, MiB, seconds, MiB of a file, folders to read.

    rlimits       how much memory, processor time and file size
    Landlock      which files can be opened: the interpreter's to read, the working folder to write
    seccomp       which system calls exist: none for networks, processes, signals, mounts, tracing
"""

import ctypes
import os
import platform
import resource
import struct
import sys

# System calls of a program that computes, reads and writes files it may open, and starts threads:
# name: (x86-64, arm64); None where the machine has no such call.
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "open": (2, None),
    "openat": (257, 56), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79),
    "statx": (332, 291), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "ftruncate": (77, 46), "fsync": (74, 82), "fdatasync": (75, 83), "fcntl": (72, 25), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214), "futex": (202, 98),
    "set_robust_list": (273, 99), "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "getrandom": (318, 278), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179),
    "umask": (95, 166), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "exit": (60, 93), "exit_group": (231, 94),
    "arch_prctl": (158, None),
}  # fmt: skip
CLONE, PRLIMIT64, IOCTL, CLONE3 = (56, 220), (302, 261), (16, 29), (435, 435)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD = 0x00010000
EPERM, ENOTTY, ENOSYS = 1, 25, 38

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SIGKILL = 1, 22, 38, 9
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same on every machine
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << i for i in range(6))
MAKE_DIR, MAKE_REG, REFER, TRUNCATE = 1 << 7, 1 << 8, 1 << 13, 1 << 14
WRITABLE = WRITE_FILE | TRUNCATE | READ_FILE | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER
"""What may be done in the working folder: no links, devices, pipes and sockets, and nothing in it can be executed."""
ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Kinds of file access that each version of Landlock knows; later ones know as many as 5."""
REFUSED = 125
"""Exit status when the powers could not be given up; nothing was run."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, doing: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{doing}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock_version() -> int:
    """Version of the kernel's Landlock; 0 or less without."""
    return int(libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def limit(memory_mib: int, seconds: int, file_mib: int) -> None:
    """Bound memory beyond what is held now, processor time and file size, so that they cannot be raised again."""
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_AS, held + (memory_mib << 20)),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_mib << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def restrict_files(readable: list[str], writable: str) -> None:
    """Leave these folders alone to be opened."""
    version = landlock_version()
    handled = (1 << ACCESS_BITS[min(version, 5)]) - 1
    attributes = [handled]
    if version >= 4:
        attributes.append(0b11)  # binding and connecting TCP
    if version >= 6:
        attributes.append(0b11)  # abstract unix sockets, signals
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = check(libc.syscall(LANDLOCK_CREATE, packed, ctypes.c_size_t(len(packed)), 0), "Landlock")
    rules = [(path, EXECUTE | READ_FILE | READ_DIR) for path in readable]
    rules.append((writable, WRITABLE))
    rules.append(("/dev/null", WRITE_FILE | READ_FILE))
    for path, access in rules:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access & handled, folder)
        check(libc.syscall(LANDLOCK_ADD, ruleset, 1, rule, 0), f"Landlock rule for {path}")
        os.close(folder)
    check(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "Landlock")
    os.close(ruleset)


def syscall_filter(machine: str) -> bytes:
    """The seccomp program (classic BPF): what is not allowed fails with EPERM."""
    which = list(AUDIT_ARCH).index(machine)
    load, equal, bit_set, answer = 0x20, 0x15, 0x45, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000, 0x80000000
    number, arch, first_flags, third_low, third_high = 0, 4, 16, 32, 36

    def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    program = [op(load, arch), op(equal, AUDIT_ARCH[machine], 1), op(answer, kill), op(load, number)]
    for numbers in ALLOWED.values():
        if (allowed := numbers[which]) is not None:
            program += [op(equal, allowed, 0, 1), op(answer, allow)]
    # threads, not processes; glibc tries clone3 first, whose flags a filter cannot see
    program += [op(equal, CLONE3[which], 0, 1), op(answer, deny | ENOSYS)]
    program += [op(equal, IOCTL[which], 0, 1), op(answer, deny | ENOTTY)]
    program += [op(equal, CLONE[which], 0, 4), op(load, first_flags), op(bit_set, CLONE_THREAD, 0, 1)]
    program += [op(answer, allow), op(answer, deny | EPERM)]
    # limits can be read, not set: root could raise them
    program += [op(equal, PRLIMIT64[which], 0, 5), op(load, third_low), op(equal, 0, 0, 3), op(load, third_high)]
    program += [op(equal, 0, 0, 1), op(answer, allow), op(answer, deny | EPERM)]
    return b"".join(program)


def restrict_calls() -> None:
    """Leave the allowed system calls alone to exist."""
    program = syscall_filter(platform.machine())
    held = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    check(libc.prctl(PR_SET_SECCOMP, 2, fprog, 0, 0), "seccomp")


def confine(readable: list[str], *, memory_mib: int, seconds: int, file_mib: int) -> None:
    """Give up everything but computing; there is no way back."""
    parent = os.getppid()
    check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(REFUSED)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    limit(memory_mib, seconds, file_mib)
    restrict_files(readable, os.getcwd())
    restrict_calls()


def main() -> None:
    path, memory_mib, seconds, file_mib, *readable = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        source = file.read()
    try:
        confine(readable, memory_mib=int(memory_mib), seconds=int(seconds), file_mib=int(file_mib))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"the sandbox could not be closed: {error}\n")
        sys.stderr.flush()
        os._exit(REFUSED)
    sys.argv[:] = ["program.py"]
    exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
