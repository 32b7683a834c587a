"""A shell that goes on from one command to the next, though each is an exec of its own.

Nothing of a command outlives it here, so what a shell knows is carried over: bash itself tells it
at the end of a command, on a descriptor that is closed to the command, and is told it at the start
of the next. That state is plain JSON: kept with a snapshot, it gives the same shell in a restored
or forked sandbox, of another backend too.

Carried over are the folder, variables, functions, aliases, the umask, options, traps and positional
parameters; processes, jobs and redirections of the shell itself (`exec 2>log`) are not.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import dataclass, replace

from k3rl.errors import CapabilityMissing, UserInputError
from k3rl.sandboxes.base import ExecRequest, ExecResult, SandboxBackend, SandboxId, run
from k3rl.sandboxes.spec import STRICT
from k3rl.types import JsonObject, from_plain, to_plain

STATE_BYTES = 512 * 1024
TEXT_BYTES = 768 * 1024
"""Of a script or a state as a command's environment carries it; Linux takes 2 MiB in all."""
PART_BYTES = 100_000
"""Of one variable; Linux takes 128 KiB."""
NOT_FOUND = 127
DYNAMIC = frozenset({
    "BASH", "BASHOPTS", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_ARGV0",
    "BASH_CMDS", "BASH_COMMAND", "BASH_EXECUTION_STRING", "BASH_LINENO", "BASH_LOADABLES_PATH",
    "BASH_MONOSECONDS", "BASH_SOURCE", "BASH_SUBSHELL", "BASH_TRAPSIG", "BASH_VERSINFO",
    "BASH_VERSION", "BASH_XTRACEFD", "COMP_WORDBREAKS", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS",
    "EUID", "FUNCNAME", "GROUPS", "HISTCMD", "HOSTNAME", "HOSTTYPE", "LINENO", "MACHTYPE", "OLDPWD",
    "OSTYPE", "PIPESTATUS", "PPID", "PWD", "RANDOM", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM",
    "UID", "_",
})  # fmt: skip
"""Variables that bash sets and that mean the present process."""
DEFAULTS = ("SHELL", "TERM")
"""Variables that bash sets, unexported, when the environment lacks them."""
PREFIX = "__k3rl_"
START = (
    r"""builtin printf '%s\0' "$PWD" >&3; builtin compgen -e >&3; builtin printf '\0' >&3""",
    'builtin printf -v __k3rl_script %b "{script}"; builtin printf -v __k3rl_state %b "{state}"',
    "builtin unset -v {parts}",
    'builtin eval "$__k3rl_state" 3>&-; builtin unset -v __k3rl_state',
    'builtin eval "$__k3rl_script" 3>&-',
)
"""On one line, so that the script's lines count from 1."""
END = r"""
{ __k3rl_status=$?
builtin trap -p DEBUG ERR >&3; builtin printf '\0' >&3; builtin trap - DEBUG ERR
builtin trap -p >&3; builtin printf '\0' >&3; builtin trap - RETURN EXIT
builtin printf '%s\0' "$SHELLOPTS" "$BASHOPTS" >&3
builtin set +o xtrace +o verbose +o posix +o errexit +o nounset
builtin declare -p >&3; builtin printf '\0' >&3
builtin declare -f >&3; builtin printf '\0' >&3
builtin declare -F >&3; builtin printf '\0' >&3
builtin alias -p >&3; builtin printf '\0' >&3
builtin umask >&3; builtin printf '\0' >&3
builtin pwd >&3; builtin printf '\0' >&3
builtin printf '%s\0' "${OLDPWD-}" >&3
builtin printf '%s ' "${@@Q}" >&3; builtin printf '\0end\0' >&3
} >/dev/null 2>&1
builtin exit "$__k3rl_status"
"""
NUM_SECTIONS = 16
"""What `START` and `END` write, the end of the last one among them."""
PREFIXED = ("xtrace", "verbose")
"""Options that would show more than the script when they were set before it."""


@dataclass(frozen=True, slots=True)
class ShellState:
    """What a shell knows, in bash's own words; its bytes as Latin-1 text."""

    __pydantic_config__ = STRICT

    folder: str
    """Begins with "." below the folder where commands start, which is another one elsewhere."""
    previous: str
    """Where `cd -` leads, in the same way; "": nowhere."""
    umask: str
    arguments: str
    removed: tuple[str, ...]
    """Variables of a command's environment that are no longer in the shell's."""
    variables: str
    functions: str
    aliases: str
    traps: str
    early_traps: str
    """DEBUG and ERR, which watch every command."""
    options: tuple[str, ...]
    """Of `set -o`, those that are on."""
    shell_options: tuple[str, ...]
    """Of `shopt`, those that are on."""


class Shell:
    """A bash session in a sandbox, whose spec should name `bash` in `executables`."""

    def __init__(
        self, backend: SandboxBackend, sandbox_id: SandboxId, state: JsonObject | None = None
    ) -> None:
        """`state`: what another shell's `state` was; None or {}: a fresh shell.

        Raises UserInputError naming what is wrong in it.
        """
        self.backend, self.id = backend, sandbox_id
        self._state = from_plain(ShellState, state) if state else None
        self._turn = asyncio.Lock()

    @property
    def state(self) -> JsonObject:
        """What the next command starts from; {} while that is a fresh shell."""
        return {} if self._state is None else to_plain(self._state)

    async def run(
        self,
        script: str,
        stdin: bytes = b"",
        deadline_s: float = 10.0,
        max_output_bytes: int = 64 * 1024,
    ) -> ExecResult:
        """Run a script as the shell's next lines; aliases work, as in a session.

        When it ends the shell itself (`exit`, `exec`, a signal, the deadline, `set -e`), the next
        one starts from the state before it. Lines before a syntax error are carried out. A state
        that is too large is not kept, which stderr tells. Raises UserInputError for a script that
        is too long or holds a NUL byte, CapabilityMissing when the sandbox has no bash.
        """
        async with self._turn:
            request = _request(script, self._state, stdin, deadline_s, max_output_bytes)
            result = await run(self.backend, self.id, request)
            if not result.channel and result.exit_code == NOT_FOUND:
                raise CapabilityMissing(
                    f"sandbox {self.id}: a shell needs bash; none is on its PATH"
                )
            state = _read(result.channel)
            is_too_large = len(result.channel) >= STATE_BYTES
            if state is not None and len(_escaped(_restoration(state))) > TEXT_BYTES:
                state, is_too_large = None, True
            self._state = state or self._state
        if is_too_large:
            note = b"shell: its variables and functions are too large to keep\n"
            result = replace(result, stderr=result.stderr + note)
        return replace(result, channel=b"")


def _request(
    script: str, state: ShellState | None, stdin: bytes, deadline_s: float, max_output_bytes: int
) -> ExecRequest:
    text = _prefix(state) + script.encode(errors="surrogateescape")
    if b"\0" in text or len(_escaped(text)) > TEXT_BYTES:
        raise UserInputError(f"a shell's script holds a NUL byte, or more than {TEXT_BYTES} bytes")
    parts = {"script": _parts("script", text), "state": _parts("state", _restoration(state))}
    environment = {**parts["script"], **parts["state"]}
    words = {name: "".join(f"${part}" for part in parts[name]) for name in parts}
    start = "; ".join(START).format(parts=" ".join(environment), **words)
    # As one command, which bash has read before an alias or an option of the shell can change it.
    argv = ("bash", "-c", f"{{ {start}{END}}}", "bash")
    return ExecRequest(argv, stdin, deadline_s, max_output_bytes, environment, STATE_BYTES)


def _parts(name: str, text: bytes) -> dict[str, str]:
    """A text as variables of an environment."""
    whole = _escaped(text)
    starts = range(0, max(len(whole), 1), PART_BYTES)
    return {
        f"{PREFIX}{name}_{n}_": whole[start : start + PART_BYTES] for n, start in enumerate(starts)
    }


def _escaped(text: bytes) -> str:
    """For printf's %b, in ASCII."""
    return re.sub(
        rb"[^\t\n -\[\]-~]", lambda found: rb"\0%03o" % found[0][0], text
    ).decode("ascii")  # fmt: skip


def _prefix(state: ShellState | None) -> bytes:
    """What must come right before the script, or it would show."""
    options = [name for name in PREFIXED if state is not None and name in state.options]
    if state is None or not (state.early_traps or options):
        return b""
    lines = "".join(f"builtin set -o {name}\n" for name in options)
    return f"{{\n{state.early_traps}{lines}}} >/dev/null 2>&1\n".encode("latin-1")


def _restoration(state: ShellState | None) -> bytes:
    """The script that makes a fresh bash know `state`.

    Functions come last but for the options, so that none stands in for a command used here.
    """
    if state is None:
        return b"builtin shopt -s expand_aliases"
    late = "expand_aliases"
    on = " ".join(name for name in state.shell_options if name != late)
    options = "".join(f" -o {name}" for name in state.options if name not in PREFIXED)
    lines = [
        "IFS=:; builtin shopt -u $BASHOPTS" + (f"; builtin shopt -s {on}" if on else ""),
        f"builtin unset -v IFS {' '.join(state.removed)}",
        state.variables,
        f"builtin umask {state.umask}",
        f"{PREFIX}root=$PWD; builtin cd -- {shlex.quote(state.folder)}",
        f"{_previous(state.previous)}; builtin unset -v {PREFIX}root",
        f"builtin set -- {state.arguments}",
        state.traps + state.aliases + state.functions,
        f"builtin shopt -s {late}" if late in state.shell_options else "",
        "builtin set +o braceexpand +o hashall +o interactive-comments" + options,
    ]
    return "\n".join(lines).encode("latin-1")


def _previous(folder: str) -> str:
    if not folder:
        return "builtin unset -v OLDPWD"
    start = f'"${PREFIX}root"' if folder.startswith(".") else ""
    return f"builtin export OLDPWD={start}{shlex.quote(folder.removeprefix('.'))}"


def _read(channel: bytes) -> ShellState | None:
    """The state that bash told; None when it did not come to that, or not to its end."""
    sections = [section.decode("latin-1") for section in channel.split(b"\0")]
    if len(sections) != NUM_SECTIONS or sections[-2] != "end":
        return None
    root, inherited, early, traps, options, shell_options, variables, *rest = sections
    functions, attributes, aliases, umask, folder, previous, arguments = rest[:7]
    kept, exported = _kept(variables)
    gone = set(inherited.split("\n")) - exported - DYNAMIC
    marked = [line for line in attributes.split("\n") if not line.startswith("declare -f ")]
    return ShellState(
        folder=_relative(folder.removesuffix("\n"), root),
        previous=_relative(previous, root) if previous else "",
        umask=umask.strip(),
        arguments=arguments.strip(" "),
        removed=tuple(sorted(name for name in gone if name and not name.startswith(PREFIX))),
        variables=kept,
        functions=functions + "\n".join(marked),
        aliases=aliases,
        traps=traps,
        early_traps=early,
        options=tuple(filter(None, options.split(":"))),
        shell_options=tuple(filter(None, shell_options.split(":"))),
    )


def _kept(variables: str) -> tuple[str, set[str]]:
    """Of `declare -p` what a later shell is told, and the names of all that are exported."""
    kept, exported = [], set()
    for statement in re.split(r"(?m)^(?=declare -)", variables):
        found = re.match(r"declare -(\S+) (\w+)", statement)
        if found is None:
            continue
        flags, name = found.groups()
        if "x" in flags:
            exported.add(name)
        is_default = name in DEFAULTS and flags == "-"
        if name not in DYNAMIC and not name.startswith(PREFIX) and not is_default:
            kept.append(statement)
    return "".join(kept), exported


def _relative(folder: str, root: str) -> str:
    """A folder as seen from where commands start, if it lies there."""
    if folder == root:
        return "."
    return f".{folder[len(root) :]}" if folder.startswith(f"{root}/") else folder
