"""The first process of a live sandbox: it starts commands, and nothing of them outlives it.

Run inside, by the interpreter found there, as pid 1 of the sandbox's namespace: signals from within
do not reach it. Where there are no namespaces, `guard.py` makes a place in which the same is true.
It uses no package but the standard library's C modules, because what it imports is waited for.
Arguments: the number of the control socket (unix, seqpacket), or the path of one to connect to;
then, where nothing outside loads it, the path of a system-call filter.

    host -> agent   b"x" + four or five descriptors: request, stdin, stdout,
                    stderr, and what the command has as its number 3    run a command
                    b"k"                                                end it now
    agent -> host   exit code, int32, when no process of the command is left; then a byte, 1 when
                    the sandbox ends with this command because something of it would stay

The request file holds the number of arguments, the arguments, and NAME=VALUE words, each ended by
NUL. The end of the socket ends the sandbox.
"""

import _signal  # type: ignore[import-not-found]
import _socket
import os
import select
import sys

KILL = 9
NO_SUCH_PROGRAM, NOT_RUNNABLE = 127, 126
# What is ignored stays so in a command: by Python, or by who started us (nohup). All that can be.
RESET_SIGNALS = tuple({*range(1, 32)} - {9, 19})
PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2
SECCOMP = {"x86_64": 317, "aarch64": 277}
SET_MODE_FILTER, NEW_LISTENER, WAIT_KILLABLE = 1, 1 << 3, 1 << 5
FIRST_TO_DIE = b"1000"
"""When memory is short the kernel kills what has the highest score: a command, not this process."""


def main() -> None:
    """Serve commands one after the other."""
    if len(sys.argv) > 2:
        with open(sys.argv[2], "rb") as file:
            load_filter(file.read())
    score = open_score()  # not allowed once we are hidden
    hide()
    Agent(_control(sys.argv[1]), score).serve()


class Agent:
    """Runs commands for what is at the other end of a control socket."""

    shared: tuple[str, ...] = ("/tmp", "/dev/shm")
    """What commands may write to beside the workspace: emptied after each."""

    def __init__(self, control: _socket.socket, score: int) -> None:
        """`score`: of `open_score`."""
        self.control, self.score = control, score

    def serve(self) -> None:
        """Run commands until one cannot be cleaned up after. Exits at the end of the socket."""
        is_clean = True
        while is_clean:
            order, fds = receive(self.control)
            if order == b"x":
                request, *streams = fds
                code = self._run(_read(request), streams)
                is_clean = self.is_clean()
                self.control.send(code.to_bytes(4, "little", signed=True) + bytes([not is_clean]))

    def _run(self, words: list[bytes], streams: list[int]) -> int:
        count = int(words[0])
        argv, environment = words[1 : 1 + count], words[1 + count :]
        variables = dict(word.split(b"=", 1) for word in environment)
        try:
            pid = self._scored(
                _find(argv[0], variables.get(b"PATH", b"")), argv, variables, streams
            )
        except OSError as error:
            return complain(argv[0], error, streams[2])
        finally:
            for handle in streams:
                os.close(handle)
        _await(self.control, pid)
        _, status = os.waitpid(pid, 0)
        end_all()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _scored(
        self, program: bytes, argv: list[bytes], variables: dict[bytes, bytes], streams: list[int]
    ) -> int:
        own_score = os.pread(self.score, 16, 0)
        # It is inherited, and whoever raised it may lower it again.
        os.pwrite(self.score, FIRST_TO_DIE, 0)
        try:
            return self.spawn(program, argv, variables, streams)
        finally:
            os.pwrite(self.score, own_score, 0)

    def spawn(
        self, program: bytes, argv: list[bytes], variables: dict[bytes, bytes], streams: list[int]
    ) -> int:
        """Start a command in a session of its own; returns its pid. Raises OSError."""
        actions = [(os.POSIX_SPAWN_DUP2, handle, number) for number, handle in enumerate(streams)]
        return os.posix_spawn(
            program, argv, variables,
            file_actions=actions, setsid=True, setsigmask=(), setsigdef=RESET_SIGNALS,
        )  # fmt: skip

    def is_clean(self) -> bool:
        """Empty what commands share, so that each finds it as the first did.

        False when that fails, or when System V objects are left.
        """
        return are_emptied(self.shared) and not _has_objects()


def _control(place: str) -> _socket.socket:
    if place.isdigit():
        os.set_inheritable(int(place), False)
        return _socket.socket(fileno=int(place))
    control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    control.connect(place)
    return control


def load_filter(data: bytes, is_watched: bool = False) -> int:
    """Filter the system calls of this process and of all it starts by a program.

    `is_watched`: returns the descriptor at which the calls arrive that are to be decided elsewhere.
    """
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("num_steps", ctypes.c_ushort), ("steps", ctypes.c_void_p))

    steps = ctypes.create_string_buffer(data, len(data))
    program = ctypes.byref(Program(len(data) // 8, ctypes.addressof(steps)))
    library = ctypes.CDLL(None, use_errno=True)
    if is_watched:
        number, flags = SECCOMP[os.uname().machine], NEW_LISTENER | WAIT_KILLABLE
        code: int = library.syscall(number, SET_MODE_FILTER, flags, program)
    else:
        code = library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)
    if code < 0:
        raise OSError(ctypes.get_errno(), "the system-call filter was refused")
    return code


def open_score() -> int:
    """Our out-of-memory score, open for writing."""
    return os.open("/proc/self/oom_score_adj", os.O_RDWR)


def hide() -> None:
    """Let no command of the same user look into this process or stop it by ptrace."""
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def call(name: str, *words: int) -> int:
    """Call a function of the C library, without the time that loading ctypes takes."""
    import _ctypes

    library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
    code: int = _ctypes.call_function(_ctypes.dlsym(library, name), words)
    return code


def receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    """An order and the descriptors that came with it. Exits at the end of the socket."""
    order, extra, _, _ = control.recvmsg(16, 64, _socket.MSG_CMSG_CLOEXEC)
    if not order:
        sys.exit(0)
    data = b"".join(body for _, kind, body in extra if kind == _socket.SCM_RIGHTS)
    return order, [
        int.from_bytes(data[start : start + 4], sys.byteorder) for start in range(0, len(data), 4)
    ]


def _read(handle: int) -> list[bytes]:
    with open(handle, "rb") as file:
        return file.read().split(b"\0")[:-1]


def complain(program: bytes, error: OSError, handle: int) -> int:
    """Say why a program cannot be run, and return the exit code that shells use for that."""
    os.write(handle, f"{os.fsdecode(program)}: {error.strerror}\n".encode(errors="replace"))
    return NO_SUCH_PROGRAM if isinstance(error, FileNotFoundError) else NOT_RUNNABLE


def _find(program: bytes, path: bytes) -> bytes:
    """A program as a shell would find it; its name, which cannot be run, when there is none."""
    if b"/" in program:
        return program
    for folder in path.split(b":"):
        place = folder + b"/" + program
        if os.access(place, os.X_OK) and not os.path.isdir(place):
            return place
    return b"/nowhere/" + program


def _await(control: _socket.socket, pid: int) -> None:
    """Return when the command's first process is gone; kill everything when told to."""
    _signal.signal(_signal.SIGCHLD, lambda *_: _reap_orphans(pid))
    _reap_orphans(pid)
    watch = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.register(control, select.POLLIN)
    try:
        while True:
            ready = {handle for handle, _ in poll.poll()}
            if watch in ready:
                return
            order, _ = receive(control)
            if order == b"k":
                os.kill(-1, KILL)
    finally:
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        os.close(watch)


def _reap_orphans(first: int) -> None:
    """Reap dead processes but the command's first one: they count against the process limit."""
    try:
        while True:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None or dead.si_pid == first:
                return
            os.waitpid(dead.si_pid, 0)
    except ChildProcessError:
        pass


def end_all() -> None:
    """Kill and reap every process below this one: who loses its parent becomes our child.

    The kernel delivers a signal to all at once, so that none can fork in between.
    """
    try:
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                os.kill(-1, KILL)
                os.waitpid(-1, 0)
    except ChildProcessError:
        return


def are_emptied(folders: tuple[str, ...]) -> bool:
    """Empty folders; False when that fails."""
    try:
        for folder in folders:
            with os.scandir(folder) as entries:
                for entry in list(entries):
                    _remove(entry)
    except (OSError, RecursionError):
        return False
    return True


def _has_objects() -> bool:
    """Whether there are System V objects, or that cannot be seen."""
    try:
        for kind in ("shm", "sem", "msg"):
            with open(f"/proc/sysvipc/{kind}") as table:
                if len(table.readlines()) > 1:
                    return True
    except OSError:
        return True
    return False


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        import shutil

        shutil.rmtree(entry.path)
    else:
        os.unlink(entry.path)


if __name__ == "__main__":
    main()
