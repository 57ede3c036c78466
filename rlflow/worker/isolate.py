"""Isolates a program for `Sandbox`: no network, no other processes, and only the files of the system and of Python.

It is started by its path and imports only the standard library. It makes user, mount, process, network, IPC and host
name namespaces of Linux (namespaces(7), user_namespaces(7), pivot_root(2)). Their processes and files are gone when the
first process in them dies.
"""

import ctypes
import json
import os
import resource
import select
import signal
import stat
import sys
from collections.abc import Iterable
from typing import Any

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
# mounts, host name, IPC, users, processes, network
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAPABILITY_VERSION = 0x20080522
LAST_CAPABILITY = 63
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DEVICES = ("null", "zero", "full", "random", "urandom")
CANNOT = 125  # the exit code of a process that could not be isolated

libc = ctypes.CDLL(None, use_errno=True)


def main(settings: dict[str, Any], command: list[str]) -> None:
    """Isolate this process and become `command`; exit with code 125 where the system does not allow it."""
    try:
        isolate(settings)
    except OSError as error:
        print(f"cannot isolate: {error}", file=sys.stderr, flush=True)
        os._exit(CANNOT)
    os.execv(command[0], command)


def isolate(settings: dict[str, Any]) -> None:
    """Fork into new namespaces, and return only in the child; the calling process waits for it and exits with its code.

    Args:
        settings: Settings from `Sandbox`: `parent`, the id of the process that started this one; `readable`, paths that
            are mounted read-only; `disk_bytes`, the size of the file system in memory; and `limits`, such as
            `{"RLIMIT_CPU": 6}`.

    Raises:
        OSError: The system does not allow it.
    """
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:  # it was gone before
        os._exit(CANNOT)
    user, group = os.getuid(), os.getgid()
    _check(libc.unshare(NEW_NAMESPACES), "unshare")
    for name, mapping in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(mapping)
    with open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # of this user namespace: none is made within
    alive, held = os.pipe()  # ends with the process that forks; its id is not seen from within
    child = os.fork()
    if child:
        _end_as(child)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(held)
    if select.select([alive], [], [], 0)[0]:  # it was gone before
        os._exit(CANNOT)
    os.close(alive)
    _new_root(settings["readable"], settings["disk_bytes"])
    _set_limits(settings["limits"])
    _drop_capabilities()


def _end_as(child: int) -> None:
    for pipe in (0, 1, 2):
        os.close(pipe)  # so that a reader sees the end of the other
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _new_root(readable: Iterable[str], disk_bytes: int) -> None:
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    root = next(path for path in ("/mnt", "/media", "/srv", "/opt", "/tmp") if os.path.isdir(path))
    bound = [path for path in readable if os.path.exists(path)]
    sources = {path: os.open(path, os.O_PATH) for path in bound}  # the new root may lie above some of them
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in DEVICES}
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},mode=755")
    for path, source in sources.items():
        _bind(source, root + path, MS_RDONLY | MS_NODEV)
    for link in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(link) and not os.path.lexists(root + link):
            os.symlink(os.readlink(link), root + link)
    for name, source in devices.items():
        _bind(source, f"{root}/dev/{name}", 0)
    for folder, mode in {"tmp": 0o1777, "proc": 0o555}.items():
        os.makedirs(f"{root}/{folder}", exist_ok=True)
        os.chmod(f"{root}/{folder}", mode)
    libc.mount(
        b"proc", f"{root}/proc".encode(), b"proc", MS_NOSUID | MS_NODEV, None
    )  # some systems refuse; none is needed
    os.chdir(root)
    _check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/tmp")


def _bind(source: int, target: str, flags: int) -> None:
    """Mount the file or folder of an open descriptor at `target`, which is made, and close the descriptor."""
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(f"/proc/self/fd/{source}", target, None, MS_BIND)
    _mount(None, target, None, MS_BIND | MS_REMOUNT | MS_NOSUID | flags)
    os.close(source)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    given = [each.encode() if each is not None else None for each in (source, target, kind)]
    _check(libc.mount(*given, ctypes.c_ulong(flags), data.encode() if data is not None else None), f"mount {target}")


def _set_limits(limits: dict[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, most in limits.items():
        hard = resource.getrlimit(getattr(resource, name))[1]  # which cannot be raised, as in a worker with less memory
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, name), (most, most))


def _drop_capabilities() -> None:
    for capability in range(LAST_CAPABILITY + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond those that the kernel knows
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _check(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
